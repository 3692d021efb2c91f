"""Reads the compressed results of a study that is committed to a repository.

The folder of a committed study contains `cells.jsonl.xz` (one line of JSON per cell),
`results.json.xz`, figures and Markdown tables. `unpack` extracts the cells into separate files,
which `bacr study --report` needs to recreate everything else. `benchmarks/pack_study.py` creates
such folders.
"""

import json
import lzma
import re
from pathlib import Path
from typing import Any

from bacr_jax.errors import UserError
from bacr_jax.files import parse_json, read_file, write_atomically
from bacr_jax.runs.folder import LOCK, lock_when_free
from bacr_study.spec import cell_path

CELLS = "cells.jsonl.xz"
RESULTS = "results.json.xz"
# Cell ids consist of names from the study file and swept values, joined by dots.
_CELL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+.-]*")


def read_compressed(path: Path) -> str:
    """Reads and decompresses an .xz file of UTF-8 text.

    Raises:
      OSError: if the file cannot be read.
      ValueError: if the file is damaged, truncated or not UTF-8.
    """
    try:
        return lzma.decompress(read_file(path)).decode("utf-8")
    except lzma.LZMAError:
        raise ValueError("the compressed data is damaged or incomplete") from None


def archived_cells(folder: Path) -> list[Any]:
    """Reads the stored results (cells) of a committed study from `cells.jsonl.xz`, as parsed JSON.

    Raises:
      UserError: if the file cannot be read or contains invalid JSON.
    """
    path = folder / CELLS
    try:
        return [parse_json(line) for line in read_compressed(path).splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: the stored results of the study can't be read ({error}); restore the "
            "original file"
        ) from None


def unpack(folder: Path) -> None:
    """Extracts `cells.jsonl.xz`, the results of all runs of a study, into one file per run.

    Existing files are not overwritten. Does nothing if the folder has no `cells.jsonl.xz`. This
    function only checks the ids of the runs; `cells.read_cell` checks the contents.

    Raises:
      UserError: if the archive cannot be read, or if a cell has no valid id.
    """
    if not (folder / CELLS).exists():
        return
    # Several jobs of a job array may unpack the same folder at the same time.
    with lock_when_free(folder / LOCK):
        for cell in archived_cells(folder):
            cell_id = cell.get("id") if isinstance(cell, dict) else None
            if not isinstance(cell_id, str) or not _CELL_ID.fullmatch(cell_id):
                raise UserError(
                    f"{folder / CELLS}: a line does not contain the results of a run, because its "
                    "id is missing or invalid; restore the original file"
                )
            path = cell_path(folder, cell_id)
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, json.dumps(cell) + "\n")
