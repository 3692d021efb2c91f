"""Assigns a colour and a marker to each method, so that a method looks the same in every chart.

Reports, comparisons and studies call `styles_of`. The recommended method has a star.
"""

from collections.abc import Sequence
from dataclasses import replace

from bacr_jax.report.charts import COLOURS, MARKERS, Series

# The recommended method, and the one before it, which the committed studies have instead.
RECOMMENDED = ("bacr-bounded", "bacr-robust")
STAR = "*"
# Colour of the policy with which others are compared.
GREY = "s0"
# Style of the policy with which others are compared, such as the policy before training.
REFERENCE = Series("", [], [], GREY, line="--", marker="s")
# Colour of each method, by the name of its preset. Methods of one family have the same colour and
# different markers.
_COLOURS = {
    # Answers of the untrained policy.
    "cot": GREY,
    "sc": GREY,
    "sc-matched": GREY,
    "untrained": GREY,
    "bacr-robust": "s1",
    "bacr-bounded": "s1",
    "bacr": "s8",
    "bacr-paper": "s8",
    "bacr-full": "s8",
    "bacr-weighted": "s8",
    "grpo": "s2",
    "dr-grpo": "s2",
    "rloo": "s2",
    "gfpo": "s2",
    "anytime": "s3",
    "anytime-one": "s3",
    "anytime-simplified": "s3",
    "dapo": "s4",
    "dler": "s4",
    "hapo": "s5",
    "laser": "s5",
    "shorter-better": "s5",
    "l1-exact": "s7",
    "l1-max": "s7",
    "s-grpo": "s7",
    "selfbudgeter": "s6",
    "effort": "s6",
    "elastic": "s6",
}
# Line styles. The next style is used after all markers of a colour have been used.
_LINES = ("-", "--", ":")
# Colours of curves that belong to none of these methods, in the order of use.
_OTHERS = [name for name in COLOURS if name != GREY]


def starred(names: Sequence[str]) -> str | None:
    """Returns the first of `RECOMMENDED` among names of methods, or None if there is none."""
    return next((name for name in RECOMMENDED if name in names), None)


def styles_of(names: Sequence[str]) -> list[Series]:
    """Returns the colour and line of the curve of each name, as a `Series` without points.

    All curves differ. Methods in `_COLOURS` have a fixed colour. A repeated name, or a name that is
    not a method, such as a run's label, gets a colour that no method in `names` has.

    Args:
      names: names of presets, or other names, in the order of the legend.
    """
    methods = [name.replace("_", "-") for name in names]
    taken = {_COLOURS[name] for name in methods if name in _COLOURS}
    free = [name for name in _OTHERS if name not in taken] or _OTHERS
    recommended = starred(methods)
    used_names = set[str]()
    used_styles = set[tuple[str | float, str, str]]()
    num_others = 0
    styles = []
    for index, name in enumerate(methods):
        if name in _COLOURS and name not in used_names:
            colour = _COLOURS[name]
        else:
            colour = free[num_others % len(free)]
            num_others += 1
        is_recommended = name == recommended and name not in used_names
        used_names.add(name)
        style = Series("", [], [], colour)
        style = (
            replace(style, marker=STAR) if is_recommended else _unused(style, index, used_styles)
        )
        used_styles.add((style.colour, style.marker, style.line))
        styles.append(style)
    return styles


def _unused(style: Series, index: int, used: set[tuple[str | float, str, str]]) -> Series:
    """Adds a marker and a line style to a style, so that it differs from the styles in `used`."""
    for line in _LINES:
        for shift in range(len(MARKERS)):
            marker = MARKERS[(index + shift) % len(MARKERS)]
            if (style.colour, marker, line) not in used:
                return replace(style, marker=marker, line=line, hollow=line != "-")
    return replace(style, marker=MARKERS[index % len(MARKERS)])
