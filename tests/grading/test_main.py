"""python -m bacr_grading."""

import json

import pytest

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


def test_the_verdicts_go_to_a_file_when_asked(tmp_path, capsys):
    cases, out = tmp_path / "cases.jsonl", tmp_path / "verdicts.jsonl"
    cases.write_text('{"pred": "\\\\boxed{\\ud83d4}", "gold": "4"}\n')
    assert main(["--cases", str(cases), "--out", str(out), "--mode", "strict"]) == 0
    assert json.loads(out.read_text())["correct"] is False
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "name a JSONL file"),
        (b"", "no rows"),
        (b"{", "line 1"),
        (b"[1]", "line 1: found list; write one JSON object a line"),
        (b'{"pred": "1"}', "no field 'gold', found ['pred']"),
        (b'{"pred": 1, "gold": "1"}', "pred is no string"),
        (b"\xff", "not UTF-8"),
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
    assert f"{out}: No such file or directory; " in capsys.readouterr().err
