"""How every figure of a study draws arms, their numbers with intervals, and curves."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bacr_jax.report.charts import COLOURS, Axis, Chart, Series, marker
from bacr_study.info import StudyInfo, Variant

_LINES = ("-", "--", ":")
Estimate = Mapping[str, Any]


@dataclass(frozen=True)
class Drawn:
    """A figure.

    Attributes:
      name: of its files.
      title: above it.
      caption: below it: what is shown.
      rows: charts, as many in each row.
      legend: columns of the legend below it.
    """

    name: str
    title: str
    caption: str
    rows: Sequence[Sequence[Chart]]
    legend: int = 3


@dataclass(frozen=True)
class Look:
    """How an arm is drawn, in every figure alike."""

    colour: str
    marker: str
    line: str

    def series(self, label: str, x: Iterable[float], y: Iterable[float], **how: Any) -> Series:
        """A curve of the arm; arms of one colour are told apart by their markers' filling, too."""
        style = {"line": self.line, "marker": self.marker, "hollow": self.line != "-"}
        return Series(label, list(x), list(y), self.colour, **{**style, **how})


def looks_of(study: StudyInfo) -> dict[str, Look]:
    """A look for every arm: no two of 27 alike, and the first reference in grey."""
    ids = [arm.id for arm in study.arms]
    first = [id_ for id_ in study.references[:1] if id_ in ids]
    return {
        id_: Look(f"s{i % len(COLOURS)}", marker(i), _LINES[i // len(COLOURS) % len(_LINES)])
        for i, id_ in enumerate([*first, *(id_ for id_ in ids if id_ not in first)])
    }


def ends_of(estimate: Estimate, *, least: float = -math.inf) -> tuple[float, float]:
    """An interval; a mean without one is its own."""
    low, high = (estimate["mean"] if estimate[k] is None else estimate[k] for k in ("low", "high"))
    return max(low, least), high


def accuracies(look: Look, label: str, x: Iterable[float], estimates: Sequence[Estimate]) -> Series:
    """Accuracies in % with their intervals, joined by a line."""
    share = lambda end: 100 * min(max(end, 0.0), 1.0)
    ends = [(share(low), share(high)) for low, high in map(ends_of, estimates)]
    return look.series(label, x, [100 * e["mean"] for e in estimates], ends=ends)


def band(curve: Mapping[str, Any], scale: float, draw: Callable[..., Series], label: str) -> Series:
    """A curve with its interval as a shade."""
    scaled = lambda key: [scale * value for value in curve[key]]
    known = curve["low"] and curve["low"][0] is not None
    ends = list(zip(scaled("low"), scaled("high"))) if known else None
    return draw(label, curve["x"], scaled("mean"), ends=ends, kind="band")


def apart(index: int, count: int) -> float:
    """Factor that sets arms a little apart on a logarithmic axis."""
    return float(2 ** (0.3 * (index - (count - 1) / 2) / max(count, 6)))


def budget_axis(budgets: Sequence[int], label: str = "thinking budget (tokens)") -> Axis:
    """An axis of doublings with a tick at each budget."""
    ticks = [(float(budget), f"{budget:,}") for budget in budgets]
    return Axis(label, log2=True, low=0.87 * min(budgets), high=1.15 * max(budgets), ticks=ticks)


def variant_label(study: StudyInfo, variant: Variant) -> str:
    """A variant in legends."""
    name = study.arm(variant.arm).name
    return name if variant.value is None else f"{name}, {variant.value}"


def accuracy_axis(study: StudyInfo) -> Axis:
    """An axis of accuracies."""
    return Axis(f"accuracy (%, {study.mode} decoding)")
