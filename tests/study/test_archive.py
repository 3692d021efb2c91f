"""What is kept of a study in a repository: the cells come back as they were."""

import json
import lzma
import subprocess
import sys

import pytest
from PIL import Image, ImageChops

from bacr_jax.errors import UserError
from bacr_study import archive
from files_world import full_disk

IDS = ["ledger.grpo.1", "ledger.grpo.0", "ledger.dapo.0"]


# Unpacks a folder when its input ends.
UNPACK = """
import pathlib, sys
from bacr_study import archive
print("ready", flush=True)
sys.stdin.read()
archive.unpack(pathlib.Path(sys.argv[1]))
"""


@pytest.fixture
def study(tmp_path):
    folder = tmp_path / "main-cpu"
    for part in ("cells", "figures", "tables"):
        (folder / part).mkdir(parents=True)
    # The last one is of another study.
    for arm, seed in (("grpo", 1), ("grpo", 0), ("rloo", 0)):
        cell = {"id": f"ledger.{arm}.{seed}", "seed": seed, "label": "é"}
        (folder / "cells" / f"{cell['id']}.json").write_text(json.dumps(cell))
    (folder / "results.json").write_text(json.dumps({"cells": dict.fromkeys(IDS[:2], {})}))
    Image.linear_gradient("L").convert("RGB").save(folder / "figures" / "a.png")
    for name in ("figures/a.pdf", "tables/a.md", "tables/a.tex", "tables/a.csv"):
        (folder / name).write_bytes(name.encode())
    return folder


def test_packing_keeps_cells_results_pictures_and_markdown_and_nothing_else(study, tmp_path):
    out = tmp_path / "kept"
    files = archive.pack(study, out, IDS)
    assert {path.relative_to(out).as_posix() for path in files} == {
        "cells.jsonl.xz",
        "results.json.xz",
        "figures/a.png",
        "tables/a.md",
    }
    first = {path: path.read_bytes() for path in files}
    assert archive.pack(study, out, IDS) == files
    assert {path: path.read_bytes() for path in files} == first
    with (
        Image.open(out / "figures" / "a.png") as small,
        Image.open(study / "figures" / "a.png") as picture,
    ):
        off = ImageChops.difference(small.convert("RGB"), picture)
    assert max(high for _, high in off.getextrema()) <= 4
    cells = archive.archived_cells(out)
    assert [cell["id"] for cell in cells] == ["ledger.grpo.0", "ledger.grpo.1"]
    assert json.loads(archive.read_compressed(out / "results.json.xz")) == {
        "cells": dict.fromkeys(IDS[:2], {})
    }


def test_what_was_packed_stays_where_it_can_not_be_packed_again(study, tmp_path, monkeypatch):
    out = tmp_path / "kept"
    kept = {path: path.read_bytes() for path in archive.pack(study, out, IDS)}
    (study / "cells" / "ledger.grpo.0.json").write_text('{"id": "ledger.grpo.0"}')
    full_disk(monkeypatch)
    with pytest.raises(UserError, match=r"cells\.jsonl\.xz: can't be written \(No space left"):
        archive.pack(study, out, IDS)
    assert {path: path.read_bytes() for path in kept} == kept
    assert len([path for path in out.rglob("*") if path.is_file()]) == len(kept)


def test_results_of_other_cells_are_not_packed(study, tmp_path):
    (study / "cells" / "ledger.grpo.2.json").write_text('{"id": "ledger.grpo.2"}')
    with pytest.raises(UserError, match="is not of the 3 cells that are there; run --report first"):
        archive.pack(study, tmp_path / "kept", [*IDS, "ledger.grpo.2"])
    assert not (tmp_path / "kept").exists()


def test_a_study_is_not_packed_into_itself(study):
    for out in (study, study / "tables" / ".."):
        with pytest.raises(UserError, match="is the study's own folder; write another"):
            archive.pack(study, out, IDS)
    assert not (study / archive.CELLS).exists()


def test_unpacking_makes_the_cells_that_are_not_there(study, tmp_path):
    out = tmp_path / "kept"
    archive.pack(study, out, IDS)
    (out / "cells").mkdir()
    (out / "cells" / "ledger.grpo.0.json").write_text("{}")
    archive.unpack(out)
    assert (out / "cells" / "ledger.grpo.0.json").read_text() == "{}"
    made = json.loads((out / "cells" / "ledger.grpo.1.json").read_text())
    assert made == json.loads((study / "cells" / "ledger.grpo.1.json").read_text())
    assert len(list((out / "cells").iterdir())) == 2
    archive.unpack(tmp_path)
    assert not (tmp_path / "cells").exists()


def test_processes_that_unpack_at_the_same_time_do_not_hinder_each_other(tmp_path):
    cells = [{"id": f"ledger.grpo.{seed}", "seed": seed} for seed in range(100)]
    lines = "".join(f"{json.dumps(cell)}\n" for cell in cells)
    (tmp_path / archive.CELLS).write_bytes(lzma.compress(lines.encode()))
    command = [sys.executable, "-c", UNPACK, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(4)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    # All are let go before any is waited for.
    for process in processes:
        process.stdin.close()
    assert [process.wait(60) for process in processes] == [0] * 4
    made = [json.loads(path.read_text()) for path in (tmp_path / "cells").iterdir()]
    assert sorted(made, key=lambda cell: cell["seed"]) == cells


def test_a_study_without_results_is_not_packed(tmp_path):
    with pytest.raises(UserError, match="has no results yet; run the study first"):
        archive.pack(tmp_path, tmp_path / "kept", IDS)
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    "text",
    [
        b"no archive",
        lzma.compress(b'{"id": "a.b.0"}')[:-12],
        lzma.compress(b"{"),
        lzma.compress(b"\xff"),
    ],
    ids=["no xz", "cut", "no JSON", "no text"],
)
def test_a_damaged_archive_is_one_line(tmp_path, text):
    (tmp_path / archive.CELLS).write_bytes(text)
    with pytest.raises(UserError, match=r"cells\.jsonl\.xz: can't be read .*; copy it again"):
        archive.unpack(tmp_path)


@pytest.mark.parametrize(
    "cell", ['{"id": "../x"}', '{"id": 3}', "[]", '{"id": ".x"}', '{"id": ""}']
)
def test_a_cell_names_no_file_elsewhere(tmp_path, cell):
    (tmp_path / archive.CELLS).write_bytes(lzma.compress(cell.encode()))
    with pytest.raises(UserError, match="holds a cell without an id"):
        archive.unpack(tmp_path)
    assert not (tmp_path / "cells").exists()
