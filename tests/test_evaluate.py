"""`bacr evaluate`, on models small enough for a test."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hf_world
from bacr_jax import evaluate
from bacr_jax.config import Config
from bacr_jax.errors import UserError
from bacr_jax.evaluate import parse, settings_name, settle
from bacr_jax.evaluation import job
from bacr_jax.export import policy_folder
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.parallel.preemption import EXIT_CODE, Preempted
from bacr_jax.questions.ledger import ledger_tokenizer

LEDGER = Qwen2Config(27, 16, 24, 2, 2, 1, 8, rope_theta=1e4, tie_embeddings=True, max_positions=64)
SHARED = Path(os.environ.get("BACR_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))
OPTIONS = ["--data", "ledger", "--budgets", "4,8", "--size", "6", "--slots", "6"]
KEYS = ["rollout.answer_tokens=3"]
SAMPLED = ["--samples", "4", "--greedy", "--temperature", "1.0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Hugging Face folder of a random model with the ledger's tokenizer."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    params = hf_world.random_params(LEDGER)
    policy_folder.save_policy(path, params, config=LEDGER, tokenizer=ledger_tokenizer())
    return path


def run(model, out, *more):
    return evaluate.main(["--model", str(model), *OPTIONS, "--out", str(out), *more, *KEYS])


def samples(out):
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("evaluations") / "whole"
    assert run(model, out, *SAMPLED) == 0
    return out


def refusal(capsys, *arguments):
    capsys.readouterr()
    assert evaluate.main([str(a) for a in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    return captured.err


def test_every_sample_is_kept_with_its_verdicts(finished):
    found = samples(finished)
    # 6 problems, 2 budgets, one greedy answer and 4 samples.
    assert len(found) == 6 * 2 * (1 + 4)
    for one in found:
        assert one["thinking_tokens"] <= one["budget"] in (4, 8)
        assert one["total_tokens"] >= one["thinking_tokens"] + 2
        assert "<answer>" in one["text"] and one["path"] in ("string", "none")
        assert one["correct"] == (one["extracted"] == one["gold"])
        if one["closed_by"] == "budget":
            assert one["thinking_tokens"] == one["budget"]


def test_results_are_the_means_of_the_samples(finished):
    results = json.loads((finished / "results.json").read_text())
    by_budget = results["sets"]["ledger"]["by_budget"]
    for mode, budgets in by_budget.items():
        for budget, entry in budgets.items():
            mine = [s for s in samples(finished) if (s["mode"], s["budget"]) == (mode, int(budget))]
            for name, key in (
                ("accuracy", "correct"),
                ("mean_thinking_tokens", "thinking_tokens"),
                ("mean_total_tokens", "total_tokens"),
            ):
                assert entry[name] == pytest.approx(sum(s[key] for s in mine) / len(mine))
    assert list(by_budget) == ["greedy", "sampled"]
    assert set(by_budget["sampled"]["8"]["maj_at"]) == {"1", "2", "4"}


def test_tables_and_a_picture_are_written(finished):
    assert (finished / "accuracy_ledger.png").read_bytes().startswith(b"\x89PNG")
    assert "| sampled, avg@4 | 8 |" in (finished / "results.md").read_text()
    assert r"\begin{tabular}" in (finished / "results.tex").read_text()


@pytest.mark.parametrize("batches", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_an_interrupted_evaluation_continues_to_the_same_results(
    model, finished, tmp_path, capsys, monkeypatch, batches
):
    out, drawn, draw = tmp_path / "out", [], job.draw_samples

    def dying(*arguments, **options):
        if len(drawn) == batches:
            raise Preempted("SIGTERM")
        drawn.append(1)
        return draw(*arguments, **options)

    monkeypatch.setattr(job, "draw_samples", dying)
    monkeypatch.setattr(job, "_WAVES_OF_A_CALL", 1)
    assert run(model, out, *SAMPLED) == EXIT_CODE
    assert "continues" in capsys.readouterr().err
    monkeypatch.undo()
    if batches:
        # What a kill in the middle of a line leaves.
        with (out / "samples.jsonl").open("a") as file:
            file.write(json.dumps(samples(finished)[12]) + '\n{"set": "led')
    assert run(model, out, *SAMPLED) == 0
    for name in ("samples.jsonl", "results.json"):
        assert (out / name).read_bytes() == (finished / name).read_bytes()


@pytest.mark.slow
def test_a_model_of_the_hub_is_got_when_asked_and_called_by_its_name(model, tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.chdir(tmp_path)
    kept = model.rename(model.with_name("0123abc"))
    asked = []
    get = lambda name, **how: asked.append((name, how["local_files_only"])) or kept
    monkeypatch.setattr(huggingface_hub, "snapshot_download", get)
    try:
        assert run("Qwen/Tiny", tmp_path / "out", "--download") == 0
    finally:
        kept.rename(model)
    assert asked == [("Qwen/Tiny", False)]
    assert json.loads((tmp_path / "out" / "results.json").read_text())["name"] == "Tiny"


def test_a_model_of_the_hub_that_is_not_here_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    line = refusal(capsys, "--model", "Qwen/Tiny", *OPTIONS)
    assert "--model: 'Qwen/Tiny' is neither" in line and "pass --download to download it" in line


def test_a_finished_evaluation_draws_nothing_again(model, finished, monkeypatch):
    before = (finished / "results.json").read_bytes()
    monkeypatch.setattr(job, "draw_samples", lambda *a, **k: pytest.fail("drew again"))
    assert run(model, finished, *SAMPLED) == 0
    assert (finished / "results.json").read_bytes() == before


# Which keys of speed are recorded with the samples.
SPEED = [
    ("model.product_dtype=bfloat16", {"product_dtype": "bfloat16"}),
    ("rollout.attention=xla", {"decode_attention": "xla"}),
    ("rollout.windows=1", {}),
    ("rollout.refill=1.0", {}),
]


@pytest.mark.parametrize(("key", "recorded"), SPEED)
def test_a_key_of_speed_can_be_overridden_and_is_recorded(
    model, finished, tmp_path, capsys, monkeypatch, key, recorded
):
    monkeypatch.setattr(job, "draw_samples", lambda *a, **k: pytest.fail("drew"))
    with pytest.raises(pytest.fail.Exception, match="drew"):
        run(model, tmp_path / "out", *SAMPLED, key)
    products = recorded.get("product_dtype", "float32")
    said = capsys.readouterr()
    line = f"computes in float32, products with weight matrices in {products}; attention of prompts"
    assert line in said.out + said.err
    decoding = json.loads((tmp_path / "out" / "evaluation.json").read_text())["decoding"]
    before = json.loads((finished / "evaluation.json").read_text())["decoding"]
    assert decoding == before | recorded


def test_samples_of_other_rounding_are_not_continued(model, finished, capsys):
    rounded = ["--model", model, *OPTIONS, "--out", finished, *SAMPLED, *KEYS]
    line = refusal(capsys, *rounded, "model.product_dtype=bfloat16")
    assert "product_dtype" in line


def test_types_and_kernels_that_do_not_go_together_are_refused(model, tmp_path, capsys):
    asked = ["--model", model, *OPTIONS, "--out", tmp_path / "out"]
    both = ["model.compute_dtype=bfloat16", "model.product_dtype=bfloat16"]
    assert "needs a model that computes in float32" in refusal(capsys, *asked, *both)
    assert "supports only 16-bit floating-point numbers" in refusal(
        capsys, *asked, "rollout.attention=cudnn"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_rounded_products_are_evaluated(model, finished, tmp_path):
    assert run(model, tmp_path / "out", *SAMPLED, "model.product_dtype=bfloat16") == 0
    assert len(samples(tmp_path / "out")) == len(samples(finished))


@pytest.fixture(scope="module")
def dense(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("evaluations") / "dense"
    assert run(model, out, *SAMPLED, "--every", "3") == 0
    return out


@pytest.mark.slow
def test_the_dense_curve_ends_where_the_evaluation_at_the_largest_budget_is(dense):
    drawn = samples(dense)
    told = {s["id"]: s for s in drawn if (s["mode"], s["budget"]) == ("greedy", 8) and not s["cut"]}
    cut = lambda at: [s for s in drawn if s["mode"] == "greedy" and s["cut"] == at]
    assert len(told) == 6 and {s["cut"] for s in drawn} == {None, 3, 6, 8}
    for last in cut(8):
        assert {**last, "cut": None} == told[last["id"]]
    for early in cut(3):
        whole = told[early["id"]]
        assert early["thinking_tokens"] == min(3, whole["thinking_tokens"])
        ended = whole["thinking_tokens"] <= 3 and whole["closed_by"] != "budget"
        assert early["closed_by"] == (whole["closed_by"] if ended else "budget")
        counts = [early[f"{kind}_tokens"] for kind in ("thinking", "forced", "answer")]
        # What is left is the tag of thinking that ended by itself.
        assert early["total_tokens"] - sum(counts) == (1 if ended else 0)
    found = json.loads((dense / "results.json").read_text())["sets"]["ledger"]
    curve, own = found["dense"]["greedy"], found["by_budget"]["greedy"]["8"]
    assert (curve["budget"], list(curve["curve"])) == (8, ["3", "6", "8"])
    for name in ("accuracy", "ci95", "mean_thinking_tokens", "mean_total_tokens", "forced_share"):
        assert curve["curve"]["8"][name] == own[name]
    for at, entry in curve["curve"].items():
        mine = [s["correct"] for s in cut(int(at))]
        assert entry["accuracy"] == pytest.approx(sum(mine) / 6)
    # The samples' traces are those of the evaluation at the largest budget, too.
    long = [s for s in drawn if (s["mode"], s["budget"]) == ("sampled", 8)]
    used = lambda at: [s["thinking_tokens"] for s in long if s["cut"] == at]
    assert used(8) == used(None) and len(used(8)) == 24


@pytest.mark.slow
def test_the_dense_curve_is_a_table_and_a_picture_of_its_own(dense):
    text = (dense / "results.md").read_text()
    assert "dense curve, one trace with 8 tokens, truncated early" in text
    assert "| greedy | 3 |" in text and "completion, and accuracy given completion" in text
    assert (dense / "dense_ledger.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_an_interrupted_dense_curve_continues(model, dense, tmp_path, monkeypatch):
    lines = (dense / "samples.jsonl").read_bytes().splitlines(keepends=True)
    out = tmp_path / "out"
    out.mkdir()
    (out / "evaluation.json").write_bytes((dense / "evaluation.json").read_bytes())
    # Half a batch of traces cut at three places.
    (out / "samples.jsonl").write_bytes(b"".join(lines[:65]))
    assert run(model, out, *SAMPLED, "--every", "3") == 0
    for name in ("samples.jsonl", "results.json"):
        assert (out / name).read_bytes() == (dense / name).read_bytes()


def test_the_policy_before_training_is_drawn_by_tokens_used(model, finished, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(model, out, *SAMPLED, "--free", str(finished)) == 0
    assert "distance from tiny, truncated early" in capsys.readouterr().out
    free = json.loads((out / "results.json").read_text())["free_curve"]
    for mode in ("greedy", "sampled"):
        entries = free["sets"]["ledger"][mode]
        assert list(entries["curve"]) == list(entries["by_budget"]) == ["4", "8"]
        for budget, entry in entries["by_budget"].items():
            # The same policy: all of its points lie on its own curve.
            assert entry["tokens"] == entries["curve"][budget]["mean_total_tokens"]
            assert entry["difference"] == pytest.approx(0.0)
    assert (out / "free_ledger.png").read_bytes().startswith(b"\x89PNG")
    options = ["--model", model, *OPTIONS, "--out", tmp_path / "two", *KEYS]
    assert "does not contain an evaluation" in refusal(capsys, *options, "--free", tmp_path)


IN_WORDS = ["conditioning.budget_input=prompt"]


@pytest.fixture(scope="module")
def swapped(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("evaluations") / "swapped"
    assert run(model, out, *SAMPLED, "--swap", *IN_WORDS) == 0
    return out


def test_a_swap_draws_every_pair_of_input_and_truncation(swapped):
    drawn = samples(swapped)
    pairs = {(s["budget"], s["cut"]) for s in drawn}
    assert pairs == {(4, None), (8, None), (4, 4), (4, 8), (8, 4), (8, 8)}
    of = lambda mode, budget, cut: [
        s for s in drawn if (s["mode"], s["budget"], s["cut"]) == (mode, budget, cut)
    ]
    for budget in (4, 8):
        # With the input as limit too, an answer is the one of the plain evaluation.
        for swap, plain in zip(of("greedy", budget, budget), of("greedy", budget, None)):
            # A closing tag after the last token of the budget counts in the longer trace only.
            same = ("id", "extracted", "thinking_tokens", "answer_tokens", "finished")
            assert [swap[name] for name in same] == [plain[name] for name in same]
        # A trace truncated earlier is the beginning of the trace with the larger limit.
        for mode in ("greedy", "sampled"):
            for early, late in zip(of(mode, budget, 4), of(mode, budget, 8), strict=True):
                assert early["thinking_tokens"] == min(4, late["thinking_tokens"])
    assert max(s["thinking_tokens"] for s in of("sampled", 4, 8)) > 4
    swap = json.loads((swapped / "results.json").read_text())["sets"]["ledger"]["swap"]
    for mode, count in (("greedy", 6), ("sampled", 24)):
        for budget, cut in ((4, 8), (8, 4)):
            mine = [s["correct"] for s in of(mode, budget, cut)]
            entry = swap[mode]["pairs"][str(budget)][str(cut)]
            assert len(mine) == count and entry["accuracy"] == pytest.approx(sum(mine) / count)


def test_a_swap_is_a_table_and_a_picture(swapped):
    text = (swapped / "results.md").read_text()
    assert "budget as input (rows) and truncation (columns)" in text
    assert "| greedy | gain of * |" in text and "thinking length by budget as input" in text
    assert (swapped / "swap_ledger.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_swap_continues(model, swapped, tmp_path):
    lines = (swapped / "samples.jsonl").read_bytes().splitlines(keepends=True)
    out = tmp_path / "out"
    out.mkdir()
    (out / "evaluation.json").write_bytes((swapped / "evaluation.json").read_bytes())
    # All plain answers, and half a batch of truncated ones.
    (out / "samples.jsonl").write_bytes(b"".join(lines[:65]))
    assert run(model, out, *SAMPLED, "--swap", *IN_WORDS) == 0
    for name in ("samples.jsonl", "results.json"):
        assert (out / name).read_bytes() == (swapped / name).read_bytes()


def test_a_swap_can_be_compared_with(model, swapped, tmp_path):
    assert run(model, tmp_path / "out", *SAMPLED, *IN_WORDS, "--compare", str(swapped)) == 0
    results = json.loads((tmp_path / "out/results.json").read_text())
    entry = results["comparisons"][str(swapped)]["ledger"]["by_budget"]["greedy"]["8"]
    assert entry["difference"] == 0.0


def test_the_option_for_budgets_has_also_the_name_that_generate_gives_it():
    start = ["--model", "hf", "--data", "ledger"]
    assert evaluate.parse([*start, "--budget", "4,8"]).budgets == "4,8"
    assert evaluate.parse([*start, "--budgets", "4,8"]).budgets == "4,8"


@pytest.mark.slow
def test_budgets_at_the_edges(model, tmp_path):
    out, options = tmp_path / "out", ["--data", "ledger", "--size", "6", "--slots", "6"]
    budgets = ["--budgets", "none,low,0", "budget.levels={low: 6}", "budget.cap=10", *KEYS]
    how = ["--model", model, *options, "--out", out, *budgets]
    assert evaluate.main([str(a) for a in how]) == 0
    drawn = samples(out)
    of = lambda budget: [s for s in drawn if s["budget"] == budget]
    for at_once in of(0):
        # No thinking token: the closing text is forced, and the answer follows.
        assert (at_once["thinking_tokens"], at_once["forced_tokens"]) == (0, 2)
        assert at_once["text"].startswith("</think><answer>")
        assert at_once["total_tokens"] == 2 + at_once["answer_tokens"]
    assert max(s["thinking_tokens"] for s in of(6)) == 6
    assert max(s["thinking_tokens"] for s in of(-1)) == 10
    found = json.loads((out / "results.json").read_text())["sets"]["ledger"]
    assert list(found["by_budget"]["greedy"]) == ["0", "6", "none"]
    # A plain model is told nothing anyway: its traces are the same as far as they go.
    for short, long in zip(of(6), of(-1)):
        if short["closed_by"] != "budget":
            assert short["text"] == long["text"]
    # Anytime accuracy is about a range of budgets, in which 0 and none have no place.
    assert found["anytime"]["greedy"]["budgets"] == [6]
    assert "| greedy | none |" in (out / "results.md").read_text()
    assert (out / "accuracy_ledger.png").exists()


@pytest.mark.slow
def test_another_model_is_compared_problem_by_problem(finished, tmp_path, capsys):
    path = tmp_path / "other"
    params = hf_world.random_params(LEDGER, seed=5)
    policy_folder.save_policy(path, params, config=LEDGER, tokenizer=ledger_tokenizer())
    assert run(path, tmp_path / "out", "--compare", str(finished)) == 0
    results = json.loads((tmp_path / "out/results.json").read_text())
    entry = results["comparisons"]["tiny"]["ledger"]["by_budget"]["greedy"]["8"]
    assert entry["difference"] == pytest.approx(entry["accuracy"] - entry["other_accuracy"])
    assert "difference to tiny" in capsys.readouterr().out
    # Another set of problems, another decoding, and an evaluation that is not finished.
    options = ["--model", path, "--data", "ledger", "--out", tmp_path / "two"]
    compare = ["--compare", finished]
    assert "different problems" in refusal(
        capsys, *options, "--budgets", "8", "--size", "5", *compare, *KEYS
    )
    assert "in common" in refusal(
        capsys, *options, "--budgets", "7", "--size", "6", *compare, *KEYS
    )
    assert "contains no evaluation" in refusal(
        capsys, *options, "--budgets", "8", "--compare", tmp_path
    )
    assert not (tmp_path / "two").exists()


@pytest.mark.slow
def test_measured_difficulty_is_written_for_the_groups(model, tmp_path, capsys):
    labels = tmp_path / "labels.jsonl"
    options = ["--model", model, "--data", "ledger", "--size", "6", "--slots", "6"]
    more = ["--budgets", "8", "--samples", "4", "--temperature", "1.0", "--split", "train"]
    how = [*options, *more, "--out", tmp_path / "out", "--label-difficulty", labels, *KEYS]
    assert evaluate.main([str(a) for a in how]) == 0
    lines = [json.loads(line) for line in labels.read_text().splitlines()]
    assert len(lines) == 6 and all(line["id"].startswith("ledger-train-") for line in lines)
    drawn = samples(tmp_path / "out")
    for line in lines:
        mine = [s["correct"] for s in drawn if s["id"] == line["id"]]
        assert line == {"id": line["id"], "avg": sum(mine) / 4, "samples": 4}
    printed = capsys.readouterr().out
    counts = [int(x.split(": ")[1].split()[0]) for x in printed.splitlines() if "solve rate" in x]
    assert len(counts) == 4 and sum(counts) == 6


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--budgets", "4,-2"], "found '-2'; use whole numbers"),
        (["--budgets", "many"], "whole numbers"),
        (["--budgets", "low,4", "budget.levels={low: 4}"], "twice"),
        (["--budgets", "low", "budget.levels={low: many}"], "budget.levels.low: found 'many'"),
        (["--budgets", "none"], "--budgets none, budget.cap=4096: the model has only 64 positions"),
        (["--budgets", "0", "--every", "4"], "largest budget 0; leave it out"),
        (["--budgets", "none", "--every", "4"], "--every 4: there is no multiple below"),
        (["--budgets", "8", "budget.grace=4"], "set budget.grace=0"),
        (
            ["--budgets", "8", "data.closing_text=</think>"],
            "whose tokens are fixed; set it to null",
        ),
        (["--budgets", "4,4"], "twice"),
        (["--budgets", "512"], "64 positions"),
        (["--budgets", "8", "--temperature", "0.7"], "--samples 0 is greedy"),
        (["--budgets", "8", "--samples", "2", "--temperature", "0"], "eval.temperature: found 0;"),
        (
            ["--budgets", "8", "--samples", "2", "--top-p", "1.5"],
            "eval.top_p: found 1.5; it must be",
        ),
        (["--budgets", "8", "--seed", "-1"], "seed: found -1; it must be"),
        (["--budgets", "8", "--samples", "-1"], "--samples"),
        (["--budgets", "8", "--every", "0"], "--every"),
        (["--budgets", "4,8", "--every", "8"], "no multiple below the largest budget 8"),
        (["--budgets", "4,8", "--every", "3", "--swap"], "can't be combined with --every 3"),
        (["--budgets", "4,8", "--swap"], "--swap: this policy does not read its budget"),
        (["--budgets", "0,8", "--swap", "conditioning.budget_input=prompt"], "at least two"),
        (["--budgets", "300", "--every", "1"], "set it to 2 or more"),
        (["--budgets", "8", "--size", "0"], "--size"),
        (["--budgets", "8", "--step", "3"], "--step"),
        (["--budgets", "8", "--samples", "2", "--self-consistency", "4"], "--samples 4"),
        (["--budgets", "2", "--samples", "4", "--self-consistency", "4"], "less than one token"),
        (["--budgets", "8", "--label-difficulty", "x.jsonl"], "--samples 8"),
        (["--budgets", "8", "budget.max=4"], "defines the policy and can't be overridden"),
        (["--budgets", "8", "rollout.answer_tokens=0"], "answer_tokens"),
        (["--budgets", "8", "--data", "nowhere:x"], "nowhere"),
        (["--budgets", "8", "--oops"], "--oops"),
        ([], "--budgets"),
    ],
)
def test_bad_options_are_one_line(model, tmp_path, capsys, arguments, says):
    out = tmp_path / "out"
    options = ["--model", model, "--data", "ledger", "--out", out, *arguments]
    assert says in refusal(capsys, *options)
    assert not out.exists()


def test_a_file_of_something_else_is_not_replaced_by_labels(model, tmp_path, capsys):
    labels = tmp_path / "x.jsonl"
    options = ["--model", model, "--data", "ledger", "--out", tmp_path / "out", "--budgets", "8"]
    for text in ('{"question": "1+1", "answer": "2"}\n', "mine"):
        labels.write_text(text)
        said = refusal(capsys, *options, "--samples", "8", "--label-difficulty", labels)
        assert f"{labels} exists, but contains no labels; use another" in said
        assert labels.read_text() == text


def test_bad_folders_are_one_line(finished, model, tmp_path, capsys):
    how = ["--data", "ledger", "--budgets", "8"]
    assert "--run DIR or --model" in refusal(capsys, *how)
    assert "no such folder" in refusal(capsys, "--model", tmp_path / "none", *how)
    assert "config.json" in refusal(capsys, "--model", tmp_path, *how)
    assert "contains no config.yaml" in refusal(capsys, "--run", tmp_path)
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    assert "no finished checkpoint" in refusal(capsys, "--run", tmp_path)
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    assert "use one of 3" in refusal(capsys, "--run", tmp_path, "--step", "4")
    # The folder of another evaluation, and one that is none.
    message = refusal(capsys, "--model", model, *OPTIONS, "--out", finished, *KEYS)
    assert "samples" in message and f"use --out {finished}-2" in message
    assert "contains no evaluation" in refusal(
        capsys, "--model", model, *OPTIONS, "--out", model, *KEYS
    )


@pytest.mark.slow
def test_a_killed_evaluation_continues_to_the_same_results(model, tmp_path):
    options = ["--data", "ledger", "--budgets", "4,8", "--size", "60", "--slots", "8", *SAMPLED]
    command = [sys.executable, "-m", "bacr_jax.evaluate", "--model", str(model), *options, *KEYS]
    whole, out = tmp_path / "whole", tmp_path / "killed"
    subprocess.run([*command, "--out", str(whole)], check=True, capture_output=True)
    killed = 0
    for share in (0.3, 0.7):
        with subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.DEVNULL) as process:
            while process.poll() is None:
                path = out / "samples.jsonl"
                if path.exists() and len(path.read_bytes()) > share * len(
                    (whole / "samples.jsonl").read_bytes()
                ):
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                    killed += 1
                time.sleep(0.01)
    assert killed >= 1
    subprocess.run([*command, "--out", str(out)], check=True, capture_output=True)
    for name in ("samples.jsonl", "results.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(
    not (SHARED / "gsm8k").is_dir(), reason="BACR_SHARED_DATA names no folder with gsm8k/"
)
def test_24_rows_of_gsm8k_at_three_budgets_with_the_real_tokenizer(tmp_path, capsys):
    shape = Qwen2Config(151_936, 32, 48, 2, 2, 1, 16, rope_theta=1e4, tie_embeddings=True)
    model = tmp_path / "tiny"
    params = hf_world.random_params(shape)
    policy_folder.save_policy(model, params, config=shape, tokenizer=SHARED / "qwen_tokenizer")
    options = ["--data", f"gsm8k:{SHARED / 'gsm8k' / 'test.jsonl'}", "--budgets", "8,16,32"]
    how = ["--model", model, *options, "--size", "24", "--out", tmp_path / "out"]
    assert evaluate.main([str(a) for a in [*how, "rollout.answer_tokens=16"]]) == 0
    results = json.loads((tmp_path / "out/results.json").read_text())
    (found,) = results["sets"].values()
    assert list(found["by_budget"]["greedy"]) == ["8", "16", "32"] and found["problems"] == 24
    for one in samples(tmp_path / "out"):
        assert one["thinking_tokens"] <= one["budget"]
        assert float(one["gold"].replace(",", "")) is not None
    assert "gsm8k" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ("", ""),
        ("--compare b --name x --train gsm8k:a", ""),
        ("--budgets 64,8", "budgets-8-64"),
        ("--budgets 8,none --samples 4 --greedy", "budgets-8-none-samples-4-and-greedy"),
        ("--samples 4 --top-p 0.9 --seed 3", "samples-4-top-p-0.9-seed-3"),
        ("--size 100 --split train --slots 8", "size-100-split-train-slots-8"),
        ("--swap", "with-swap"),
        ("--budgets 8,64 --swap --size 9", "budgets-8-64-with-swap-size-9"),
    ],
)
def test_an_evaluation_is_named_by_the_options_that_change_its_samples(options, name):
    arguments = parse(["--run", "a", *options.split()])
    assert settings_name(arguments, settle(arguments, Config()).eval) == name


@pytest.mark.parametrize(
    "override",
    ["data.prompt_format=boxed", "data.prompt_format = boxed", "data={prompt_format: boxed}"],
)
def test_a_policy_that_writes_its_budget_keeps_its_prompt_format(override):
    trained = dataclasses.replace(Config(), method="selfbudgeter")
    with pytest.raises(UserError) as refusal:
        settle(parse(["--run", "a", override]), trained)
    assert str(refusal.value).startswith(f"{override} can't be used with SelfBudgeter")


def test_options_with_paths_get_a_digest_that_keeps_them_apart():
    names = []
    for options in ("--data a/test.jsonl", "--data b/test.jsonl", "rollout.answer_tokens=9"):
        arguments = parse(["--run", "a", *options.split()])
        names.append(settings_name(arguments, settle(arguments, Config()).eval))
    assert [name.rpartition("-")[0] for name in names] == ["test", "test", "answer-tokens-9"]
    assert len(set(names)) == 3
    arguments = parse(["--run", "a", *(["--data", "jsonl:" + "x" * 99])])
    assert len(settings_name(arguments, settle(arguments, Config()).eval)) < 70
