"""Committed cells of a study are unpacked as they were, and damaged archives are refused."""

import json
import lzma
import subprocess
import sys

import pytest

from bacr_jax.errors import UserError
from bacr_study import archive

# Unpacks a folder when its input ends.
UNPACK = """
import pathlib, sys
from bacr_study import archive
print("ready", flush=True)
sys.stdin.read()
archive.unpack(pathlib.Path(sys.argv[1]))
"""


def archive_of(folder, cells):
    lines = "".join(f"{json.dumps(cell)}\n" for cell in cells)
    (folder / archive.CELLS).write_bytes(lzma.compress(lines.encode()))


def test_unpacking_writes_the_missing_cells_and_keeps_those_that_exist(tmp_path):
    cells = [{"id": f"ledger.grpo.{seed}", "seed": seed, "label": "é"} for seed in range(2)]
    archive_of(tmp_path, cells)
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "ledger.grpo.0.json").write_text("{}")
    archive.unpack(tmp_path)
    assert (tmp_path / "cells" / "ledger.grpo.0.json").read_text() == "{}"
    assert json.loads((tmp_path / "cells" / "ledger.grpo.1.json").read_text()) == cells[1]
    assert len(list((tmp_path / "cells").iterdir())) == 2


def test_a_folder_without_an_archive_stays_as_it_is(tmp_path):
    archive.unpack(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_processes_that_unpack_at_the_same_time_do_not_hinder_each_other(tmp_path):
    cells = [{"id": f"ledger.grpo.{seed}", "seed": seed} for seed in range(100)]
    archive_of(tmp_path, cells)
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
    with pytest.raises(
        UserError, match=r"cells\.jsonl\.xz: the stored results .*; restore the original file"
    ):
        archive.unpack(tmp_path)


@pytest.mark.parametrize(
    "cell", ['{"id": "../x"}', '{"id": 3}', "[]", '{"id": ".x"}', '{"id": ""}']
)
def test_a_cell_names_no_file_elsewhere(tmp_path, cell):
    (tmp_path / archive.CELLS).write_bytes(lzma.compress(cell.encode()))
    with pytest.raises(
        UserError, match="a line does not contain the results of a run, because its id"
    ):
        archive.unpack(tmp_path)
    assert not (tmp_path / "cells").exists()
