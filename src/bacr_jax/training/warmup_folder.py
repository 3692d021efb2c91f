"""The folder of a warm-up: which one it is, who makes it, and its weights once it is finished.

Several runs may share it: the first makes the warm-up, others wait, and all begin from its weights.
"""

import contextlib
import dataclasses
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from bacr_jax import documents
from bacr_jax.config import Config, derived
from bacr_jax.config import io as config_io
from bacr_jax.documents import write_atomically
from bacr_jax.errors import UserError
from bacr_jax.parallel import processes
from bacr_jax.runs.checkpoint import Checkpoints
from bacr_jax.runs.folder import (
    LOCK,
    RunPaths,
    WarmupPaths,
    check_writable,
    lock_if_free,
    steps_in,
    usable,
)
from bacr_jax.types import Params, Poll


def told_budgets(config: Config) -> Int[np.ndarray, "n"] | None:
    """The budgets that the warm-up's prompts tell in words; None: none.

    All that training and evaluation will tell, so that no number is new to the policy then.
    """
    if not config.conditioning.in_words:
        return None
    budget = config.budget
    trained: Any = range(budget.min, budget.max + 1)
    if budget.prior == "choices":
        trained = derived.drawn(config)
    return np.array(sorted({*trained, budget.max, *config.eval.budgets}))


def warmup_fingerprint(config: Config) -> str:
    """Returns what identifies the warm-up of a config: a hash of all settings that change it."""
    config = derived.warmup_config(config)
    if config.data.train == "ledger":
        of_ledger = ("variant", "max_operand", "train_size")
        task = tuple(f"data.ledger.{name}" for name in of_ledger)
    else:
        names = ("train", "dir", "prompt_format", "max_prompt_tokens", "question_column")
        later = ("trace_column", "system_prompt", "template_variables")
        task = (*(f"data.{name}" for name in (*names, *later)), "eval.holdout")
        # Named where they are set, so that all other warm-ups keep their names.
        since = [f"data.{name}" for name in ("answer_column", "answers", "closing_text")]
        since += ["conditioning.words"] if config.conditioning.in_words else []
        found, usual = config_io.flatten(config), config_io.flatten(Config())
        task += tuple(name for name in since if found[name] != usual[name])
    settings = config_io.fingerprint(
        dataclasses.replace(config, warmup=dataclasses.replace(config.warmup, dir=None)),
        *("seed", "model", *task, "warmup"),
    )
    told = told_budgets(config)
    if told is None:
        return settings
    return f"{settings}-{hashlib.sha256(json.dumps(told.tolist()).encode()).hexdigest()[:12]}"


@contextlib.contextmanager
def alone(folder: Path, poll: Poll) -> Iterator[None]:
    """Holds a warm-up's folder, by process 0; waits while another run is making it."""
    first, told = processes.is_first(), False
    while True:
        lock = lock_if_free(folder / LOCK) if first else None
        if processes.largest(lock is not None):
            break
        if first and not told:
            print(f"waiting for the run that makes the warm-up in {folder}", file=sys.stderr)
            told = True
        if poll:
            poll()
        time.sleep(1)
    try:
        yield
    finally:
        if lock is not None:
            lock.close()


def check_warmup(config: Config, run: RunPaths) -> None:
    """Refuses a `warmup.dir` with another warm-up, or unwritable; a begun run needs none."""
    if config.warmup.steps and config.warmup.dir and not steps_in(run.checkpoints):
        paths = WarmupPaths(Path(config.warmup.dir))
        with usable(f"warmup.dir={paths.path}"):
            if paths.identity.exists():
                _check_identity(config, paths)
            else:
                check_writable(paths.path)


def _check_identity(config: Config, paths: WarmupPaths) -> None:
    """Refuses a finished warm-up of other settings, or without weights."""
    path, where = paths.identity, f"{'warmup.dir=' if config.warmup.dir else ''}{paths.path}"
    try:
        identity = documents.read_object(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: is damaged ({error}); remove the folder of the warm-up") from None
    if identity.get("fingerprint") != warmup_fingerprint(config):
        raise UserError(
            f"{where}: holds a warm-up with other settings (seed, model, data, warmup "
            "or the budgets told in words differ); write another warmup.dir"
        )
    if not steps_in(paths.weights):
        raise UserError(f"{where}: has lost its weights; remove the folder of the warm-up")


def read_warmup(config: Config, paths: WarmupPaths, like: Params) -> Params:
    """The finished weights in a folder, shaped and placed like `like`."""
    _check_identity(config, paths)
    checkpoints = Checkpoints(paths.weights, keep=1)
    _, params, _ = checkpoints.restore(like)
    checkpoints.close()
    return params


def keep_warmup(
    config: Config, paths: WarmupPaths, step: int, params: Params, measured: dict[str, float]
) -> None:
    """Saves the finished weights, then what says whose they are; drops the unfinished ones."""
    record = {"steps": step, **measured}
    if processes.is_first():
        # Without the file that says whose they are, weights may be another warm-up's.
        shutil.rmtree(paths.weights, ignore_errors=True)
    processes.largest(0)  # Waits for process 0.
    checkpoints = Checkpoints(paths.weights, keep=1)
    checkpoints.save(step, params, record)
    checkpoints.close()
    if processes.is_first():
        identity = {"fingerprint": warmup_fingerprint(config), **record}
        write_atomically(paths.identity, json.dumps(identity) + "\n")
        shutil.rmtree(paths.unfinished)
