"""The folder of a warm-up: its fingerprint, its lock, and its weights when it is finished.

Several runs may share a folder. The first run trains the warm-up while the other runs wait. All of
them then start from its weights.
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

from bacr_jax import files
from bacr_jax.config import Config, resolve
from bacr_jax.config import io as config_io
from bacr_jax.errors import UserError
from bacr_jax.files import write_atomically
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

# Config keys that identify the questions of a warm-up on the ledger task.
_LEDGER_KEYS = (
    "data.ledger.variant",
    "data.ledger.max_operand",
    "data.ledger.train_size",
)
# Config keys that identify the questions of any other warm-up.
_DATA_KEYS = (
    "data.train",
    "data.dir",
    "data.prompt_format",
    "data.max_prompt_tokens",
    "data.question_column",
    "data.trace_column",
    "data.system_prompt",
    "data.template_variables",
    "eval.holdout",
)
# Config keys that are only part of the fingerprint if they differ from their defaults. They were
# added later, and existing fingerprints must stay valid.
_NEWER_DATA_KEYS = ("data.answer_column", "data.answers", "data.closing_text")


def warmup_prompt_budgets(config: Config) -> Int[np.ndarray, "n"] | None:
    """Returns the budgets to write into the prompts of the warm-up.

    The result contains all budgets of training and evaluation, so that the policy sees every number
    during the warm-up. None if prompts do not contain the budget.
    """
    if not config.conditioning.in_prompt:
        return None
    budget = config.budget
    training_budgets: Any = range(budget.min, budget.max + 1)
    if budget.prior == "choices":
        training_budgets = resolve.drawn(config)
    return np.array(sorted({*training_budgets, budget.max, *config.eval.budgets}))


def warmup_fingerprint(config: Config) -> str:
    """Returns a hash of all settings that affect the result of a config's warm-up."""
    config = resolve.warmup_config(config)
    without_folder = dataclasses.replace(
        config, warmup=dataclasses.replace(config.warmup, dir=None)
    )
    settings = config_io.fingerprint(without_folder, "seed", "model", *_task_keys(config), "warmup")
    budgets = warmup_prompt_budgets(config)
    if budgets is None:
        return settings
    digest = hashlib.sha256(json.dumps(budgets.tolist()).encode()).hexdigest()
    return f"{settings}-{digest[:12]}"


def _task_keys(config: Config) -> tuple[str, ...]:
    """Returns the config keys that identify the questions of a warm-up."""
    if config.data.train == "ledger":
        return _LEDGER_KEYS
    newer_keys = list(_NEWER_DATA_KEYS)
    if config.conditioning.in_prompt:
        newer_keys.append("conditioning.prompt_text")
    values = config_io.flatten(config)
    defaults = config_io.flatten(Config())
    changed_keys = [key for key in newer_keys if values[key] != defaults[key]]
    return (*_DATA_KEYS, *changed_keys)


@contextlib.contextmanager
def locked(folder: Path, poll: Poll) -> Iterator[None]:
    """Context manager that holds the lock of a warm-up's folder.

    Process 0 acquires the lock. All processes wait while another run holds it.
    """
    is_first = processes.is_first()
    has_reported = False
    while True:
        lock = lock_if_free(folder / LOCK) if is_first else None
        if processes.largest(lock is not None):
            break
        if is_first and not has_reported:
            print(f"waiting for the run that makes the warm-up in {folder}", file=sys.stderr)
            has_reported = True
        if poll:
            poll()
        time.sleep(1)
    try:
        yield
    finally:
        if lock is not None:
            lock.close()


def check_warmup(config: Config, run: RunPaths) -> None:
    """Checks that `warmup.dir` is writable or already contains the warm-up of the config.

    Nothing is checked if the run has checkpoints, because it then no longer needs the warm-up.

    Raises:
      UserError: the folder contains a different warm-up, is damaged, or is not writable.
    """
    if not config.warmup.steps or not config.warmup.dir or steps_in(run.checkpoints):
        return
    paths = WarmupPaths(Path(config.warmup.dir))
    with usable(f"warmup.dir={paths.path}"):
        if paths.identity.exists():
            _check_identity(config, paths)
        else:
            check_writable(paths.path)


def _check_identity(config: Config, paths: WarmupPaths) -> None:
    """Raises UserError if a finished warm-up has different settings or its weights are missing."""
    path = paths.identity
    location = f"warmup.dir={paths.path}" if config.warmup.dir else str(paths.path)
    try:
        identity = files.read_object(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); remove the folder of the warm-up") from None
    if identity.get("fingerprint") != warmup_fingerprint(config):
        raise UserError(
            f"{location} contains a warm-up with other settings (seed, model, data, warmup or the "
            "budgets in the prompts differ); set another warmup.dir"
        )
    if not steps_in(paths.weights):
        raise UserError(f"{location} has no weights any more; remove the folder of the warm-up")


def read_warmup(config: Config, paths: WarmupPaths, like: Params) -> Params:
    """Reads the weights of a finished warm-up.

    Args:
      like: parameters with the shapes and shardings of the result.

    Raises:
      UserError: the warm-up has different settings, is damaged, or its weights are missing.
    """
    _check_identity(config, paths)
    checkpoints = Checkpoints(paths.weights, keep=1)
    _, params, _ = checkpoints.restore(like)
    checkpoints.close()
    return params


def save_warmup(
    config: Config, paths: WarmupPaths, step: int, params: Params, accuracies: dict[str, float]
) -> None:
    """Saves the weights of a finished warm-up, then the file that contains its fingerprint.

    Checkpoints of the unfinished warm-up are deleted afterwards.
    """
    record = {"steps": step, **accuracies}
    if processes.is_first():
        # Delete old weights first, because weights without a fingerprint may belong to another
        # warm-up.
        shutil.rmtree(paths.weights, ignore_errors=True)
    processes.largest(0)  # Wait for process 0.
    checkpoints = Checkpoints(paths.weights, keep=1)
    checkpoints.save(step, params, record)
    checkpoints.close()
    if processes.is_first():
        identity = {"fingerprint": warmup_fingerprint(config), **record}
        write_atomically(paths.identity, json.dumps(identity) + "\n")
        shutil.rmtree(paths.unfinished)
