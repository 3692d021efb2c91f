"""A study's folder as it is kept in a repository: one file of cells, and what pages show.

`pack` writes it, `unpack` makes cells of it again; everything else is made from the cells by
`--report`. Packing twice gives the same bytes.
"""

import io
import json
import lzma
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bacr_jax.documents import parse_json, read_file, read_object, write_atomically
from bacr_jax.errors import UserError
from bacr_jax.runs.folder import LOCK, lock_when_free
from bacr_study.spec import cell_path

CELLS, RESULTS = "cells.jsonl.xz", "results.json.xz"
# Cell ids: names of a study's file and swept values, joined by dots.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+.-]*")


def read_compressed(path: Path) -> str:
    """The text of an .xz file; OSError or ValueError: it can't be read, or is damaged."""
    try:
        return lzma.decompress(read_file(path)).decode("utf-8")
    except lzma.LZMAError:
        raise ValueError("it ends in the middle, or is damaged") from None


def _compressed(path: Path, text: str) -> None:
    # A third smaller than gzip's, and with neither time nor name: the same cells are the same file.
    content = lzma.compress(text.encode("utf-8"), preset=9 | lzma.PRESET_EXTREME)
    write_atomically(path, content)


def pack(folder: Path, out: Path, ids: Sequence[str]) -> list[Path]:
    """Writes cells, results, figures (PNG) and tables (Markdown) of a study for keeping.

    Cells other than those of `ids`, such as another study's, are left out.
    """
    cells = [path for id_ in sorted(ids) if (path := cell_path(folder, id_)).exists()]
    if not cells or not (folder / "results.json").exists():
        raise UserError(f"--pack: {folder} has no results yet; run the study first")
    if out.resolve() == folder.resolve():
        raise UserError(f"--pack {out}: is the study's own folder; write another")
    records, results = [read_object(path) for path in cells], read_object(folder / "results.json")
    if {record["id"] for record in records} != set(results.get("cells", ())):
        raise UserError(
            f"--pack: {folder}/results.json is not of the {len(cells)} cells that are there; run "
            "--report first"
        )
    out.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    _compressed(out / CELLS, "".join(f"{line}\n" for line in lines))
    _compressed(out / RESULTS, json.dumps(results, ensure_ascii=False) + "\n")
    kept = [out / CELLS, out / RESULTS]
    shown = {"figures": ("*.png", _small_picture), "tables": ("*.md", read_file)}
    for part, (pattern, content) in shown.items():
        (out / part).mkdir(exist_ok=True)
        for path in sorted((folder / part).glob(pattern)):
            write_atomically(out / part / path.name, content(path))
            kept.append(out / part / path.name)
    return kept


def _small_picture(path: Path) -> bytes:
    """A picture's file in 128 colours, a third of the size; lines and tints look the same."""
    from PIL import Image

    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(colors=128, dither=Image.Dither.NONE)
    content = io.BytesIO()
    small.save(content, format="PNG", optimize=True)
    return content.getvalue()


def archived_cells(folder: Path) -> list[Any]:
    """The cells that `pack` put into a folder."""
    path = folder / CELLS
    try:
        return [parse_json(line) for line in read_compressed(path).splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: can't be read ({error}); copy it again") from None


def unpack(folder: Path) -> None:
    """Makes a file of every archived cell that has none; who reads it checks it."""
    if not (folder / CELLS).exists():
        return
    # Jobs of an array do so at the same time.
    with lock_when_free(folder / LOCK):
        for cell in archived_cells(folder):
            name = cell.get("id") if isinstance(cell, dict) else None
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise UserError(f"{folder / CELLS}: holds a cell without an id; copy it again")
            path = cell_path(folder, name)
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, json.dumps(cell) + "\n")
