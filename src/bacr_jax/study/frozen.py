"""A policy as it was at a checkpoint of a run, ready to answer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bacr_jax.config import Config
from bacr_jax.data import ledger
from bacr_jax.data.environment import Environment, Questions, build_environment
from bacr_jax.data.prompts import format_for
from bacr_jax.data.tokenizers import load_tokenizer
from bacr_jax.errors import UserError
from bacr_jax.learner import policy as policies
from bacr_jax.methods import load_method
from bacr_jax.runs.folder import RunPaths
from bacr_jax.runs.open import read_config, read_params

Params = dict[str, Any]


@dataclass(frozen=True)
class Frozen:
    """A policy as it was at a checkpoint, and all that it needs to answer.

    Attributes:
      config: of its run.
      step: of the checkpoint.
      policy: compiled forms.
      params: theta.
      head: the value head as it was; None: the method has none.
      environment: questions, rules, grader.
    """

    config: Config
    step: int
    policy: policies.Policy
    params: Params
    head: Params | None
    environment: Environment

    @property
    def pool_questions(self) -> Questions:
        """Held-out questions."""
        return next(iter(self.environment.eval.values()))


def open_frozen(folder: Path, step: int, environment: Environment | None = None) -> Frozen:
    """Reads a checkpoint of a run.

    Args:
      folder: of the run.
      step: of the checkpoint.
      environment: of the same run, if it is there already.
    """
    config = read_config(folder)
    method = load_method(config)
    if environment is None:
        if config.data.train == "ledger":
            tokenizer: Any = ledger.ledger_tokenizer()
        else:
            where = config.model.tokenizer or config.model.path
            tokenizer = load_tokenizer(where, where="model.tokenizer")
        rows = policies.vocabulary_rows(config, len(tokenizer))
        environment = build_environment(config, tokenizer, rows, style=format_for(config))
    policy = policies.make_policy(config, method, environment.vocab_size)
    to_device = lambda tree: jax.tree.map(jnp.asarray, tree)
    params = to_device(read_params(folder, step))
    head = to_device(_read_head(folder, step)) if method.uses_value else None
    return Frozen(config, step, policy, params, head, environment)


def _read_head(folder: Path, step: int) -> Params:
    """Parameters of a checkpoint's value head, on the host."""
    import orbax.checkpoint as ocp

    state = RunPaths(folder.absolute()).checkpoints / str(step) / "state"
    reader = ocp.PyTreeCheckpointer()
    try:
        saved = reader.metadata(state).item_metadata.tree["train"]["head"]
        wanted = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), saved)
        item = {"train": {"head": wanted}}
        on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
        restore = ocp.args.PyTreeRestore(item=item, restore_args=on_host, partial_restore=True)
        return dict(reader.restore(state, args=restore)["train"]["head"])
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        raise UserError(
            f"{state}: holds no value head ({str(error).splitlines()[0]}); write a run of a method "
            "with a value head"
        ) from None
