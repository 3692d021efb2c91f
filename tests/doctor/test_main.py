"""`bacr doctor`: its page, its file, its exit codes."""

import json

import pytest

from bacr_doctor import __main__ as command
from bacr_doctor.checks import CHECKS
from bacr_doctor.records import Record


@pytest.fixture
def told(monkeypatch, tmp_path, capsys):
    def run(*words, statuses=("ok",)):
        records = [Record(s, "seen", keys={"seed": 1}, name=s) for s in statuses]
        monkeypatch.setattr(command, "run_checks", lambda *_: iter(records))
        code = command.main(["--out", str(tmp_path / "doctor.json"), *map(str, words)])
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("statuses", "code"), [(("ok",), 0), (("ok", "warn"), 0), (("warn", "broken"), 1)]
)
def test_only_what_is_broken_is_a_failure(told, tmp_path, statuses, code):
    found, out, _ = told("--write-overlay", tmp_path / "fit.yaml", statuses=statuses)
    assert found == code and f"{len(statuses)} checks" in out
    said = json.loads((tmp_path / "doctor.json").read_text())
    assert [one["status"] for one in said["checks"]] == list(statuses)
    assert (tmp_path / "fit.yaml").read_text() == ("{}\n" if statuses == ("ok",) else "seed: 1\n")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["seed=1"], "were passed without a config"),
        (["--config", "quickstart", "budget.max=0"], "budget.max"),
        (["--device", "v100"], "use one of rtx-4090"),
        (["--seconds", "0"], "--seconds '0': the time limit"),
        (["--write-overlay", "/nowhere/x.yaml"], "the file can't be written"),
        (["--write-overlay", "/proc/x.yaml"], "the file can't be written"),
        (
            ["--out", "x", "--write-overlay", "./x"],
            "--write-overlay x: --out is the same file; use another",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(told, words, line):
    code, out, said = told(*words)
    assert (code, out, said.count("\n")) == (2, "", 1) and line in said


@pytest.mark.parametrize("option", ["--out", "--write-overlay"])
def test_a_config_is_not_written_over(told, tmp_path, option):
    mine = tmp_path / "mine.yaml"
    mine.write_text("seed: 3\n")
    code, _, said = told("--config", mine, option, mine)
    assert (
        code == 2
        and "this file is a config that the command reads, and it would be overwritten" in said
    )
    assert mine.read_text() == "seed: 3\n"


def test_every_check_has_a_name_of_its_own():
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
