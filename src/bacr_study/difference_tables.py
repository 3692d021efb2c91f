"""Creates the tables of paired differences between arms from results.json."""

from collections.abc import Iterator, Mapping
from typing import Any

from bacr_jax.report.table import Item, Shown, Table, budget_name
from bacr_study import items
from bacr_study.figure_parts import panel_title
from bacr_study.figures import CONTRASTS
from bacr_study.items import Results
from bacr_study.spec import Study

# Suffix appended to the task's name in tables of differences, by view.
_FAMILIES = {
    "accuracy": "",
    "anytime": ", mean over budgets",
    "hard": ", harder problems",
    "sensitivity": ", by swept value",
}
# Columns per task and budget in the table of named contrasts.
_CONTRAST_COLUMNS = ("points", "simultaneous", "Holm p", "sign flip")


def contrast_tables(results: Results, study: Study) -> Iterator[Table]:
    """Yields the table of the study's named contrasts.

    Each row has the difference and the Holm-adjusted p-value on each task at each budget of
    `Study.focus`.
    """
    entries = {}
    for entry in results["contrasts"]:
        entries[entry["name"], entry["task"], entry["budget"]] = entry
    columns = [(task, budget) for task in study.tasks for budget in study.focus_budgets(task)]
    header = ["pair", "arm", "less"]
    groups = [("", len(header))]
    for task, budget in columns:
        header += _CONTRAST_COLUMNS
        groups.append((panel_title(task, budget), len(_CONTRAST_COLUMNS)))
    rows: list[list[Item]] = []
    for name, (of, less) in study.contrasts.items():
        row: list[Item] = [name, of, less]
        for task, budget in columns:
            entry = entries.get((name, task.id, budget))
            row.append(items.difference_item(entry))
            row.append(items.simultaneous_item(entry) if entry else "")
            row.append(items.p_item(entry["p_holm"]) if entry else "")
            row.append(items.sign_flip_item(entry) if entry else "")
        rows.append(row)
    yield Table(
        CONTRASTS,
        header,
        rows,
        groups=groups,
        words=3,
        name="contrasts",
        caption="Percentage points, paired by seed and problem, with 95 % intervals (crossed "
        "random effects of seeds and problems). Simultaneous: intervals that hold for these "
        f"{len(entries)} differences at once (Bonferroni). Holm p: over the same tests. Sign flip: "
        "p-value of the exact sign-flip test over seeds, not corrected.",
    )


def difference_tables(results: Results, study: Study) -> Iterator[Table]:
    """Yields a table of paired differences with p-values for each reference arm.

    A reference arm is a method with its settings that the other arms are compared with.
    """
    arm_of_variant = {variant.key: variant.arm for variant in study.variants()}
    by_reference: dict[str, list[Mapping[str, Any]]] = {}
    for entry in results["comparisons"]:
        reference = arm_of_variant[entry["reference"]]
        by_reference.setdefault(reference, []).append(entry)
    names = items.row_names(study)
    for reference, entries in by_reference.items():
        yield Table(
            f"Differences from {study.arm(reference).name}",
            [
                "method",
                "task",
                "budget",
                "points",
                "simultaneous",
                "p",
                "Holm p",
                "sign flip",
                "tests",
                "seeds × problems",
                "updates",
                "failed",
            ],
            [_difference_row(results, study, names, entry) for entry in entries],
            words=2,
            caption="Percentage points, paired by seed and problem, with 95 % intervals "
            "(crossed random effects of seeds and problems, Satterthwaite's degrees of "
            "freedom). Simultaneous: the interval that holds for all differences of the family at "
            "once (Bonferroni). Holm p: corrected for the same tests. Sign flip: p-value of the "
            "exact sign-flip test over seeds, not corrected; with S seeds it is at least 2 / 2^S. "
            "One problem: only means over problems are known. Updates: of the method, and of the "
            "arm that is subtracted. Failed: runs of the method (table of failed runs).",
            name=f"differences_{reference}",
        )


def _difference_row(
    results: Results, study: Study, names: Mapping[str, str], entry: Mapping[str, Any]
) -> list[Item]:
    """Formats an entry of `comparisons` in results.json as a table row."""
    task = study.task(entry["task"]).label
    failures = results["failures"][entry["task"]]
    return [
        names[entry["variant"]],
        f"{task}{_FAMILIES[entry['view']]}",
        budget_name(entry["budget"]),
        items.difference_item(entry),
        items.simultaneous_item(entry),
        items.p_item(entry["p"]),
        items.p_item(entry["p_holm"]),
        items.sign_flip_item(entry),
        str(entry["tests"]),
        f"{entry['seeds']} × {entry['problems']:,}",
        _updates_of_both(results, entry["task"], entry["variant"], entry["reference"]),
        items.failed_runs_item(failures.get(entry["variant"])),
    ]


def _updates_of_both(results: Results, task: str, variant: str, reference: str) -> str:
    """Returns the numbers of optimizer updates of two variants as text, such as `34 and 18`."""
    texts = []
    for key in (variant, reference):
        cost = results["costs"][task].get(key, {})
        item = items.updates_item(cost)
        texts.append(item.text if isinstance(item, Shown) else str(item))
    return " and ".join(texts)


def decoding_tables(results: Results, study: Study) -> Iterator[Table]:
    """Yields the table of differences between methods that depend on the decoding mode.

    It contains the differences for which `items.differs_by_mode` is true. Yields nothing if none of
    them qualifies.
    """
    names = items.row_names(study)
    rows: list[list[Item]] = []
    for entry in results["decoding"]:
        if not items.differs_by_mode(entry):
            continue
        row = [
            names[entry["variant"]],
            names[entry["reference"]],
            study.task(entry["task"]).label,
            budget_name(entry["budget"]),
            items.difference_item(entry["sampled"]),
            items.difference_item(entry["greedy"]),
            items.difference_item(entry["change"]),
        ]
        rows.append(row)
    if not rows:
        return
    yield Table(
        "Where greedy decoding says something else than sampling",
        [
            "method",
            "less",
            "task",
            "budget",
            "sampled",
            "greedy",
            "greedy less sampled",
        ],
        rows,
        words=3,
        caption=f"{len(rows)} of {len(results['decoding'])} differences of two arms, in "
        "percentage points, paired by seed and problem, with 95 % intervals, not corrected for "
        "their number (about 5 % would be here by chance alone). Here are those whose two "
        "forms are apart by more than the interval of their difference, and those with the "
        "opposite sign, each by more than its interval. Read a row as: by so much is the "
        "method ahead of the other if answers are sampled, by so much if they are greedy; a "
        "claim that holds in one column alone is one about that decoding.",
        name="decoding",
    )
