"""Files beside checkpoints: kept, read once, and refused where another hand was at them."""

import hashlib

import pytest

from bacr_jax.errors import UserError
from bacr_jax.files import append_line, read_lines, write_lines
from bacr_jax.runs.folder import RunPaths
from bacr_jax.runs.history import History, restore_files


def test_the_history_is_of_all_lines_and_reads_each_once(tmp_path):
    paths = RunPaths(tmp_path)
    history = History(paths)
    assert history.now([])["metrics"] == {"records": 0, "sha256": hashlib.sha256().hexdigest()}
    for step in (1, 2):
        append_line(paths.metrics, {"step": step})
    kept = history.now([])
    digest = hashlib.sha256(b'{"step": 1}\n{"step": 2}\n').hexdigest()
    assert kept["metrics"] == {"records": 2, "sha256": digest}
    assert restore_files(paths, kept, 2) == []
    # What another hand has changed since is not read again, so it is no part of what was kept.
    paths.metrics.write_text('{"step": 0}\n{"step": 2}\n')
    append_line(paths.metrics, {"step": 3})
    kept = history.now([])
    with pytest.raises(UserError, match=r"step .* was saved: the contents of its records differ"):
        restore_files(paths, kept, 3)


def test_evaluations_are_those_of_the_checkpoint_and_one_of_its_step_that_came_after(tmp_path):
    paths = RunPaths(tmp_path)
    before, during, after, later = (
        {"when": when, "step": step}
        for when, step in (("before", 0), ("during", 2), ("after", 2), ("during", 4))
    )
    kept = History(paths).now([before, during])
    # The first was changed, and a step that has to be repeated was evaluated too.
    write_lines(paths.evaluations, [{**before, "sets": {}}, during, after, later])
    (said,) = restore_files(paths, kept, 2)
    assert "eval.jsonl was changed since the run wrote it" in said
    assert read_lines(paths.evaluations) == [before, during, after]
    assert restore_files(paths, kept, 2) == []
