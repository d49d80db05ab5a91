/* Calls of the system about files below a folder are counted, and one of them fails: loaded before the C library. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[PATH_MAX], failed[32];
static int count, at, code; /* code 0: half of the bytes are written */

void fault_arm(const char *under, int which, int error) {
  snprintf(folder, sizeof folder, "%s/", under);
  failed[0] = 0, at = which, code = error, count = 0;
}
int fault_count(void) { return count; }
const char *fault_failed(void) { return failed; }

static int due(const char *name, const char *path, int part) {
  if (!folder[0] || !path || strncmp(path, folder, strlen(folder))) return 0;
  if (++count != at || (!code && !part)) return 0;
  snprintf(failed, sizeof failed, "%s", name);
  errno = code;
  return 1;
}
static int due_fd(const char *name, int file, int part) {
  char link[64], path[PATH_MAX];
  int kept = errno;
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t size = readlink(link, path, sizeof path - 1);
  errno = kept;
  if (size < 0) return 0;
  path[size] = 0;
  return due(name, path, part);
}
#define REAL(type, name) \
  static type (*real)(); \
  if (!real) real = (type(*)())dlsym(RTLD_NEXT, name)

#define OPEN(name)                                  \
  int name(const char *path, int flags, ...) {      \
    va_list more;                                   \
    va_start(more, flags);                          \
    int mode = va_arg(more, int);                   \
    va_end(more);                                   \
    REAL(int, #name);                               \
    return due("open", path, 0) ? -1 : real(path, flags, mode); \
  }
OPEN(open)
OPEN(open64)
#define WRITE(name, type)                                                  \
  ssize_t name(int file, const void *data, size_t size, type place) {      \
    REAL(ssize_t, #name);                                                  \
    if (!due_fd("pwrite", file, 1)) return real(file, data, size, place);  \
    return code || size < 2 ? -1 : real(file, data, size / 2, place);      \
  }
WRITE(pwrite, off_t)
WRITE(pwrite64, off64_t)
ssize_t write(int file, const void *data, size_t size) {
  REAL(ssize_t, "write");
  if (!due_fd("write", file, 1)) return real(file, data, size);
  return code || size < 2 ? -1 : real(file, data, size / 2);
}
#define ON_FILE(name, said)                                  \
  int name(int file) {                                       \
    REAL(int, #name);                                        \
    return due_fd(said, file, 0) ? -1 : real(file);          \
  }
ON_FILE(fsync, "fsync")
ON_FILE(fdatasync, "fsync")
#define CUT(name, type)                                      \
  int name(int file, type size) {                            \
    REAL(int, #name);                                        \
    return due_fd("ftruncate", file, 0) ? -1 : real(file, size); \
  }
CUT(ftruncate, off_t)
CUT(ftruncate64, off64_t)
int rename(const char *from, const char *to) {
  REAL(int, "rename");
  return due("rename", to, 0) ? -1 : real(from, to);
}
int unlink(const char *path) {
  REAL(int, "unlink");
  return due("unlink", path, 0) ? -1 : real(path);
}
int mkdir(const char *path, mode_t mode) {
  REAL(int, "mkdir");
  return due("mkdir", path, 0) ? -1 : real(path, mode);
}
