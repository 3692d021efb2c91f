"""How every figure of a study draws arms, intervals, axes and legends."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bacr_jax.report.figures import COLOURS, MARKERS
from bacr_jax.study.info import StudyInfo, Variant

# Black is the eighth of Okabe and Ito's colours, wine is of Tol's muted scheme (2021); yellow can't
# be seen on white.
_PALETTE = (*COLOURS, "#000000", "#882255")
_MARKERS = (*MARKERS, "<", ">")
# Name, title, caption and the figure itself.
Drawn = tuple[str, str, str, Any]


@dataclass(frozen=True)
class Look:
    """How an arm is drawn, in every figure alike."""

    colour: str
    marker: str
    line: str

    @property
    def fill(self) -> str:
        """Of the marker: arms of one colour are told apart where no line is drawn, too."""
        return self.colour if self.line == "-" else "white"


def looks_of(study: StudyInfo) -> dict[str, Look]:
    """A look for every arm: no two of 27 alike, and the first reference in grey."""
    ids = [arm.id for arm in study.arms]
    first = [id_ for id_ in study.references[:1] if id_ in ids]
    lines = ("-", "--", ":")
    return {
        id_: Look(
            _PALETTE[i % len(_PALETTE)],
            _MARKERS[i % len(_MARKERS)],
            lines[i // len(_PALETTE) % len(lines)],
        )
        for i, id_ in enumerate([*first, *(id_ for id_ in ids if id_ not in first)])
    }


def _clip(ends: Sequence[Any]) -> np.ndarray:
    return np.clip(np.array(ends, np.float64), 0.0, 1.0)


def points(
    axis: Any,
    x: Sequence[float] | np.ndarray,
    estimates: Sequence[Mapping[str, Any]],
    name: str,
    look: Look,
) -> None:
    """Accuracies in % with their intervals, joined by a line."""
    mean = np.array([e["mean"] for e in estimates])
    # A mean without an interval is its own.
    low = _clip([e["mean"] if e["low"] is None else e["low"] for e in estimates])
    high = _clip([e["mean"] if e["high"] is None else e["high"] for e in estimates])
    bars(axis, x, 100 * mean, 100 * low, 100 * high, look, label=name)


def bars(
    axis: Any,
    x: Sequence[float] | np.ndarray,
    y: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    look: Look,
    **style: Any,
) -> None:
    """Numbers with their intervals, joined by a line unless `linestyle` says otherwise."""
    axis.errorbar(
        x,
        y,
        yerr=np.maximum([y - low, high - y], 0.0),
        color=look.colour,
        marker=look.marker,
        markerfacecolor=look.fill,
        linestyle=style.pop("linestyle", look.line),
        markersize=4.5,
        linewidth=1.4,
        elinewidth=0.9,
        capsize=2,
        **style,
    )


def legend(figure: Any, axes: Iterable[Any], columns: int = 3) -> None:
    """One legend below all panels, of every name that any of them has."""
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, name in zip(*axis.get_legend_handles_labels()):
            found.setdefault(name, handle)
    if found:
        ncols = min(columns, len(found))
        extra = 0.2 * -(-len(found) // ncols)
        figure.set_figheight(figure.get_figheight() + extra)
        figure.legend(
            found.values(),
            found.keys(),
            loc="outside lower left",
            ncols=ncols,
            frameon=False,
            fontsize=8.5,
        )


def apart(index: int, count: int) -> float:
    """Factor that sets arms a little apart on a logarithmic axis."""
    return float(2 ** (0.3 * (index - (count - 1) / 2) / max(count, 6)))


def log2_axis(axis: Any, values: Sequence[int] = ()) -> None:
    """A horizontal axis of doublings, with ticks at the values or at powers of two."""
    axis.set_xscale("log", base=2)
    if values:
        axis.set_xticks(list(values), [f"{value:,}" for value in values])
        axis.minorticks_off()
        return
    low, high = axis.get_xlim()
    ticks = [2.0**k for k in range(int(np.ceil(np.log2(low))), int(np.log2(high)) + 1)]
    # Half a doubling where whole ones are too few to read values from.
    if len(ticks) < 3:
        ends = (int(np.ceil(2 * np.log2(low))), int(np.floor(2 * np.log2(high))))
        ticks = [2.0 ** (k / 2) for k in range(ends[0], ends[1] + 1)]
    axis.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    axis.minorticks_off()


def panel_title(axis: Any, text: str) -> None:
    """A title above a panel, from the left."""
    axis.set_title(text, loc="left", fontsize=10)


def band(axis: Any, band: Mapping[str, Any], scale: float, **style: Any) -> None:
    """A curve with its interval as a shade."""
    x, mean = band["x"], scale * np.array(band["mean"])
    axis.plot(x, mean, **style)
    if band["low"] and band["low"][0] is not None:
        low, high = scale * np.array(band["low"]), scale * np.array(band["high"])
        axis.fill_between(x, low, high, color=style["color"], alpha=0.13, linewidth=0)


def short_number(value: float, _: Any = None) -> str:
    """`1.5M`, `20k` or `300`: for the ticks of an axis."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def variant_label(study: StudyInfo, variant: Variant) -> str:
    """A variant in legends."""
    name = study.arm(variant.arm).name
    return name if variant.value is None else f"{name}, {variant.value}"


def accuracy_unit(study: StudyInfo) -> str:
    """The label of an axis of accuracies."""
    return f"accuracy (%, {study.mode} decoding)"
