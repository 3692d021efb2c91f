"""The example of data of one's own: its verifier, its files, and the config that names both."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from bacr_jax import train as command

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "own_data.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("own_data", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("answer", "score"),
    [("20", 1.0), (" 21 ", 0.8), ("16", 0.2), ("25", 0.0), ("-20", 0.0), ("20 or 21", 0.0)],
)
def test_an_answer_is_worth_less_the_further_away_it_is(example, answer, score):
    assert example.check("7+7+1+5", answer, "20") == pytest.approx(score)


def test_the_config_is_good_for_the_files_that_the_example_writes(
    example, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(FILE.parent)
    monkeypatch.setattr(sys, "argv", ["own_data.py", "own"])
    example.main()
    train_set, test_set = (
        [json.loads(line) for line in (tmp_path / f"own/{name}.jsonl").read_text().splitlines()]
        for name in ("train", "test")
    )
    assert all(row["long"].endswith(f"={row['answer']}") for row in test_set)
    asked = [{row["question"] for row in rows} for rows in (train_set, test_set)]
    assert asked[0].isdisjoint(asked[1])
    with pytest.raises(SystemExit) as stop:
        command.main(["--config", "own-data", "--check"])
    assert not stop.value.code and "the config is valid, and" in capsys.readouterr().out
    assert command.main(["--config", "own-data", "--check", "data.trace_column=[short, lang]"]) == 2
    assert "there is no column 'lang' with the trace" in capsys.readouterr().err
