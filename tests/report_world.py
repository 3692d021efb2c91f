"""A run folder as reports read it."""

import json

from bacr_jax.config import Config
from bacr_jax.config import io as config_io

HOSTILE = "<script>alert('x')</script>"

TRACE = {
    "step": 3,
    "row": 0,
    "prompt": f"what is {HOSTILE}?",
    "budget": 8,
    "thinking": f"a{HOSTILE}b",
    "segments": ["one ", "two ", f"rest {HOSTILE}"],
    "thinking_tokens": 6,
    "closed_by": "tag",
    "context": [2, 4],
    "answers": ["<answer>1</answer>", HOSTILE],
    "outcomes": [0.0, 1.0],
}


def entry(accuracy):
    return {
        "accuracy": accuracy,
        "ci95": [accuracy - 0.1, accuracy + 0.1],
        "mean_thinking_tokens": 9.0,
    }


def evaluation(step, when, accuracy):
    summary = {"greedy": {"8": entry(accuracy), "16": entry(accuracy + 0.1)}}
    return {"step": step, "when": when, "sets": {"ledger": summary}}


def lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def make_run(folder):
    """A run folder without a finished run's summary."""
    (folder / "config.yaml").write_text(config_io.to_yaml(Config()))
    (folder / "rollouts").mkdir()
    budgets = {"budget/p10_0": 4.0, "budget/median_0": 8.0, "budget/p90_0": 12.0}
    records = [{"step": i, "reward/mean": i / 10, **budgets} for i in (1, 2, 3)]
    lines(folder / "metrics.jsonl", records)
    whens = [(0, "before", 0.2), (2, "during", 0.5), (3, "after", 0.6)]
    lines(folder / "eval.jsonl", [evaluation(*when) for when in whens])
    lines(folder / "rollouts" / "000003.jsonl", [TRACE])
    return folder
