"""The real path on a CPU: the 7B config, MATH, Qwen2.5's tokenizer, and a model of no size."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROJECT = Path(__file__).resolve().parents[1]
# The shipped config, with nothing but overrides: less of everything.
SMALL = [
    "model.compute_dtype=float32",
    "model.logprob_chunk=64",
    "data.eval=[math500:math500/test.jsonl]",
    "data.max_prompt_tokens=128",
    "budget.min=4",
    "budget.max=8",
    "rollout.questions=8",
    "rollout.group_size=4",
    "rollout.answer_tokens=8",
    "rollout.chunk=4",
    "train.steps=2",
    "train.micro_batch_tokens=1600",
    "train.length_buckets=2",
    "eval.budgets=[8]",
    "eval.size=2",
    "eval.holdout=4",
    "checkpoint.every=1",
]


@pytest.fixture(scope="module")
def model(shared_data, tmp_path_factory):
    """A random Qwen2 as transformers writes it, with Qwen2.5-7B's vocabulary and tokenizer."""
    torch = pytest.importorskip("torch", reason="the extra parity is not installed")
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny-Instruct"
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=152_064,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32_768,
        rope_theta=1e6,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(shape).to(torch.bfloat16).save_pretrained(folder)
    for file in (shared_data / "qwen_tokenizer").iterdir():
        shutil.copy(file, folder)
    return folder


def command(module, *arguments):
    line = [sys.executable, "-m", f"bacr_jax.{module}", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True)


@pytest.mark.slow
# A CPU sorts 152,064 scores for every token of a nucleus: sampled answers in one format only.
@pytest.mark.parametrize(("prompt_format", "samples"), [("think_answer", 1), ("boxed", 0)])
def test_the_7b_config_trains_evaluates_saves_and_exports(
    shared_data, model, tmp_path, prompt_format, samples
):
    run = tmp_path / "run"
    trained = command(
        "train",
        f"--config={PROJECT / 'configs/qwen2.5-7b-math.yaml'}",
        f"output.dir={run}",
        f"model.path={model}",
        f"data.dir={shared_data}",
        f"data.prompt_format={prompt_format}",
        f"eval.samples={samples}",
        *SMALL,
    )
    assert trained.returncode == 0, trained.stderr
    assert f" left out (bacr data --config {run}/config.yaml), " in trained.stdout
    assert "held out for validation" in trained.stdout
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert np.isfinite(line["loss/total"]) and line["policy/skipped"] == 0
        # the sampler and the learner see one model
        assert abs(line["mismatch/k1"]) < 1e-3
    trace = json.loads((run / "rollouts/000002.jsonl").read_text().splitlines()[0])
    assert trace["prompt"].startswith("<|im_start|>system\n") and len(trace["answers"]) == 1
    opened = {"think_answer": "<answer>", "boxed": "\\boxed{"}[prompt_format]
    assert all(answer.startswith(opened) for answer in trace["answers"])
    for record in (run / "eval.jsonl").read_text().splitlines():
        summary, held_out = json.loads(record)["sets"].values()
        assert list(held_out) == ["greedy"] and held_out["greedy"]["8"]["problems"] == 4
        assert list(summary) == ["greedy", "sampled"][: 1 + samples]
        for found in summary.values():
            assert found["8"]["problems"] == 2
            assert found["8"]["mean_thinking_tokens"] <= 8
    assert {path.name for path in (run / "checkpoints").iterdir()} >= {"1", "2"}
    exported = command("export", "--run", run, "--out", tmp_path / "hf")
    assert exported.returncode == 0, exported.stderr
    assert {"config.json", "tokenizer.json"} <= {p.name for p in (tmp_path / "hf").iterdir()}


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.train=math:nowhere.jsonl", "no file or folder"),
        ("data.train=jsonl:bad.jsonl", "the columns are frage, antwort"),
        ("data.eval=[math500:nowhere.jsonl]", "no file or folder"),
    ],
)
def test_data_that_can_not_be_used_is_one_line_and_no_run_folder(
    shared_data, tmp_path, capsys, override, says
):
    from bacr_jax.train import main

    (tmp_path / "bad.jsonl").write_text('{"frage": "Q", "antwort": "1"}\n')
    good = {"problem": "Q", "level": 1, "answer": "1"}
    (tmp_path / "good.jsonl").write_text(json.dumps(good))
    code = main(
        [
            f"--config={PROJECT / 'configs/qwen2.5-7b-math.yaml'}",
            "model.path=null",
            f"model.tokenizer={shared_data / 'qwen_tokenizer'}",
            f"output.dir={tmp_path / 'run'}",
            f"data.dir={tmp_path}",
            "data.train=math:good.jsonl",
            "data.eval=[jsonl:good.jsonl]",
            "data.num_groups=1",
            *SMALL[:1],
            override,
        ]
    )
    assert code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and says in error
    assert not (tmp_path / "run").exists()
