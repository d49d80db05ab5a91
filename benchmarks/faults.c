/* Calls of the system about files below a folder are counted, and one of them fails; or all of them are written down,
   with what they change, in the order in which they happen. Loaded before the C library. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static char folder[PATH_MAX], failed[32];
static int count, at, code; /* code 0: half of the bytes are written */
static char recorded[PATH_MAX];
static int record = -1; /* the file of what happened */
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

void fault_arm(const char *under, int which, int error) {
  snprintf(folder, sizeof folder, "%s/", under);
  failed[0] = 0, at = which, code = error, count = 0;
}
int fault_count(void) { return count; }
const char *fault_failed(void) { return failed; }

static void put(const void *data, size_t size) {
  while (size) {
    long done = syscall(SYS_write, record, data, size);
    if (done <= 0) return;
    data = (const char *)data + done, size -= done;
  }
}
static int under(const char *path) {
  return record >= 0 && path && (!strcmp(path, recorded) || (!strncmp(path, recorded, strlen(recorded)) && path[strlen(recorded)] == '/'));
}
/* One line of a kind, two names and two numbers, and the bytes. */
static void note(char kind, const char *path, const char *to, int64_t place, const void *data, uint32_t size) {
  if (!under(path) && !under(to)) return;
  int kept = errno;
  uint16_t lengths[2] = {strlen(path), to ? strlen(to) : 0};
  pthread_mutex_lock(&one_at_a_time);
  put(&kind, 1), put(lengths, sizeof lengths), put(&place, sizeof place), put(&size, sizeof size);
  put(path, lengths[0]);
  if (to) put(to, lengths[1]);
  if (data) put(data, size);
  pthread_mutex_unlock(&one_at_a_time);
  errno = kept;
}
static int named(int file, char *path) {
  char link[64];
  int kept = errno;
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t size = readlink(link, path, PATH_MAX - 1);
  errno = kept;
  if (size < 0) return 0;
  path[size] = 0;
  return 1;
}
static void note_fd(char kind, int file, int64_t place, const void *data, uint32_t size) {
  char path[PATH_MAX];
  if (record >= 0 && named(file, path)) note(kind, path, 0, place, data, size);
}
void fault_record(const char *below, const char *into) {
  if (record >= 0) syscall(SYS_close, record);
  snprintf(recorded, sizeof recorded, "%s", below);
  record = into ? syscall(SYS_openat, AT_FDCWD, into, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600) : -1;
}
void fault_mark(int64_t number) { note('A', recorded, 0, number, 0, 0); }

static int due(const char *name, const char *path, int part) {
  if (!folder[0] || !path || strncmp(path, folder, strlen(folder))) return 0;
  if (++count != at || (!code && !part)) return 0;
  snprintf(failed, sizeof failed, "%s", name);
  errno = code;
  return 1;
}
static int due_fd(const char *name, int file, int part) {
  char path[PATH_MAX];
  return folder[0] && named(file, path) ? due(name, path, part) : 0;
}
#define REAL(type, name) \
  static type (*real)(); \
  if (!real) real = (type(*)())dlsym(RTLD_NEXT, name)

static int opened(int file, const char *path, int flags) {
  char found[PATH_MAX];
  if (file >= 0 && record >= 0 && flags & (O_CREAT | O_TRUNC) && named(file, found)) {
    if (flags & O_CREAT) note('C', found, 0, 0, 0, 0);
    if (flags & O_TRUNC) note('T', found, 0, 0, 0, 0);
  }
  return file;
}
#define OPEN(name)                                  \
  int name(const char *path, int flags, ...) {      \
    va_list more;                                   \
    va_start(more, flags);                          \
    int mode = va_arg(more, int);                   \
    va_end(more);                                   \
    REAL(int, #name);                               \
    return due("open", path, 0) ? -1 : opened(real(path, flags, mode), path, flags); \
  }
OPEN(open)
OPEN(open64)
#define WRITE(name, type)                                                  \
  ssize_t name(int file, const void *data, size_t size, type place) {      \
    REAL(ssize_t, #name);                                                  \
    int now = due_fd("pwrite", file, 1);                                   \
    if (now && (code || size < 2)) return -1;                              \
    ssize_t done = real(file, data, now ? size / 2 : size, place);         \
    if (done > 0) note_fd('W', file, place, data, done);                   \
    return done;                                                           \
  }
WRITE(pwrite, off_t)
WRITE(pwrite64, off64_t)
ssize_t write(int file, const void *data, size_t size) {
  REAL(ssize_t, "write");
  int now = due_fd("write", file, 1);
  if (now && (code || size < 2)) return -1;
  ssize_t done = real(file, data, now ? size / 2 : size);
  if (done > 0 && record >= 0) {
    int kept = errno;
    off_t end = lseek(file, 0, SEEK_CUR); /* -1 for what is no file */
    errno = kept;
    if (end >= 0) note_fd('W', file, end - done, data, done);
  }
  return done;
}
#define ON_FILE(name, said)                                  \
  int name(int file) {                                       \
    REAL(int, #name);                                        \
    if (due_fd(said, file, 0)) return -1;                    \
    int done = real(file);                                   \
    if (!done) note_fd('F', file, 0, 0, 0);                  \
    return done;                                             \
  }
ON_FILE(fsync, "fsync")
ON_FILE(fdatasync, "fsync")
#define CUT(name, type)                                      \
  int name(int file, type size) {                            \
    REAL(int, #name);                                        \
    if (due_fd("ftruncate", file, 0)) return -1;             \
    int done = real(file, size);                             \
    if (!done) note_fd('T', file, size, 0, 0);               \
    return done;                                             \
  }
CUT(ftruncate, off_t)
CUT(ftruncate64, off64_t)
int rename(const char *from, const char *to) {
  REAL(int, "rename");
  if (due("rename", to, 0)) return -1;
  int done = real(from, to);
  if (!done) note('R', from, to, 0, 0, 0);
  return done;
}
int unlink(const char *path) {
  REAL(int, "unlink");
  if (due("unlink", path, 0)) return -1;
  int done = real(path);
  if (!done) note('U', path, 0, 0, 0, 0);
  return done;
}
int mkdir(const char *path, mode_t mode) {
  REAL(int, "mkdir");
  if (due("mkdir", path, 0)) return -1;
  int done = real(path, mode);
  if (!done) note('M', path, 0, 0, 0, 0);
  return done;
}
