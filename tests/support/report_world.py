"""Creates run folders from which reports can be written."""

import json

from bacr_jax.config import Config
from bacr_jax.config import io as config_io

# Text that must be escaped in HTML. It occurs in every text of a trace.
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
    "id": f"ledger-{HOSTILE}",
    "level": 2,
    "group": 1,
    "question": f"what is {HOSTILE}?",
    "gold": f"7{HOSTILE}",
    "policy_budget": 8,
    "budget_input": "embedding",
    "prompt_tokens": 5,
    "closing_tokens": 1,
    "forced_tokens": [2, 1],
    "answer_tokens": [1, 2],
    "total_tokens": [5, 9],
    "read": {},
    "cuts": [2, 8],
    "extracted": [None, HOSTILE],
    "decided_by": ["none", "symbolic"],
    "rewards": [0.0, 1.3],
    "values": [0.25, 0.5],
    "segment_advantages": [0.75, -0.125],
    "answer_advantages": [-0.25, "nan"],
    "in_loss": True,
}


def entry(accuracy, budget):
    """Returns the results of an evaluation for one set, decoding mode and budget."""
    return {
        "accuracy": accuracy,
        "ci95": [accuracy - 0.1, accuracy + 0.1],
        "mean_thinking_tokens": 9.0,
        "mean_forced_tokens": 1.0,
        "mean_answer_tokens": 2.0,
        "mean_total_tokens": 0.75 * budget + 3,
        "completion_rate": 0.5,
        "completion_ci95": [0.4, 0.6],
        "problems": 100,
        "closed_rate": 1.0,
        "closed_ci95": [0.9, 1.0],
        "accuracy_if_complete": accuracy,
        "if_complete_ci95": [accuracy - 0.05, accuracy + 0.05],
        "thinking_if_right": 0.5 * budget,
        "thinking_right_ci95": [0.4 * budget, 0.6 * budget],
        "thinking_if_wrong": None,
        "thinking_wrong_ci95": None,
        "accuracy_if_cut": None,
        "if_cut_ci95": None,
        "adherence": {
            "requested": budget,
            "used": 0.75 * budget,
            "ratio": 0.75,
            "ratio_ci95": [0.7, 0.8],
            "quantiles": {"p10": 0.5 * budget, "p50": 0.7 * budget, "p90": budget, "max": budget},
            "over_share": 0.0,
            "mean_excess": 0.0,
        },
    }


def evaluation(step, when, accuracy):
    """Returns a record of eval.jsonl.

    Args:
      when: "before", "during" or "after" training.
      accuracy: accuracy at budget 8. The accuracy at budget 16 is .1 higher.
    """
    summary = {"greedy": {"8": entry(accuracy, 8), "16": entry(accuracy + 0.1, 16)}}
    return {"step": step, "when": when, "sets": {"ledger": summary}}


def lines(path, records):
    """Writes records as JSON Lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def make_run(folder):
    """Fills a run folder with three steps and returns it. The run is unfinished.

    A finished run also has a summary.json.
    """
    (folder / "config.yaml").write_text(config_io.to_yaml(Config()))
    (folder / "rollouts").mkdir()
    budgets = {"budget/p10_0": 4.0, "budget/median_0": 8.0, "budget/p90_0": 12.0}
    records = [{"step": i, "reward/mean": i / 10, **budgets} for i in (1, 2, 3)]
    lines(folder / "metrics.jsonl", records)
    whens = [(0, "before", 0.2), (2, "during", 0.5), (3, "after", 0.6)]
    lines(folder / "eval.jsonl", [evaluation(*when) for when in whens])
    lines(folder / "rollouts" / "000003.jsonl", [TRACE])
    return folder


def make_whole_run(folder, *, gain=0.2, method="bacr", spec="math500:data/test.jsonl"):
    """Creates the folder of a finished run with everything that reports show, and returns it.

    Args:
      gain: increase of the mean reward and of the accuracy during training.
      method: name of the method.
      spec: evaluation set, as in `data.eval`.
    """
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(config_io.to_yaml(Config(method=method)))
    (folder / "rollouts").mkdir()
    steps = range(1, 13)
    lines(folder / "metrics.jsonl", [_metrics(step, gain) for step in steps])
    lines(
        folder / "eval.jsonl",
        [
            {"step": step, "when": when, "sets": {spec: _summary(0.3 + gain * step / 12)}}
            for step, when in ((0, "before"), (6, "during"), (12, "after"))
        ],
    )
    for step in steps:
        traces = [_trace(step, row, gain) for row in range(8)]
        lines(folder / "rollouts" / f"{step:06}.jsonl", traces)
    summary = {"method": method.upper(), "steps": 12, "generated_tokens": 1234}
    (folder / "summary.json").write_text(json.dumps({**summary, "wall_seconds": 61.0}))
    return folder


def _summary(accuracy):
    """Returns the results for one evaluation set, by decoding mode and budget."""
    budgets = (64, 128, 256)
    return {
        mode: {str(b): entry(accuracy + less + i / 10, b) for i, b in enumerate(budgets)}
        for mode, less in (("greedy", 0.0), ("sampled", -0.05))
    }


def _metrics(step, gain):
    """Returns a record of metrics.jsonl."""
    groups = range(3)
    return {
        "step": step,
        "reward/mean": 0.2 + gain * step / 12,
        "reward/cut_1": 0.1,
        "reward/cut_2": 0.3,
        "rollout/thinking_mean": 90.0 - step,
        "rollout/completion_rate": 0.5,
        "budget/mean": 120.0,
        "policy/entropy": 0.4,
        "policy/grad_norm": "inf" if step == 5 else 1.0,
        "mismatch/k3": 1e-9 * step,
        "value/loss": 0.2,
        **{f"curriculum/mu_{g}": 60.0 + 20 * g for g in groups},
        **{f"curriculum/pass_rate_{g}": 0.8 - g / 5 for g in groups},
        **{f"budget/{q}_{g}": v for g in groups for q, v in _QUANTILES.items()},
        "time/plan": 0.1,
        "time/rollout": 30.0 if step == 1 else 2.0,
        "time/verify": 0.5,
        "time/learn": 3.0,
        "time/adapt": 0.2,
        "time/tokens_per_s": 150.0,
    }


_QUANTILES = {"p10": 40.0, "median": 80.0, "p90": 120.0}


def _trace(step, row, gain):
    """Returns a trace as rollouts/ contains it, whose last answer is correct in even rows."""
    right = row % 2 == 0
    return {
        **TRACE,
        "step": step,
        "row": row,
        "id": f"math-{row}",
        "level": 1 + row % 4,
        "question": f"What is {row} plus {step}? {HOSTILE}",
        "budget": 64 * 2 ** (row % 3),
        "policy_budget": 64 * 2 ** (row % 3),
        "closed_by": "budget" if row % 3 == 0 else "tag",
        "outcomes": [0.0, float(right)],
        "rewards": [0.0, 1.3 * right],
        "values": [0.05 + gain * row / 8, 0.6],
        "segments": ["so " * 40, f"then {row} ", "and the end"],
    }
