"""`benchmarks/pack_study.py` writes what docs/results keeps of a study, and nothing else."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image, ImageChops

from bacr_jax.errors import UserError
from bacr_study import archive
from files_world import full_disk
from study_world import finished, planned

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "pack_study.py"
IDS = ["ledger.grpo.1", "ledger.grpo.0", "ledger.dapo.0"]


@pytest.fixture(scope="module")
def pack():
    specification = importlib.util.spec_from_file_location("pack_study", SCRIPT)
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    return script.pack


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


def test_packing_keeps_cells_results_pictures_and_markdown_and_nothing_else(pack, study, tmp_path):
    out = tmp_path / "kept"
    files = pack(study, out, IDS)
    assert {path.relative_to(out).as_posix() for path in files} == {
        "cells.jsonl.xz",
        "results.json.xz",
        "figures/a.png",
        "tables/a.md",
    }
    first = {path: path.read_bytes() for path in files}
    assert pack(study, out, IDS) == files
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


def test_what_was_packed_stays_where_it_can_not_be_packed_again(pack, study, tmp_path, monkeypatch):
    out = tmp_path / "kept"
    kept = {path: path.read_bytes() for path in pack(study, out, IDS)}
    (study / "cells" / "ledger.grpo.0.json").write_text('{"id": "ledger.grpo.0"}')
    full_disk(monkeypatch)
    with pytest.raises(
        UserError, match=r"cells\.jsonl\.xz: the file can't be written \(No space left"
    ):
        pack(study, out, IDS)
    assert {path: path.read_bytes() for path in kept} == kept
    assert len([path for path in out.rglob("*") if path.is_file()]) == len(kept)


def test_results_of_other_cells_are_not_packed(pack, study, tmp_path):
    (study / "cells" / "ledger.grpo.2.json").write_text('{"id": "ledger.grpo.2"}')
    with pytest.raises(
        UserError, match="other cells than the 3 in .*; run the study with --report first"
    ):
        pack(study, tmp_path / "kept", [*IDS, "ledger.grpo.2"])
    assert not (tmp_path / "kept").exists()


def test_a_study_is_not_packed_into_itself(pack, study):
    for out in (study, study / "tables" / ".."):
        with pytest.raises(UserError, match="is the study's own folder; use another"):
            pack(study, out, IDS)
    assert not (study / archive.CELLS).exists()


def test_a_study_without_results_is_not_packed(pack, tmp_path):
    with pytest.raises(UserError, match="has no results yet; run the study first"):
        pack(tmp_path, tmp_path / "kept", IDS)
    assert not (tmp_path / "kept").exists()


def test_the_script_packs_a_study_by_its_file(tmp_path):
    study, (run, *_), folder = planned(tmp_path, "seeds=[0]", "arms=[grpo]")
    finished(study, run, run.variant)
    (folder / "results.json").write_text(json.dumps({"cells": {run.id: {}}}))
    command = [sys.executable, SCRIPT, "--config", tmp_path / "two.yaml"]
    command += ["--studies", folder.parent, "--out", tmp_path / "kept"]
    words = [*map(str, command), "seeds=[0]", "arms=[grpo]"]
    subprocess.run(words, check=True)
    assert [cell["id"] for cell in archive.archived_cells(tmp_path / "kept")] == [run.id]
    refused = subprocess.run([*words, "--size", "none"], capture_output=True, text=True)
    assert refused.returncode == 2 and refused.stderr.startswith("error: ")
