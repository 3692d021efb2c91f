"""Keeps the raw data of runs in one compressed file, for docs/results.

    python benchmarks/pack_runs.py runs/quickstart-seeds/*/ --out docs/results/quickstart-cpu
        --about commit=74ba7c52 "machine=two cores of ..." "versions=jax ..." "other work=..."

The file is cells.jsonl.xz, with a JSON line for each run: id (the folder's name), about (the given
facts), config (the text of config.yaml), summary, eval and metrics; with --rollouts also the traces
that the run kept. Paths in a config become relative to the folder above the run. Packing twice
gives the same bytes. Prints the file and its size as one JSON object.
"""

import argparse
import json
import lzma
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[Any]:
    """Reads a file with a JSON object on every line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def record_of(folder: Path, about: dict[str, str], *, rollouts: bool) -> dict[str, Any]:
    """Collects what is kept of a run folder."""
    config = (folder / "config.yaml").read_text()
    # Written by this machine: its header is a digest, and its paths mean nothing elsewhere.
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
