"""Where compiled programs are kept, and what happens where they can't be."""

import os
import subprocess
import sys
import time
import zlib

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.errors import UserError
from bacr_jax.parallel import compile_cache
from bacr_jax.parallel.compile_cache import (
    delete_incomplete,
    delete_oldest,
    keep_programs,
    machine_name,
)

DIR, ENABLED = "jax_compilation_cache_dir", "jax_enable_compilation_cache"
LEAST = "jax_persistent_cache_min_compile_time_secs"
MAX_SIZE = "jax_compilation_cache_max_size"


@pytest.fixture
def jax_alone(monkeypatch, tmp_path):
    """JAX told nothing, a home of its own; everything as before afterwards."""
    before = {name: jax.config.values[name] for name in (DIR, LEAST, ENABLED)}
    monkeypatch.delenv(DIR.upper(), raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    jax.config.update(DIR, None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_by_default_programs_lie_with_the_users_own_caches(jax_alone, monkeypatch, tmp_path):
    own = tmp_path / "home" / ".cache" / "bacr_jax" / "compiled" / machine_name()
    kept = keep_programs(None)
    assert (kept.folder, kept.refused) == (own, False)
    assert kept.line == f"compiled programs are cached in {own} (output.compile_cache)"
    assert jax.config.values[DIR] == str(own) and own.stat().st_mode & 0o077 == 0
    # Asked again, as by the next run of a notebook.
    assert keep_programs(None) == kept
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert keep_programs(None).folder.is_relative_to(tmp_path / "xdg")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert keep_programs(None).folder == own


def test_what_jax_was_told_stays_unless_the_config_says_otherwise(jax_alone, monkeypatch, tmp_path):
    monkeypatch.setenv(DIR.upper(), str(tmp_path / "mine"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "torn-cache").touch()
    os.utime(tmp_path / "mine" / "torn-cache", (1, 1))
    kept = keep_programs(None)
    assert not (tmp_path / "mine" / "torn-cache").exists()
    assert kept.folder == tmp_path / "mine" and "(JAX_COMPILATION_CACHE_DIR)" in kept.line
    assert jax.config.values[DIR] == str(tmp_path / "mine")
    kept = keep_programs(str(tmp_path / "other"))
    assert kept.folder == tmp_path / "other" / machine_name()
    assert jax.config.values[DIR] == str(kept.folder)
    kept = keep_programs("none")
    assert (kept.folder, jax.config.values[DIR]) == (None, None)
    assert kept.line == "compiled programs are not cached (output.compile_cache=none)"
    assert keep_programs(None).folder == tmp_path / "mine"
    jax.config.update("jax_enable_compilation_cache", False)
    assert keep_programs(None).line.endswith("not cached (JAX_ENABLE_COMPILATION_CACHE)")


def test_a_folder_that_cant_be_written_is_a_line_and_no_more(jax_alone, monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.touch()
    kept = keep_programs(str(file))
    assert kept.refused and kept.folder is None and jax.config.values[DIR] is None
    assert kept.line.startswith(
        f"WARNING, output.compile_cache: the folder of compiled programs can't be written ({file}"
    )
    rest = (
        "they are compiled again at every start; use another folder, or output.compile_cache=none"
    )
    assert kept.line.endswith(rest)
    # The same of a folder of JAX's own variable.
    monkeypatch.setenv(DIR.upper(), str(file / "mine"))
    kept = keep_programs(None)
    assert kept.refused and kept.folder is None and jax.config.values[DIR] is None
    assert kept.line.startswith(
        f"WARNING, JAX_COMPILATION_CACHE_DIR: the folder of compiled programs can't be written "
        f"({file}"
    )
    assert kept.line.endswith(rest)


def test_a_url_is_left_to_jax(jax_alone, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(DIR.upper(), "gs://bucket/programs")
    for setting, url, key in (
        (None, "gs://bucket/programs", "JAX_COMPILATION_CACHE_DIR"),
        ("gs://mine/", f"gs://mine/{machine_name()}", "output.compile_cache"),
    ):
        kept = keep_programs(setting)
        assert (kept.folder, kept.refused, jax.config.values[DIR]) == (None, False, url)
        assert kept.line == f"compiled programs are cached in {url} ({key})"
    assert list(tmp_path.iterdir()) == []


def test_the_programs_unused_for_longest_make_room(tmp_path):
    old, new = tmp_path / "xla-old", tmp_path / "xla-new"
    for place, (folder, name, size) in enumerate(
        ((old, "a-cache", 40), (new, "b-cache", 40), (new, "c-cache", 40), (new, "notes", 999))
    ):
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(bytes(size))
        os.utime(folder / name, (place, place))
    (tmp_path / "another-cache").write_bytes(bytes(999))
    left = lambda: sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    delete_oldest(tmp_path, 120)
    assert left() == ["a-cache", "another-cache", "b-cache", "c-cache", "notes"]
    # Read later than it was written.
    os.utime(old / "a-cache", (9, 0))
    delete_oldest(tmp_path, 100)
    assert left() == ["a-cache", "another-cache", "c-cache", "notes"]
    delete_oldest(tmp_path / "missing", 1)


def test_only_folders_of_this_library_have_a_maximum_size(jax_alone, monkeypatch, tmp_path):
    """Other projects may share the folder JAX_COMPILATION_CACHE_DIR."""
    monkeypatch.setattr(compile_cache, "MAX_BYTES", 120)
    before = jax.config.values[MAX_SIZE]
    shared, own = tmp_path / "shared", tmp_path / "own" / machine_name()
    # The programs of a shared folder can also be in a folder with the name of ours.
    for folder in (shared, shared / machine_name(), own):
        folder.mkdir(parents=True)
        for index in range(3):
            program = folder / f"{index}-cache"
            program.write_bytes(zlib.compress(os.urandom(40)))
            os.utime(program, (time.time() - 90,) * 2)
    monkeypatch.setenv(DIR.upper(), str(shared))
    assert keep_programs(None).folder == shared
    assert len(list(shared.rglob("*-cache"))) == 6
    assert keep_programs(str(own.parent)).folder == own
    assert len(list(own.glob("*-cache"))) == 2
    # JAX's own limit would delete the programs of others, so only a user sets it.
    assert jax.config.values[MAX_SIZE] == before


def test_none_is_a_choice_and_no_misspelt_null():
    assert config_io.load([], ["output.compile_cache=none"]).output.compile_cache == "none"
    with pytest.raises(UserError, match=r"model\.path: found 'none'; use null"):
        config_io.load([], ["model.path=none"])
    # Runs from before the key keep their fingerprints.
    assert config_io.fingerprint(Config()) == config_io.fingerprint(
        config_io.override(Config(), ["output.compile_cache=null"])
    )


PROGRAM = """
import sys, jax, jax.numpy as jnp
from bacr_jax.parallel.compile_cache import keep_programs
keep_programs(sys.argv[1])
print(float(jax.jit(lambda x: jnp.sin(x) @ x.T)(jnp.arange(12.0).reshape(3, 4)).sum()).hex())
"""


@pytest.mark.slow
def test_two_processes_at_once_and_a_torn_file_give_the_same_numbers(tmp_path):
    environment = {name: v for name, v in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"JAX_PLATFORMS": "cpu"}

    def start():
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)

    both = [start(), start()]
    found = {process.communicate()[0] for process in both}
    kept = list((tmp_path / machine_name()).glob("*-cache"))
    assert len(found) == 1 and len(kept) >= 3 and all(not p.returncode for p in both)
    for path in kept:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert start().communicate()[0] in found
    # Nobody is writing them any more, and they have not been looked at since: whole again.
    minutes_ago = time.time() - 120
    for path in kept:
        os.utime(path, (minutes_ago, minutes_ago))
    os.utime(tmp_path / machine_name() / "looked", (0, 0))
    assert start().communicate()[0] in found
    for path in kept:
        assert zlib.decompress(path.read_bytes())


def test_half_a_program_is_dropped_once_nobody_can_be_writing_it(tmp_path):
    whole, now = zlib.compress(os.urandom(3 << 20)), time.time()
    files = {"whole": (whole, 90), "half": (whole[: len(whole) // 2], 90), "empty": (b"", 90)}
    files |= {"less-a-byte": (whole[:-1], 90), "other": (bytes(range(256)), 90)}
    files |= {"being-written": (whole[:9], 30), "unreadable-zstd": (b"\x28\xb5\x2f\xfd" * 9, 90)}
    for name, (data, age) in files.items():
        path = tmp_path / f"{name}-cache"
        path.write_bytes(data)
        os.utime(path, (now - age, now - age))
    (tmp_path / "notes").write_bytes(b"")
    torn = ("half", "empty", "less-a-byte", "other", "unreadable-zstd")
    assert set(delete_incomplete(tmp_path)) == {f"{name}-cache" for name in torn}
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"whole-cache", "being-written-cache", "notes", "looked"}
    # What was looked at is not looked at again; what was young then is.
    (tmp_path / "whole-cache").write_bytes(b"")
    os.utime(tmp_path / "whole-cache", (now - 90, now - 90))
    looked = tmp_path / "looked"
    assert delete_incomplete(tmp_path) == []
    os.utime(looked, (now - 40, now - 40))
    os.utime(tmp_path / "being-written-cache", (now - 35, now - 35))
    assert delete_incomplete(tmp_path) == []
    os.utime(looked, (now - 100, now - 100))
    assert set(delete_incomplete(tmp_path)) == {"whole-cache"}


def test_one_that_another_process_dropped_first_keeps_no_other(tmp_path, monkeypatch):
    for name in ("a", "b", "c"):
        path = tmp_path / f"{name}-cache"
        path.write_bytes(b"")
        os.utime(path, (time.time() - 90,) * 2)
    unlink, met = os.unlink, []

    def also_elsewhere(path):
        unlink(path)
        met.append(path)
        if len(met) == 1:
            raise FileNotFoundError(path)

    monkeypatch.setattr(os, "unlink", also_elsewhere)
    assert len(delete_incomplete(tmp_path)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["looked"]
    assert (tmp_path / "looked").stat().st_mtime < time.time() - 50
    assert delete_incomplete(tmp_path / "missing") == []
