"""Tests that `bacr train --check` trains nothing, and prints faults or the next command."""

import json

import pytest

from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.runs.folder import WarmupPaths
from bacr_jax.train import main
from bacr_jax.training import initialize
from bacr_jax.training.checks import check_inputs
from bacr_jax.training.warmup_folder import warmup_fingerprint
from methods_world import load


def test_a_check_ends_with_the_runs_first_lines_and_the_next_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    words = ["--config", "quickstart", "data.ledger.train_size=64", "output.dir=runs/a b"]
    with pytest.raises(SystemExit) as stop:
        main([*words, "--check"])
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert "evaluating on 500 of ledger: 2,000 questions" in lines
    assert "  cuts.count=1 (published: 4)" in lines
    assert lines[-8:] == [
        "method   bacr-bounded (BACR); 20 departures from its publication, listed above",
        "model    random, 3 layers of width 64, 131,584 parameters; warm-up of 800 steps",
        "devices  not looked at by --check; bacr doctor tries them",
        "run      100 steps of 32 questions x 8 traces",
        "         budgets 8, 16, 32, 64 (eval.budgets)",
        "         58 questions of Ledger, none left out, 6 held out for validation",
        "         in runs/a b; Ctrl-C saves and stops, the same command resumes",
        "next     bacr train --config quickstart data.ledger.train_size=64 'output.dir=runs/a b'",
    ]
    assert not (tmp_path / "runs").exists()


def test_a_check_refuses_a_shared_warm_up_with_other_texts(tmp_path):
    row = '{"question": "2+2", "answer": "4", "cot": "=4"}\n'
    (tmp_path / "own.jsonl").write_text(row)
    spec = f"jsonl:{tmp_path}/own.jsonl"
    config = load(
        tmp_path, None, f"data.train={spec}", f"data.eval=['{spec}']", "data.num_groups=1",
        "data.prompt_format=characters", "data.trace_column=cot", "warmup.steps=3",
        f"warmup.dir={tmp_path}/warm",
    )  # fmt: skip
    paths = WarmupPaths(tmp_path / "warm")
    (paths.weights / "3").mkdir(parents=True)
    digests = []
    initialize.check_inputs(resolve(config), digests.append)
    identity = {"fingerprint": warmup_fingerprint(config), "texts": digests[0]}
    paths.identity.write_text(json.dumps(identity))
    assert check_inputs(config, "auto", (), download=False)
    for changes, says in (
        ({"texts": "other"}, "a warm-up with other traces or answers than data.train has now"),
        ({"fingerprint": "other", "texts": "other"}, "a warm-up with other settings"),
    ):
        paths.identity.write_text(json.dumps(identity | changes))
        with pytest.raises(UserError) as refusal:
            check_inputs(config, "auto", (), download=False)
        (line,) = refusal.value.lines
        assert line.startswith(f"warmup.dir={tmp_path}/warm contains {says}")
