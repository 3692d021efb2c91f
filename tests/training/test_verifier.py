"""Tests runs with a user-defined verifier that fails, hangs, or returns invalid scores."""

from pathlib import Path

import pytest

from bacr_grading.verifier import FAULTS
from bacr_jax.errors import UserError
from bacr_jax.files import read_lines
from judge_world import judge, point_at
from whole_runs import WHOLE_RUN

JUDGE = Path(__file__).parents[2] / "examples" / "verify_with_judge.py"
FAST = ("output.tensorboard=false", "output.report=false", "eval.samples=0", "eval.every=null")
# Overrides with which the policy closes most of its answers.
CLOSED = ("rollout.answer_tokens=4", "warmup.steps=200", "rollout.questions=8")


# A verifier that fails while a file exists. A test creates and removes the file.
FAILING = """
import os

def check(question, answer, gold):
    if os.path.exists({mark!r}):
        raise ConnectionError("the judge is away")
    return float(answer == gold)
"""


@pytest.fixture
def failing(tmp_path):
    """Writes the verifier and the config of a run.

    Returns the path of the file during whose existence the verifier fails, the path of the config,
    and overrides for a run that is graded by the verifier.
    """
    mark = tmp_path / "away"
    verifier, config = tmp_path / "mine.py", tmp_path / "small.yaml"
    verifier.write_text(FAILING.replace("{mark!r}", repr(str(mark))))
    config.write_text(WHOLE_RUN)
    words = [f"output.dir={tmp_path / 'run'}", f"grader={verifier}:check", *FAST, *CLOSED]
    return mark, config, words


def test_a_verifier_that_fails_on_the_first_evaluation_stops_the_run(failing, tmp_path, capsys):
    from bacr_jax.train import main

    mark, config, words = failing
    mark.touch()
    assert main(["--config", str(config), *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"{tmp_path}/mine.py:check returned no score for any of the answers of the first" in line
    assert "ConnectionError: the judge is away (line 6)" in line
    folder = tmp_path / "run"
    assert (folder / "checkpoints" / "0").is_dir()
    # An evaluation without any score is not recorded.
    assert not (folder / "eval.jsonl").exists()
    mark.unlink()
    assert main(["--config", str(config), *words]) == 0
    assert [record["when"] for record in read_lines(folder / "eval.jsonl")] == ["before", "after"]


def test_a_verifier_that_fails_for_three_steps_stops_the_run_with_a_checkpoint(failing, tmp_path):
    from bacr_jax.train import run
    from bacr_jax.training.events import EvaluationDone

    mark, config, words = failing

    def leave(event):
        if isinstance(event, EvaluationDone):
            mark.touch()

    with pytest.raises(UserError, match=r"any of the answers of 3 steps in a row .*judge is away"):
        run(config, [*words, "train.steps=9"], callbacks=[leave])
    assert (tmp_path / "run" / "checkpoints" / "3").is_dir()
    mark.unlink()
    assert run(config, [*words, "train.steps=9"]).step == 9


def test_check_tries_a_verifier_on_reference_answers(failing, capsys):
    from bacr_jax.train import main

    mark, config, words = failing
    command = ["--config", str(config), "--check", *words]
    with pytest.raises(SystemExit) as left:
        main(command)
    assert left.value.code == 0
    assert "mine.py:check: scores of reference answers: 1, 1, 1, 1" in capsys.readouterr().out
    mark.touch()
    assert main(command) == 2
    line = capsys.readouterr().err
    assert (
        "returned no score for any of 4 reference answers (last error: ConnectionError: the" in line
    )


ZERO = """
def check(question, answer, gold):
    return 0.0
"""


def check_zero_verifier(tmp_path, key):
    """Runs `bacr train --check` with a verifier that scores 0, and returns its exit code."""
    from bacr_jax.train import main

    verifier, config = tmp_path / "zero.py", tmp_path / "small.yaml"
    verifier.write_text(ZERO)
    config.write_text(WHOLE_RUN)
    words = [f"output.dir={tmp_path / 'run'}", key.format(f"{verifier}:check"), *FAST]
    try:
        return main(["--config", str(config), "--check", *words])
    except SystemExit as left:
        return left.code


def test_check_refuses_a_grader_that_gives_no_reward(tmp_path, capsys):
    assert check_zero_verifier(tmp_path, "grader={}") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "zero.py:check: scores of reference answers: 0, 0, 0, 0; a policy that answers" in line
    assert "set data.answers=verbatim if the references are not answers" in line


def test_check_accepts_a_reward_that_only_scores_the_thinking(tmp_path, capsys):
    assert check_zero_verifier(tmp_path, "reward.weights={{correct: 1, '{}': 0.2}}") == 0
    assert "0, 0, 0, 0 (right if it scores the format or the thinking)" in capsys.readouterr().out


def test_check_accepts_a_verifier_that_gives_no_reward_to_references_that_are_no_answers(
    tmp_path, capsys
):
    from bacr_jax.train import main

    verifier, config = tmp_path / "zero.py", tmp_path / "small.yaml"
    verifier.write_text(ZERO)
    config.write_text(WHOLE_RUN)
    (tmp_path / "own.jsonl").write_text('{"question": "2+2", "answer": "assert f() == 4"}\n')
    spec = f"jsonl:{tmp_path}/own.jsonl"
    words = [
        *(f"output.dir={tmp_path / 'run'}", f"grader={verifier}:check", *FAST),
        *(f"data.train={spec}", f"data.eval=['{spec}']", "data.answers=verbatim"),
        *("data.num_groups=1", "data.prompt_format=characters", "warmup.steps=0"),
    ]
    with pytest.raises(SystemExit) as left:
        main(["--config", str(config), "--check", *words])
    assert left.value.code == 0
    assert "zero.py:check: scores of reference answers: 0" in capsys.readouterr().out


def moody(answer, times):
    """Hangs, fails, or replies with NaN, text, part credit or a score.

    By the answer's digits and how often it was asked about, so that no evaluation fails as a whole;
    a second try is mostly answered as the first was.
    """
    kind = (sum(map(ord, answer)) + times // 2) % 7
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
        # A call that hangs is terminated at the grader's deadline.
        point_at(server, monkeypatch, tmp_path / "budget", SECONDS=5, TRIES=2)
        assert main([*command, *own]) == 0
    records = read_lines(folder / "metrics.jsonl")
    assert len(records) == 4
    reasons = {name: total(records, f"failed_{name}") for name in ("late", "raised", "nan", "text")}
    assert all(reasons.values()), reasons
    assert total(records, "failed_range")
    assert total(records, "failed") == sum(total(records, f"failed_{fault}") for fault in FAULTS)
    # Answers with a partial score have a partial reward.
    assert sum(record["grader/partly_correct"] for record in records)
    assert any(0 < record["reward/cut_4"] < 1 for record in records)
    said = "".join(capsys.readouterr())
    assert "WARNING: the verifier returned no score for" in said
    assert "answer format before training (" in said
    # A changed file is another verifier, with which the run can't be resumed.
    verifier.write_text(JUDGE.read_text() + "\n# changed\n")
    more = [*command, *own, "train.steps=5", "--allow-change", "train.steps"]
    assert main(more) == 2
    assert (
        f"grader={verifier}:judge: the code that grades answers was changed after the run in"
        in capsys.readouterr().err
    )
