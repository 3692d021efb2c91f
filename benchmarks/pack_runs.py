"""Packs the raw data of runs into one compressed file, for docs/results.

    python benchmarks/pack_runs.py runs/quickstart-seeds/*/ --out docs/results/NAME
        --about commit=74ba7c52 "machine=two cores of ..." "versions=jax ..." "other work=..."

The output file is cells.jsonl.xz. It contains a JSON line for each run with the keys id (the name
of the folder), about (the values of --about), config (the text of config.yaml), summary, eval and
metrics. With --rollouts it also contains the traces that the run has stored. Paths in a config
become relative to the parent folder of the run. The output is reproducible byte for byte. The
script prints the path and the size of the file as one JSON object.
"""

import argparse
import json
import lzma
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[Any]:
    """Reads a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def record_of(folder: Path, about: dict[str, str], *, rollouts: bool) -> dict[str, Any]:
    """Returns the record of a run folder for the packed file."""
    config = (folder / "config.yaml").read_text()
    # Removes the header comments of config.yaml, which only concern the original run folder.
    settings = "".join(line for line in config.splitlines(True) if not line.startswith("#"))
    record = {
        "id": folder.name,
        "about": about,
        "config": settings.replace(f"{folder.parent}/", ""),
        "summary": json.loads((folder / "summary.json").read_text()),
        "eval": read_lines(folder / "eval.jsonl"),
        "metrics": read_lines(folder / "metrics.jsonl"),
    }
    if rollouts:
        paths = sorted((folder / "rollouts").glob("*.jsonl"))
        record["rollouts"] = [row for path in paths for row in read_lines(path)]
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--about", nargs="+", default=[], metavar="NAME=TEXT")
    parser.add_argument("--rollouts", action="store_true")
    arguments = parser.parse_args()
    about = dict(fact.split("=", 1) for fact in arguments.about)
    runs = sorted(arguments.runs)
    records = [record_of(folder, about, rollouts=arguments.rollouts) for folder in runs]
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "cells.jsonl.xz"
    path.write_bytes(lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(json.dumps({"file": str(path), "runs": len(records), "bytes": path.stat().st_size}))


if __name__ == "__main__":
    main()
