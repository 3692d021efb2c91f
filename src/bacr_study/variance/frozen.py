"""A policy as it was at a checkpoint of a run, ready to answer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bacr_jax.config import Config
from bacr_jax.methods import load_method
from bacr_jax.prompts.environment import Environment, Questions, build_environment
from bacr_jax.prompts.formats import format_for
from bacr_jax.runs import setup
from bacr_jax.runs.checkpoint import read_part
from bacr_jax.runs.folder import RunPaths
from bacr_jax.runs.open import read_config, read_params
from bacr_jax.training.start import tokenizer_of

Params = dict[str, Any]


@dataclass(frozen=True)
class Frozen:
    """A policy as it was at a checkpoint, and all that it needs to answer.

    Attributes:
      head: the value head as it was; None: the method has none.
    """

    config: Config
    step: int
    policy: setup.Policy
    params: Params
    head: Params | None
    environment: Environment

    @property
    def pool_questions(self) -> Questions:
        """Held-out questions."""
        return next(iter(self.environment.eval.values()))


def open_frozen(folder: Path, step: int, environment: Environment | None = None) -> Frozen:
    """Reads a checkpoint of a run; its environment only if it is not given."""
    config = read_config(folder)
    method = load_method(config)
    if environment is None:
        tokenizer, rows = tokenizer_of(config)
        environment = build_environment(config, tokenizer, rows, style=format_for(config))
    policy = setup.make_policy(config, method, environment.vocab_size)
    to_device = lambda tree: jax.tree.map(jnp.asarray, tree)
    params = to_device(read_params(folder, step))
    head = None
    if method.uses_value:
        state = RunPaths(folder.absolute()).checkpoints / str(step) / "state"
        head = to_device(read_part(state, "train", "head"))
    return Frozen(config, step, policy, params, head, environment)
