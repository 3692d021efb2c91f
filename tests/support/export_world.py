"""Creates run folders that `export` can read, without training."""

import jax.numpy as jnp
import numpy as np
import optax
import yaml

from bacr_jax.config import io as config_io
from bacr_jax.learner.train_step import init_state
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.runs.checkpoint import Checkpoints
from bacr_jax.training.algorithm import RunState

LEDGER = Qwen2Config(27, 16, 24, 3, 4, 2, 4, rope_theta=1e4, tie_embeddings=True)
MODEL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
}


def checkpoint(run, params, step, **meta):
    """Writes a checkpoint with the given parameters and metadata into a run folder."""
    tx = optax.adam(1e-3)
    state = RunState(
        train=init_state(params, None, tx, tx),
        curriculum={"rates": jnp.ones(4)},
        stream=np.zeros(4, np.int32),
        generated_tokens=jnp.int32(7),
    )
    checkpoints = Checkpoints(run / "checkpoints", keep=2)
    checkpoints.save(step, state, {"step": step, **meta})
    checkpoints.close()


def make_run(run, params, settings):
    """Creates a run folder with a config and a checkpoint at step 3, and returns the folder."""
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    config_io.load([run / "config.yaml"])
    checkpoint(run, params, 3)
    return run
