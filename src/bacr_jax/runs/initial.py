"""Creates or loads the initial parameters of a run.

The parameters are the model, the budget module, the adapters and the value head. This module also
loads the frozen base weights of a run's adapters, because the run's checkpoints do not contain
them.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bacr_jax import parallel
from bacr_jax.config import WarmupConfig
from bacr_jax.config.settings import PolicySettings
from bacr_jax.errors import UserError
from bacr_jax.model import adapters, budget, qwen2, value
from bacr_jax.model.hf import peft
from bacr_jax.model.hf.hf_config import BudgetModule
from bacr_jax.model.hf.reading import load_policy
from bacr_jax.runs.checkpoint import read_meta, read_part
from bacr_jax.runs.digest import fingerprint
from bacr_jax.runs.folder import RunPaths, WarmupPaths, steps_in
from bacr_jax.runs.setup import Policy
from bacr_jax.types import Params


def initial_params(key: jax.Array, policy: Policy, path: str | None) -> Params:
    """Returns the initial parameters. Trained parameters have dtype float32.

    Args:
      key: PRNG key for parameters that are initialized at random.
      policy: architecture and devices of the policy.
      path: Hugging Face folder, or None to initialize all parameters at random.
    """
    params = _model_params(key, policy, path, policy.param_dtype)
    return with_adapters(key, policy, with_budget_module(key, policy, params))


def plain_params(key: jax.Array, policy: Policy, path: str | None) -> Params:
    """Returns `initial_params` without the budget module and adapters, in float32."""
    params = _model_params(key, policy, path, jnp.float32)
    return {name: leaf for name, leaf in params.items() if name != "budget"}


def _model_params(key: jax.Array, policy: Policy, path: str | None, dtype: Any) -> Params:
    """Returns the parameters of a model folder in `dtype`, or random parameters in float32."""
    if path is None:
        return policy.make(lambda: qwen2.init(key, policy.learner.model))
    mesh = policy.learner.mesh
    sharding_of = None if mesh is None else parallel.sharding_of(mesh)
    return load_policy(path, dtype=dtype, sharding_of=sharding_of)[1]


def with_adapters(key: jax.Array, policy: Policy, params: Params) -> Params:
    """Adds the policy's LoRA adapters and casts the base weights to `policy.param_dtype`.

    Returns the parameters unchanged if the policy has no adapters.
    """
    settings = policy.adapter
    if settings is None:
        return params
    shape = policy.learner.model
    base, _ = adapters.split({**params, "adapter": {}})
    # Cast one leaf at a time, so that memory never contains two copies of the base weights.
    base = jax.tree.map(lambda leaf: _cast_and_free(leaf, policy.param_dtype), base)
    params = {**params, **base}
    if settings.path is None:
        init = functools.partial(adapters.init, config=shape, settings=settings)
        return {**params, **policy.make(init, jax.random.fold_in(key, 1))}
    trained = peft.load_adapter(settings.path, shape, settings)
    conditioning = policy.learner.conditioning
    expected_module = None
    if conditioning is not None:
        expected_module = BudgetModule(conditioning, policy.learner.b_max)
    module = peft.load_module(settings.path, shape, expected_module)
    if module is not None:
        trained["budget"] = module
    return {**params, **policy.place(jax.tree.map(jnp.asarray, trained))}


def abstract_params(policy: Policy) -> Params:
    """Returns the shapes and dtypes of `initial_params`, for compiling and restoring."""
    shape = policy.learner.model
    settings = policy.adapter
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(
        lambda key: with_budget_module(key, policy, qwen2.init(key, shape)), key
    )
    if settings is None:
        return params
    base, trained = adapters.split({**params, "adapter": {}})
    base = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, policy.param_dtype), base)
    init = functools.partial(adapters.init, config=shape, settings=settings)
    return {**trained, **base, **jax.eval_shape(init, key)}


def _cast_and_free(leaf: jax.Array, dtype: Any) -> jax.Array:
    """Casts a weight to another dtype and frees the memory of the original."""
    if leaf.dtype == dtype:
        return leaf
    cast = jax.block_until_ready(leaf.astype(dtype))
    leaf.delete()
    return cast


def with_budget_module(key: jax.Array, policy: Policy, params: Params) -> Params:
    """Adds a new budget module if the policy needs one and the parameters contain none.

    The budget module computes the embedding that conditions the policy on its budget. If the policy
    is not conditioned, an existing budget module is removed.
    """
    conditioning = policy.learner.conditioning
    shape = policy.learner.model
    plain = {name: leaf for name, leaf in params.items() if name != "budget"}
    if conditioning is None:
        return plain
    if "budget" in params:
        return params
    module = policy.make(
        lambda: budget.init(key, conditioning, width=shape.hidden_size, layers=shape.num_layers)
    )
    return {**plain, "budget": module}


def random_head(key: jax.Array, policy: Policy) -> Params | None:
    """Returns a randomly initialized value head, or None if the method has no value head."""
    settings = policy.learner.value
    if settings is None:
        return None
    width = value.num_features(
        policy.learner.model.hidden_size,
        conditioned=policy.learner.conditioning is not None,
        kind=settings.input,
    )
    hidden_size = settings.hidden_size
    return policy.make(lambda: value.init(key, num_features=width, hidden_size=hidden_size))


def read_base(
    folder: Path,
    settings: PolicySettings,
    warmup: WarmupConfig,
    state: Path,
    moved: Path | None = None,
) -> Params:
    """Loads the base weights of a checkpoint's LoRA adapters, and `adapter_scale`.

    The base weights are frozen during training, so checkpoints do not contain them.

    Args:
      folder: run folder.
      settings: settings of the run's policy.
      warmup: section `warmup` of the run's config.
      state: folder `state` of the checkpoint.
      moved: current location of the folder `model.path` if the folder was moved, otherwise None.

    Returns:
      The base parameters, with the layers stacked along the first axis.

    Raises:
      UserError: if the base weights are missing or differ from the recorded fingerprint.
    """
    dtype = jnp.dtype(settings.param_dtype)
    adapter = settings.adapter
    if warmup.steps:
        source = Path(warmup.dir) if warmup.dir else RunPaths(folder).warmup
        params = _read_warmup(source, dtype)
    else:
        assert settings.model.path is not None
        source = moved or Path(settings.model.path)
        params = load_policy(source, dtype=dtype)[1]
    params.pop("budget", None)
    assert adapter.rank is not None
    params["adapter_scale"] = np.float32(adapter.alpha / adapter.rank)
    expected = read_meta(state).get("base_fingerprint")
    if expected not in (None, fingerprint(params)):
        raise UserError(
            f"{source}: the base weights were changed after the adapters in {folder} were trained "
            "on them; restore the original weights"
        )
    return params


def _read_warmup(folder: Path, dtype: Any) -> Params:
    """Loads the final weights of a warm-up to the host."""
    weights = WarmupPaths(folder.absolute()).weights
    steps = steps_in(weights)
    if not steps:
        raise UserError(
            f"{folder} contains no finished warm-up, but the run's adapters were trained on the "
            "weights of one; restore this folder"
        )
    params = read_part(weights / str(steps[-1]) / "state")
    return dict(jax.tree.map(lambda leaf: leaf.astype(dtype), params))
