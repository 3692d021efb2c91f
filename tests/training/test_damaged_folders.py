"""Tests that a run with missing or truncated files has the same result, or reports the problem."""

import json
import shutil

import pytest

from bacr_jax.parallel.preemption import EXIT_CODE
from whole_runs import WHOLE_RUN, StopAt, assert_same_run

# With a KL penalty, so that a resumed run still needs the weights of the warm-up.
CONFIG = """
method: grpo
loss: {kl_coef: 0.04, kl_kind: k3}
output: {tensorboard: false, report: false}
"""
# Files that a run can create again, and files without which it is refused.
REMADE = ("checkpoints", "warmup", "best.json", "eval.jsonl")
RECORDS = ("config.yaml", "metrics.jsonl")


def train(command, *overrides):
    from bacr_jax.train import main

    return main([*command, *overrides])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A finished run, and one that was stopped in its last evaluation but one."""
    place = tmp_path_factory.mktemp("runs")
    (place / "small.yaml").write_text(WHOLE_RUN + CONFIG)
    command = lambda name: ["--config", str(place / "small.yaml"), f"output.dir={place / name}"]
    assert train(command("finished")) == 0
    shutil.copytree(place / "finished" / "warmup", place / "stopped_warmup")
    with pytest.MonkeyPatch.context() as patch:
        StopAt(patch, place / "stopped" / "metrics.jsonl", 3, 1)
        assert train(command("stopped")) == EXIT_CODE
    return place


def best_of(folder):
    return json.loads((folder / "best.json").read_text())["step"]


def damages(folder):
    """Names, and what to do to a copy of the folder: each file and each step of checkpoints.

    Of the files inside a checkpoint, the newest one's and the warm-up's, and of its arrays' the
    largest: tests/runs/test_checkpoint.py harms every one of them.
    """
    cut = lambda at: at.write_bytes(at.read_bytes()[: at.stat().st_size // 2])
    newest = max((folder / "checkpoints").iterdir(), key=lambda path: int(path.name))
    weights = next((folder / "warmup" / "weights").iterdir())
    for path in (*(folder / "checkpoints").iterdir(), folder / "checkpoints", weights):
        yield path.relative_to(folder), "removed", shutil.rmtree
    yield "warmup", "removed", lambda at: shutil.rmtree(at)
    files = [path for path in folder.iterdir() if path.is_file() and path.name != ".lock"]
    files.append(folder / "warmup" / "warmup.json")
    for inside in (newest, weights):
        arrays = [path for path in inside.rglob("d/*") if path.is_file()]
        files += [max(arrays, key=lambda path: path.stat().st_size)]
        files += [inside / "meta" / "metadata", inside / "state" / "_METADATA"]
    for path in sorted(files):
        yield path.relative_to(folder), "removed", lambda at: at.unlink()
        yield path.relative_to(folder), "cut", cut


@pytest.mark.slow
@pytest.mark.parametrize("which", ["finished", "stopped"])
def test_each_file_removed_or_cut_leads_to_the_same_end_or_to_one_line(
    runs, which, tmp_path, capsys
):
    whole, seen = runs / "finished", {"same": [], "refused": []}
    seconds = json.loads((whole / "summary.json").read_text())["wall_seconds"]
    for name, how, harm in damages(runs / which):
        folder = tmp_path / "run"
        shutil.copytree(runs / which, folder)
        harm(folder / name)
        capsys.readouterr()
        code = train(["--config", str(runs / "small.yaml"), f"output.dir={folder}"])
        said = capsys.readouterr()
        if code == 0:
            # If the best checkpoint was removed, one of the other checkpoints is selected.
            also = () if str(name) == f"checkpoints/{best_of(whole)}" else ("best.json",)
            assert_same_run(folder, whole, 4, also=also)
            assert (folder / "checkpoints" / str(best_of(folder))).is_dir()
            summary = json.loads((folder / "summary.json").read_text())
            remade = ("summary.json", "eval.jsonl", "config.yaml")
            if which == "finished" and str(name) not in remade and "checkpoints" not in str(name):
                assert summary["wall_seconds"] == seconds
            seen["same"].append(f"{name} {how}")
        else:
            assert code == 2 and said.err.count("\n") == 1, said.err
            assert said.err.startswith("error: ")
            seen["refused"].append(f"{name} {how}: {said.err.strip()[-150:]}")
        shutil.rmtree(folder)
    for outcome, names in seen.items():
        print(outcome, len(names), *names, sep="\n  ")
    refused = {line.split(": ")[0] for line in seen["refused"]}
    assert {f"{name} removed" for name in REMADE} <= set(seen["same"])
    assert {f"{name} {how}" for name in RECORDS for how in ("removed", "cut")} <= refused


@pytest.mark.slow
def test_a_reference_policy_that_is_another_one_is_refused(runs, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(runs / "stopped", folder)
    other = ["--config", str(runs / "small.yaml"), f"output.dir={tmp_path / 'other'}", "seed=1"]
    assert train(other, "train.steps=0", "eval.size=4") == 0
    # Replace the warm-up by another one with the same fingerprint.
    identity = (folder / "warmup" / "warmup.json").read_text()
    shutil.rmtree(folder / "warmup")
    shutil.copytree(tmp_path / "other" / "warmup", folder / "warmup")
    (folder / "warmup" / "warmup.json").write_text(identity)
    before = (folder / "metrics.jsonl").read_bytes()
    assert train(["--config", str(runs / "small.yaml"), f"output.dir={folder}"]) == 2
    error = capsys.readouterr().err
    assert "these weights were changed since the start of the run" in error
    assert (folder / "metrics.jsonl").read_bytes() == before
