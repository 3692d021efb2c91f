"""Tests that numbers on pages agree with the committed results (cells) of their runs."""

import collections
import importlib.util
import itertools
import json
import lzma
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.special import stdtrit
from scipy.stats import binomtest

import replay_alarms
import stability_arms
from bacr_jax.evaluation.decline import accuracy_declined, closed_answers_declined
from bacr_jax.report import figures
from bacr_study.statistics import clopper_pearson_interval, crossed_test
from bacr_study.study_file import read_study

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text()
BUDGETS = ("8", "16", "32", "64")


def cells(name):
    """Reads the packed cells or runs of a folder of docs/results."""
    path = ROOT / "docs" / "results" / name / "cells.jsonl.xz"
    return [json.loads(line) for line in lzma.decompress(path.read_bytes()).splitlines()]


def with_interval(entry):
    low, high = entry["ci95"]
    return f"{100 * entry['accuracy']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


@pytest.fixture(scope="module")
def quickstart():
    """Evaluations of the quickstart by seed: after the warm-up, after BACR, after GRPO."""
    runs = {run["id"]: run["summary"]["eval"] for run in cells("quickstart-bounded-cpu")}
    return {
        seed: (
            runs[f"bacr-{seed}"]["before"],
            runs[f"bacr-{seed}"]["after"],
            runs[f"grpo-{seed}"]["after"],
        )
        for seed in range(3)
    }


def greedy_by_policy(quickstart, budget):
    """Greedy entries at a budget: for each policy, one entry a seed."""
    by_seed = [
        [evaluation["greedy"][budget] for evaluation in evaluations]
        for evaluations in quickstart.values()
    ]
    return list(zip(*by_seed))


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_quickstarts_table_has_every_seed(quickstart, budget):
    page = (ROOT / "docs" / "results" / "quickstart-bounded-cpu" / "seeds.md").read_text()
    for seed, evaluations in quickstart.items():
        entries = [evaluation["greedy"][budget] for evaluation in evaluations]
        row = [f"{with_interval(one)}, {one['mean_thinking_tokens']:.1f}" for one in entries]
        assert f"| {seed} | {budget} | {' | '.join(row)} |" in page


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_quickstart_page_has_the_mean_over_seeds_and_its_range(quickstart, budget):
    row = []
    for entries in greedy_by_policy(quickstart, budget):
        accuracy = [100 * entry["accuracy"] for entry in entries]
        spread = f" [{min(accuracy):.1f}, {max(accuracy):.1f}]" if min(accuracy) < 100 else ""
        row.append(f"{np.mean(accuracy):.1f}{spread}")
    assert f"| {budget} | {' | '.join(row)} |" in QUICKSTART


@pytest.mark.parametrize("budget", ["32", "64"])
def test_the_quickstart_page_has_the_mean_thinking_tokens(quickstart, budget):
    row = []
    for entries in greedy_by_policy(quickstart, budget):
        thinking = [entry["mean_thinking_tokens"] for entry in entries]
        row.append(f"{np.mean(thinking):.1f}")
    assert f"| thinking tokens at {budget} | {' | '.join(row)} |" in QUICKSTART


@pytest.mark.parametrize("budget", ["16", "32"])
def test_readme_has_the_quickstarts_table_of_seed_0(quickstart, budget):
    before, after, _ = (evaluation["greedy"][budget] for evaluation in quickstart[0])
    columns = [
        re.escape(f"{with_interval(one)} {one['mean_thinking_tokens']:.1f} tok")
        for one in (before, after)
    ]
    assert re.search(rf"^ *{budget} +{columns[0]} +{columns[1]}$", README, re.MULTILINE)


def verdicts(arm, mode, budget):
    """Shares of right samples of SmolLM2's study, seed by problem."""
    of_arm = sorted(
        (cell for cell in cells("smollm2-cpu") if cell["arm"] == arm), key=lambda cell: cell["seed"]
    )
    entries = [next(iter(cell["sets"].values()))[mode][budget] for cell in of_arm]
    return np.array([[int(digit) for digit in entry["correct"]] for entry in entries], float)


def lead(arm, mode, level):
    """bacr-robust's lead at 20 tokens in points, as the study's page has it."""
    contrast = crossed_test(verdicts("bacr-robust", mode, "20") - verdicts(arm, mode, "20"))
    half = float(stdtrit(contrast.df, 0.5 + level / 2)) * contrast.standard_error
    low, high = contrast.difference - half, contrast.difference + half
    return f"{100 * contrast.difference:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


@pytest.mark.parametrize("mode", ["sampled", "greedy"])
def test_the_smollm2_study_has_the_leads_for_both_decodings(mode):
    arms = ("bacr-robust", "anytime-one", "grpo")
    means = [f"{100 * verdicts(arm, mode, '20').mean():.0f} %" for arm in arms]
    leads = [lead(arm, mode, 0.975) for arm in arms[1:]]
    page = (ROOT / "docs" / "studies" / "smollm2.md").read_text()
    assert f"| {mode} | {' | '.join(means + leads)} |" in page


def test_a_greedy_lead_over_anytimereasoner_is_not_shown():
    assert lead("anytime-one", "greedy", 0.975) == "+23.7 [-8.3, +55.7]"
    difference = verdicts("bacr-robust", "greedy", "20") - verdicts("anytime-one", "greedy", "20")
    assert (difference.mean(1) < 0).sum() == 1


@pytest.mark.parametrize(
    ("arm", "label"),
    [
        ("untrained", "after the warm-up"),
        ("grpo", "GRPO"),
        ("anytime-one", "AnytimeReasoner, one answer"),
        ("bacr-robust", "`bacr-robust`, 31 to 34 updates"),
    ],
)
def test_the_smollm2_page_has_the_differences_with_18_updates(arm, label):
    repeated = {cell["seed"]: cell for cell in cells("smollm2-updates-cpu")}
    reference = {cell["seed"]: cell for cell in cells("smollm2-cpu") if cell["arm"] == arm}
    row = []
    for mode, budget in itertools.product(("sampled", "greedy"), ("20", "48")):
        by_seed = []
        for seed in sorted(repeated):
            pair = [
                next(iter(cell["sets"].values()))[mode][budget]["correct"]
                for cell in (repeated[seed], reference[seed])
            ]
            answers = [np.array([int(digit) for digit in correct], float) for correct in pair]
            by_seed.append(answers[0] - answers[1])
        contrast = crossed_test(np.array(by_seed))
        low, high = 100 * contrast.low, 100 * contrast.high
        row.append(f"{100 * contrast.difference:+.1f} [{low:+.1f}, {high:+.1f}]")
    page = (ROOT / "docs" / "studies" / "smollm2.md").read_text()
    assert f"| {label} | {' | '.join(row)} |" in page


RIVALS = {
    "bacr-robust": "BACR (robust)",
    "s_grpo": "S-GRPO",
    "l1_exact": "L1-Exact",
    "l1_max": "L1-Max",
    "dler": "DLER",
    "elastic": "Elastic Reasoning",
    "effort": "Adaptive effort control",
}


@pytest.mark.parametrize("arm", RIVALS)
def test_the_rivals_page_has_the_updates(arm):
    page = (ROOT / "docs" / "studies" / "rivals.md").read_text()
    runs = [cell for cell in cells("rivals-cpu") if cell["arm"] == arm]
    updates = [
        f"{np.mean([run['steps'] for run in runs if run['task'] == task]):.0f}"
        for task in ("redundant", "tradeoff")
    ]
    assert f"| {RIVALS[arm]} | {' | '.join(updates)} |" in page


@pytest.mark.parametrize(
    ("arm", "label"),
    [
        ("anytime-matched", "at equal tokens, with 101 updates and the same entropy bonus"),
        ("anytime-long", "with four times the training tokens, 253 updates"),
    ],
)
def test_the_controls_page_has_the_presets_lead(arm, label):
    def correct(name, budget):
        runs = [cell for cell in cells("controls-cpu") if cell["arm"] == name]
        runs.sort(key=lambda run: run["seed"])
        entries = [run["sets"]["ledger"]["sampled"][budget] for run in runs]
        samples = runs[0]["samples"]["sampled"]
        return np.array([[int(n) for n in entry["correct"]] for entry in entries]) / samples

    columns = []
    for budget in ("8", "32"):
        contrast = crossed_test(correct("bacr-constant", budget) - correct(arm, budget))
        half = float(stdtrit(contrast.df, 0.975)) * contrast.standard_error
        low, high = contrast.difference - half, contrast.difference + half
        columns.append(f"{100 * contrast.difference:+.0f} [{100 * low:+.0f}, {100 * high:+.0f}]")
    page = (ROOT / "docs" / "studies" / "controls.md").read_text().replace(" points [", " [")
    assert f"| {label} | {' | '.join(columns)} |" in page


@pytest.mark.parametrize(
    ("when", "label"), [("before", "after the warm-up"), ("after", "BACR, 30 steps")]
)
@pytest.mark.parametrize(
    ("folder", "number", "seed"),
    [
        ("smollm2-recipe-bounded-cpu", 0, 2),
        ("smollm2-recipe-bounded-cpu", 1, 12),
        ("smollm2-recipe-bounded-cpu", 2, 13),
        ("smollm2-recipe-cpu", 0, 2),
    ],
)
def test_the_page_of_smollm2_has_the_runs_with_and_without_the_bound(
    folder, number, seed, when, label
):
    run = cells(folder)[number]
    assert run["summary"]["seed"] == seed
    part = 0 if "bounded" in folder else 1
    page = (ROOT / "docs" / "smollm2-runs.md").read_text().split("### A run that failed")[part]
    row = re.search(rf"^\| seed {seed}: {label} \| (.*) \|$", page, re.MULTILINE)[1]
    row = row.replace("*", "")
    greedy = run["summary"]["eval"][when]["greedy"]
    entries = [greedy[budget] for budget in ("12", "20", "28", "48")]
    expected = [f"{with_interval(e)}, {e['mean_thinking_tokens']:.1f}" for e in entries]
    assert row.replace("[0.0, .8]", "[0.0, 0.8]").split(" | ") == expected


def test_the_failed_run_stopped_closing_its_answers():
    (run,) = cells("smollm2-recipe-cpu")
    closed = [line["rollout/closed_answers"] for line in run["metrics"]]
    assert min(closed[:10]) > 0.9 and max(closed[10:]) < 0.85
    assert round(min(closed), 2) == 0.61
    largest = [trace for trace in run["rollouts"] if trace["step"] > 20 and trace["told"] == 48]
    assert len(largest) == 8
    assert all(trace["thinking"].startswith("Step\n\n\n") for trace in largest)


def test_the_quickstarts_figure_is_drawn_from_its_runs(quickstart, tmp_path):
    path = ROOT / "benchmarks" / "quickstart.py"
    specification = importlib.util.spec_from_file_location("quickstart_benchmark", path)
    benchmark = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(benchmark)
    runs = [run for run in cells("quickstart-bounded-cpu") if run["id"].startswith("bacr")]
    means = benchmark.mean_of([run["summary"]["eval"]["after"] for run in runs])
    figures.accuracy_picture(tmp_path / "accuracy.png", {"BACR": means}, "ledger")
    assert (tmp_path / "accuracy.png").exists()


def test_packed_runs_are_the_same_bytes_and_have_no_path_of_a_machine(tmp_path):
    run = tmp_path / "runs" / "one"
    (run / "rollouts").mkdir(parents=True)
    (run / "config.yaml").write_text(f"# a digest\noutput:\n  dir: {run}\n")
    (run / "summary.json").write_text('{"steps": 2}')
    (run / "eval.jsonl").write_text('{"step": 0}\n')
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    (run / "rollouts" / "000001.jsonl").write_text('{"row": 0}\n')
    script = ROOT / "benchmarks" / "pack_runs.py"
    contents = []
    for out in (tmp_path / "first", tmp_path / "second"):
        words = [run, "--out", out, "--rollouts", "--about", "commit=abc"]
        subprocess.run([sys.executable, script, *map(str, words)], check=True)
        contents.append((out / "cells.jsonl.xz").read_bytes())
    assert contents[0] == contents[1]
    assert json.loads(lzma.decompress(contents[0])) == {
        "id": "one",
        "about": {"commit": "abc"},
        "config": "output:\n  dir: one\n",
        "summary": {"steps": 2},
        "eval": [{"step": 0}],
        "metrics": [{"step": 1}, {"step": 2}],
        "rollouts": [{"row": 0}],
    }


def shown_losses(after, before):
    """Budgets with a loss by an exact sign test over the same problems (one-sided, .025 / 4)."""
    budgets = []
    for budget, entry in after.items():
        pairs = list(zip(before[budget]["correct"], entry["correct"], strict=True))
        lost = pairs.count(("1", "0"))
        won = pairs.count(("0", "1"))
        if lost and binomtest(lost, lost + won, alternative="greater").pvalue < 0.025 / 4:
            budgets.append(budget)
    return budgets


# Labels of the arms on the page about the stability studies.
STABILITY_LABELS = {
    "shipped": "no bound on updates",
    "by-budget": "running means by budget",
    "bounded-update": "KL of an update at most .02",
    "bounded-by-budget": "both",
    "bounded-slow": "KL at most .02, slow embedding",
    "bounded-slow-by-budget": "the same, means by budget",
    "bounded-shared-budget": "KL at most .02, group with one budget",
    "tight-update": "KL of an update at most .005",
    "tight-by-budget": "KL at most .005, means by budget",
    "tight-kl": "KL at most .005, KL to the start",
}


def results_of_runs(folder, mode="greedy"):
    """Returns the results by budget before and after each training run, in a decoding mode."""
    entries_of = {
        (cell["task"], cell["arm"], cell["seed"]): next(iter(cell["sets"].values()))[mode]
        for cell in cells(folder)
    }
    before_of = {
        task: entries for (task, arm, _), entries in entries_of.items() if arm == "untrained"
    }
    return {
        key: (before_of[key[0]], entries)
        for key, entries in entries_of.items()
        if key[1] != "untrained"
    }


def lowest_closed(folder):
    """Yields the arm of each trained run, and its lowest share of closed answers at any step."""
    for cell in cells(folder):
        if cell["arm"] != "untrained":
            yield cell["arm"], min(point["closed_answers"] for point in cell["curve"])


def ends(values):
    """Returns the range of shares in percent, such as `5 to 10`."""
    percents = [100 * value for value in values]
    both = sorted({f"{min(percents):.0f}", f"{max(percents):.0f}"}, key=int)
    return " to ".join(both)


def percent(entries):
    """Returns the accuracies as on the pages, such as `9/15/58/58`."""
    return "/".join(f"{100 * entry['accuracy']:.0f}" for entry in entries.values())


def test_the_page_of_stability_has_every_finished_run():
    page = (ROOT / "docs" / "studies" / "stability.md").read_text()
    screening, twenty = page.split("## At the recipe's own rates")
    rows = [line for line in screening.splitlines() if re.search(r" \| \d+ \| \d+ \|$", line)]
    expected = []
    for machine, folder in (
        ("Xeon", "stability-unfinished"),
        ("EPYC", "stability-epyc-unfinished"),
    ):
        runs_of_arm = collections.defaultdict(list)
        for (task, arm, seed), run in results_of_runs(folder).items():
            runs_of_arm[arm].append((seed, int(task.removeprefix("warm")), *run))
        for arm, runs in runs_of_arm.items():
            afters = []
            failed = 0
            shown = 0
            for seed, warmup, before, after in sorted(runs, key=lambda run: run[:2]):
                afters.append(f"{percent(after)} ({warmup}.{seed})")
                failed += any(
                    accuracy_declined(before[budget]["accuracy"], entry["accuracy"], 150)
                    for budget, entry in after.items()
                )
                shown += bool(shown_losses(after, before))
            expected.append(
                f"| {STABILITY_LABELS[arm]}, {machine} | {', '.join(afters)} | {failed} | {shown} |"
            )
    assert sorted(rows) == sorted(expected)

    rows = [line for line in twenty.splitlines() if re.search(r"\| \d+ of \d+ \[", line)]
    expected = []
    closed_with_bound = []
    befores = collections.defaultdict(list)
    for machine in ("Xeon", "EPYC"):
        folder = f"stability-twenty-{machine.lower()}-unfinished"
        closed_with_bound += [share for arm, share in lowest_closed(folder) if arm != "shipped"]
        by_mode = {mode: runs_by_arm(folder, mode) for mode in ("greedy", "sampled")}
        for arm in by_mode["greedy"]:
            items = [f"{STABILITY_LABELS[arm]}, {machine}"]
            items += [failed_item(by_mode[mode][arm]) for mode in by_mode]
            for mode, runs_of in by_mode.items():
                items.append(ends(after["20"]["accuracy"] for _, after in runs_of[arm]))
                befores[mode] += [before["20"]["accuracy"] for before, _ in runs_of[arm]]
            expected.append(f"| {' | '.join(items)} |")
    assert sorted(rows) == sorted(expected)
    assert (
        f"| before training | | | {ends(befores['greedy'])} | {ends(befores['sampled'])} |"
        in twenty
    )
    assert (
        f"with it, the lowest share of any step is {100 * min(closed_with_bound):.0f} %" in twenty
    )


def runs_by_arm(folder, mode):
    """Returns pairs of results before and after training, by arm."""
    runs_of = collections.defaultdict(list)
    for (_, arm, _), run in results_of_runs(folder, mode).items():
        runs_of[arm].append(run)
    return runs_of


def failed_item(runs):
    """Returns the share of runs that failed at any budget, such as `1 of 3 [1, 91]`."""
    failed = 0
    for before, after in runs:
        failed += any(
            accuracy_declined(before[budget]["accuracy"], entry["accuracy"], 300)
            or closed_answers_declined(
                1 - before[budget]["no_answer_share"], 1 - entry["no_answer_share"], 300
            )
            for budget, entry in after.items()
        )
    low, high = clopper_pearson_interval(failed, len(runs))
    return f"{failed} of {len(runs)} [{100 * low:.0f}, {100 * high:.0f}]"


@pytest.mark.parametrize("study", ["stability", "stability-twenty"])
def test_the_tables_of_arms_have_every_finished_run(study):
    xeon = study if study == "stability" else f"{study}-xeon"
    folders = {"Xeon": f"{xeon}-unfinished", "EPYC": f"{study}-epyc-unfinished"}
    results = ROOT / "docs" / "results"
    page = (results / f"{study}-tables" / "arms.md").read_text()
    settings = read_study(ROOT / "configs" / "studies" / f"{study}.yaml")
    machines = [(machine, results / folder) for machine, folder in folders.items()]
    assert stability_arms.arms_table(settings, machines).markdown() == page
    if study == "stability-twenty":
        for machine, folder in folders.items():
            for arm, runs in runs_by_arm(folder, "greedy").items():
                sampled = failed_item(runs_by_arm(folder, "sampled")[arm])
                name = settings.arm(arm).name
                assert f"| {name} | {machine} | {failed_item(runs)} | {sampled} |" in page


def test_the_replay_counts_the_alarms_of_runs_with_all_metrics():
    folders = ["smollm2-recipe-cpu", "quickstart-cpu"]
    for machine in ("epyc", "xeon"):
        folders += [f"stability-twenty-{machine}-runs", f"stability-twenty-{machine}-unfinished"]
    study = ROOT / "configs" / "studies" / "stability-twenty.yaml"
    shared_warmups = replay_alarms.shared_warmups_of([study])
    runs = {}
    for folder in folders:
        path = ROOT / "docs" / "results" / folder
        runs[folder] = list(replay_alarms.runs_in(path, shared_warmups))
    reports = [
        replay_alarms.report_of(run)
        for of_folder in replay_alarms.joined(runs).values()
        for run in of_folder
    ]
    # Cells without a packed run remain. Their evaluations before training are known too.
    whole = [report for report in reports if "unfinished" not in report["run"]]
    assert (len(reports), len(whole)) == (42, 37)
    assert all(report["failed"] is not None for report in reports)
    counts = replay_alarms.counts_of(whole)
    assert (counts["failed"], counts["failed_with_alarm"]) == (16, 3)
    assert (counts["fine"], counts["false_alarms"]) == (21, {"update_kl": 1})
    assert replay_alarms.counts_of(reports)["failed"] == 19


@pytest.mark.parametrize(("task", "column"), [("redundant", 6), ("trade-off", 15)])
def test_the_page_of_stability_has_the_means_on_the_ledger(task, column):
    tables = ROOT / "docs" / "results" / "stable-ledger-cpu" / "tables"
    means = []
    for arm in ("BACR (robust)", "KL of an update at most .005"):
        row = line_of(tables / "accuracy.md", f"| {arm} |")
        means.append(re.search(r"[\d.]+ ± [\d.]+", row.split(" | ")[column])[0])
    start = f"| KL of an update at most .005 | ledger, {task}, mean over budgets |"
    row = line_of(tables / "differences_bacr-robust.md", start)
    difference = row.split(" | ")[3].replace("−", "-")
    page = (ROOT / "docs" / "studies" / "stability.md").read_text()
    assert f"| {task} | {means[0]} | {means[1]} | {difference} |" in page


def line_of(path, start):
    """Returns the first line of a file that begins with a text."""
    return next(line for line in path.read_text().splitlines() if line.startswith(start))


@pytest.mark.parametrize(
    ("arm", "label"),
    [("bacr-robust", "0: `bacr-robust`"), ("self-distill-tenth", ".1"), ("self-distill", "1")],
)
def test_the_distill_page_has_the_accuracies_and_updates(arm, label):
    runs = {
        task: [cell for cell in cells("distill-cpu") if (cell["task"], cell["arm"]) == (task, arm)]
        for task in ("redundant", "tradeoff")
    }
    assert [len(of_task) for of_task in runs.values()] == [5, 5]

    def entries(task):
        return [run["sets"]["ledger"]["sampled"] for run in runs[task]]

    def with_half(values):
        half = stdtrit(4, 0.975) * np.std(values, ddof=1) / np.sqrt(5)
        return f"{100 * np.mean(values):.0f} ± {100 * half:.0f}"

    updates = [f"{np.mean([run['steps'] for run in of_task]):.0f}" for of_task in runs.values()]
    means = [
        with_half(
            [np.mean([entry["accuracy"] for entry in of_run.values()]) for of_run in entries(task)]
        )
        for task in runs
    ]
    at_8 = with_half([of_run["8"]["accuracy"] for of_run in entries("tradeoff")])
    thinking = np.mean([of_run["12"]["mean_thinking_tokens"] for of_run in entries("tradeoff")])
    row = " | ".join([label, *updates, *means, at_8, f"{thinking:.1f}"])
    page = (ROOT / "docs" / "studies" / "distill.md").read_text()
    assert f"| {row} |" in page, row


def text_of(page):
    """Returns the words of a page of docs/, separated by single spaces."""
    return " ".join((ROOT / "docs" / page).read_text().split())


def test_the_page_of_studies_counts_the_differences_of_all_committed_studies():
    by_interval = by_holm = 0
    for path in sorted((ROOT / "docs" / "results").glob("*/results.json.xz")):
        results = json.loads(lzma.decompress(path.read_bytes()))
        for entry in [*results["comparisons"], *results.get("contrasts", [])]:
            if "simultaneous_low" in entry:
                by_interval += entry["simultaneous_low"] > 0 or entry["simultaneous_high"] < 0
                by_holm += entry["p_holm"] < 0.05
    text = (
        f"In the committed studies they find {by_interval} differences and Holm's test {by_holm}."
    )
    assert text in text_of("study.md")


# Committed studies whose runs have a known end. Runs that a study shares with an earlier one of
# this list count in the earlier one.
STUDIES = (
    *("main", "elsewhere", "hard", "rivals", "scale", "ablation", "controls", "sensitivity"),
    *("told", "smollm2", "distill"),
)
# Committed studies without an evaluation before training.
OPEN_ENDED = ("search", "search-elsewhere", "rivals-search", "smollm2-updates")
# Number of held-out questions.
HELD_OUT = 256


@pytest.fixture(scope="module")
def trained_runs():
    """Cell and replayed alarms of each trained run, by study. No run occurs twice."""
    by_study = {}
    seen = set()
    for study in STUDIES:
        by_id = {cell["id"]: cell for cell in cells(f"{study}-cpu")}
        by_study[study] = []
        for run in replay_alarms.runs_in(ROOT / "docs" / "results" / f"{study}-cpu"):
            cell = by_id[run.name.partition("/")[2]]
            fields = ("task", "config_sha", "seed", "wall_seconds", "generated_tokens")
            key = tuple(cell[field] for field in fields)
            if key not in seen:
                by_study[study].append((cell, replay_alarms.report_of(run)))
            seen.add(key)
    return by_study


def means_that_fell(study):
    """Counts the trained runs whose mean greedy accuracy over the task's budgets fell."""
    path = ROOT / "docs" / "results" / f"{study}-cpu" / "results.json.xz"
    tasks = json.loads(lzma.decompress(path.read_bytes()))["study"]["tasks"]
    task_of = {task["id"]: task for task in tasks}
    by_id = {cell["id"]: cell for cell in cells(f"{study}-cpu")}

    def mean(cell):
        task = task_of[cell["task"]]
        greedy = cell["sets"][task["main"]]["greedy"]
        return np.mean([greedy[str(budget)]["accuracy"] for budget in task["budgets"]])

    count = collections.Counter()
    for cell in by_id.values():
        if cell["steps"]:
            before = by_id[f"{cell['task']}.cot.{cell['seed']}"]
            count[cell["task"]] += accuracy_declined(mean(before), mean(cell), HELD_OUT)
    return count


def test_the_page_of_results_counts_the_means_that_fell(trained_runs):
    page = text_of("results.md")
    fell = {}
    for study, runs in trained_runs.items():
        fell[study] = sum(bool(report["mean_fell"]) for _, report in runs)
    shares = [
        f"{fell[study]} of {len(trained_runs[study])}"
        for study in ("hard", "rivals", "scale", "distill")
    ]
    unchanged = ("ablation", "controls", "sensitivity", "told")
    assert sum(fell[study] for study in unchanged) == 0
    assert (
        f"in {shares[0]} runs of hard, {shares[1]} of rivals, {shares[2]} of scale, {shares[3]} of "
        f"distill, and none of {sum(len(trained_runs[study]) for study in unchanged)} of"
    ) in page

    both = [run for study in ("main", "elsewhere") for run in trained_runs[study]]
    failed = sum(bool(report["failed"]) for _, report in both)
    means = means_that_fell("main") + means_that_fell("elsewhere")
    held_out = collections.Counter(cell["task"] for cell, report in both if report["mean_fell"])
    assert (
        f"in main and elsewhere {failed} runs failed at some budget, but {means.total()} greedy "
        f"means over the tasks' budgets fell. Held-out means fell in {held_out.total()}, "
        f"{held_out['count_bits']} of them on count_bits, where"
    ) in page
    assert means["count_bits"] == 0


def test_the_page_of_alarms_counts_the_runs_of_studies(trained_runs):
    page = text_of("alarms.md")
    runs = [run for of_study in trained_runs.values() for run in of_study]
    closed = sum("closed_answers" in cell["curve"][-1] for cell, _ in runs)
    counts = replay_alarms.counts_of([report for _, report in runs])
    assert (
        f"{counts['runs']} runs of studies (shared ones once) have only the mean reward of each "
        f"step, {closed} also closed answers. {counts['failed']} ended worse, one with an alarm."
    ) in page
    assert counts["failed_with_alarm"] == 1 and counts["fine_with_alarm"] == 0
    reports = []
    for study in OPEN_ENDED:
        folder = ROOT / "docs" / "results" / f"{study}-cpu"
        reports += map(replay_alarms.report_of, replay_alarms.runs_in(folder))
    alarmed = [
        report for report in reports if not replay_alarms.OF_RUIN.isdisjoint(report["alarms"])
    ]
    assert len(alarmed) == 1
    assert (
        f"No other sound run has an alarm, and one of {len(reports)} without a known end." in page
    )
