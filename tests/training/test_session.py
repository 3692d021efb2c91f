"""Tests what happens around the steps of a run: exports, resuming, and errors of process 0."""

import errno
from types import SimpleNamespace

import pytest

from bacr_jax.config import io as config_io
from bacr_jax.errors import UserError
from bacr_jax.out_of_memory import OutOfMemory
from bacr_jax.parallel import processes
from bacr_jax.parallel.preemption import Preempted
from bacr_jax.runs.folder import RunFolder
from bacr_jax.runs.progress import Progress
from bacr_jax.training import initialize, session, warmup_folder
from bacr_jax.training.session import export_if_due, start


def test_folders_are_exported_when_they_are_due_and_at_the_end_but_once(tmp_path, monkeypatch):
    done = []
    trainer = SimpleNamespace(
        config=config_io.load(["quickstart"], ["export.every=2"]),
        folder=RunFolder(tmp_path, None),
        save=lambda state, step: done.append(f"save {step}"),
        checkpoints=SimpleNamespace(wait=lambda: done.append("wait")),
        progress=SimpleNamespace(print_line=lambda line: None),
        poll=lambda: done.append("poll"),
        # Others wait in it as long as it takes: no phase that has a usual length.
        on_phase=lambda phase, step: done.append(phase),
    )

    def export(run, out, *, step):
        done.append(step)
        out.mkdir(parents=True)

    monkeypatch.setattr("bacr_jax.export.from_run.export", export)
    # What a kill leaves of an export, and what somebody else put there.
    others = (".cache", ".2", ".2.old", ".x.abcd_123", ".2.abcd_123.bak", "mine")
    for name in (".2.abcd_123", ".40.00000000", *others):
        (tmp_path / "exports" / name).mkdir(parents=True)
    for step in (0, 1, 2, 2, 3):
        export_if_due(trainer, None, step)
    export_if_due(trainer, None, 3, last=True)
    of = lambda step: [f"save {step}", "wait", "poll", "export", step]
    assert done == [*of(2), *of(3)]
    assert {path.name for path in (tmp_path / "exports").iterdir()} == {"2", "3", *others}
    trainer.config = config_io.load(["quickstart"])
    export_if_due(trainer, None, 4, last=True)
    assert len(done) == 10


@pytest.mark.parametrize("step", [0, 20])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_run_that_goes_back_sets_its_later_exports_and_evaluations_aside(
    tmp_path, monkeypatch, step, is_first
):
    monkeypatch.setattr(processes, "is_first", lambda: is_first)
    folder, lines = RunFolder(tmp_path, None), []
    trainer = SimpleNamespace(
        start=lambda: (None, step),
        progress=SimpleNamespace(print_line=lines.append),
    )

    def listed():
        exports = {path.name for path in folder.exports.iterdir()}
        return exports | {path.name for path in folder.later_evaluations.iterdir()}

    assert start(trainer, folder) == (None, step)
    for path in (folder.exports / "40", folder.evaluation_of(40, "samples-4")):
        path.mkdir(parents=True)
    kept = {"20", "step-000020"}
    if step == 20:
        for path in (folder.exports / "20", folder.evaluation_of(20)):
            path.mkdir(parents=True)
    before = listed()
    for _ in range(2):
        assert start(trainer, folder) == (None, step)
    if not is_first:
        assert listed() == before and lines == []
        return
    assert listed() == {"before-resume"} | (kept if step == 20 else set())
    assert (folder.exports / "before-resume" / "40").is_dir()
    assert (folder.later_evaluations / "before-resume" / "step-000040-samples-4").is_dir()
    (line,) = lines
    assert line.startswith(f"exports and evaluations after step {step} belong to deleted checkpo")
    assert str(folder.exports / "before-resume") in line


def test_memory_that_runs_out_is_no_end_of_all_processes(tmp_path, monkeypatch):
    class Watched(Exception):
        pass

    # Exceptions that all processes raise together, and what else `train` turns into a line.
    def watched(expected):
        assert issubclass(Preempted, expected) and not issubclass(OutOfMemory, expected)
        raise Watched

    monkeypatch.setattr(session, "watched", watched)
    with pytest.raises(Watched):
        session.train(config_io.load(["quickstart"]), RunFolder(tmp_path, None))


def export(folder):
    trainer = SimpleNamespace(
        config=config_io.load(["quickstart"], ["export.every=1"]),
        folder=folder,
        save=lambda state, step: None,
        checkpoints=SimpleNamespace(wait=lambda: None),
        poll=lambda: None,
        on_phase=lambda phase, step: None,
    )
    export_if_due(trainer, None, 1)


def set_aside(folder):
    start(SimpleNamespace(start=lambda: (None, 1)), folder)


def restore(folder):
    initialize.restore_files(folder, {}, 1, Progress())


def lock(folder):
    with warmup_folder.locked(folder.path, None):
        pass


@pytest.mark.parametrize(
    ("work", "failing"),
    [
        (export, "bacr_jax.export.from_run.export"),
        (set_aside, "bacr_jax.training.session.evaluations_after"),
        (restore, "bacr_jax.runs.history.restore_files"),
        (lock, "bacr_jax.training.warmup_folder.lock_if_free"),
    ],
)
@pytest.mark.parametrize(
    "error",
    [
        UserError("a: is wrong; use b", "c: is wrong; use d"),
        OSError(errno.ENOSPC, "No space left on device"),
        PermissionError(errno.EACCES, "Permission denied", "/a/b"),
    ],
)
def test_an_error_of_process_0_is_raised_in_all_processes(
    tmp_path, monkeypatch, work, failing, error
):
    sent, raised = [], []

    def fail(*_, **options):
        raise error

    def text_from_first(text):
        if processes.is_first():
            sent.append(text)
            return text
        return sent.pop(0)

    monkeypatch.setattr(failing, fail)
    monkeypatch.setattr(processes, "text_from_first", text_from_first)
    for is_first in (True, False):
        monkeypatch.setattr(processes, "is_first", lambda now=is_first: now)
        with pytest.raises(type(error)) as caught:
            work(RunFolder(tmp_path, None))
        raised.append(caught.value)
    assert raised[0] is error and sent == []
    first, other = map(vars_of, raised)
    assert first == other


def vars_of(error):
    """Returns what the message of an error is made of."""
    if isinstance(error, UserError):
        return error.lines
    return error.errno, error.strerror, error.filename
