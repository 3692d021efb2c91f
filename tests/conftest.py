"""Settings that must stand before JAX starts, and fixtures shared by rooms."""

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
# Tests work in folders of their own, where a relative path would name something else.
for variable in ("BACR_SHARED_DATA", "JAX_COMPILATION_CACHE_DIR", "PYTHONPATH"):
    if os.environ.get(variable):
        paths = os.environ[variable].split(os.pathsep)
        os.environ[variable] = os.pathsep.join(os.path.abspath(path) for path in paths)
# Compiling is most of the work of these tests, and many compile the same: one cache for the test
# session, its workers and the commands they start. A cache from before is never read.
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

# How long an example takes depends on what else the machine does.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")
# Tracing makes many small objects that live on, and nearly none that only a collection frees.
gc.set_threshold(50_000, 20, 50)


def pytest_addoption(parser):
    parser.addoption("--slice", metavar="K/N", help="run slice K of N of the slow tests")
    parser.addoption("--soak-steps", type=int, default=4000, help="steps of the soak's two runs")
    parser.addoption("--soak-every", type=float, default=120.0, help="seconds between its mishaps")
    parser.addoption(
        "--soak-out", metavar="DIR", type=os.path.abspath, help="where its pictures and figures go"
    )


def pytest_ignore_collect(collection_path, config):
    return slices.is_elsewhere(collection_path, config) or None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    slices.keep_slice(config, items)


FILES_BEFORE = pytest.StashKey()
FILES_CHANGED = pytest.StashKey()


def pytest_sessionstart(session):
    if not hasattr(session.config, "workerinput"):
        session.config.stash[FILES_BEFORE] = repository_files()


def pytest_sessionfinish(session):
    """Fails a session that changed the repository; workers of xdist leave that to their parent."""
    before = session.config.stash.get(FILES_BEFORE, None)
    if before is None:
        return
    changed = changed_files(before, repository_files())
    session.config.stash[FILES_CHANGED] = changed
    if changed and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    changed = config.stash.get(FILES_CHANGED, [])
    if changed:
        terminalreporter.section("the repository changed while its tests ran")
        terminalreporter.line("Tests write to tmp_path only. If you edited these, run them again:")
        for path in changed:
            terminalreporter.line(f"  {path}")


@pytest.fixture(scope="session", autouse=True)
def session_folder(tmp_path_factory):
    """The working directory of fixtures that several tests share."""
    with contextlib.chdir(tmp_path_factory.mktemp("session")):
        yield


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    """Every test, and every process that it starts, works in the test's own empty folder.

    By the same monkeypatch as a test's own chdir: undone separately and later, the test's would
    leave the next test's shared fixtures in this test's folder.
    """
    monkeypatch.chdir(tmp_path)
    return tmp_path


OLD_FUSIONS = "xla_cpu_use_fusion_emitters"


def xla_knows(flag):
    """Returns whether XLA has a flag; it ends a process that gives it one it does not know."""
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        return True
    # Later versions name flags that they no longer take, so that only XLA itself can tell.
    environment = os.environ | {"XLA_FLAGS": f"--{flag}=false"}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    return (
        subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0
    )


def pytest_configure(config):
    """Tests compile much and compute little, so XLA compiles them without its optimizations.

    Fused loops are most of what is left of a compilation: without their newer code generator it
    takes a quarter of the time. GPU tests and the soak are about the programs that users run.
    """
    if config.option.markexpr in ("gpu", "soak"):
        return
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    # Which lines of Python an operation came from: for profiles, which no test makes.
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
    if "XLA_FLAGS" not in os.environ and xla_knows(OLD_FUSIONS):
        os.environ["XLA_FLAGS"] = f"--{OLD_FUSIONS}=false"


@pytest.fixture(autouse=True)
def programs_that_users_run(request, monkeypatch):
    """For a test whose processes train for minutes."""
    if request.node.get_closest_marker("optimized"):
        monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)
        if os.environ.get("XLA_FLAGS") == f"--{OLD_FUSIONS}=false":
            monkeypatch.delenv("XLA_FLAGS")


def pytest_unconfigure():
    """Removes the cache; workers have none of their own."""
    if OWN_CACHE is not None:
        shutil.rmtree(OWN_CACHE, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_are_dropped():
    """Programs of one module are seldom those of the next, and together they fill gigabytes."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()


@pytest.fixture(scope="session")
def world():
    from rollout_world import plain_world

    return plain_world()


@pytest.fixture(scope="session")
def ledger_tokens():
    from bacr_jax.questions.ledger import ledger_tokenizer

    return ledger_tokenizer()


@pytest.fixture(scope="session")
def shared_data():
    """Real data, or a skip that says where it was looked for."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("BACR_SHARED_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"needs real data: {folder} is not there (set BACR_SHARED_DATA)")
    return folder


@pytest.fixture(scope="session")
def qwen(shared_data):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(shared_data / "qwen_tokenizer")
