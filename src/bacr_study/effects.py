"""Compares the methods of a study in pairs, and computes the effect of each part of an ablation."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from bacr_jax.evaluation.samples import GREEDY
from bacr_study.cells import Grid, Setting
from bacr_study.spec import MEAN, PARTS, Study, Variant
from bacr_study.statistics import holm, mean_interval, simultaneous_interval

# A JSON object in results.json.
Record = dict[str, Any]


class _Case(NamedTuple):
    """A difference in accuracy between two variants (methods with settings) that will be tested.

    Attributes:
      labels: fields that identify the case in the record of its result.
      of: the variant from whose accuracy the other accuracy is subtracted.
      less: the variant whose accuracy is subtracted.
      where: the setting in which both accuracies are measured.
    """

    labels: Record
    of: Variant
    less: Variant
    where: Setting


def _pairs(study: Study, reference: str) -> Iterator[tuple[Variant, Variant]]:
    """Yields each variant together with the reference arm at the same swept value.

    A variant is an arm (a method with its settings) at one of its swept values. The reference is an
    arm that the others are compared with.
    """
    references = {variant.value: variant for variant in study.variants_of(study.arm(reference))}
    for variant in study.variants():
        if variant.arm != reference and variant.value in references:
            yield variant, references[variant.value]


def _default_pairs(study: Study) -> Iterator[tuple[Variant, Variant]]:
    """Yields each method at a swept value together with the same method at the default value."""
    for sweep, arms in study.sweeps().items():
        for arm, value in itertools.product(arms, sweep.values):
            if sweep.default is not None and value != sweep.default:
                yield Variant(arm.id, value), Variant(arm.id, sweep.default)


def _in_focus(study: Study) -> list[Setting]:
    """Returns a setting for each task and each budget that the study lists in its field `focus`."""
    return [
        Setting(task.id, task.main, budget)
        for task in study.tasks
        for budget in study.focus_budgets(task)
    ]


def _tested(grid: Grid, cases: Iterable[_Case]) -> list[Record]:
    """Tests a family of differences, and adjusts p-values and intervals for the number of tests.

    Returns:
      A record for each case with its labels, the fields of `Contrast`, `p_holm` (the p-value
      adjusted over the family), `simultaneous_low` and `simultaneous_high` (the ends of
      `simultaneous_interval`) and `tests` (the size of the family). Cases that cannot be tested
      because an arm has no cells are left out.
    """
    records: list[Record] = []
    for case in cases:
        contrast = grid.difference(case.of, case.less, case.where)
        if contrast:
            records.append({**case.labels, **contrast})
    adjusted = holm([record["p"] for record in records])
    for record, p in zip(records, adjusted):
        low, high = simultaneous_interval(
            record["difference"], record["standard_error"], record["df"], len(records)
        )
        record["p_holm"] = p
        record["simultaneous_low"] = low
        record["simultaneous_high"] = high
        record["tests"] = len(records)
    return records


def _family(
    grid: Grid,
    view: str,
    pairs: Sequence[tuple[Variant, Variant]],
    settings: Iterable[Setting],
) -> list[Record]:
    """Tests the differences of all pairs in all settings as one family of tests.

    Args:
      grid: the stored results of the study's runs.
      view: the kind of result (view) for which the tests are made; stored in the records.
      pairs: the variants to compare; the second one is subtracted from the first.
      settings: the settings in which they are compared.

    Returns:
      The records returned by `_tested`.
    """
    cases = []
    for where in settings:
        for of, less in pairs:
            labels = {
                "view": view,
                "task": where.task,
                "set": where.set,
                "budget": where.budget,
                "variant": of.key,
                "reference": less.key,
            }
            cases.append(_Case(labels, of, less, where))
    return _tested(grid, cases)


def contrasts(grid: Grid) -> list[Record]:
    """Tests the study's named comparisons at the budgets of `Study.focus` and on average.

    A study that addresses only a few questions names the pairs of arms (methods with their
    settings) that answer them. Holm's correction then applies to these pairs, not to all pairs of
    arms.

    Returns:
      Records with the fields `name`, `of`, `less`, `task` and `budget`, and the fields returned by
      `_tested`.
    """
    cases = []
    for where in _in_focus(grid.study):
        for name, (of, less) in grid.study.contrasts.items():
            labels = {
                "name": name,
                "of": of,
                "less": less,
                "task": where.task,
                "budget": where.budget,
            }
            cases.append(_Case(labels, Variant(of), Variant(less), where))
    return _tested(grid, cases)


def comparisons(grid: Grid) -> list[Record]:
    """Tests the difference in accuracy of every arm from each reference arm.

    An arm is a method with its settings, and a reference arm is one that the others are compared
    with. The tests of one table and one reference arm form a family. The mean over budgets is a
    separate family (view `anytime`), so that it does not reduce the power of the tests at single
    budgets.

    Returns:
      Records with the fields `view`, `task`, `set`, `budget`, `variant` and `reference`, and the
      fields returned by `_tested`.
    """
    study = grid.study
    by_budget = []
    means = []
    hard = []
    for task in study.tasks:
        for budget in task.budgets:
            by_budget.append(Setting(task.id, task.main, str(budget)))
            hard.append(Setting(task.id, task.hard, str(budget)))
        means.append(Setting(task.id, task.main, MEAN))
    views_of_accuracy = {"accuracy", "efficiency", "scale", "ablation"}
    records: list[Record] = []
    for reference in study.references:
        pairs = list(_pairs(study, reference))
        if views_of_accuracy & set(study.views):
            records += _family(grid, "accuracy", pairs, by_budget)
            records += _family(grid, "anytime", pairs, means)
        if "hard" in study.views:
            records += _family(grid, "hard", pairs, hard)
    if "sensitivity" in study.views:
        pairs = list(_default_pairs(study))
        records += _family(grid, "sensitivity", pairs, _in_focus(study))
    return records


def decoding(grid: Grid) -> list[Record]:
    """Tests whether differences from the reference arms depend on the decoding mode.

    A reference arm is a method with its settings that the others are compared with.

    Returns:
      Records with the fields `task`, `set`, `budget`, `variant` and `reference`, and the contrasts
      `sampled`, `greedy` and `change`. `change` is the greedy difference minus the sampled
      difference, tested as a single contrast. Arms that were evaluated in only one mode are left
      out.
    """
    study = grid.study
    records = []
    for reference, task in itertools.product(study.references, study.tasks):
        for budget in (*map(str, task.budgets), MEAN):
            where = Setting(task.id, task.main, budget)
            for variant, other in _pairs(study, reference):
                by_mode = _differences_by_mode(grid, variant, other, where)
                if not all(by_mode.values()):
                    continue
                labels = {
                    "task": task.id,
                    "set": task.main,
                    "budget": budget,
                    "variant": variant.key,
                    "reference": other.key,
                }
                records.append({**labels, **by_mode})
    return records


def _differences_by_mode(
    grid: Grid, of: Variant, less: Variant, sampled: Setting
) -> dict[str, Record | None]:
    """Tests a difference under sampled and greedy decoding, and the change between them.

    Args:
      grid: the stored results of the study's runs.
      of: the variant from whose accuracy the other accuracy is subtracted.
      less: the variant whose accuracy is subtracted.
      sampled: task, evaluation set and budget of the comparison, with sampled decoding.

    Returns:
      The contrasts `sampled`, `greedy` and `change` described in `decoding`.
    """
    greedy = replace(sampled, mode=GREEDY)
    change = grid.contrast(
        [
            (of, greedy, 1.0),
            (less, greedy, -1.0),
            (of, sampled, -1.0),
            (less, sampled, 1.0),
        ]
    )
    return {
        "sampled": grid.difference(of, less, sampled),
        "greedy": grid.difference(of, less, greedy),
        "change": change,
    }


def difficulty(grid: Grid) -> dict[str, Any]:
    """Computes the accuracy per difficulty level, and the difference from the first reference arm.

    The reference arm is a method with its settings that the others are compared with.

    Returns:
      A nested dictionary by task, budget (`Study.focus`), variant and level, with `problems`
      (the number of problems), `accuracy` (an estimate over seeds) and `difference` (a contrast;
      None for the reference arm, or without results per problem).
    """
    study = grid.study
    reference = Variant(study.references[0]) if study.references else None
    by_task: dict[str, Any] = {}
    for where in _in_focus(study):
        variants = grid.variants(where.task)
        for variant, level in itertools.product(variants, _levels_of(grid, where)):
            at_level = replace(where, level=level)
            rates = list(grid.table(variant, at_level).values())
            if not rates:
                continue
            difference = None
            if reference is not None and variant != reference:
                difference = grid.difference(variant, reference, at_level)
            accuracies = [float(rates_of_seed.mean()) for rates_of_seed in rates]
            by_budget = by_task.setdefault(where.task, {})
            by_variant = by_budget.setdefault(where.budget, {})
            by_level = by_variant.setdefault(variant.key, {})
            by_level[str(level)] = {
                "problems": rates[0].size,
                "accuracy": asdict(mean_interval(accuracies)),
                "difference": difference,
            }
    return by_task


def _levels_of(grid: Grid, where: Setting) -> list[int]:
    """Returns the difficulty levels of a set's problems in increasing order.

    Level 0 is excluded because it marks problems without a level.
    """
    for variant in grid.variants(where.task):
        for cell in grid.of(where.task, variant):
            levels = cell.levels(where.set)
            # All cells of a task have the same problems, so the first cell with levels is enough.
            if levels is not None:
                return sorted(set(levels.tolist()) - {0})
    return []


def ablation(grid: Grid) -> dict[str, Any]:
    """Computes the effect of each part of an ablation, and whether the effects add up.

    Let y(S) be the accuracy with the set of parts S enabled, k the number of parts, and 0 the empty
    set:

      main effect of i    mean over the 2^(k-1) sets S without i of y(S + i) - y(S)
      alone               y({i}) - y(0);  on top of the first part: y({1, i}) - y({1})
      joint               y(all) - y(0);  on top of the first part: y(all) - y({1})
      surplus             joint - sum over i of alone; positive if the parts reinforce each other

    Each effect is a contrast of runs on the same seeds and problems, and is tested once by
    `crossed_test`. Effects that need a missing arm are left out.

    Returns:
      A nested dictionary by task and budget (`Study.focus`), with `rows` (the difference of each
      arm from the arm without any parts) and `effects` (records with `kind`, `part` and the fields
      of `Contrast`).
    """
    study = grid.study
    variants: dict[frozenset[str], Variant] = {}
    for arm in study.arms:
        variants[frozenset(arm.parts)] = Variant(arm.id)
    without_parts = variants.get(frozenset())
    by_task: dict[str, Any] = {}
    for where in _in_focus(study):
        rows = {}
        for variant in variants.values():
            if without_parts is not None and variant != without_parts:
                rows[variant.key] = grid.difference(variant, without_parts, where)
        effects = []
        for kind, part, weights in effect_weights(PARTS):
            if not set(weights) <= variants.keys():
                continue
            terms = [(variants[subset], where, weight) for subset, weight in weights.items()]
            contrast = grid.contrast(terms)
            if contrast:
                effects.append({"kind": kind, "part": part, **contrast})
        by_budget = by_task.setdefault(where.task, {})
        by_budget[where.budget] = {"rows": rows, "effects": effects}
    return by_task


def effect_weights(
    parts: Sequence[str],
) -> Iterator[tuple[str, str, Mapping[frozenset[str], float]]]:
    """Yields every effect of an ablation as a weighted sum of accuracies (see `ablation`).

    Yields:
      The kind of the effect, the part ("" if it concerns all parts), and the weight of the accuracy
      with each subset of parts enabled.
    """
    subsets: list[frozenset[str]] = [frozenset()]
    for part in parts:
        subsets += [subset | {part} for subset in subsets]
    share = 1.0 / 2 ** (len(parts) - 1)
    for part in parts:
        weights = {}
        for subset in subsets:
            weights[subset] = share if part in subset else -share
        yield "main effect", part, weights
    yield from _effects_on_top(parts, frozenset(), "")
    yield from _effects_on_top(parts, frozenset(parts[:1]), f" on top of {parts[0]}")


def _effects_on_top(
    parts: Sequence[str], ground: frozenset[str], suffix: str
) -> Iterator[tuple[str, str, Mapping[frozenset[str], float]]]:
    """Yields the effects `alone`, `joint` and `surplus` of adding parts to the parts in `ground`.

    The results have the form of `effect_weights`. `suffix` is appended to the kind of each effect.
    """
    everything = frozenset(parts)
    rest = [part for part in parts if part not in ground]
    for part in rest:
        yield f"alone{suffix}", part, {ground | {part}: 1.0, ground: -1.0}
    yield f"joint{suffix}", "", {everything: 1.0, ground: -1.0}
    surplus = {everything: 1.0, ground: len(rest) - 1.0}
    surplus |= {ground | {part}: -1.0 for part in rest}
    yield f"surplus{suffix}", "", surplus
