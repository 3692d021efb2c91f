"""Manages the folder of a warm-up, with its fingerprint, its lock and its finished weights.

Several runs may share a folder. The first run trains the warm-up while the other runs wait. All of
them then start from its weights.
"""

import contextlib
import dataclasses
import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bacr_jax import files
from bacr_jax.config import Config, WarmupConfig
from bacr_jax.config import io as config_io
from bacr_jax.config.cli import print_message
from bacr_jax.config.settings import WarmupSettings, resolve
from bacr_jax.errors import UserError
from bacr_jax.files import write_atomically
from bacr_jax.model.sizes import Qwen2Config
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
from bacr_jax.runs.provenance import check_same_model, model_record
from bacr_jax.types import Params, Poll

# Key of the digest of the supervised texts, in the file of a finished warm-up and in the metadata
# of an unfinished one. Warm-ups on the ledger have no digest.
_TEXTS = "texts"
# Config keys that identify the questions of a warm-up on the ledger task.
_LEDGER_KEYS = (
    "data.ledger.variant",
    "data.ledger.max_operand",
    "data.ledger.train_size",
)
# Config keys that identify the questions and answers of any other warm-up.
_DATA_KEYS = (
    "data.train",
    "data.dir",
    "data.prompt_format",
    "data.max_prompt_tokens",
    "data.question_column",
    "data.trace_column",
    "data.answer_column",
    "data.answers",
    "data.closing_text",
    "data.system_prompt",
    "data.template_variables",
    "eval.holdout",
)


def warmup_fingerprint(config: Config) -> str:
    """Returns a hash of the settings that determine each step of a config's warm-up.

    It does not contain the settings of the accuracy measurement that decides the number of
    additional rounds (`data.eval`, `eval.budgets`, `rollout.answer_tokens` and others), because
    existing warm-ups would then no longer be found. Runs that share a warm-up use the number of
    rounds of the first run.
    """
    settings = resolve(config).warmup
    # The hash contains the seed of the warm-up in place of the run's seed.
    warmup = dataclasses.replace(config.warmup, seed=None, dir=None)
    config = dataclasses.replace(config, seed=settings.seed, warmup=warmup)
    task_keys = _task_keys(config_io.flatten(config), in_prompt=config.conditioning.in_prompt)
    digest = config_io.fingerprint(config, "seed", "model", *task_keys, "warmup")
    if settings.prompt_budgets is None:
        return digest
    budgets = hashlib.sha256(json.dumps(settings.prompt_budgets).encode()).hexdigest()
    return f"{digest}-{budgets[:12]}"


def _task_keys(values: Mapping[str, Any], *, in_prompt: bool) -> tuple[str, ...]:
    """Returns the config keys that identify the questions of a warm-up.

    Args:
      values: values of a config, by dotted key.
      in_prompt: True if prompts contain the budget.
    """
    if values["data.train"] == "ledger":
        return _LEDGER_KEYS
    return (*_DATA_KEYS, "conditioning.prompt_text") if in_prompt else _DATA_KEYS


@contextlib.contextmanager
def locked(folder: Path, poll: Poll) -> Iterator[None]:
    """Context manager that holds the lock of a warm-up's folder.

    Process 0 acquires the lock. All processes wait while another run holds it.

    Raises:
      UserError: the folder can't be locked. Raised in all processes.
    """
    has_reported = False
    while True:
        lock = processes.on_first(lambda: lock_if_free(folder / LOCK))
        if processes.largest(lock is not None):
            break
        if processes.is_first() and not has_reported:
            print_message(f"waiting for another run that trains the warm-up in {folder}")
            has_reported = True
        if poll:
            poll()
        time.sleep(1)
    try:
        yield
    finally:
        if lock is not None:
            lock.close()


def check_warmup(
    warmup: WarmupConfig, fingerprint: str, run: RunPaths, texts_digest: str | None = None
) -> None:
    """Checks that `warmup.dir` is writable, or contains a warm-up with the same settings.

    Nothing is checked if the run has checkpoints, because it then no longer needs the warm-up.

    Args:
      warmup: section `warmup` of the config.
      fingerprint: `warmup_fingerprint` of the config.
      run: files of the run.
      texts_digest: `SftBatches.texts_digest`, or None if it is unknown.

    Raises:
      UserError: the folder contains a different warm-up, is damaged, or is not writable.
    """
    if not warmup.steps or not warmup.dir or steps_in(run.checkpoints):
        return
    paths = WarmupPaths(Path(warmup.dir))
    with usable(f"warmup.dir={paths.path}"):
        if paths.identity.exists():
            _check_identity(warmup, fingerprint, paths, texts_digest)
        else:
            check_writable(paths.path)


def _check_identity(
    warmup: WarmupConfig, fingerprint: str, paths: WarmupPaths, texts_digest: str | None = None
) -> None:
    """Raises UserError if a finished warm-up is a different one or its weights are missing."""
    path = paths.identity
    location = _location(warmup, paths)
    try:
        identity = files.read_object(path)
    except OSError as error:
        raise UserError(
            f"{path}, which describes the warm-up, can't be read ({error.strerror}); make the file "
            "readable, and run the same command again"
        ) from None
    except ValueError as error:
        raise UserError(
            f"{path}, which describes the warm-up, is damaged ({error}); delete the folder of the "
            "warm-up, which is then repeated"
        ) from None
    if identity.get("fingerprint") != fingerprint:
        raise UserError(
            f"{location} contains a warm-up with other settings (seed, model, data, warmup or the "
            "budgets in the prompts); set another warmup.dir"
        )
    check_texts(warmup, identity, texts_digest, paths)
    if not steps_in(paths.weights):
        raise UserError(
            f"{location}: the weights of this warm-up are missing; delete the folder, and the "
            "warm-up is repeated"
        )


def _location(warmup: WarmupConfig, paths: WarmupPaths) -> str:
    """Returns the folder of a warm-up for error messages, with its key if the config has it."""
    return f"warmup.dir={paths.path}" if warmup.dir else str(paths.path)


def check_texts(
    warmup: WarmupConfig, record: Mapping[str, Any], texts_digest: str | None, paths: WarmupPaths
) -> None:
    """Checks that a warm-up was trained on the traces and answers that the training set has now.

    Args:
      warmup: section `warmup` of the config.
      record: the record of the warm-up, with a digest of its texts.
      texts_digest: `SftBatches.texts_digest`, or None to check nothing.
      paths: files of the warm-up.

    Raises:
      UserError: the texts are different.
    """
    if texts_digest is None or record.get(_TEXTS) == texts_digest:
        return
    raise UserError(
        f"{_location(warmup, paths)} contains a warm-up with other traces or answers than "
        "data.train has now; restore them, or set another warmup.dir"
    )


def check_base(
    warmup: WarmupConfig, record: Mapping[str, Any], model: Mapping[str, Any], paths: WarmupPaths
) -> None:
    """Checks that the config.json of the base model is the one that a warm-up was trained with.

    Args:
      warmup: section `warmup` of the config.
      record: the record of the warm-up, which may contain `base_record`.
      model: `base_record` of the model now.
      paths: files of the warm-up.

    Raises:
      UserError: the config.json differs.
    """
    check_same_model(record, model, "model.path", f"the warm-up {_location(warmup, paths)}")


def base_record(settings: WarmupSettings, model: Qwen2Config) -> dict[str, Any]:
    """Returns the entry of the base model in a warm-up's record. Empty without a model folder."""
    return {} if settings.model_path is None else model_record(model)


def texts_record(texts_digest: str | None) -> dict[str, str]:
    """Returns the entries of a warm-up's record that identify its supervised texts."""
    return {} if texts_digest is None else {_TEXTS: texts_digest}


def read_warmup(
    warmup: WarmupConfig,
    fingerprint: str,
    paths: WarmupPaths,
    like: Params,
    texts_digest: str | None = None,
    model: Mapping[str, Any] | None = None,
) -> Params:
    """Reads the weights of a finished warm-up.

    Args:
      warmup: section `warmup` of the config.
      fingerprint: `warmup_fingerprint` of the config.
      paths: files of the warm-up.
      like: parameters with the shapes and shardings of the result.
      texts_digest: `SftBatches.texts_digest`, or None for a warm-up on the ledger.
      model: `base_record` of the model, or None to check nothing.

    Raises:
      UserError: the warm-up has different settings, texts or another base model, is damaged, or its
        weights are missing.
    """
    _check_identity(warmup, fingerprint, paths, texts_digest)
    check_base(warmup, files.read_object(paths.identity), model or {}, paths)
    checkpoints = Checkpoints(paths.weights, keep=1)
    _, params, _ = checkpoints.restore(like)
    checkpoints.close()
    return params


def save_warmup(
    fingerprint: str,
    paths: WarmupPaths,
    step: int,
    params: Params,
    accuracies: dict[str, float],
    texts_digest: str | None = None,
    model: Mapping[str, Any] | None = None,
) -> None:
    """Saves the weights of a finished warm-up, then the file that contains its fingerprint.

    Checkpoints of the unfinished warm-up are deleted afterwards.

    Args:
      texts_digest: `SftBatches.texts_digest`, or None for a warm-up on the ledger.
      model: `base_record` of the model, or None to record nothing.
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
        inputs = {**texts_record(texts_digest), **(model or {})}
        identity = {"fingerprint": fingerprint, **inputs, **record}
        write_atomically(paths.identity, json.dumps(identity) + "\n")
        shutil.rmtree(paths.unfinished)
