"""Draws the pictures of docs/ that no study draws, for light and dark pages.

    python docs/images/make_pictures.py

Writes main, quickstart, smollm2, smollm2_gsm8k, tradeoff and vllm_sampler next to this file, and
the pictures of the variance research into docs/results, each with its variant for dark pages.
smollm2, smollm2_gsm8k, tradeoff and vllm_sampler show tables of the docs, because the files of
these runs were not kept. All others show committed results.
"""

import dataclasses
import json
import lzma
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bacr_jax.report import pictures
from bacr_jax.report.charts import Axis, Chart, Series
from bacr_jax.report.curve_styles import REFERENCE, styles_of
from bacr_jax.report.evaluation_charts import accuracy_charts
from bacr_study.archive import CELLS, unpack
from bacr_study.cells import read_cells
from bacr_study.configured import with_sets
from bacr_study.figure_parts import StudyFigure, saved
from bacr_study.figures import accuracy_figures
from bacr_study.plan import plan_runs
from bacr_study.results import build_results
from bacr_study.study_file import read_study

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
# Benchmarks are scripts, and research is not installed.
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from pack_study import small_picture  # noqa: E402
from quickstart import mean_of  # noqa: E402
from research.variance import report as variance_report  # noqa: E402

RESULTS = ROOT / "docs" / "results"
# Pictures of the variance research: folder, file of results, regime of budgets, name.
VARIANCE = (
    ("variance-cpu", "variance.json.xz", "common", "variance_common"),
    ("variance-cpu", "variance.json.xz", "independent", "variance_independent"),
    ("variance-training-cpu", "variance.json.xz", "training", "variance_training"),
    ("variance-search-cpu", "seed-11.json.xz", "common", "seed-11"),
)
RUNS_PAGE = ROOT / "docs" / "smollm2-runs.md"
VLLM_TABLE = ROOT / "docs" / "results" / "vllm-sampler" / "accuracy.md"
VLLM_POLICIES = ("after the warm-up", "our decoder", "our decoder again", "vLLM", "one step ahead")
# An entry of the SmolLM2 tables: accuracy and interval in percent, mean thinking tokens.
ENTRY = re.compile(r"([\d.]+) \[([\d.]+), ([\d.]+)\],? ([\d.]+)")
BACR_STYLE, GRPO_STYLE = styles_of(["bacr-bounded", "grpo"])


def main() -> None:
    """Draws all pictures and prints the paths of the files."""
    title = "Accuracy by budget on the trade-off ledger"
    draw("main", title, [[study_chart()]])
    draw("quickstart", "ledger: mean and range over 3 seeds", quickstart_charts())
    text = RUNS_PAGE.read_text()
    sums, gsm8k = text.split("\n## ")[1:3]
    draw(
        "smollm2",
        "SmolLM2-135M, sums of three terms: thirty steps of BACR, seed 2",
        [
            table_charts(
                [12, 20, 28, 48],
                {
                    "after the warm-up": (REFERENCE, row(sums, "seed 2: after the warm-up")),
                    "BACR, 30 steps": (BACR_STYLE, row(sums, "seed 2: BACR, 30 steps")),
                },
            )
        ],
    )
    columns = list(zip(*[row(gsm8k, str(budget)) for budget in (32, 64, 128, 192)]))
    policies = {
        "after the warm-up": REFERENCE,
        "BACR, 61 steps": BACR_STYLE,
        "GRPO, 40 steps": GRPO_STYLE,
    }
    entries = {name: (style, column) for (name, style), column in zip(policies.items(), columns)}
    charts = table_charts([32, 64, 128, 192], entries)
    draw("smollm2_gsm8k", "SmolLM2-135M on GSM8K: equal generated tokens", [charts])
    draw("vllm_sampler", "Quickstart: our decoder and vLLM", [[vllm_chart()]])
    for folder_name, results, regime, name in VARIANCE:
        draw_variance(RESULTS / folder_name, results, regime, name)
    predicted = variance_report.predicted_figure(
        read_json(RESULTS / VARIANCE[2][0] / VARIANCE[2][1])
    )
    draw_figure(predicted, RESULTS / "variance-training-cpu" / "variance_predicted.png")


def read_json(path: Path) -> Any:
    """Reads a compressed JSON file."""
    return json.loads(lzma.decompress(path.read_bytes()))


def draw(name: str, title: str, rows: Sequence[Sequence[Chart]]) -> None:
    """Draws a picture for light and dark pages, and reduces the files to 128 colours."""
    path = FOLDER / f"{name}.png"
    pictures.save_both(path, title, rows)
    reduce_colours(path)


def reduce_colours(path: Path) -> None:
    """Reduces a picture and its variant for dark pages to 128 colours."""
    for file in (path, pictures.dark_path(path)):
        file.write_bytes(small_picture(file))
        print(file)


def draw_figure(figure: StudyFigure, path: Path) -> None:
    """Draws a figure into a PNG file and its variant for dark pages."""
    with tempfile.TemporaryDirectory() as folder:
        for file in saved(figure, Path(folder)):
            if file.suffix == ".png":
                shutil.copy(file, path.with_name(file.name.replace(figure.name, path.stem)))
    reduce_colours(path)


def draw_variance(folder: Path, results: str, regime: str, name: str) -> None:
    """Draws the noise of all baselines for one regime of budgets."""
    figure = variance_report.noise_figure(read_json(folder / results), regime)
    draw_figure(figure, folder / f"{name}.png")


def study_chart() -> Chart:
    """Returns the chart of four arms of the study `main` on the trade-off, from its cells."""
    study = read_study(
        ROOT / "configs" / "studies" / "main.yaml",
        overrides=[
            "arms=[grpo,anytime-one,bacr-paper,bacr-robust]",
            "tasks=[tradeoff]",
            "reference=[anytime-one]",
            "views=[accuracy]",
        ],
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(RESULTS / "main-cpu" / CELLS, folder)
        unpack(folder)
        # The evaluation sets of the tasks are in the configs of the runs.
        study = with_sets(study, plan_runs(study, folder))
        results = build_results(read_cells(folder, study), study)
    (figure,) = accuracy_figures(results, study)
    chart = figure.rows[0][0]
    return dataclasses.replace(chart, title="", note="mean over 5 seeds with 95 % intervals")


def quickstart_charts() -> list[list[Chart]]:
    """Returns the charts of the quickstart's runs: accuracy by budget, then by tokens."""
    packed = (RESULTS / "quickstart-bounded-cpu" / CELLS).read_bytes()
    runs = [json.loads(line) for line in lzma.decompress(packed).splitlines()]
    evaluations: dict[str, list[Any]] = {"warm-up": [], "BACR": [], "GRPO": []}
    for run in runs:
        evaluation = run["summary"]["eval"]
        if run["id"].startswith("bacr"):
            evaluations["warm-up"].append(evaluation["before"])
            evaluations["BACR"].append(evaluation["after"])
        else:
            evaluations["GRPO"].append(evaluation["after"])
    means = {name: mean_of(of_policy) for name, of_policy in evaluations.items()}
    styles = dict(zip(means, (REFERENCE, BACR_STYLE, GRPO_STYLE)))
    charts = accuracy_charts(means, styles)
    half = len(charts) // 2
    return [charts[:half], charts[half:]]


def row_text(section: str, name: str) -> str:
    """Returns the text of the first row of a name, without the name."""
    match = re.search(rf"^\| {re.escape(name)} \| (.*) \|$", section, re.MULTILINE)
    if match is None:
        raise SystemExit(f"no table has the row {name!r}; name the row as the page does")
    return match[1].replace("*", "")


def row(section: str, name: str) -> list[tuple[float, ...]]:
    """Returns the entries of the first row of a name: accuracy, both ends, thinking tokens."""
    return [tuple(map(float, entry)) for entry in ENTRY.findall(row_text(section, name))]


def vllm_chart() -> Chart:
    """Returns the chart of accuracy by budget for each sampler, from docs/results."""
    page = VLLM_TABLE.read_text()
    budgets = [8, 16, 32, 64]
    rows = []
    for budget in budgets:
        cells = row_text(page, str(budget)).split(" | ")
        rows.append([tuple(map(float, re.findall(r"[\d.]+", cell))) for cell in cells])
    styles = [REFERENCE, *styles_of(VLLM_POLICIES[1:])]
    policies = {}
    for name, style, column in zip(VLLM_POLICIES, styles, zip(*rows)):
        # An accuracy without an interval was the same for all seeds.
        entries = [entry if len(entry) == 3 else entry * 3 for entry in column]
        policies[name] = (style, entries)
    chart = accuracy_chart(budgets, policies)
    return dataclasses.replace(chart, title="", note="greedy, mean and range over 4 seeds")


# Style of each policy, and at each budget its accuracy, both ends and perhaps its thinking tokens.
Policies = Mapping[str, tuple[Series, Sequence[tuple[float, ...]]]]


def table_charts(budgets: Sequence[int], policies: Policies) -> list[Chart]:
    """Returns the charts of accuracy and of thinking tokens by budget.

    Args:
      budgets: the budgets in thinking tokens.
      policies: style of each policy, and its entry of `row` at each budget.
    """
    lengths = []
    for name, (style, entries) in policies.items():
        y = [entry[-1] for entry in entries]
        lengths.append(dataclasses.replace(style, label=name, x=list(map(float, budgets)), y=y))
    thinking = Axis("mean thinking tokens used", low=0.0)
    return [
        accuracy_chart(budgets, policies),
        Chart("Thinking used by budget, greedy", lengths, budget_axis(budgets), thinking),
    ]


def accuracy_chart(budgets: Sequence[int], policies: Policies) -> Chart:
    """Returns the chart of greedy accuracy by budget with its intervals."""
    curves = []
    for name, (style, entries) in policies.items():
        y = [accuracy for accuracy, *_ in entries]
        ends = [(low, high) for _, low, high, *_ in entries]
        x = list(map(float, budgets))
        curves.append(dataclasses.replace(style, label=name, x=x, y=y, ends=ends))
    y_axis = Axis("accuracy (%)", low=0.0)
    return Chart("Accuracy by budget, greedy", curves, budget_axis(budgets), y_axis)


def budget_axis(budgets: Sequence[int]) -> Axis:
    """Returns a logarithmic axis (base 2) with a tick at each budget."""
    return Axis(
        "thinking budget (tokens)",
        log2=True,
        low=0.93 * budgets[0],
        high=1.07 * budgets[-1],
        ticks=[(float(budget), str(budget)) for budget in budgets],
    )


if __name__ == "__main__":
    main()
