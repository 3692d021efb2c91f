"""Compares BACR with AnytimeReasoner on a task where short thinking is less accurate.

    python benchmarks/tradeoff.py --seeds 0 1 2 --out runs/tradeoff

It measures whether it helps that the policy receives its budget. In the `tradeoff` ledger, a trace
is written either in steps (correct, up to 30 tokens) or at once (at most 8 tokens, often wrong on
long problems). The first token of a trace selects the style. For each seed, all arms start from the
same warm-up and have the same number of steps, questions and rollouts:

    own      BACR with one of the evaluated budgets, rewarded for its answer there (Eq. 1)
    final    the same with four cuts of weights .12 .12 .16 .6, and the dense reward
    uniform  the same with the paper's four cuts of equal weight (Eq. 9)
    anytime  AnytimeReasoner: without a budget as input, rewarded at all four, one answer at each

Finished runs are reused. The script prints a line per run, and finally one JSON object: for each
budget, the share of sampled traces that are written in steps, the sampled and greedy accuracy, and
the difference of each arm from AnytimeReasoner. It also writes tradeoff.png, and tradeoff-dark.png
for dark pages.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from scipy import stats

from bacr_jax.report import pictures
from bacr_jax.report.charts import Axis, Chart, Series
from bacr_jax.report.curve_styles import styles_of
from bacr_jax.runs.folder import RunPaths

# The arms differ in their rewards. All except AnytimeReasoner use V as the baseline.
VALUE = ["advantage.baseline=value", "advantage.score_weighted=false"]
ARMS = {
    "own": VALUE,
    "final": [*VALUE, "cuts.count=4", "cuts.weights=[.12, .12, .16, .6]"],
    "uniform": [*VALUE, "cuts.count=4", "cuts.weights=uniform"],
    # Uses the entropy bonus of the other arms, and one answer per cut so that rollouts are equal.
    "anytime": ["anytime.answers=1", "loss.entropy_coef=0.02"],
}
# Method of each arm, which determines its colour, and its name in the picture.
NAMES = {
    "own": ("bacr", "BACR, rewarded at its budget (own)"),
    "final": ("bacr-full", "BACR, most reward at its budget (final)"),
    "uniform": ("bacr-paper", "BACR, the paper's uniform cuts (uniform)"),
    "anytime": ("anytime-one", "AnytimeReasoner (anytime)"),
}
# Number of traces per budget for measuring a style's share, with an error of about 1.5 points.
PROBLEMS = 1000


def run(folder: Path, config: str, arm: str, *overrides: str) -> dict:
    """Returns the summary of a run, and first trains the run if it is not finished."""
    summary = RunPaths(folder).summary
    if not summary.exists():
        command = [sys.executable, "-m", "bacr_jax.train", "--config", config]
        if arm == "anytime":
            command += ["--config", str(Path(config).parent / "methods" / "anytime.yaml")]
        arguments = [*command, f"output.dir={folder}", *ARMS[arm], *overrides]
        subprocess.run(arguments, check=True)
    return json.loads(summary.read_text())


def style_shares(folder: Path) -> dict[str, float]:
    """Returns the share of sampled traces that are written in steps, for each budget."""
    from bacr_jax.questions.ledger import ID
    from bacr_jax.rollout import RolloutRequest, SamplingSetup, generate, sampling_params
    from bacr_jax.runs.folder import open_run
    from bacr_jax.runs.saved_policy import read_config
    from bacr_jax.training.loop import Trainer

    kept = folder / "styles.json"
    if kept.exists():
        return json.loads(kept.read_text())
    config = read_config(folder)
    with open_run(folder, config) as opened:
        trainer = Trainer(config, opened)
        state, _ = trainer.start()
        policy, task_data = trainer.policy, trainer.task_data
        questions = next(iter(task_data.eval.values()))
        index = np.arange(len(questions))[:: max(len(questions) // PROBLEMS, 1)]
        shares = {}
        for budget in config.eval.budgets:
            budgets = np.full(len(index), budget, np.int32)
            rollout = generate(
                policy.decode_params(state.train.policy),
                questions.at(index, budgets),
                RolloutRequest(budgets, budgets[:, None]),
                jax.random.fold_in(jax.random.key(config.seed), budget),
                SamplingSetup(
                    replace(policy.evaluation, answer_tokens=1),
                    task_data.rules,
                    sampling_params(1.0),
                    policy.phi_of(state.train.policy),
                ),
            )
            trunks = rollout.trunks
            first = trunks.tokens[np.arange(len(index)), trunks.prompt_lengths]
            shares[str(budget)] = float(np.mean(first == ID["a"]))
    kept.write_text(json.dumps(shares))
    return shares


def over_seeds(values: list[float]) -> dict[str, float | list[float]]:
    """Returns the mean over seeds and its 95 % confidence interval (Student's t)."""
    mean = float(np.mean(values))
    found: dict[str, float | list[float]] = {"mean": round(mean, 4)}
    if len(values) > 1:
        error = stats.sem(values) * stats.t.ppf(0.975, len(values) - 1)
        found["ci95"] = [round(float(mean - error), 4), round(float(mean + error), 4)]
    return found


def charts_of(results: dict) -> list[Chart]:
    """Returns the charts of the share of traces in steps and of the sampled accuracy, by budget.

    Each arm has a line through its means over seeds, and a faint line for each of several seeds.
    """
    styles = {}
    for arm, style in zip(results, styles_of([NAMES[arm][0] for arm in results])):
        styles[arm] = replace(style, label=NAMES[arm][1])
    labels = {"steps_share": "traces in steps (%)", "sampled": "sampled accuracy (%)"}
    charts = []
    for quantity, label in labels.items():
        curves = list[Series]()
        for arm, entries in results.items():
            seeds = [entry[quantity] for entry in entries.values()]
            budgets = [float(budget) for budget in seeds[0]]
            values = 100 * np.array([list(seed.values()) for seed in seeds])
            if len(seeds) > 1:
                colour = styles[arm].colour
                curves += [Series("", budgets, row, colour, kind="faint") for row in values]
            curves.append(replace(styles[arm], x=budgets, y=list(values.mean(0))))
        ticks = [(budget, f"{budget:.0f}") for budget in budgets]
        x_axis = Axis("thinking budget (tokens)", ticks=ticks)
        charts.append(Chart("", curves, x_axis, Axis(label, low=0.0, high=100.0)))
    return charts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/tradeoff.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--out", type=Path, default=Path("runs/tradeoff"))
    arguments = parser.parse_args()
    results: dict = {}
    for seed in arguments.seeds:
        first = arguments.out / f"{arguments.arms[0]}-{seed}"
        for arm in arguments.arms:
            folder = arguments.out / f"{arm}-{seed}"
            shared = [] if folder == first else [f"warmup.dir={first / 'warmup'}"]
            summary = run(folder, arguments.config, arm, f"seed={seed}", *shared)
            after, before = summary["eval"]["after"], summary["eval"]["before"]
            entry = {
                "steps_share": style_shares(folder),
                "sampled": {b: e["accuracy"] for b, e in after["sampled"].items()},
                "greedy": {b: e["accuracy"] for b, e in after["greedy"].items()},
                "before": {b: e["accuracy"] for b, e in before["sampled"].items()},
                "generated_tokens": summary["generated_tokens"],
                "wall_seconds": round(summary["wall_seconds"]),
            }
            results.setdefault(arm, {})[str(seed)] = entry
            shown = lambda x: " ".join(f"{100 * value:5.1f}" for value in x.values())
            print(
                f"seed {seed}  {arm:8s} steps {shown(entry['steps_share'])}   sampled "
                f"{shown(entry['sampled'])}   greedy {shown(entry['greedy'])}",
                flush=True,
            )
    smallest, *_, largest = next(iter(results[arguments.arms[0]].values()))["sampled"]
    summary = {}
    for arm, seeds in results.items():
        wanted = {
            "rise_of_steps_share": lambda e, _: (
                e["steps_share"][largest] - e["steps_share"][smallest]
            ),
            "sampled_at_largest": lambda e, _: e["sampled"][largest],
            "greedy_at_largest": lambda e, _: e["greedy"][largest],
        }
        if arm != "anytime" and "anytime" in results:
            for mode in ("sampled", "greedy"):
                wanted[f"{mode}_ahead_of_anytime"] = lambda e, a, mode=mode: (
                    e[mode][largest] - a[mode][largest]
                )
        other = results.get("anytime", seeds)
        summary[arm] = {
            name: over_seeds([of(entry, other[seed]) for seed, entry in seeds.items()])
            for name, of in wanted.items()
        }
    title = f"Mean of {len(arguments.seeds)} seeds"
    pictures.save_both(arguments.out / "tradeoff.png", title, [charts_of(results)])
    print(json.dumps({"mean": summary, "seeds": results}))


if __name__ == "__main__":
    main()
