"""Evaluation sets that are not there: refused, or left out with a line that says what gets them."""

import json
import sys

import pytest

from bacr_jax import evaluate
from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.schema import DataConfig
from bacr_jax.errors import UserError
from bacr_jax.questions.__main__ import main
from bacr_jax.questions.loaders import load_questions
from bacr_jax.questions.missing import without_missing
from bacr_jax.runs.folder import check_run_folder, open_run
from bacr_jax.training import checks

GSM8K, AIME, OWN = "gsm8k:gsm8k/test.jsonl", "aime24:aime24/test.jsonl", "jsonl:own.jsonl"


def config(folder, *sets, missing="skip", **data):
    words = [f"data.eval={json.dumps(sets)}", f"data.eval_missing={missing}", f"data.dir={folder}"]
    words += [f"data.{key}={value}" for key, value in data.items()]
    return config_io.override(Config(), words)


def remaining(config, *begun):
    return without_missing(config.data, config.eval, *begun)


def put(folder, spec):
    path = folder / spec.partition(":")[2]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')


def test_what_is_not_there_is_left_out_with_the_command_that_gets_it(tmp_path):
    put(tmp_path, GSM8K)
    left, lines = remaining(config(tmp_path, GSM8K, AIME, OWN))
    assert left == config(tmp_path, GSM8K).data
    assert lines == (
        f"data.eval: {AIME} is left out (there is no file or folder "
        f"'{tmp_path}/aime24/test.jsonl'); bacr data --prepare {tmp_path} aime24 gets it",
        f"data.eval: {OWN} is left out (there is no file or folder '{tmp_path}/own.jsonl')",
    )


def test_by_default_it_is_refused_with_the_command_too(tmp_path):
    asked = config(tmp_path, AIME, missing="refuse")
    assert DataConfig().eval_missing == "refuse"
    assert remaining(asked) == (asked.data, ())
    with pytest.raises(UserError, match=r"no file or folder .*--prepare .* aime24 gets it$"):
        load_questions(AIME, asked.data, 0, "test")


def test_a_run_without_any_set_is_refused(tmp_path):
    line = rf"none of its sets exists .*--prepare {tmp_path} gsm8k aime24 gets it$"
    with pytest.raises(UserError, match=line):
        remaining(config(tmp_path, GSM8K, OWN, AIME))


def test_the_set_that_chooses_a_checkpoint_must_be_there(tmp_path):
    put(tmp_path, GSM8K)
    asked = config_io.override(config(tmp_path, GSM8K, AIME), ["eval.select=aime24"])
    with pytest.raises(
        UserError,
        match=r"is the name of none of the sets in data.eval.*files are missing: aime24:aime24",
    ):
        remaining(asked)


def test_only_absence_is_forgiven(tmp_path):
    (tmp_path / "own.jsonl").write_text("{")
    asked = config(tmp_path, OWN, "gsm9k:x")
    assert remaining(asked) == (asked.data, ())
    with pytest.raises(UserError, match=r"own.jsonl line 1"):
        load_questions(OWN, asked.data, 0, "test")


def test_a_run_goes_on_with_the_sets_that_it_began_with(tmp_path):
    put(tmp_path, GSM8K)
    wanted = config(tmp_path, GSM8K, AIME)
    begun, _ = remaining(wanted)
    assert remaining(wanted, begun, tmp_path / "run")[0] == begun
    put(tmp_path, AIME)
    again, (line,) = remaining(wanted, begun, tmp_path / "run")
    assert again == begun
    assert f"{AIME} was missing when the run in {tmp_path}/run began" in line
    # A set that the run evaluated and that is gone now.
    (tmp_path / "gsm8k" / "test.jsonl").unlink()
    with pytest.raises(UserError, match=r"gsm8k.* was evaluated when the run in .*; restore it;"):
        remaining(wanted, begun, tmp_path / "run")
    # Another run than the one that is there: its folder refuses that as ever.
    put(tmp_path, GSM8K)
    other, _ = remaining(config(tmp_path, AIME), begun, tmp_path / "run")
    assert other.eval == (AIME,)


def test_training_says_what_it_does_without_and_goes_on_so(tmp_path, capsys):
    put(tmp_path, GSM8K)
    run = tmp_path / "run"
    asked = config_io.override(config(tmp_path, GSM8K, AIME), [f"output.dir={run}"])
    begun = checks.completed(asked, download=False)
    assert begun.data.eval == (GSM8K,) and f"{AIME} is left out" in capsys.readouterr().out
    open_run(run, begun).__exit__(None, None, None)
    put(tmp_path, AIME)
    again = checks.completed(asked, download=False)
    assert again == begun and f"--run {run} --data {AIME} to evaluate it" in capsys.readouterr().out
    check_run_folder(run, config_io.flatten(again))


def test_an_evaluation_refuses_a_set_that_it_names(tmp_path):
    trained = config(tmp_path, GSM8K, AIME)
    settled = lambda *words: evaluate.settle(evaluate.parse(["--run", "r", *words]), trained).data
    assert settled().eval_missing == "skip"
    assert settled("--data", AIME).eval_missing == "refuse"
    for override in (
        "data.eval_missing=skip",
        "data.eval_missing = skip",
        "data={eval_missing: skip}",
    ):
        assert settled("--data", AIME, override).eval_missing == "skip"


def test_the_hub_without_a_network_has_no_set(tmp_path, monkeypatch):
    class Hub:
        @staticmethod
        def snapshot_download(repo, **how):
            raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
    put(tmp_path, GSM8K)
    _, (line,) = remaining(config(tmp_path, GSM8K, "aime24:hf://HuggingFaceH4/aime_2024"))
    assert (
        "is left out ('HuggingFaceH4/aime_2024' can't be downloaded from the hub (no route))"
        in line
    )


def test_inspecting_a_config_names_them(tmp_path, capsys):
    put(tmp_path, GSM8K)
    put(tmp_path, OWN)
    file = tmp_path / "run.yaml"
    file.write_text(
        f"data: {{dir: {tmp_path}, train: '{OWN}', eval: ['{GSM8K}', '{AIME}'], num_groups: 1}}\n"
        "model: {tokenizer: mine}\n"
    )
    assert main(["--config", str(file), "data.eval_missing=skip"]) == 0
    assert f"data.eval: {AIME} is left out" in capsys.readouterr().out
    assert main(["--config", str(file)]) == 2
    assert f"--prepare {tmp_path} aime24 gets it" in capsys.readouterr().err
