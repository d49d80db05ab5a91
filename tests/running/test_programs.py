"""Compiled programs are kept on disk for the next process, unless somebody says otherwise."""

import os

import jax
import pytest

from opvi.running import _kept as kept
from opvi.running import _programs as programs


def test_the_folder_is_the_users(untouched, tmp_path):
    untouched.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = os.umask(0)
    try:
        folder = programs.keep_programs()
    finally:
        os.umask(before)
    assert folder.parent == tmp_path / "cache" / "opvi" / "programs"
    assert programs.OURS.fullmatch(folder.name)
    assert jax.__version__ in folder.name
    made = [folder / "whole", folder, *folder.parents[:3]]
    assert [path.stat().st_mode & 0o777 for path in made] == [0o700] * 5
    assert jax.config.values["jax_compilation_cache_dir"] == str(folder)
    assert jax.config.values["jax_compilation_cache_max_size"] == programs.LARGEST
    untouched.setenv("OPVI_PROGRAMS", str(tmp_path / "other"))
    assert programs.keep_programs() == programs.kept_in() == folder  # the first call decides


@pytest.mark.parametrize("word", ["off", "0", "no", "False", "NONE"])
def test_the_switch_is_heard(untouched, tmp_path, word):
    untouched.setenv("XDG_CACHE_HOME", str(tmp_path))
    untouched.setenv("OPVI_PROGRAMS", word)
    untouched.chdir(tmp_path)
    assert programs.keep_programs() is None
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("wanted", ["", "named"])
def test_jaxs_own_switch_is_heard(untouched, tmp_path, wanted):
    untouched.setenv("XDG_CACHE_HOME", str(tmp_path))
    untouched.setenv("OPVI_PROGRAMS", wanted and str(tmp_path / wanted))
    jax.config.update("jax_enable_compilation_cache", False)
    assert programs.keep_programs() is None
    assert not any(tmp_path.iterdir())
    jax.config.update("jax_enable_compilation_cache", True)
    assert programs.keep_programs() is not None
    jax.config.update("jax_enable_compilation_cache", False)
    assert programs.kept_in() is None


def test_a_folder_of_jaxs_own_stays_its_own(untouched, tmp_path):
    theirs = tmp_path / "theirs"
    jax.config.update("jax_compilation_cache_dir", str(theirs))
    before = dict(jax.config.values)
    assert programs.keep_programs() == theirs / "opvi"
    (tmp_path / "usual").mkdir()
    assert theirs.stat().st_mode == (tmp_path / "usual").stat().st_mode  # they may share it with others
    (theirs / "a-cache").write_bytes(b"without a bound there is no time beside it")
    for wanted in (str(tmp_path / "ours"), str(theirs)):
        untouched.setattr(programs, "_asked", False)
        untouched.setenv("OPVI_PROGRAMS", wanted)
        theirs.chmod(0o700)
        assert str(programs.keep_programs()) == wanted
    assert dict(jax.config.values) == before
    assert (theirs / "a-cache").exists()


def test_a_remote_folder_is_left_alone(untouched, tmp_path):
    untouched.chdir(tmp_path)
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/programs")
    assert programs.keep_programs() is None
    assert not any(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="folders have no owner here")
@pytest.mark.parametrize("place", [".", "whole"])
@pytest.mark.parametrize(("mode", "owner"), [(0o770, 0), (0o707, 0), (0o700, 1)])
def test_folders_that_others_may_write_to_are_refused(untouched, tmp_path, place, mode, owner):
    """Whoever can write there could run code in this process."""
    untouched.setenv("XDG_CACHE_HOME", str(tmp_path))
    programs.keep_programs()
    folder = next((tmp_path / "opvi" / "programs").iterdir())
    (folder / place).chmod(mode)
    about, me = (folder / place).stat(), os.geteuid()
    untouched.setattr(programs, "_folder", None)
    untouched.setattr(os, "geteuid", lambda: me + owner)
    assert about.st_mode & 0o777 == mode
    jax.config.update("jax_compilation_cache_dir", None)
    untouched.setattr(programs, "_asked", False)
    assert programs.keep_programs() is None  # without a word: nobody named it
    untouched.setattr(programs, "_asked", False)
    untouched.setenv("OPVI_PROGRAMS", str(folder))
    with pytest.warns(RuntimeWarning, match=f"OPVI_PROGRAMS is '{folder}'.*run code as you.*chmod go-w"):
        assert programs.keep_programs() is None
    assert programs.keep_programs() is None  # said once
    assert jax.config.values["jax_compilation_cache_dir"] is None


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="folders have no owner here")
@pytest.mark.parametrize(
    ("mode", "owner", "kept"),
    [(0o777, 0, False), (0o1777, 0, True), (0o773, 0, False), (0o755, 0, True), (0o700, 4321, False)],
)
def test_nobody_else_can_put_another_folder_in_its_place(untouched, tmp_path, mode, owner, kept):
    """Whoever may rename a folder above it, or owns one, could move it away and link to another."""
    above = tmp_path / "shared"
    (above / "mine").mkdir(parents=True)
    (above / "mine").chmod(0o700)
    above.chmod(mode)
    if owner:
        if os.geteuid():
            pytest.skip("only root gives folders away")
        os.chown(above, owner, owner)
    untouched.setenv("OPVI_PROGRAMS", str(above / "mine" / "programs"))
    if kept:
        assert programs.keep_programs() == above / "mine" / "programs"
    else:
        with pytest.warns(RuntimeWarning, match=f"but {above} is a folder that others own or may write to"):
            assert programs.keep_programs() is None
        assert not any((above / "mine").iterdir())


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="folders have no owner here")
def test_a_link_on_the_way_is_followed_once(untouched, tmp_path):
    (tmp_path / "real").mkdir(0o700)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    untouched.setenv("OPVI_PROGRAMS", str(tmp_path / "link" / "programs"))
    assert programs.keep_programs() == tmp_path / "real" / "programs"  # wherever the link may lead tomorrow
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "open")
    untouched.setattr(programs, "_asked", False)
    jax.config.update("jax_compilation_cache_dir", None)
    with pytest.warns(RuntimeWarning, match=f"but {tmp_path / 'open'} is a folder that others"):
        assert programs.keep_programs() is None


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owner here")
@pytest.mark.parametrize("way", ["writable", "owner", "link", "folder", "pipe", ""])
def test_a_program_that_somebody_else_may_have_written_is_not_read(tmp_path, way):
    folder = tmp_path / "whole"
    folder.mkdir(0o700)
    path = folder / "program"
    kept._write(path, b"program")
    if way == "writable":
        path.chmod(0o622)
    elif way == "owner":
        if os.geteuid():
            pytest.skip("only root gives files away")
        os.chown(path, 4321, 4321)
    elif way == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif way == "folder":
        folder.chmod(0o770)
    elif way == "pipe":
        path.unlink()
        os.mkfifo(path)
    assert kept._read(path) == (None if way else b"program")


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owner here")
def test_programs_of_jax_that_others_may_write_to_are_removed(untouched, tmp_path):
    for name, mode in (("a-cache", 0o666), ("a-atime", 0o600), ("b-cache", 0o600), ("b-atime", 0o600), ("mine", 0o666)):
        (tmp_path / name).write_bytes(bytes(8))
        (tmp_path / name).chmod(mode)
    untouched.setenv("OPVI_PROGRAMS", str(tmp_path))
    assert programs.keep_programs() == tmp_path
    assert {path.name for path in tmp_path.iterdir()} == {"b-cache", "b-atime", "mine", "whole"} | {"a-atime"}


def test_without_a_home_nothing_is_kept(untouched):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    untouched.delenv("XDG_CACHE_HOME", raising=False)
    untouched.setattr(programs.Path, "home", homeless)
    assert programs.keep_programs() is None
    untouched.setattr(programs, "_asked", False)
    untouched.setenv("OPVI_PROGRAMS", "~no-such-user/programs")
    with pytest.warns(RuntimeWarning, match="programs', but programs cannot be kept there: .*home directory. Name"):
        assert programs.keep_programs() is None


def test_a_relative_cache_folder_is_ignored(untouched, tmp_path):
    """As the specification of XDG_CACHE_HOME says."""
    untouched.setenv("XDG_CACHE_HOME", "cache")
    untouched.setattr(programs.Path, "home", lambda: tmp_path)
    assert programs._user_cache().is_relative_to(tmp_path)


def test_folders_of_other_versions_are_removed_once_unused(untouched, tmp_path):
    untouched.setenv("XDG_CACHE_HOME", str(tmp_path))
    ours = tmp_path / "opvi" / "programs"
    old, used, other = ours / "jax-0.9.0-0123456789ab", ours / "jax-0.9.1-0123456789ab", ours / "jax-notes"
    for folder in (old, used, other):
        (folder / "whole").mkdir(parents=True)
        (folder / "whole" / "program").write_bytes(b"")
        for path in (folder / "whole" / "program", folder / "whole", folder):
            os.utime(path, (0, 0))
    os.utime(used / "whole" / "program")  # as each process does that reads it
    folder = programs.keep_programs()
    assert set(ours.iterdir()) == {folder, used, other}
    jax.config.update("jax_compilation_cache_dir", None)
    untouched.setattr(programs, "_asked", False)
    os.utime(used / "whole" / "program", (0, 0))
    programs.keep_programs()
    assert used.exists()  # looked at only when a folder is made


def test_half_a_program_is_swept_away_and_a_file_in_the_way_is_no_error(untouched, tmp_path):
    (tmp_path / "a-cache").write_bytes(b"half")  # and no time beside it
    (tmp_path / "b-cache").write_bytes(b"whole")
    (tmp_path / "b-atime").write_bytes(bytes(8))
    untouched.setenv("OPVI_PROGRAMS", str(tmp_path))
    assert programs.keep_programs() == tmp_path
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b-atime", "b-cache", "whole"]
    jax.config.update("jax_compilation_cache_dir", None)
    untouched.setattr(programs, "_asked", False)
    untouched.setenv("OPVI_PROGRAMS", str(tmp_path / "b-cache" / "below"))
    with pytest.warns(
        RuntimeWarning, match="below', but programs cannot be kept there: .*Not a directory.* Name another folder"
    ):
        assert programs.keep_programs() is None
    assert (tmp_path / "b-cache").read_bytes() == b"whole"


def test_memory_is_given_back_after_programs_that_took_long(monkeypatch):
    asked = []
    monkeypatch.setattr(programs, "give_back", lambda: asked.append(1))
    event = "/jax/core/compile/backend_compile_duration"
    for name, seconds in ((event, 0.1), ("/jax/core/compile/jaxpr_trace_duration", 2.0), (event, 0.5)):
        programs._made(name, seconds, fun_name="jit(advanced)")
    assert asked == [1]
    programs._tidy.cache_clear()
    heard = []
    monkeypatch.setattr(jax.monitoring, "register_event_duration_secs_listener", heard.append)
    for _ in range(2):
        programs.keep_programs()
    assert heard == [programs._made]
