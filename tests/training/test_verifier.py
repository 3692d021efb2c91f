"""A run graded by a verifier of one's own that misbehaves in every way: counted, and it goes on."""

from pathlib import Path

import pytest

from bacr_grading.verifier import FAULTS
from bacr_jax.documents import read_lines
from judge_world import judge, point_at
from whole_runs import WHOLE_RUN

JUDGE = Path(__file__).parents[2] / "examples" / "verify_with_judge.py"
FAST = ("output.tensorboard=false", "output.report=false", "eval.samples=0", "eval.every=null")
# Enough for a policy that closes most of its answers.
CLOSED = ("rollout.answer_tokens=4", "warmup.steps=200", "rollout.questions=8")


def moody(answer, times):
    """Hangs, fails, or replies with NaN, text, part credit or a score, by the answer's digits."""
    kind = sum(map(ord, answer)) % 7
    return ("hang", 500, "NaN", "well done", "7", "0.5", "1")[kind]


def total(records, name):
    return sum(record[f"process/grader_{name}"] for record in records)


@pytest.mark.slow
def test_a_judge_that_hangs_raises_or_says_nonsense_is_counted_and_training_goes_on(
    tmp_path, monkeypatch, capsys
):
    from bacr_jax.train import main

    config, folder = tmp_path / "small.yaml", tmp_path / "run"
    config.write_text(WHOLE_RUN)
    command = ["--config", str(config), f"output.dir={folder}", *FAST, *CLOSED]
    verifier = tmp_path / "judge.py"
    verifier.write_text(JUDGE.read_text())
    own = [f"grader={verifier}:judge", "grading.deadline=1", "grading.workers=4"]
    with judge(moody) as server:
        # A call that hangs is ended by the grader's deadline.
        point_at(server, monkeypatch, tmp_path / "budget", SECONDS=5, TRIES=2)
        assert main([*command, *own]) == 0
    records = read_lines(folder / "metrics.jsonl")
    assert len(records) == 4
    reasons = {name: total(records, f"failed_{name}") for name in ("late", "raised", "nan", "text")}
    assert all(reasons.values()), reasons
    assert total(records, "failed_range")
    assert total(records, "failed") == sum(total(records, f"failed_{fault}") for fault in FAULTS)
    # Answers that got part credit paid it.
    assert sum(record["grader/partly_correct"] for record in records)
    assert any(0 < record["reward/cut_4"] < 1 for record in records)
    said = "".join(capsys.readouterr())
    assert "WARNING: the verifier gave no score to" in said
    assert "format of the starting policy (" in said
    # Another content of the file is another verifier, and is refused on resuming.
    verifier.write_text(JUDGE.read_text() + "\n# changed\n")
    more = [*command, *own, "train.steps=5", "--allow-change", "train.steps"]
    assert main(more) == 2
    assert f"grader={verifier}:judge: the file is not what the run in" in capsys.readouterr().err
