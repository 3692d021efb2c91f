"""Checks of the doctor that go wrong, and faults to put under those of its page."""

import dataclasses
import functools
import os
import sys
import time
from pathlib import Path

from bacr_doctor.records import Record


def well(subject):
    return Record("ok", str(os.getpid()))


def breaks(subject):
    return Record("broken", str(os.getpid()))


def hangs(subject):
    time.sleep(600)


def dies(subject):
    print("what it said last", file=sys.stderr, flush=True)
    os.abort()


def has_a_gpu(subject):
    return Record("ok", "", values={"platform": "gpu"})


def needs_xla(subject):
    if subject.config.rollout.attention != "xla":
        os.abort()
    return Record("ok", "")


def wrong_kernel():
    from bacr_jax.model import attention

    right = attention.cached_attention
    # Two keys are forgotten.
    attention.cached_attention = lambda q, k, v, mask, **how: right(
        q, k, v, mask.at[..., 3:5].set(False), **how
    )


def nan_update():
    import jax
    import jax.numpy as jnp

    from bacr_jax.learner import train_step

    right = train_step.objective

    def broken(*given, **how):
        loss, metrics = right(*given, **how)
        return loss * jnp.where(jax.lax.stop_gradient(loss) > -1e9, jnp.nan, 1.0), metrics

    train_step.objective = broken


def no_rename():
    def refuse(source, target):
        raise OSError(95, "Operation not supported")

    os.replace = refuse


def dead_grader():
    from bacr_grading import pool

    right = pool.Program.__init__

    def init(self, **given):
        right(self, **{"script": Path("/nowhere/worker.py"), **given})

    pool.Program.__init__ = init


def slow_device():
    from bacr_doctor import rates
    from bacr_plan.devices import find

    rates.data_sheet = lambda subject: find("h100")


def with_faults(check, *faults):
    """The same check on a machine with faults."""
    return dataclasses.replace(check, function=functools.partial(_under, check.function, faults))


@functools.cache
def _put_in(fault):
    fault()


def _under(does, faults, subject, *arguments):
    for fault in faults:
        _put_in(fault)
    return does(subject, *arguments)


def crashing(check):
    """The same check, which ends its process."""
    return dataclasses.replace(check, function=dies)
