"""Tests work in folders of their own: what lies in the repository's ignored folders is not seen."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from repository_files import ROOT, changed_files, repository_files

TESTS = Path(__file__).parent
# Names that tests use for the repository's root.
ROOTS = {"ROOT", "PROJECT", "REPOSITORY", "SHIPPED", "CONFIGS", "EXAMPLES", "__file__"}


@pytest.fixture(scope="module")
def folder_of_shared_fixtures():
    return Path.cwd()


def test_a_test_and_its_processes_start_in_the_tests_own_empty_folder(tmp_path):
    assert Path.cwd() == tmp_path
    assert list(tmp_path.iterdir()) == []
    print_folder = [sys.executable, "-c", "import os; print(os.getcwd())"]
    done = subprocess.run(print_folder, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path)


def test_a_fixture_that_tests_share_works_outside_of_the_repository(folder_of_shared_fixtures):
    assert not folder_of_shared_fixtures.is_relative_to(ROOT)
    assert list(folder_of_shared_fixtures.iterdir()) == []


def working_directories(tree):
    """Returns the expressions of a test module that a process or the test changes its folder to."""
    expressions = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        expressions += [word.value for word in node.keywords if word.arg == "cwd"]
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name in ("chdir", "fchdir"):
            expressions += node.args
    return expressions


def is_in_the_repository(expression):
    names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
    return bool(names & ROOTS)


def test_no_test_makes_the_repository_its_working_directory():
    wrong = []
    for path in sorted(TESTS.rglob("*.py")):
        for expression in working_directories(ast.parse(path.read_text())):
            if is_in_the_repository(expression):
                wrong.append(f"{path.relative_to(ROOT)}:{expression.lineno}")
    assert wrong == [], "use tmp_path, and absolute paths of what the repository has"


def test_the_search_for_working_directories_sees_both_forms():
    text = "run(x, cwd=ROOT)\nmonkeypatch.chdir(SHIPPED.parents[2])\nos.chdir(tmp_path)\n"
    found = [is_in_the_repository(one) for one in working_directories(ast.parse(text))]
    assert found == [True, True, False]


@pytest.fixture
def small_repository(tmp_path):
    """A repository with this conftest, and no tests yet."""
    repository = tmp_path / "repository"
    support = repository / "tests" / "support"
    support.mkdir(parents=True)
    shutil.copy(TESTS / "conftest.py", repository / "tests")
    for name in ("slices.py", "slow_seconds.json", "repository_files.py"):
        shutil.copy(TESTS / "support" / name, support)
    (repository / ".gitignore").write_text("__pycache__/\n.pytest_cache/\n.hypothesis/\n/runs/\n")
    settings = "[pytest]\npythonpath = tests/support\naddopts = --import-mode=importlib\n"
    (repository / "pytest.ini").write_text(settings)
    (repository / "data").mkdir()
    return repository


def run_tests(repository, body, *options):
    test = f"import os\nfrom pathlib import Path\nROOT = Path(__file__).parents[1]\n{body}"
    (repository / "tests" / "test_one.py").write_text(test)
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=repository,
        env={**os.environ, "BACR_SHARED_DATA": "data", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )


def test_a_test_that_changes_its_folder_leaves_shared_fixtures_in_theirs(small_repository):
    body = (
        "import pytest\n"
        "@pytest.fixture(scope='module')\n"
        "def shared():\n"
        "    return Path.cwd()\n"
        "def test_first(monkeypatch, tmp_path):\n"
        "    monkeypatch.chdir(tmp_path)\n"
        "def test_second(shared, tmp_path):\n"
        "    assert 'session' in shared.name\n"
    )
    done = run_tests(small_repository, body)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["one process", "workers"])
def test_a_session_that_writes_into_the_repository_fails_and_names_the_file(
    small_repository, options
):
    body = 'def test_it():\n    (ROOT / "tests" / "new.txt").write_text("x")\n'
    done = run_tests(small_repository, body, *options)
    assert done.returncode == 1
    assert "1 passed" in done.stdout
    assert "  tests/new.txt\n" in done.stdout


def test_a_session_that_writes_to_its_working_directory_passes(small_repository):
    # A training of the user may write to runs/ meanwhile.
    body = (
        "def test_it():\n"
        '    Path("runs").mkdir()\n'
        '    (ROOT / "runs").mkdir()\n'
        '    (ROOT / "runs" / "a").touch()\n'
        '    assert os.environ["BACR_SHARED_DATA"] == str(ROOT / "data")\n'
    )
    done = run_tests(small_repository, body)
    assert (done.returncode, "repository changed" in done.stdout) == (0, False), done.stdout


def test_new_removed_and_changed_files_are_changes(tmp_path):
    (tmp_path / ".gitignore").write_text("/runs/\nbuild/\n*.egg-info/\n")
    ignored = ("runs/a", "sub/build/b", "sub/x.egg-info/c", ".git/d")
    for name in ("removed", "edited", "same", "sub/runs/counted", *ignored):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    before = repository_files(tmp_path)
    assert set(before) == {".gitignore", "removed", "edited", "same", "sub/runs/counted"}
    (tmp_path / "removed").unlink()
    (tmp_path / "edited").write_text("22")
    (tmp_path / "new").touch()
    assert changed_files(before, repository_files(tmp_path)) == ["edited", "new", "removed"]


def test_ci_runs_the_commands_of_readme_in_its_order():
    readme = (ROOT / "README.md").read_text()
    marked = re.findall(r"<!-- ([\w ]+) -->\n```bash\n(.*)\n```\n<!-- /\1 -->", readme)
    assert marked == [
        ("main job", "bacr train --config configs/quickstart.yaml"),
        ("test command", "python -m pytest -n 2 --dist loadfile"),
    ]
    script = (ROOT / ".ci" / "run").read_text()
    assert re.findall(r'^run_readme_command "(.*)"$', script, re.MULTILINE) == [
        name for name, _ in marked
    ]
