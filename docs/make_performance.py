"""`python docs/make_performance.py`: tables of docs/performance.md from recorded baselines.

Writes the text between two markers of the page from benchmarks/baselines/*.json, which the option
`--record` of a benchmark wrote. With `--check` nothing is written, and the exit code is 1 if the
page is not up to date.
"""

import sys
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "docs")]

import record  # noqa: E402 - neither folder is a package
from made_page import write_or_check  # noqa: E402

PAGE = Path(__file__).with_name("performance.md")
BASELINES = ROOT / "benchmarks" / "baselines"
COMMAND = "python docs/make_performance.py"
BEGIN = f"<!-- Made by `{COMMAND}` from benchmarks/baselines; do not edit. -->"
END = "<!-- End of the made part. -->"
COLUMNS = (
    "| benchmark | what | median | quartiles; of a ratio 95 % interval | values | commit, date |\n"
    "| --- | --- | ---: | --- | ---: | --- |"
)


def number(value: float) -> str:
    """Returns a number with three significant digits, and thousands with commas."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def machine_of(content: Mapping[str, Any]) -> str:
    """Returns the line that describes the machine of a record."""
    machine = content["machine"]
    parts = [f"{machine['processor']} (family {machine['family']}, model {machine['model']})"]
    parts.append(f"{machine['cores']} cores, {machine['memory_gib']} GiB")
    parts.extend(machine["accelerators"])
    if "driver" in machine:
        parts.append(f"driver {machine['driver']}")
    return ", ".join(parts)


def rows_of(content: Mapping[str, Any]) -> list[str]:
    """Returns the table rows of a record: its measurements, then its ratios."""
    commit = (content["commit"] or "unknown")[:8] + (" with changes" if content["changed"] else "")
    origin = f"{commit}, {content['date']}"
    name = f"`benchmarks/{content['benchmark']}.py`"
    rows = []
    for title, values in content["measurements"].items():
        spread = "counted"
        if not values["exact"]:
            spread = " to ".join(map(number, values["quartiles"]))
        median = f"{number(values['median'])} {values['unit']}"
        count = len(values["values"])
        rows.append(f"| {name} | {title} | {median} | {spread} | {count} | {origin} |")
    for title, ratio in content["ratios"].items():
        over = content["measurements"][ratio["over"]]["values"]
        under = content["measurements"][ratio["under"]]["values"]
        _, interval = record.ratio_interval(over, under)
        spread = "too few values" if interval is None else " to ".join(map(number, interval))
        what = f"{title}: {ratio['over']} / {ratio['under']}"
        rows.append(f"| {name} | {what} | {number(ratio['value'])} x | {spread} | | {origin} |")
    return rows


def tables() -> str:
    """Returns one table per machine, with the records of that machine in the order of files."""
    records = [record.read(path) for path in sorted(BASELINES.glob("*.json"))]
    if not records:
        return "No baseline is recorded yet."
    by_machine = defaultdict(list)
    for content in records:
        by_machine[machine_of(content)].append(content)
    parts = []
    for machine, contents in by_machine.items():
        versions: dict[str, str] = {}
        for content in contents:
            versions |= content["versions"]
        listed = ", ".join(f"{name} {version}" for name, version in versions.items())
        rows = [row for content in contents for row in rows_of(content)]
        lines = [f"**{machine}.**", textwrap.fill(f"{listed}.", 110), "", COLUMNS, *rows]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def page() -> str:
    """Returns the whole page, with new tables between the markers."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE}: a marker is missing; write the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def main(arguments: list[str]) -> int:
    """Writes the page, or checks it. Returns the exit code."""
    complaint = f"docs/performance.md differs from benchmarks/baselines; run {COMMAND}"
    return write_or_check(arguments, PAGE, page(), complaint)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
