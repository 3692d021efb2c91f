"""Paired comparisons of a study's arms, and what each part of an ablation does."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from bacr_jax.evaluation.samples import GREEDY
from bacr_study.cells import Grid, Setting
from bacr_study.spec import MEAN, PARTS, Study, Variant
from bacr_study.statistics import holm, mean_interval

Entry = dict[str, Any]


def _pairs(study: Study, reference: str) -> Iterator[tuple[Variant, Variant]]:
    """Every variant beside the reference arm at the same value."""
    others = {variant.value: variant for variant in study.variants_of(study.arm(reference))}
    for variant in study.variants():
        if variant.arm != reference and variant.value in others:
            yield variant, others[variant.value]


def _default_pairs(study: Study) -> Iterator[tuple[Variant, Variant]]:
    """Every swept value beside the default one of the same arm."""
    for sweep, arms in study.sweeps().items():
        for arm, value in itertools.product(arms, sweep.values):
            if sweep.default not in (None, value):
                yield Variant(arm.id, value), Variant(arm.id, sweep.default)


def _in_focus(study: Study) -> list[Setting]:
    """Every task at its budgets in focus."""
    return [
        Setting(task.id, task.main, budget)
        for task in study.tasks
        for budget in study.focus_budgets(task)
    ]


def _tested(grid: Grid, cases: Iterable[tuple[Entry, Variant, Variant, Setting]]) -> list[Entry]:
    """A family of tests: Holm's p-values over all of it, and how many tests these are.

    Cases have what an entry says besides, an arm, the arm that it is compared with, and where; one
    that lacks an arm is left out.
    """
    found = [(said, grid.difference(of, less, at)) for said, of, less, at in cases]
    entries = [{**said, **contrast} for said, contrast in found if contrast]
    adjusted = holm([entry["p"] for entry in entries])
    return [{**entry, "p_holm": p, "tests": len(entries)} for entry, p in zip(entries, adjusted)]


def _family(
    grid: Grid, view: str, pairs: Iterable[tuple[Variant, Variant]], settings: Iterable[Setting]
) -> list[Entry]:
    """The tests of a table: differences of pairs in each setting."""
    cases = []
    for at, (of, less) in itertools.product(settings, pairs):
        place = {"view": view, "task": at.task, "set": at.set, "budget": at.budget}
        cases.append(({**place, "variant": of.key, "reference": less.key}, of, less, at))
    return _tested(grid, cases)


def contrasts(grid: Grid) -> list[Entry]:
    """Paired differences of the study's pairs at the budgets in focus and on their mean.

    A study that asks a few questions names their pairs beside what they will mean, and tests those
    alone: Holm's correction is over them, not over all pairs that its arms make. Entries have
    name, of, less, task, budget, the fields of `Contrast`, `p_holm` and the number of tests.
    """
    cases = []
    for at in _in_focus(grid.study):
        for name, (of, less) in grid.study.contrasts.items():
            said = {"name": name, "of": of, "less": less, "task": at.task, "budget": at.budget}
            cases.append((said, Variant(of), Variant(less), at))
    return _tested(grid, cases)


def comparisons(grid: Grid) -> list[Entry]:
    """Paired differences from each reference arm; a family of tests is a table and a reference.

    The mean over budgets is a family of its own (`anytime`), so that it takes no power from the
    budgets; so is each ablation row's difference from the first row. Entries have view, task, set,
    budget, variant, reference, the fields of `Contrast`, `p_holm` and the family's number of tests.
    """
    study = grid.study
    found: list[Entry] = []
    each = [(task, str(budget)) for task in study.tasks for budget in task.budgets]
    main = [Setting(task.id, task.main, budget) for task, budget in each]
    mean = [Setting(task.id, task.main, MEAN) for task in study.tasks]
    hard = [Setting(task.id, task.hard, budget) for task, budget in each]
    for reference in study.references:
        pairs = list(_pairs(study, reference))
        if {"accuracy", "efficiency", "scale", "ablation"} & set(study.views):
            found += _family(grid, "accuracy", pairs, main)
            found += _family(grid, "anytime", pairs, mean)
        if "hard" in study.views:
            found += _family(grid, "hard", pairs, hard)
    if "sensitivity" in study.views:
        found += _family(grid, "sensitivity", _default_pairs(study), _in_focus(study))
    return found


def decoding(grid: Grid) -> list[Entry]:
    """Differences from each reference arm, sampled and greedily, and how far the two are apart.

    Entries have task, set, budget, variant, reference, and the contrasts `sampled`, `greedy` and
    `change`: greedy less sampled, tested as one. Arms decoded in one mode alone are left out.
    """
    study, found = grid.study, list[Entry]()
    for reference, task in itertools.product(study.references, study.tasks):
        for budget in (*map(str, task.budgets), MEAN):
            for variant, other in _pairs(study, reference):
                sampled = Setting(task.id, task.main, budget)
                greedy = replace(sampled, mode=GREEDY)
                apart = [(variant, greedy, 1.0), (other, greedy, -1.0)]
                apart += [(variant, sampled, -1.0), (other, sampled, 1.0)]
                contrasts = {
                    "sampled": grid.difference(variant, other, sampled),
                    "greedy": grid.difference(variant, other, greedy),
                    "change": grid.contrast(apart),
                }
                if all(contrasts.values()):
                    where = {"task": task.id, "set": task.main, "budget": budget}
                    names = {"variant": variant.key, "reference": other.key}
                    found.append({**where, **names, **contrasts})
    return found


def difficulty(grid: Grid) -> dict[str, Any]:
    """Accuracy by level, and its difference from the first reference arm.

    By task, budget in focus, variant and level: problems, accuracy, and difference (None: of the
    reference itself, or no verdicts).
    """
    study = grid.study
    reference = Variant(study.references[0]) if study.references else None
    found: dict[str, Any] = {}
    for where in _in_focus(study):
        variants = grid.variants(where.task)
        cells = [cell for variant in variants for cell in grid.of(where.task, variant)]
        # The same in all cells of a task.
        known = [one for cell in cells if (one := cell.levels(where.set)) is not None]
        levels = sorted(set(known[0].tolist()) - {0}) if known else []
        for variant, level in itertools.product(variants, levels):
            at = replace(where, level=level)
            rates = list(grid.table(variant, at).values())
            if not rates:
                continue
            contrast = None
            if reference not in (None, variant):
                contrast = grid.difference(variant, reference, at)
            by_variant = found.setdefault(at.task, {}).setdefault(at.budget, {})
            by_variant.setdefault(variant.key, {})[str(level)] = {
                "problems": rates[0].size,
                "accuracy": asdict(mean_interval([float(one.mean()) for one in rates])),
                "difference": contrast,
            }
    return found


def ablation(grid: Grid) -> dict[str, Any]:
    """What each part of an ablation adds, alone and on average, and whether gains add up.

    With y(S) the accuracy with the parts S on, k parts, and 0 none of them on:

      main effect of i    mean over the 2^(k-1) sets S without i of y(S + i) - y(S)
      alone               y({i}) - y(0);  on top of the first part: y({1, i}) - y({1})
      joint               y(all) - y(0);  on top of the first part: y(all) - y({1})
      surplus             joint - sum over i of alone: above 0 if parts help each other

    All are contrasts of runs on the same seeds and problems, tested as one (`crossed_test`). An
    effect that lacks an arm is left out. By task and budget in focus: `rows` (difference of each
    arm from none of the parts) and `effects` (name, kind, part, contrast).
    """
    study = grid.study
    by_parts = {frozenset[str](arm.parts): Variant(arm.id) for arm in study.arms}
    found: dict[str, Any] = {}
    base = by_parts.get(frozenset())
    for where in _in_focus(study):
        rows = {
            variant.key: grid.difference(variant, base, where)
            for variant in by_parts.values()
            if base not in (None, variant)
        }
        effects = []
        for kind, part, weights in effect_weights(PARTS):
            if set(weights) <= by_parts.keys():
                contrast = grid.contrast([(by_parts[s], where, w) for s, w in weights.items()])
                if contrast:
                    effects.append({"kind": kind, "part": part, **contrast})
        found.setdefault(where.task, {})[where.budget] = {"rows": rows, "effects": effects}
    return found


def effect_weights(
    parts: Sequence[str],
) -> Iterator[tuple[str, str, Mapping[frozenset[str], float]]]:
    """(kind, part, weight of each combination of parts) of every effect that `ablation` names."""
    everything, first = frozenset(parts), frozenset(parts[:1])
    subsets: list[frozenset[str]] = [frozenset()]
    for part in parts:
        subsets += [subset | {part} for subset in subsets]
    for part in parts:
        share = 1.0 / 2 ** (len(parts) - 1)
        yield "main effect", part, {s: share if part in s else -share for s in subsets}
    for ground, top in ((frozenset[str](), ""), (first, f" on top of {parts[0]}")):
        rest = [part for part in parts if part not in ground]
        for part in rest:
            yield f"alone{top}", part, {ground | {part}: 1.0, ground: -1.0}
        yield f"joint{top}", "", {everything: 1.0, ground: -1.0}
        surplus = {everything: 1.0, ground: len(rest) - 1.0}
        surplus |= {ground | {part}: -1.0 for part in rest}
        yield f"surplus{top}", "", surplus
