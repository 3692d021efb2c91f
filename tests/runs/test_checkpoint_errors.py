"""Tests that only a damaged checkpoint is called damaged, and that other causes are named."""

import errno
import os

import jax
import jax.numpy as jnp
import pytest

from bacr_jax.errors import UserError
from bacr_jax.out_of_memory import OutOfMemory, phase_memory
from bacr_jax.runs import checkpoint
from bacr_jax.runs.checkpoint import Checkpoints, check_policy, read_meta, read_part

DEVICE_MEMORY = RuntimeError(
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."
)
STALE = OSError(errno.ESTALE, os.strerror(errno.ESTALE), "x")
DENIED = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "x")
MANY_FILES = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
# The form in which the array store raises errors of the operating system.
IN_TEXT = ValueError(
    'UNKNOWN: Error reading "a/0.0": Failed to open: "/x": Host is down '
    f"[os_error_code='{errno.EHOSTDOWN}']"
)


def state(value):
    policy = {"w": jnp.full((2, 3), value, jnp.float32)}
    return {"train": {"policy": policy}, "key": jax.random.key(0), "tokens": 7}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with checkpoints 1 and 2."""
    folder = tmp_path_factory.mktemp("checkpoints")
    checkpoints = Checkpoints(folder, keep=2)
    for step in (1, 2):
        checkpoints.save(step, state(step), {"step": step})
    checkpoints.close()
    return folder


def wrapped(error):
    """The error as Orbax raises it: as the cause of an exception of any class."""
    outer = Exception("Encountered error while reading array index")
    outer.__cause__ = error
    return outer


def raising(error):
    def fail(*args, **kwargs):
        raise error

    return fail


def readers(folder):
    """Calls of all functions that read the checkpoint of step 2."""
    step = folder / "2" / "state"
    return {
        "meta": lambda: Checkpoints(folder, keep=2).meta(2),
        "restore": lambda: Checkpoints(folder, keep=2).restore(state(0), 2),
        "read_meta": lambda: read_meta(step),
        "read_part": lambda: read_part(step, "train", "policy"),
    }


@pytest.mark.parametrize("wrap", [lambda error: error, wrapped], ids=["raised", "wrapped"])
@pytest.mark.parametrize("error", [DEVICE_MEMORY, MemoryError()], ids=["device", "host"])
def test_out_of_memory_is_reported_as_such(saved, monkeypatch, error, wrap):
    monkeypatch.setattr(checkpoint, "_record", raising(wrap(error)))
    for name, read in readers(saved).items():
        # Training is at its start, which has a phase of its own.
        at_start = name in ("meta", "restore")
        with pytest.raises(OutOfMemory) as raised, phase_memory("start"):
            read()
        phases = ("start",) if at_start else ("checkpoint reading", "start")
        assert raised.value.phases == phases
        assert raised.value.on_host == isinstance(error, MemoryError)


@pytest.mark.parametrize("wrap", [lambda error: error, wrapped], ids=["raised", "wrapped"])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (STALE, "Stale file handle"),
        (DENIED, "Permission denied"),
        (MANY_FILES, "Too many open files"),
        (IN_TEXT, "Host is down"),
    ],
)
def test_an_error_of_the_system_is_no_damage(saved, monkeypatch, error, reason, wrap):
    monkeypatch.setattr(checkpoint, "_record", raising(wrap(error)))
    for read in readers(saved).values():
        with pytest.raises(UserError) as refused:
            read()
        assert str(refused.value) == (
            f"{saved / '2'} can't be read ({reason}), but no damage was found; remove this "
            "cause, and run the same command again"
        )


@pytest.mark.parametrize("name", ["state/manifest.ocdbt", "state/_METADATA", "meta/metadata"])
def test_a_file_that_can_not_be_opened_is_no_damage(tmp_path, name):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(2, state(2), {"step": 2})
    checkpoints.close()
    path = tmp_path / "2" / name
    content = path.read_bytes()
    path.unlink()
    # Root may read every file, but a link to itself can't be opened.
    path.symlink_to(path)
    reads = [*readers(tmp_path).values(), lambda: check_policy(tmp_path / "2" / "state")]
    refusals = []
    for read in reads:
        try:
            read()
        except UserError as refusal:
            refusals.append(str(refusal))
    assert refusals
    for refusal in refusals:
        assert "can't be read (Too many levels of symbolic links), but no damage" in refusal
    # A missing file is damage.
    path.unlink()
    with pytest.raises(UserError, match="damaged"):
        for read in reads:
            read()
    path.write_bytes(content)
    check_policy(tmp_path / "2" / "state")


def other_dtype():
    other = state(0)
    other["train"]["policy"]["w"] = jnp.zeros((2, 3), jnp.bfloat16)
    return other


def other_shape():
    other = state(0)
    other["train"]["policy"]["w"] = jnp.zeros((5, 3))
    return other


@pytest.mark.parametrize(
    ("like", "says"),
    [
        (
            other_dtype(),
            r"w is float32\[2, 3\] in the checkpoint, but bfloat16\[2, 3\] in this run",
        ),
        (other_shape(), r"w is float32\[2, 3\] in the checkpoint, but float32\[5, 3\] in this run"),
        (
            state(0) | {"method_state": {"mean": jnp.zeros(())}},
            r"method_state/mean is missing in the checkpoint, but float32\[\] in this run",
        ),
    ],
    ids=["dtype", "shape", "state"],
)
def test_arrays_of_another_type_are_no_damage(saved, like, says):
    with pytest.raises(UserError, match=says) as refused:
        Checkpoints(saved, keep=2).restore(like, 2)
    line = str(refused.value)
    assert line.startswith(f"{saved / '2'} belongs to a run with another model, method or dtype")
    assert "damaged" not in line and "delete" not in line


@pytest.mark.parametrize("error", [MemoryError(), STALE], ids=["memory", "stale"])
def test_a_save_that_could_not_be_verified_need_not_be_deleted(tmp_path, monkeypatch, error):
    monkeypatch.setattr(checkpoint, "read_whole", raising(error))
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state(1), {"step": 1})
    with pytest.raises(UserError, match="was saved, but could not be verified") as refused:
        checkpoints.confirm(wait=True)
    checkpoints.close()
    assert "delete" not in str(refused.value)
    monkeypatch.undo()
    assert Checkpoints(tmp_path, keep=1).restore(state(0))[0] == 1
