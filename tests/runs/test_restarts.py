"""Jobs that Slurm restarts: those that get further go on, others are given up."""

import errno
import os
import time

import pytest

from bacr_jax.errors import UserError
from bacr_jax.runs import restarts
from bacr_jax.runs.folder import RunPaths, is_begun
from bacr_jax.runs.restarts import MOST_RESTARTS, give_up_reason
from bacr_jax.training.warmup_folder import locked


def restarted(tmp_path, count, job="17"):
    """Why a job is given up at its COUNT-th restart; "": it is not."""
    environment = {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": str(count)}
    return give_up_reason(RunPaths(tmp_path), tmp_path / "warmup", environment)


def test_a_job_that_saves_nothing_is_given_up_after_some_restarts(tmp_path):
    assert [restarted(tmp_path, count) for count in range(1, MOST_RESTARTS + 1)] == [
        ""
    ] * MOST_RESTARTS
    reason = restarted(tmp_path, MOST_RESTARTS + 1)
    assert reason.startswith(
        f"training: stopped, because Slurm restarted job 17 {MOST_RESTARTS + 1}"
    )
    assert "submit the job again" in reason
    # Submitted again it is another job.
    assert restarted(tmp_path, 1, job="18") == ""


def test_the_processes_of_a_start_count_it_once(tmp_path):
    """Any of them can be missing, so each of them counts, before the run folder exists."""
    run = tmp_path / "new" / "run"
    for count in range(1, MOST_RESTARTS + 2):
        reasons = {restarted(run, count) for _ in range(1 + count % 3)}
        assert len(reasons) == 1
        assert any(reasons) == (count > MOST_RESTARTS)
    assert not is_begun(run, "output.dir=x", "config.yaml", "run")


def test_only_the_first_process_of_a_start_writes_the_count(tmp_path, monkeypatch):
    written = []
    write = restarts.write_json
    monkeypatch.setattr(
        restarts, "write_json", lambda *values: (written.append(values), write(*values))
    )
    for count in (1, 2, 3):
        for _ in range(3):
            assert restarted(tmp_path, count) == ""
        assert len(written) == count


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_failed_read_does_not_change_the_count(tmp_path, monkeypatch, number):
    """NFS reports ESTALE to a process that reads the file while another host replaces it."""
    read = restarts.read_json
    failures = 0

    def read_sometimes(path):
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError(number, os.strerror(number), str(path))
        return read(path)

    monkeypatch.setattr(restarts, "read_json", read_sometimes)
    monkeypatch.setattr(restarts.time, "sleep", lambda seconds: None)
    for count in range(1, MOST_RESTARTS + 1):
        failures = 1
        assert restarted(tmp_path, count) == ""
    content = RunPaths(tmp_path).restarts.read_bytes()
    failures = 1000
    with pytest.raises(UserError) as error:
        restarted(tmp_path, MOST_RESTARTS + 1)
    assert f"can't be read ({os.strerror(number)}); make" in str(error.value)
    assert RunPaths(tmp_path).restarts.read_bytes() == content
    failures = 1
    assert restarted(tmp_path, MOST_RESTARTS + 1)
    failures = 1
    assert restarted(tmp_path, MOST_RESTARTS + 1)


def test_a_job_that_is_given_up_leaves_a_file_for_the_launch_script(tmp_path):
    marker = tmp_path / "slurm-17.given-up"
    environment = {"SLURM_JOB_ID": "17", "BACR_GIVE_UP_FILE": str(marker)}
    paths = RunPaths(tmp_path / "run")
    for count in range(MOST_RESTARTS + 2):
        environment["SLURM_RESTART_COUNT"] = str(count)
        reason = give_up_reason(paths, tmp_path / "warmup", environment)
        assert marker.exists() == bool(reason) == (count > MOST_RESTARTS)


def test_locks_are_not_saves(tmp_path):
    """Each start locks the folder of the warm-up, after its restarts were counted."""
    reasons = []
    for count in range(1, MOST_RESTARTS + 2):
        reasons.append(restarted(tmp_path, count))
        with locked(tmp_path / "warmup", None):
            pass
    assert reasons[-1]


@pytest.mark.parametrize("unfinished", ["checkpoints/1.orbax-checkpoint-tmp", "warmup/progress/a"])
def test_a_checkpoint_that_is_not_finished_is_no_save(tmp_path, unfinished):
    """A job may be killed in every save, for example because memory runs out."""
    reasons = []
    for count in range(1, MOST_RESTARTS + 2):
        folder = tmp_path / unfinished
        (folder / "state").mkdir(parents=True, exist_ok=True)
        later = time.time() + count
        for path in (folder / "state", folder):
            os.utime(path, (later, later))
        reasons.append(restarted(tmp_path, count))
    assert reasons[-1] and not any(reasons[:-1])


@pytest.mark.parametrize(
    "saved", ["checkpoints/20", "warmup/progress/a1/100", "warmup/weights/300"]
)
def test_a_job_that_saves_something_goes_on_for_ever(tmp_path, saved):
    for count in range(1, 4 * MOST_RESTARTS):
        assert restarted(tmp_path, count) == ""
        if count % MOST_RESTARTS == 0:
            (tmp_path / saved).mkdir(parents=True, exist_ok=True)
            later = time.time() + count
            os.utime(tmp_path / saved, (later, later))


@pytest.mark.parametrize(
    "environment",
    [{}, {"SLURM_RESTART_COUNT": "9"}, {"SLURM_JOB_ID": "17"},
     {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "0"}],
)  # fmt: skip
def test_other_starts_are_not_counted(tmp_path, environment):
    for _ in range(2 * MOST_RESTARTS):
        assert give_up_reason(RunPaths(tmp_path), tmp_path / "warmup", environment) == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"restarts": "many"}', '{"job": null}'])
def test_a_count_that_can_not_be_read_begins_anew(tmp_path, text):
    RunPaths(tmp_path).restarts.write_text(text)
    assert restarted(tmp_path, 1) == ""
    assert '"restarts": 1' in RunPaths(tmp_path).restarts.read_text()
