"""python -m bacr_grading."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bacr_grading import __main__ as command
from bacr_grading import load_verifier
from bacr_grading.__main__ import main


def test_the_command_writes_one_verdict_for_each_row(tmp_path, capsys):
    cases = tmp_path / "cases.jsonl"
    rows = [{"pred": "1/2", "gold": "0.5"}, {"pred": "\\boxed{3", "gold": "3", "other": 1}]
    cases.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    assert main(["--cases", str(cases)]) == 0
    verdicts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [verdict["correct"] for verdict in verdicts] == [True, False]
    assert verdicts[0] == {
        "row": 0,
        "correct": True,
        "extracted": "1/2",
        "path": "number",
        "timed_out": False,
        "strict": False,
    }


def test_its_files_may_be_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "cases.jsonl").write_text('{"pred": "3", "gold": "3"}\n')
    assert main(["--cases=~/cases.jsonl", "--out=~/verdicts.jsonl"]) == 0
    assert json.loads((tmp_path / "verdicts.jsonl").read_text())["correct"] is True


def test_the_verdicts_go_to_a_file_when_asked(tmp_path, capsys):
    cases, out = tmp_path / "cases.jsonl", tmp_path / "verdicts.jsonl"
    cases.write_text('{"pred": "\\\\boxed{\\ud83d4}", "gold": "4"}\n')
    assert main(["--cases", str(cases), "--out", str(out), "--mode", "strict"]) == 0
    assert json.loads(out.read_text())["correct"] is False
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "use the path of a JSONL file"),
        (b"", "the file is empty"),
        (b"{", "line 1"),
        (b"[1]", "line 1: the JSON value is a list; every line must be one JSON object"),
        (b'{"pred": "1"}', "the field 'gold' is missing (the fields of this line are ['pred'])"),
        (b'{"pred": 1, "gold": "1"}', "the field 'pred' is not a string"),
        (b"\xff", "is not UTF-8"),
        (
            b'{"pred": "1", "pred": "2", "gold": "2"}',
            "line 1: the name 'pred' occurs twice; keep only one of them\n",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(tmp_path, capsys, content, message):
    cases = tmp_path / "cases.jsonl"
    if content is not None:
        cases.write_bytes(content)
    assert main(["--cases", str(cases)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_output_that_cannot_be_written_is_one_line(tmp_path, capsys):
    cases = tmp_path / "cases.jsonl"
    cases.write_text('{"pred": "1", "gold": "1"}\n')
    out = tmp_path / "no" / "o.jsonl"
    assert main(["--cases", str(cases), "--out", str(out)]) == 2
    assert (
        f"--out {out}: the file can't be written (No such file or directory); "
        in capsys.readouterr().err
    )


def test_an_output_that_is_also_an_input_is_refused(tmp_path, capsys):
    cases, grader = tmp_path / "cases.jsonl", tmp_path / "mine.py"
    cases.write_text('{"pred": "1", "gold": "1", "question": "?"}\n')
    grader.write_text("def check(question, answer, gold): return 1.0\n")
    for path in (cases, grader):
        before = path.read_bytes()
        out = f"{tmp_path}/../{tmp_path.name}/{path.name}"
        assert main(["--cases", str(cases), "--grader", f"{grader}:check", "--out", out]) == 2
        assert capsys.readouterr().err.endswith("overwrite the input; use another path\n")
        assert path.read_bytes() == before


def test_verdicts_of_before_stay_until_the_new_ones_are_there(tmp_path, monkeypatch):
    cases, out = tmp_path / "cases.jsonl", tmp_path / "verdicts.jsonl"
    cases.write_text('{"pred": "1", "gold": "1"}\n')
    out.write_text("yesterday's")

    def interrupted(*_):
        yield "{}\n"
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(command, "_grade", interrupted)
        assert main(["--cases", str(cases), "--out", str(out)]) == 130
    there = ["cases.jsonl", "verdicts.jsonl"]
    assert out.read_text() == "yesterday's"
    assert sorted(path.name for path in tmp_path.iterdir()) == there
    assert main(["--cases", str(cases), "--out", str(out)]) == 0
    assert json.loads(out.read_text())["correct"] is True
    assert sorted(path.name for path in tmp_path.iterdir()) == there


def test_a_device_gets_the_verdicts_itself(tmp_path, capsys):
    cases = tmp_path / "cases.jsonl"
    cases.write_text('{"pred": "1", "gold": "1"}\n')
    assert main(["--cases", str(cases), "--out", "/dev/null"]) == 0
    assert Path("/dev/null").is_char_device()
    assert main(["--cases", str(cases), "--out", "/dev/full"]) == 2
    assert "No space left on device; free disk space" in capsys.readouterr().err


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path, capsys):
    cases, grader = tmp_path / "cases.jsonl", tmp_path / "mine.py"
    cases.write_text('{"pred": "1", "gold": "1"}\n', encoding="utf-8-sig")
    grader.write_text("def check(question, answer, gold): return 1.0\n", encoding="utf-8-sig")
    assert main(["--cases", str(cases)]) == 0
    assert json.loads(capsys.readouterr().out)["correct"] is True
    assert load_verifier(f"{grader}:check").source.startswith("def")


def test_a_full_disk_and_a_plain_terminal_end_in_no_traceback():
    program = """
import sys
from bacr_io.command import entry_point
sys.exit(entry_point(lambda argv: print("gro\\xdf"))([]))"""
    command = [sys.executable, "-c", program]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "No space left on device; free disk space" in done.stderr
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    assert subprocess.check_output(command, env=ascii_only) == b"gro\\xdf\n"
