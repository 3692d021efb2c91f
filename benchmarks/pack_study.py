"""Packs a finished study into a folder that is small enough to commit, for docs/results.

    python benchmarks/pack_study.py --config configs/studies/main.yaml --out docs/results/main-cpu

Run the study, or its --report, first. The script writes cells.jsonl.xz (a JSON line for each cell),
results.json.xz, figures as PNG files with 128 colours, and tables in Markdown. Cells of other
studies and arms are omitted. The output is reproducible byte for byte. The script prints the paths
of the written files.
"""

import argparse
import io
import json
import lzma
import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from bacr_jax.errors import UserError
from bacr_jax.files import read_file, read_object, write_atomically
from bacr_study.archive import CELLS, RESULTS
from bacr_study.plan import folder_of
from bacr_study.spec import cell_path
from bacr_study.study_file import read_study


def write_compressed(path: Path, text: str) -> None:
    """Writes text as an .xz file.

    The file is a third smaller than with gzip. The format stores neither a timestamp nor a file
    name, so equal cells are packed into equal files.
    """
    content = lzma.compress(text.encode("utf-8"), preset=9 | lzma.PRESET_EXTREME)
    write_atomically(path, content)


def small_picture(path: Path) -> bytes:
    """Returns a PNG file with 128 colours, which looks the same at a third of the size."""
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(colors=128, dither=Image.Dither.NONE)
    content = io.BytesIO()
    small.save(content, format="PNG", optimize=True)
    return content.getvalue()


def pack(folder: Path, out: Path, ids: Sequence[str]) -> list[Path]:
    """Writes the cells, results, figures and tables of a study to another folder.

    Args:
      folder: folder of the study, such as studies/main-cpu.
      out: folder to write to.
      ids: ids of the study's cells. Other cells in the folder are omitted.

    Returns:
      Paths of the written files.

    Raises:
      UserError: if the study has no results, if its results do not match its cells, or if `out` is
        the study's folder.
    """
    cells = [cell_path(folder, cell_id) for cell_id in sorted(ids)]
    cells = [path for path in cells if path.exists()]
    results_path = folder / "results.json"
    if not cells or not results_path.exists():
        raise UserError(f"{folder}: has no results yet; run the study first")
    if out.resolve() == folder.resolve():
        raise UserError(f"--out {out}: is the study's own folder; use another folder")
    records = [read_object(path) for path in cells]
    results = read_object(results_path)
    if {record["id"] for record in records} != set(results.get("cells", ())):
        raise UserError(
            f"{results_path}: contains other cells than the {len(cells)} in {folder / 'cells'}; "
            "run the study with --report first"
        )

    out.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    write_compressed(out / CELLS, "".join(f"{line}\n" for line in lines))
    write_compressed(out / RESULTS, json.dumps(results, ensure_ascii=False) + "\n")
    written = [out / CELLS, out / RESULTS]
    for part, pattern, content_of in (
        ("figures", "*.png", small_picture),
        ("tables", "*.md", read_file),
    ):
        (out / part).mkdir(exist_ok=True)
        for path in sorted((folder / part).glob(pattern)):
            write_atomically(out / part / path.name, content_of(path))
            written.append(out / part / path.name)
    return written


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, type=Path, help="the study's file")
    parser.add_argument("--size", help="one of the study's sizes; default: the first")
    parser.add_argument("--studies", type=Path, default=Path("studies"), help="folder of studies")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as the study had them")
    arguments = parser.parse_intermixed_args()
    try:
        study = read_study(arguments.config, size=arguments.size, overrides=arguments.overrides)
        folder = folder_of(study, arguments.studies)
        print(*pack(folder, arguments.out, list(study.cell_ids())), sep="\n")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
