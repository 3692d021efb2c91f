"""`bacr export`: from a run folder to a folder that loads."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

import hf_world
import thinking_world
from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.export import __main__ as export
from bacr_jax.export import from_run
from bacr_jax.model.hf import hf_config, reading
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.prompts.fingerprints import template_fingerprint, tokenizer_fingerprint
from bacr_jax.prompts.tokenizers import load_tokenizer
from bacr_jax.questions.ledger import ledger_tokenizer
from bacr_jax.runs import checkpoint as saved_checkpoint
from bacr_jax.runs.provenance import model_record
from bacr_jax.runs.saved_policy import open_policy
from export_world import LEDGER, MODEL, checkpoint, make_run

# Room for a tokenizer of bytes.
ENGLISH = dataclasses.replace(hf_world.TINY, vocab_size=300)


@pytest.fixture
def ledger_run(tmp_path):
    """A conditioned run of the procedural task, its model random from the start."""
    params = hf_world.random_params(LEDGER, conditioning=Config().conditioning)
    settings = {"model": MODEL, "budget": {"min": 8, "max": 64, "levels": {"low": 16}}}
    return make_run(tmp_path / "run", params, settings), params


def same(one, two):
    jax.tree.map(np.testing.assert_array_equal, one, two)


def refusal(capsys, *arguments):
    assert export.main([str(a) for a in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


def test_a_conditioned_run_goes_out_with_its_budget_module(ledger_run, tmp_path, capsys):
    run, params = ledger_run
    out = tmp_path / "out"
    assert export.main(["--run", str(run), "--out", str(out)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == sorted(str(path) for path in out.iterdir())
    assert {"budget.safetensors", "tokenizer.json"} <= {path.name for path in out.iterdir()}
    config, found = reading.load_policy(out)
    assert config == LEDGER
    same(found, params)
    module = hf_config.read_budget_module(out)
    assert hf_config.read_levels(out) == {"low": 16}
    assert module.b_max == 64 and module.conditioning == Config().conditioning


@pytest.mark.parametrize("told", ["prompt", "both"])
def test_the_sentence_of_a_run_goes_with_its_folder(ledger_run, tmp_path, capsys, told):
    from bacr_jax.evaluation.decoder import open_decoder
    from bacr_jax.runs.saved_policy import open_policy

    _, params = ledger_run
    if told == "prompt":
        params = {name: leaf for name, leaf in params.items() if name != "budget"}
    settings = {
        "model": MODEL,
        "conditioning": {"budget_input": told},
        "budget": {"min": 8, "max": 64},
    }
    run, out = make_run(tmp_path / "told", params, settings), tmp_path / "out"
    assert export.main(["--run", str(run), "--out", str(out)]) == 0
    assert "after the question: f{budget} (config.json, budget_words)" in capsys.readouterr().out
    raw = yaml.safe_load((out / "config.json").read_text())
    kind = "Qwen2ForCausalLM" if told == "prompt" else "BacrQwen2ForCausalLM"
    assert (raw["model_type"], raw["architectures"]) == ("qwen2", [kind])
    assert raw["budget_words"] == hf_config.read_budget_words(out) == "f{budget}"
    assert (out / "model.safetensors").exists() == (told == "prompt")
    same(reading.load_policy(out)[1], params)
    # Nobody has to say again how it is told.
    saved = open_policy(None, out)
    assert (saved.config.conditioning.budget_input, saved.config.conditioning.prompt_text) == (
        told,
        "f{budget}",
    )
    decoder = open_decoder(saved, 27, max_thinking=8, slots=2)
    assert (decoder.phi_of is not None) == (told == "both")


def test_the_words_of_a_run_in_english_are_the_configs(tmp_path):
    base = tmp_path / "base"
    hf_world.make_folder(base, ENGLISH, tokenizer=hf_world.chat_tokenizer())
    sentence = "Use {budget} tokens or fewer."
    settings = {"model": {"path": str(base)}, "data": {"train": "gsm8k:somewhere"}}
    settings["conditioning"] = {"budget_input": "prompt", "prompt_text": sentence}
    params = reading.load_policy(base)[1]
    from_run.export(make_run(tmp_path / "run", params, settings), tmp_path / "out")
    assert hf_config.read_budget_words(tmp_path / "out") == sentence
    # A run that goes on from there and is told nothing leaves the sentence behind.
    settings["model"] = {"path": str(tmp_path / "out")}
    settings["conditioning"] = {"budget_input": "none"}
    from_run.export(make_run(tmp_path / "next", params, settings), tmp_path / "plain")
    assert hf_config.read_budget_words(tmp_path / "plain") is None
    text = (tmp_path / "out/config.json").read_text().replace("{budget}", "few")
    (tmp_path / "out/config.json").write_text(text)
    with pytest.raises(UserError, match="`budget_words`, .*, is 'Use few tokens or fewer.'; use"):
        hf_config.read_budget_words(tmp_path / "out")


def test_the_best_checkpoint_is_exported_unless_a_step_is_named(ledger_run, tmp_path, capsys):
    run, older = ledger_run
    newer = hf_world.random_params(LEDGER, seed=9, conditioning=Config().conditioning)
    checkpoint(run, newer, 5)
    from_run.export(run, tmp_path / "out")
    same(reading.load_policy(tmp_path / "out")[1], newer)
    assert export.main(["--run", str(run), "--out", str(tmp_path / "newest")]) == 0
    same(reading.load_policy(tmp_path / "newest")[1], newer)
    line = f"{run}: step 5, the newest, as no evaluation chose a best one\n"
    assert capsys.readouterr().err == line
    best = {"step": 3, "accuracy": 0.5, "set": "ledger", "worst": None, "declines": []}
    (run / "best.json").write_text(json.dumps(best))
    line = f"{run}: step 3, the best: mean accuracy 50.0 % on Ledger; --step newest takes step 5\n"
    for words, policy, printed in (
        ([], older, line),
        (["--step", "best"], older, line),
        (["--step", "3"], older, ""),
        (["--step", "newest"], newer, f"{run}: step 5, the newest\n"),
    ):
        out = tmp_path / "-".join(["step", *words])
        assert export.main(["--run", str(run), "--out", str(out), *words]) == 0
        same(reading.load_policy(out)[1], policy)
        number = 3 if policy is older else 5
        assert f"step {number}" in (out / "README.md").read_text()
        assert capsys.readouterr().err == printed
    out = tmp_path / "none"
    assert "use one of 3, 5" in refusal(capsys, "--run", run, "--out", out, "--step", "4")
    assert "--step" in refusal(capsys, "--run", run, "--out", out, "--step", "last")


def test_a_folder_says_by_itself_how_its_policy_is_asked(ledger_run, tmp_path):
    from bacr_jax.prompts.formats import FORMATS
    from bacr_jax.runs.saved_policy import open_policy

    from_run.export(ledger_run[0], tmp_path / "out")
    saved = open_policy(None, tmp_path / "out")
    assert saved.style == FORMATS["ledger"]
    config = saved.config
    assert (config.rollout.answer_tokens, config.budget.min, config.budget.max) == (128, 8, 64)
    assert config.budget.cap == 64 and dict(config.budget.levels) == {"low": 16}
    # Who names another format on the command line gets that one.
    other = config_io.override(config, ["data.prompt_format=boxed"])
    assert saved.under(other).style is None and saved.under(config).style == saved.style
    raw = json.loads((tmp_path / "out/config.json").read_text())
    del raw["thinking"]["cap"]
    (tmp_path / "out/config.json").write_text(json.dumps(raw))
    (tmp_path / "out/manifest.json").unlink()
    with pytest.raises(
        UserError, match="thinking.cap` is null, which is missing or not valid; run bacr export"
    ):
        open_policy(None, tmp_path / "out")


def test_words_can_go_out_without_any_code(ledger_run, tmp_path, capsys):
    run, params = ledger_run
    plain = {name: leaf for name, leaf in params.items() if name != "budget"}
    settings = {
        "model": MODEL,
        "conditioning": {"budget_input": "prompt"},
        "budget": {"min": 8, "max": 64},
    }
    words, out = make_run(tmp_path / "words", plain, settings), tmp_path / "out"
    assert export.main(["--run", str(words), "--out", str(out), "--merge-budget-prompt"]) == 0
    assert not list(out.rglob("*.py"))
    assert json.loads((out / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    assert "f" in (out / "chat_template.jinja").read_text()
    capsys.readouterr()
    two = tmp_path / "two"
    message = refusal(capsys, "--run", run, "--out", two, "--merge-budget-prompt")
    assert "conditioning.budget_input=embedding" in message and not two.exists()


def test_the_help_does_not_name_one_of_the_families(capsys):
    with pytest.raises(SystemExit):
        export.main(["--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "write a plain folder without code" in printed
    assert not any(name in printed for name in ("Qwen", "Llama"))


@pytest.fixture
def adapter_run(tmp_path):
    """The config of a run that trained adapters and reads its budget in the prompt."""
    run = tmp_path / "adapters"
    run.mkdir()
    settings = {
        "model": {**MODEL, "path": str(tmp_path / "base")},
        "adapter": {"rank": 2},
        "conditioning": {"budget_input": "prompt"},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    return run


@pytest.mark.parametrize(
    "option", [["--dtype", "bfloat16"], ["--dtype", "float32"], ["--merge-budget-prompt"]]
)
def test_options_that_a_peft_folder_ignores_are_refused(adapter_run, tmp_path, capsys, option):
    out = tmp_path / "peft"
    peft = ["--run", adapter_run, "--out", out, "--adapter", "peft"]
    message = refusal(capsys, *peft, *option)
    assert f"{' '.join(option)} has no effect with --adapter peft" in message
    assert not out.exists()


@pytest.mark.parametrize("adapter", ["peft", "merged"])
def test_only_a_folder_with_a_config_is_said_to_have_the_sentence(
    adapter_run, tmp_path, capsys, monkeypatch, adapter
):
    monkeypatch.setattr(from_run, "export", lambda *a, **k: ["a"])
    words = ["--run", adapter_run, "--out", tmp_path / "out", "--adapter", adapter]
    assert export.main([str(word) for word in words]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{tmp_path / 'out' / 'a'}\n")
    assert ("config.json" in printed) == (adapter == "merged")


@pytest.mark.parametrize("told", ["embedding", "prompt"])
def test_the_exported_tokenizer_loads_and_stops_where_the_task_does(
    ledger_run, tmp_path, told, capfd
):
    from transformers import AutoTokenizer

    run, params = ledger_run
    if told == "prompt":
        plain = {name: leaf for name, leaf in params.items() if name != "budget"}
        settings = {
            "model": MODEL,
            "conditioning": {"budget_input": told},
            "budget": {"min": 8, "max": 64},
        }
        run = make_run(tmp_path / "words", plain, settings)
    from_run.export(run, tmp_path / "out")
    capfd.readouterr()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    # Nobody is asked to run code, and nothing is warned of.
    assert capfd.readouterr() == ("", "")
    assert len(tokenizer) == 27 and tokenizer.padding_side == "left"
    text = "<bos>4a2b3c1+-=<think>0123</think><answer>9</answer>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == ledger_tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    raw = (tmp_path / "out/config.json").read_text()
    assert json.loads(raw)["eos_token_id"] == tokenizer.eos_token_id


def test_a_run_from_a_folder_keeps_its_tokenizer_and_may_have_moved(tmp_path, capsys):
    base = tmp_path / "base"
    params = hf_world.make_folder(
        base, ENGLISH, tokenizer=hf_world.chat_tokenizer(), dtype="bfloat16"
    )
    sampling = {"do_sample": True, "temperature": 0.7, "repetition_penalty": 1.05}
    (base / "generation_config.json").write_text(json.dumps(sampling))
    settings = {"model": {"path": str(base)}, "data": {"train": "gsm8k:somewhere"}}
    run = make_run(tmp_path / "run", params, settings)
    from_run.export(run, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "model.safetensors", "custom_generate", "README.md"} <= names
    # The base's own sampling settings are not those that the policy was trained with.
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert set(generation) - {"bos_token_id", "eos_token_id", "pad_token_id"} == {
        "do_sample",
        "max_length",
    }
    assert generation["do_sample"] is False
    same(reading.load_policy(tmp_path / "out")[1], params)
    base.rename(tmp_path / "moved")
    assert "pass its current folder as --base" in refusal(
        capsys, "--run", run, "--out", tmp_path / "two"
    )
    moved = str(tmp_path / "moved")
    arguments = ["--run", str(run), "--out", str(tmp_path / "two"), "--base", moved]
    assert export.main([*arguments, "--dtype", "bfloat16"]) == 0
    assert '"torch_dtype": "bfloat16"' in (tmp_path / "two/config.json").read_text()


@pytest.mark.parametrize(
    ("of_base", "exported"),
    [
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1},
            {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
        ),
        # R1-Distill has no top_k.
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.8},
            {"do_sample": True, "temperature": 0.7, "top_p": 0.8},
        ),
        # Without settings of the base, the settings of the run's evaluations.
        ({}, {"do_sample": True, "temperature": 0.5, "top_p": 0.9}),
        (
            {"do_sample": False, "temperature": 0.7},
            {"do_sample": True, "temperature": 0.5, "top_p": 0.9},
        ),
    ],
)
def test_a_model_that_thinks_by_itself_keeps_its_sampling(tmp_path, of_base, exported):
    shape = hf_world.FAMILIES["qwen3"]
    base = thinking_world.thinking_folder(tmp_path / "base", "qwen3", shape, **of_base)
    run = thinking_world.thinking_run(
        tmp_path / "run", base, eval={"temperature": 0.5, "top_p": 0.9}
    )
    from_run.export(run, tmp_path / "out")
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    ids = {"bos_token_id", "eos_token_id", "pad_token_id", "max_length"}
    assert {key: value for key, value in generation.items() if key not in ids} == exported


def test_sampling_settings_that_are_not_valid_are_refused(tmp_path, capsys):
    shape = hf_world.FAMILIES["qwen3"]
    sampling = {"do_sample": True, "temperature": "hot"}
    base = thinking_world.thinking_folder(tmp_path / "base", "qwen3", shape, **sampling)
    run = thinking_world.thinking_run(tmp_path / "run", base)
    message = refusal(capsys, "--run", run, "--out", tmp_path / "out")
    assert "base/generation_config.json: `temperature` is 'hot', which is not valid" in message
    assert not (tmp_path / "out").exists()


def test_bad_input_is_one_line_and_nothing_is_written(ledger_run, tmp_path, capsys):
    run, out = ledger_run[0], tmp_path / "out"
    assert "--out" in refusal(capsys, "--run", run)
    assert "no config.yaml" in refusal(capsys, "--run", tmp_path / "none", "--out", out)
    assert "--dtype" in refusal(capsys, "--run", run, "--out", out, "--dtype", "int8")
    assert "contains no config.json" in refusal(
        capsys, "--run", run, "--out", out, "--base", tmp_path
    )
    other = tmp_path / "other"
    hf_world.make_folder(other, Qwen2Config(27, 16, 20, 3, 4, 2, 4, tie_embeddings=True))
    message = refusal(capsys, "--run", run, "--out", out, "--base", other)
    assert "has shape (3, 16, 24)" in message and "(3, 16, 20)" in message
    assert not out.exists()
    out.mkdir()
    assert "already exists" in refusal(capsys, "--run", run, "--out", out)
    assert list(out.iterdir()) == []


def test_a_run_without_a_finished_checkpoint(ledger_run, tmp_path, capsys):
    run = ledger_run[0]
    (run / "checkpoints").rename(tmp_path / "kept")
    assert "contains no finished checkpoint" in refusal(
        capsys, "--run", run, "--out", tmp_path / "out"
    )
    (run / "checkpoints").mkdir()
    assert "contains no finished checkpoint" in refusal(
        capsys, "--run", run, "--out", tmp_path / "out"
    )
    assert list((run / "checkpoints").iterdir()) == []


def test_a_damaged_checkpoint(ledger_run, tmp_path, capsys):
    run = ledger_run[0]
    for path in (run / "checkpoints/3/state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    assert "the policy can't be read" in refusal(capsys, "--run", run, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("adapter", ["merged", "peft"])
def test_a_run_whose_base_was_edited_is_not_exported(tmp_path, capsys, adapter):
    base, out = tmp_path / "base", tmp_path / "out"
    params = hf_world.make_folder(base, ENGLISH, tokenizer=hf_world.chat_tokenizer())
    settings = {"model": {"path": str(base)}, "data": {"train": "math:x"}}
    if adapter == "peft":
        settings["adapter"] = {"rank": 2}
    run = make_run(tmp_path / "run", params, settings)
    checkpoint(run, params, 20, **model_record(hf_config.read_hf_config(base)))
    assert open_policy(run, None, 20).tokenizer() is not None
    edited = json.loads((base / "config.json").read_text()) | {"rms_norm_eps": 1e-3}
    moved = base.rename(tmp_path / "moved")
    (moved / "config.json").write_text(json.dumps(edited))
    moved_policy = open_policy(run, None, 20)
    moved_policy = moved_policy.under(
        config_io.override(moved_policy.config, [f"model.path={moved}"])
    )
    says = "its config.json differs from the one with which the run in"
    # As evaluate and generate do.
    with pytest.raises(UserError, match=f"^model.path={moved}: {says}"):
        moved_policy.tokenizer()
    command = ["--run", run, "--out", out, "--base", moved, "--adapter", adapter]
    line = refusal(capsys, *command)
    assert line.startswith(f"error: --base {moved}: {says}") and "rms_norm_eps is 0.001" in line
    assert not out.exists()
    # A checkpoint without the configuration of its model is not compared.
    moved_policy = dataclasses.replace(moved_policy, step=3)
    assert moved_policy.tokenizer() is not None


def test_a_checkpoint_for_which_the_memory_does_not_suffice(
    ledger_run, tmp_path, capsys, monkeypatch
):
    def read(*_):
        raise MemoryError

    monkeypatch.setattr(saved_checkpoint, "_read", read)
    code = export.main(["--run", str(ledger_run[0]), "--out", str(tmp_path / "out")])
    assert (code, capsys.readouterr().err) == (
        1,
        "error: checkpoint reading: the machine's memory ran out; free memory, or use a machine "
        "with more of it\n",
    )


@pytest.mark.slow  # a process
def test_as_a_command_it_prints_the_files_and_names_the_checkpoint_on_stderr(ledger_run, tmp_path):
    source = str(Path(__file__).parents[2] / "src")
    command = [sys.executable, "-m", "bacr_jax.export", "--run", str(ledger_run[0])]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": source},
        capture_output=True,
        text=True,
    )
    # The checkpoint is named on stderr, so that stdout has only the files, for pipes.
    checkpoint_line = f"{ledger_run[0]}: step 3, the newest, as no evaluation chose a best one\n"
    assert (done.returncode, done.stderr) == (0, checkpoint_line)
    files = sorted(str(path) for path in (tmp_path / "out").iterdir())
    assert done.stdout.splitlines() == files


def test_a_run_whose_template_was_edited_is_not_exported(tmp_path, capsys):
    base, out = tmp_path / "base", tmp_path / "out"
    params = hf_world.make_folder(base, ENGLISH, tokenizer=hf_world.chat_tokenizer())
    settings = {"model": {"path": str(base)}, "data": {"train": "math:x"}}
    run = make_run(tmp_path / "run", params, settings)
    config = config_io.load([run / "config.yaml"])
    tokenizer = load_tokenizer(base, where="model.path")
    digests = {
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "template": template_fingerprint(tokenizer, from_run.trained_style(resolve(config).method)),
    }
    trained = json.loads(json.dumps(config_io.flatten(config)))
    checkpoint(run, params, 20, prompt_fingerprints=digests, config=trained)
    assert len(open_policy(run, None, 20).tokenizer()) == len(tokenizer)
    template = base / "chat_template.jinja"
    template.write_text("Changed. " + template.read_text())
    says = "its chat template differs from the one"
    # As evaluate and generate do.
    with pytest.raises(UserError, match=says):
        open_policy(run, None, 20).tokenizer()
    assert says in refusal(capsys, "--run", run, "--out", out)
    assert not out.exists()
    # A checkpoint without digests is opened.
    assert export.main(["--run", str(run), "--out", str(out), "--step", "3"]) == 0


@pytest.mark.parametrize("key", ["path", "tokenizer"])
def test_a_damaged_tokenizer_is_named_by_the_key_of_its_folder(tmp_path, capsys, key):
    folders = {"path": tmp_path / "base", "tokenizer": tmp_path / "tokenizer"}
    params = hf_world.make_folder(folders["path"], ENGLISH)
    folders["tokenizer"].mkdir()
    (folders[key] / "tokenizer.json").write_text("{}")
    model = {"path": str(folders["path"]), key: str(folders[key])}
    run = make_run(tmp_path / "run", params, {"model": model, "data": {"train": "math:x"}})
    error = refusal(capsys, "--run", run, "--out", tmp_path / "out")
    assert error.startswith(f"error: model.{key}: the tokenizer in '{folders[key]}' is missing")
    assert not (tmp_path / "out").exists()
