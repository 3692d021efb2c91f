"""Tests that `bacr train --check` trains nothing, and prints the next command."""

import pytest

from bacr_jax.train import main


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
    assert lines[-7:] == [
        "method   bacr-robust (BACR); 19 departures from its publication, listed above",
        "model    random, 3 layers of width 64, 131,584 parameters; warm-up of 800 steps",
        "devices  not looked at by --check; bacr doctor tries them",
        "run      100 steps of 32 questions x 8 traces; budgets 8 to 64",
        "         58 questions of Ledger, none left out, 6 held out for validation",
        "         in runs/a b; Ctrl-C saves and stops, the same command resumes",
        "next     bacr train --config quickstart data.ledger.train_size=64 'output.dir=runs/a b'",
    ]
    assert not (tmp_path / "runs").exists()
