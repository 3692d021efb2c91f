"""`bacr evaluate` beside a training set: results without its near-duplicates."""

import json

import pytest

import hf_world
from bacr_jax import evaluate
from bacr_jax.evaluation import job
from bacr_jax.export import policy_folder
from bacr_jax.model.sizes import Qwen2Config

TRAIN = ["What is seven plus eight minus two?", "How many legs have three spiders together?"]
# The first two share most of their words with a training question, the last no three in a row.
TEST = [
    "what is seven plus eight minus 2",
    "How many legs have three spiders together, and why?",
    "How many pages remain of a book of 90 when 30 are read?",
    "Two trains meet after an hour; how far apart were they?",
]


@pytest.fixture(scope="module")
def english(tmp_path_factory):
    """A tiny model that reads English, and two sets."""
    folder = tmp_path_factory.mktemp("near")
    tokenizer = hf_world.chat_tokenizer()
    shape = Qwen2Config(
        len(tokenizer), 16, 24, 1, 2, 1, 8, rope_theta=1e4, tie_embeddings=True, max_positions=2048
    )
    params = hf_world.random_params(shape)
    policy_folder.save_policy(folder / "tiny", params, config=shape, tokenizer=tokenizer)
    for name, texts in (("train", TRAIN), ("test", TEST)):
        rows = [{"question": text, "answer": str(i)} for i, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run_english(world, out, *more):
    how = ["--model", world / "tiny", "--data", f"jsonl:{world / 'test.jsonl'}", "--budgets", "4,8"]
    keys = ["rollout.answer_tokens=3", "model.compute_dtype=float32"]
    return evaluate.main([str(a) for a in [*how, "--out", out, *more, *keys]])


@pytest.mark.slow  # a policy with a vocabulary for English
def test_the_command_compares_with_the_set_it_is_told(english, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    assert run_english(english, out) == 0
    (before,) = json.loads((out / "results.json").read_bytes())["sets"].values()
    assert before["near_duplicates"] is None
    # The training set can be named later: nothing is drawn again.
    monkeypatch.setattr(job, "draw_samples", lambda *a, **k: pytest.fail("drew again"))
    assert run_english(english, out, "--train", f"jsonl:{english / 'train.jsonl'}") == 0
    (after,) = json.loads((out / "results.json").read_bytes())["sets"].values()
    assert after["near_duplicates"] == {"count": 2, "of": "jsonl"}
    lines = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    for budget, entry in after["by_budget"]["greedy"].items():
        others = [s for s in lines if s["budget"] == int(budget) and s["id"][-1] in ("2", "3")]
        assert len(others) == entry["without_near_duplicates"]["problems"] == 2
        for name, key in (("accuracy", "correct"), ("mean_total_tokens", "total_tokens")):
            expected = sum(s[key] for s in others) / 2
            assert entry["without_near_duplicates"][name] == pytest.approx(expected)
        del entry["without_near_duplicates"]
    # Nothing else changed.
    assert {**after, "near_duplicates": None} == before
    assert "the other 2" in (out / "results.md").read_text()
    assert "the other 2" in (out / "results.tex").read_text()
    capsys.readouterr()
    assert run_english(english, out, "--train", "jsonl:nowhere.jsonl") == 2
    assert run_english(english, out, "--train", "ledger") == 2
    errors = capsys.readouterr().err
    assert (
        errors.count("\n") == 2
        and "no file or folder" in errors
        and "leave the option out" in errors
    )
