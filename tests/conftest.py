"""Sets environment variables before JAX is imported, and defines hooks and shared fixtures."""

import contextlib
import gc
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Make relative paths absolute, because each test has a different working directory.
for variable in ("BACR_SHARED_DATA", "JAX_COMPILATION_CACHE_DIR", "PYTHONPATH"):
    if os.environ.get(variable):
        paths = os.environ[variable].split(os.pathsep)
        os.environ[variable] = os.pathsep.join(os.path.abspath(path) for path in paths)
# Most of the time of the tests is compilation, and many tests compile the same programs. They share
# a new compilation cache, which the xdist workers and the commands started by tests also use. A
# cache of an earlier session is only read if JAX_COMPILATION_CACHE_DIR names it.
OWN_CACHE = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    OWN_CACHE = tempfile.mkdtemp(prefix="bacr_jax_compiled_")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = OWN_CACHE
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

import slices  # noqa: E402
from repository_files import changed_files, repository_files  # noqa: E402

# Hypothesis has no deadline, because the duration of an example depends on the machine's load.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")
# Collect garbage less often, because tracing creates many small objects that stay alive, and hardly
# any that only the garbage collector can free.
gc.set_threshold(50_000, 20, 50)


def pytest_addoption(parser):
    """Adds the options of slow tests and of the soak test."""
    parser.addoption("--slice", metavar="K/N", help="run slice K of N of the slow tests")
    parser.addoption("--soak-steps", type=int, default=4000, help="steps of the soak's two runs")
    parser.addoption("--soak-every", type=float, default=120.0, help="seconds between its mishaps")
    parser.addoption(
        "--soak-out", metavar="DIR", type=os.path.abspath, help="where its pictures and figures go"
    )


def pytest_ignore_collect(collection_path, config):
    """Skips the import of test files that contain no test of `--slice`."""
    return slices.is_elsewhere(collection_path, config) or None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Selects and orders the tests of `--slice`."""
    slices.keep_slice(config, items)


# Files of the repository at the start of the session, and paths that had changed at its end.
FILES_BEFORE = pytest.StashKey()
FILES_CHANGED = pytest.StashKey()


def pytest_sessionstart(session):
    """Records the files of the repository, except in xdist workers."""
    if not hasattr(session.config, "workerinput"):
        session.config.stash[FILES_BEFORE] = repository_files()


def pytest_sessionfinish(session):
    """Fails the session if files of the repository have changed.

    The workers of xdist recorded no files, so only their parent process compares them.
    """
    before = session.config.stash.get(FILES_BEFORE, None)
    if before is None:
        return
    changed = changed_files(before, repository_files())
    session.config.stash[FILES_CHANGED] = changed
    if changed and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    """Prints the files of the repository that have changed."""
    changed = config.stash.get(FILES_CHANGED, [])
    if changed:
        terminalreporter.section("the repository changed while its tests ran")
        terminalreporter.line("Tests write to tmp_path only. If you edited these, run them again:")
        for path in changed:
            terminalreporter.line(f"  {path}")


@pytest.fixture(scope="session", autouse=True)
def session_folder(tmp_path_factory):
    """Sets an empty working directory for fixtures that several tests share."""
    with contextlib.chdir(tmp_path_factory.mktemp("session")):
        yield


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    """Sets the test's temporary folder as working directory, and returns it.

    Processes that the test starts inherit the directory. The fixture uses the monkeypatch that a
    test may use for another chdir. Its undo then restores the first directory. With two separate
    patches, the shared fixtures of the next test could run in this test's folder.
    """
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Flag of XLA that selects the newer code generator for fused loops on CPUs.
OLD_FUSIONS = "xla_cpu_use_fusion_emitters"


def xla_knows(flag):
    """True if XLA has a flag. XLA aborts a process that sets an unknown flag."""
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        return True
    # Newer versions still contain the names of removed flags, so try the flag in a new process.
    environment = os.environ | {"XLA_FLAGS": f"--{flag}=false"}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    return (
        subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0
    )


def pytest_configure(config):
    """Disables most optimizations of XLA, because tests spend more time compiling than computing.

    Fused loops take most of the remaining compile time. With the older code generator for them,
    compilation takes a quarter of the time. The GPU tests and the soak test keep all
    optimizations, because they test the programs that users run.
    """
    if config.option.markexpr in ("gpu", "soak"):
        return
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    # Do not record the Python lines of each operation, which only profiles need.
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
    if "XLA_FLAGS" not in os.environ and xla_knows(OLD_FUSIONS):
        os.environ["XLA_FLAGS"] = f"--{OLD_FUSIONS}=false"


@pytest.fixture(autouse=True)
def programs_that_users_run(request, monkeypatch):
    """Enables the optimizations of XLA in processes that a test marked `optimized` starts.

    These processes train for minutes, so the optimizations save more time than they take.
    """
    if request.node.get_closest_marker("optimized"):
        monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)
        if os.environ.get("XLA_FLAGS") == f"--{OLD_FUSIONS}=false":
            monkeypatch.delenv("XLA_FLAGS")


def pytest_unconfigure():
    """Removes the compilation cache of the session. Workers of xdist use their parent's cache."""
    if OWN_CACHE is not None:
        shutil.rmtree(OWN_CACHE, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_are_dropped():
    """Discards the compiled programs of each test module.

    Two modules rarely use the same programs, and all programs together need gigabytes of memory.
    """
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()


@pytest.fixture(scope="session")
def world():
    """Returns the small random policy of `rollout_world`."""
    from rollout_world import plain_world

    return plain_world()


@pytest.fixture(scope="session")
def ledger_tokens():
    """Returns the tokenizer of the ledger task."""
    from bacr_jax.questions.ledger import ledger_tokenizer

    return ledger_tokenizer()


@pytest.fixture(scope="session")
def shared_data():
    """Returns the folder with real data, or skips the test and reports the missing folder."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("BACR_SHARED_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"needs real data: {folder} is not there (set BACR_SHARED_DATA)")
    return folder


@pytest.fixture(scope="session")
def qwen(shared_data):
    """Returns Qwen2.5's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(shared_data / "qwen_tokenizer")
