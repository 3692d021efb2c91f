"""Compares BACR with published GRPO on the quickstart, over several seeds.

    python benchmarks/quickstart.py --seeds 0 1 2 --out runs/quickstart-seeds [--record FILE]

For each seed, both methods start from the same warm-up and generate the same number of tokens. GRPO
is the preset configs/methods/grpo.yaml on top of the same config. Every run uses the ordinary
training command. Finished runs are reused. The script prints a table per seed and the mean change
over seeds. The last line is one JSON object. It also writes accuracy.png.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from rich.console import Console

import record
from bacr_jax.report import figures, table
from bacr_jax.runs.folder import RunPaths

# Lengths in an evaluation, in tokens, that the tables and the figure show.
LENGTHS = ("mean_thinking_tokens", "mean_total_tokens")
GRPO = Path(__file__).parents[1] / "configs" / "methods" / "grpo.yaml"


def command(configs: list[str | Path], folder: Path, *overrides: str) -> list[str]:
    """Returns the training command. Later configs override earlier ones."""
    named = [word for config in configs for word in ("--config", str(config))]
    return ["bacr_jax.train", *named, f"output.dir={folder}", *overrides]


def run(configs: list[str | Path], folder: Path, *overrides: str) -> dict:
    paths = RunPaths(folder)
    if not paths.summary.exists():
        words = command(configs, folder, *overrides)
        subprocess.run([sys.executable, "-m", *words], check=True)
    return json.loads(paths.summary.read_text())


def mean_of(summaries: list[dict]) -> dict:
    """Averages accuracies and lengths over seeds. The interval is the range over seeds."""
    first = summaries[0]
    result: dict = {}
    for mode, budgets in first.items():
        result[mode] = {}
        for budget in budgets:
            entries = [summary[mode][budget] for summary in summaries]
            accuracy = [entry["accuracy"] for entry in entries]
            means = {key: float(np.mean([entry[key] for entry in entries])) for key in LENGTHS}
            result[mode][budget] = {
                "accuracy": float(np.mean(accuracy)),
                "ci95": [min(accuracy), max(accuracy)],
                **means,
            }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart-seeds"))
    record.add_option(parser)
    arguments = parser.parse_args()
    console, collected = Console(width=120), {"warm-up": [], "BACR": [], "GRPO": []}
    seconds = []
    for seed in arguments.seeds:
        base = arguments.out / f"bacr-{seed}"
        bacr = run([arguments.config], base, f"seed={seed}")
        grpo = run(
            [arguments.config, GRPO],
            arguments.out / f"grpo-{seed}",
            f"seed={seed}",
            f"warmup.dir={RunPaths(base).warmup}",
            f"train.max_generated_tokens={bacr['generated_tokens']}",
        )
        policies = {
            "warm-up": bacr["eval"]["before"],
            "BACR": bacr["eval"]["after"],
            "GRPO": grpo["eval"]["after"],
        }
        for name, summary in policies.items():
            collected[name].append(summary)
        seconds.append(bacr["wall_seconds"])
        title = f"seed {seed}: accuracy (%), 95 % interval, mean thinking tokens"
        console.print(table.comparison_table(title, policies))
        tokens = f"{bacr['generated_tokens']:,} and {grpo['generated_tokens']:,}"
        console.print(f"generated tokens {tokens}; BACR run {bacr['wall_seconds']:.0f} s\n")
    means = {name: mean_of(summaries) for name, summaries in collected.items()}
    console.print(
        table.comparison_table(f"mean (and range) over {len(arguments.seeds)} seeds", means)
    )
    figures.accuracy_picture(
        arguments.out / "accuracy.png",
        means,
        f"ledger: mean and range over {len(arguments.seeds)} seeds",
    )
    greedy = {name: means[name]["greedy"] for name in means}
    budgets = list(greedy["warm-up"])
    gain = lambda name: [
        round(100 * (greedy[name][b]["accuracy"] - greedy["warm-up"][b]["accuracy"]), 1)
        for b in budgets
    ]
    longest = budgets[-1]
    length = lambda name: greedy[name][longest]["mean_thinking_tokens"]
    record.write(arguments, record.seconds({"bacr": seconds}, "whole run"))
    print(
        json.dumps(
            {
                "budgets": budgets,
                "bacr_gain_points": gain("BACR"),
                "grpo_gain_points": gain("GRPO"),
                "bacr_length_change": round(length("BACR") / length("warm-up") - 1, 3),
                "grpo_length_change": round(length("GRPO") / length("warm-up") - 1, 3),
                "wall_seconds": [round(s) for s in seconds],
            }
        )
    )


if __name__ == "__main__":
    main()
