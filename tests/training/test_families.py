"""Tests that a model of each family can be checked, trained, exported and used for generation."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

import hf_world
import thinking_world
from bacr_jax import generate, train
from bacr_jax.export.from_run import export
from bacr_jax.files import read_lines
from bacr_jax.model.hf import hf_config
from methods_world import PRESETS
from small_config import SMALL

QUESTIONS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(1, 17)]
# For each model: its family, changes to the shape of the family, and its tokenizer. R1-Distill is a
# Qwen2 model whose output head is not tied to the embedding matrix.
CASES = {
    "r1": ("qwen2", {"tie_embeddings": False}, "r1"),
    "qwen3": ("qwen3", {}, "qwen3"),
    "llama": ("llama", {}, "qwen3"),
}


def arguments(place, kind, *more):
    """Of a run of one step on sums, asked in the model's own tags."""
    family, changes, tokens = CASES[kind]
    shape = dataclasses.replace(hf_world.FAMILIES[family], **changes)
    base = thinking_world.thinking_folder(place / "base", tokens, shape)
    table = place / "sums.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    settings = {
        "model.path": base,
        "data.train": f"jsonl:{table}",
        "data.eval": f"[jsonl:{table}]",
        "data.prompt_format": "native",
        "data.num_groups": 1,
        "eval.every": "null",
        "warmup.steps": 0,
        "output.dir": place / "run",
        "output.report": False,
        "output.tensorboard": False,
    }
    written = [f"{key}={value}" for key, value in settings.items()]
    return ["--config", str(SMALL), *written, *more]


def test_a_run_of_r1_is_right_or_refused(tmp_path, capsys):
    settings = arguments(tmp_path, "r1")
    for right in ("native", "think_answer"):
        with pytest.raises(SystemExit) as stop:
            train.main([*settings, f"data.prompt_format={right}", "--check"])
        assert not stop.value.code and "the config is valid, and" in capsys.readouterr().out
    assert train.main([*settings, "data.prompt_format=boxed", "--check"]) == 2
    assert (
        "but the prompt format 'boxed' does not end it with </think>; set data."
        in capsys.readouterr().err
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("adapter", [(), ("adapter.rank=2",)], ids=["whole", "adapters"])
def test_from_a_folder_to_a_folder(tmp_path, capsys, kind, adapter):
    assert train.main(arguments(tmp_path, kind, *adapter)) == 0
    export(tmp_path / "run", tmp_path / "out")
    before, after = (
        json.loads((tmp_path / f / "config.json").read_text()) for f in ("base", "out")
    )
    family = CASES[kind][0]
    assert after["model_type"] == before["model_type"] == family
    assert after["architectures"] == [f"Bacr{family.capitalize()}ForCausalLM"]
    assert hf_config.read_hf_config(tmp_path / "out") == hf_config.read_hf_config(tmp_path / "base")
    close = thinking_world.small(CASES[kind][2]).convert_tokens_to_ids("</think>")
    assert after["thinking"]["closing_ids"].count(close) == 1
    capsys.readouterr()
    greedy = ["--budget", "4", "--temperature", "0", "What is 1+1?"]
    assert generate.main(["--model", str(tmp_path / "out"), *greedy]) == 0
    said = capsys.readouterr().out
    assert "\\boxed{" in said
    assert f"[4 thinking tokens, {len(after['thinking']['closing_ids'])} forced, " in said


# Overrides with smaller sizes for configs/r1-distill-1.5b-math.yaml. They do not change the method.
LESS = {
    "model.compute_dtype": "float32",
    "model.logprob_chunk": 64,
    "data.num_groups": 1,
    "data.max_prompt_tokens": 256,
    "grading.workers": 1,
    "budget.min": 4,
    "budget.max": 8,
    "budget.levels": "{}",
    "rollout.questions": 4,
    "rollout.group_size": 2,
    "rollout.answer_tokens": 4,
    "rollout.chunk": 4,
    "rollout.windows": 1,
    "rollout.refill": 1.0,
    "train.steps": 2,
    "train.micro_batch_tokens": 1600,
    "train.length_buckets": 2,
    "eval.every": "null",
    "eval.budgets": "[4, 8]",
    "eval.size": 2,
    "eval.slots": "null",
    "output.report": False,
    "output.tensorboard": False,
}


def released_by_transformers(place):
    """A random folder of R1-Distill-Qwen's class, template and tags, as transformers writes it."""
    torch = pytest.importorskip("torch", reason="the extra parity is not installed")
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = thinking_world.small("r1")
    torch.manual_seed(0)
    shape = Qwen2Config(
        # The embedding matrix has more rows than the tokenizer has ids, as in the released model.
        vocab_size=len(tokenizer) + 9,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        rope_theta=1e4,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(shape).to(torch.bfloat16).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.mark.slow
def test_the_config_of_r1_trains_and_a_cut_closes_its_thinking(tmp_path):
    base, run = released_by_transformers(tmp_path / "base"), tmp_path / "run"
    sets = [f"jsonl:{tmp_path / name}.jsonl" for name in ("sums", "more")]
    for spec in sets:
        rows = "".join(json.dumps(row) + "\n" for row in QUESTIONS)
        Path(spec.removeprefix("jsonl:")).write_text(rows)
    settings = {
        **LESS,
        "model.path": base,
        "data.train": sets[0],
        "data.eval": json.dumps(sets),
        "eval.samples": json.dumps(dict(zip(sets, (2, 0)))),
        "output.dir": run,
    }
    config = PRESETS.parent / "r1-distill-1.5b-math.yaml"
    written = [f"{key}={value}" for key, value in settings.items()]
    assert train.main(["--config", str(config), *written]) == 0
    steps = read_lines(run / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert math.isfinite(step["loss/total"]) and step["policy/skipped"] == 0
    for record in read_lines(run / "eval.jsonl"):
        drawn = [
            {mode: {entry["samples"] for entry in budgets.values()} for mode, budgets in of.items()}
            for of in record["sets"].values()
        ]
        assert drawn == [{"greedy": {1}, "sampled": {2}}, {"greedy": {1}}]
    (answer,) = generate.open_session(run, None).ask(["What is 1 + 1?"], [4])
    assert (answer.closed_by, answer.thinking_tokens) == ("budget", 4)
    forced = "...\n\n...\n\n</think>\n\n**Final Answer**\n\\boxed{"
    closing = thinking_world.small("r1")(forced, add_special_tokens=False)["input_ids"]
    assert list(answer.tokens[4 : 4 + len(closing)]) == closing
    assert answer.forced_tokens == len(closing)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    """A folder of Qwen2.5's family whose tokens are bytes."""
    place = tmp_path_factory.mktemp("qwen2")
    tokenizer = hf_world.chat_tokenizer()
    shape = dataclasses.replace(hf_world.TINY, vocab_size=len(tokenizer))
    hf_world.make_folder(place / "base", shape, tokenizer=tokenizer)
    (place / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return place


# Presets that differ from the others in sampling, budgets or answers. test_algorithm.py trains the
# quickstart with all presets.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("anytime", ()),
        ("bacr-full", ()),
        ("effort", ()),
        ("gated_bonus", ()),
        ("gated_penalty", ()),
        ("grpo", ("train.minibatches=2", "loss.dual_clip=10", "loss.sequence_cap=3")),
        ("grpo", ("distill.coef=1", "distill.teacher=BASE")),
        ("l1_exact", ()),
        ("s_grpo", ()),
        ("self_distill", ()),
        ("thinkprune", ()),
    ],
)
def test_a_preset_trains_it_two_steps(qwen2, tmp_path, name, keys):
    settings = {
        "model.path": qwen2 / "base",
        "data.train": f"jsonl:{qwen2 / 'sums.jsonl'}",
        "data.eval": f"[jsonl:{qwen2 / 'sums.jsonl'}]",
        "data.prompt_format": "think_answer",
        "data.num_groups": 1,
        "warmup.steps": 0,
        "train.steps": 2,
        "eval.every": "null",
        "output.dir": tmp_path / "run",
        "output.report": False,
        "output.tensorboard": False,
    }
    if name == "s_grpo":
        settings["budget.min"] = 8  # The method has eight exits.
    written = [f"{key}={value}" for key, value in settings.items()]
    keys = [key.replace("BASE", str(qwen2 / "base")) for key in keys]
    preset = str(PRESETS / f"{name}.yaml")
    assert train.main(["--config", str(SMALL), "--config", preset, *written, *keys]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(math.isfinite(value) for step in steps for value in step.values())
    assert all(abs(step["mismatch/k1"]) < 1e-3 for step in steps)
    if "distill.coef=1" in keys:
        # The teacher is the policy before training.
        assert abs(steps[0]["distill/reverse_kl"]) < 1e-5
