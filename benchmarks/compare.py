"""Compares two records of a benchmark: the ratio of every measurement, its interval, a verdict.

    python benchmarks/compare.py OLD.json NEW.json [--tolerance 0.02] [--other-machine]

The ratio is the speed of NEW divided by the speed of OLD, so that more than 1 is better. Its 95 %
interval is a bootstrap over the rounds. A verdict is `better` or `worse` only if the whole interval
is on one side of 1 and the ratio differs from 1 by more than the tolerance. Counted values are
compared exactly. The ratios within a record are not compared, because the two measurements of each
ratio are compared.

Exit code: 0 if nothing is worse, 1 if a measurement is worse, 2 if the records cannot be compared:
another benchmark, other settings, or another machine without `--other-machine`.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import record

MACHINE = ("processor", "family", "model", "cores", "accelerators")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, metavar="OLD", help="a file that --record wrote")
    parser.add_argument("new", type=Path, metavar="NEW", help="a later file of the same benchmark")
    parser.add_argument("--tolerance", type=float, default=0.02, help="change that is ignored")
    parser.add_argument("--other-machine", action="store_true", help="allow different machines")
    return parser.parse_args()


def check_comparable(old: Mapping[str, Any], new: Mapping[str, Any], any_machine: bool) -> None:
    """Checks that two records are of the same measurement on the same machine.

    Raises:
      ValueError: they are not.
    """
    for name in ("benchmark", "settings"):
        if old[name] != new[name]:
            raise ValueError(
                f"{name}: found {old[name]} and {new[name]}; use two records with the same"
            )
    if set(old["measurements"]) != set(new["measurements"]):
        raise ValueError("measurements: the records have different ones; use records of one kind")
    if any_machine:
        return
    for name in MACHINE:
        if old["machine"][name] != new["machine"][name]:
            raise ValueError(
                f"machine: its {name} is {old['machine'][name]!r} and {new['machine'][name]!r}; "
                "write records of one machine, or --other-machine"
            )


def verdict(ratio: float, interval: tuple[float, float] | None, tolerance: float) -> str:
    """Returns a verdict on a ratio of speeds."""
    if interval is None:
        return f"fewer than {record.FEWEST_VALUES} values"
    low, high = interval
    if low > 1 and ratio > 1 + tolerance:
        return "better"
    if high < 1 and ratio < 1 - tolerance:
        return "worse"
    return "no difference shown"


def exact_verdict(ratio: float) -> str:
    """Returns a verdict on a ratio of counted values."""
    if ratio == 1:
        return "same"
    return "better" if ratio > 1 else "worse"


def compare(old: Mapping[str, Any], new: Mapping[str, Any], tolerance: float) -> tuple[str, str]:
    """Returns the text and the verdict on one measurement of two records."""
    over = old["values"] if old["better"] == "lower" else new["values"]
    under = new["values"] if old["better"] == "lower" else old["values"]
    if old["exact"]:
        ratio = over[0] / under[0]
        interval = None
        result = exact_verdict(ratio)
    else:
        ratio, interval = record.ratio_interval(over, under)
        result = verdict(ratio, interval, tolerance)
    limits = "" if interval is None else f"[{interval[0]:.3f}, {interval[1]:.3f}]"
    medians = f"{old['median']:10.4g} {new['median']:10.4g} {old['unit']:9}"
    return f"{medians} {ratio:7.3f} {limits:16} {result}", result


def main() -> int:
    options = parse()
    try:
        old = record.read(options.old)
        new = record.read(options.new)
        check_comparable(old, new, options.other_machine)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{old['benchmark']}: {old['commit']} against {new['commit']}")
    print(f"{'':40} {'old':>10} {'new':>10} {'unit':9} {'ratio':>7} {'95 % interval':16} verdict")
    verdicts = []
    for name, before in old["measurements"].items():
        text, result = compare(before, new["measurements"][name], options.tolerance)
        verdicts.append(result)
        print(f"{name:40} {text}")
    return 1 if "worse" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
