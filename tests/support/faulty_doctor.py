"""Checks with known outcomes, and faults of a machine, for tests of `bacr doctor`.

Functions that take a subject are checks. Functions without an argument patch this process so that
one of the doctor's checks must report a problem.
"""

import dataclasses
import functools
import os
import signal
import sys
import time
from pathlib import Path

from bacr_doctor.records import Record


def well(subject):
    """Returns a passing record with the id of its process."""
    return Record("ok", str(os.getpid()))


def breaks(subject):
    """Returns a failing record with the id of its process."""
    return Record("broken", str(os.getpid()))


def hangs(subject):
    time.sleep(600)


def leaves_files(subject):
    """Kills its process while its temporary folder has a file."""
    with subject.temporary_folder() as folder:
        (folder / "large").write_bytes(bytes(1000))
        os.kill(os.getpid(), signal.SIGKILL)


def dies(subject):
    print("what it said last", file=sys.stderr, flush=True)
    os.abort()


def has_a_gpu(subject):
    return Record("ok", "", values={"platform": "gpu"})


def needs_xla(subject):
    """Aborts the process unless the config selects the attention kernel xla."""
    if subject.config.rollout.attention != "xla":
        os.abort()
    return Record("ok", "")


def wrong_kernel():
    """Makes cached attention ignore two keys."""
    from bacr_jax.model import attention

    right = attention.cached_attention
    # Mask out keys 3 and 4.
    attention.cached_attention = lambda q, k, v, mask, **how: right(
        q, k, v, mask.at[..., 3:5].set(False), **how
    )


def nan_update():
    """Makes the loss of an update NaN."""
    import jax
    import jax.numpy as jnp

    from bacr_jax.learner import train_step

    right = train_step.objective

    def broken(*given, **how):
        loss, metrics, scores = right(*given, **how)
        factor = jnp.where(jax.lax.stop_gradient(loss) > -1e9, jnp.nan, 1.0)
        return loss * factor, metrics, scores

    train_step.objective = broken


def no_rename():
    """Makes renaming files fail, as on some network file systems."""

    def refuse(source, target):
        raise OSError(95, "Operation not supported")

    os.replace = refuse


def dead_grader():
    """Makes grading workers fail to start, because their script does not exist."""
    from bacr_grading import pool

    right = pool.Program.__init__

    def init(self, **given):
        right(self, **{"script": Path("/nowhere/worker.py"), **given})

    pool.Program.__init__ = init


def slow_device():
    """Makes the doctor compare the measured rates with an H100's data sheet."""
    from bacr_doctor import rates
    from bacr_plan.devices import find

    rates.data_sheet = lambda subject: find("h100")


def with_faults(check, *faults):
    """Returns a copy of a check that puts faults into its process before it runs."""
    return dataclasses.replace(check, function=functools.partial(_under, check.function, faults))


@functools.cache
def _put_in(fault):
    """Calls a fault once per process."""
    fault()


def _under(does, faults, subject, *arguments):
    """Runs the function of a check with faults."""
    for fault in faults:
        _put_in(fault)
    return does(subject, *arguments)


def crashing(check):
    """Returns a copy of a check that aborts its process."""
    return dataclasses.replace(check, function=dies)
