"""Pictures of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bacr_jax.report.tables import Summary

# Colour-blind safe (Okabe and Ito).
COLOURS = ("#999999", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")


def _axes(columns: int) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, columns, figsize=(4.8 * columns, 3.8), layout="constrained", squeeze=False
    )
    for axis in axes[0]:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes[0]


def accuracy_by_budget(path: Path, policies: Mapping[str, Summary], title: str) -> None:
    """Accuracy against budget (greedy and sampled) and against the thinking tokens really used.

    Args:
      path: PNG to write.
      policies: summaries by name, in the order of the legend.
      title: above the picture.
    """
    modes = list(next(iter(policies.values())))
    figure, axes = _axes(len(modes) + 1)
    for (name, summary), colour in zip(policies.items(), COLOURS):
        for axis, mode in zip(axes, modes):
            entries = summary[mode]
            budgets = [int(b) for b in entries]
            accuracy = [100 * e["accuracy"] for e in entries.values()]
            below = [a - 100 * e["ci95"][0] for a, e in zip(accuracy, entries.values())]
            above = [100 * e["ci95"][1] - a for a, e in zip(accuracy, entries.values())]
            axis.errorbar(
                budgets, accuracy, yerr=[below, above], color=colour, marker="o", ms=4, capsize=3,
                label=name,
            )  # fmt: skip
            axis.set_xscale("log", base=2)
            axis.set_xticks(budgets, [str(b) for b in budgets])
            axis.minorticks_off()
            axis.set(xlabel="thinking budget (tokens)", ylim=(-3, 103), title=mode)
        entries = summary[modes[0]]
        tokens = [e["mean_thinking_tokens"] for e in entries.values()]
        accuracy = [100 * e["accuracy"] for e in entries.values()]
        axes[-1].plot(tokens, accuracy, color=colour, marker="o", ms=4, label=name)
    axes[0].set_ylabel("accuracy (%), 95 % interval")
    axes[-1].set(
        xlabel="mean thinking tokens used", ylim=(-3, 103), title=f"{modes[0]}, tokens really used"
    )
    axes[0].legend(frameon=False, loc="lower right")
    figure.suptitle(title, x=0.01, ha="left")
    figure.savefig(path, dpi=130)


def training_curves(path: Path, records: Sequence[Mapping[str, Any]], title: str) -> None:
    """Reward by cut, thinking length, entropy and the schedule over steps.

    Args:
      path: PNG to write.
      records: lines of metrics.jsonl.
      title: above the picture.
    """
    figure, axes = _axes(4)
    steps = [record["step"] for record in records]
    number = lambda value: float(value)
    series = lambda name: [number(record[name]) for record in records]
    named = lambda prefix: sorted(k for k in records[0] if k.startswith(prefix))
    for name, colour in zip(named("reward/cut_"), COLOURS):
        axes[0].plot(steps, series(name), color=colour, label=f"cut {name.rsplit('_', 1)[1]}")
    axes[0].set(title="share correct by cut", ylim=(0, 1))
    axes[1].plot(steps, series("rollout/thinking_mean"), color=COLOURS[1], label="thinking")
    axes[1].plot(steps, series("budget/mean"), color=COLOURS[0], label="budget")
    axes[1].set(title="mean tokens", ylim=(0, None))
    for name, colour in zip(named("curriculum/mu_"), COLOURS):
        axes[2].plot(steps, series(name), color=colour, label=f"group {name.rsplit('_', 1)[1]}")
    axes[2].set(title="scheduled mean budget by difficulty")
    axes[3].plot(steps, series("policy/entropy"), color=COLOURS[1], label="entropy (nats)")
    axes[3].plot(steps, series("policy/grad_norm"), color=COLOURS[2], label="gradient norm")
    axes[3].set(title="policy", ylim=(0, None))
    for axis in axes:
        axis.set_xlabel("step")
        axis.legend(frameon=False, fontsize=8)
    figure.suptitle(title, x=0.01, ha="left")
    figure.savefig(path, dpi=130)
