"""Parameters that a run starts from: a model's, its budget module, adapters, a value head.

And the frozen base of a run's adapters, which its checkpoints do not hold.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bacr_jax import parallel
from bacr_jax.config import Config
from bacr_jax.config.derived import param_dtype
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
    """Parameters to start from: a Hugging Face folder's, or random ones; fp32 where trained."""
    params = _model_params(key, policy, path, policy.param_dtype)
    return with_adapters(key, policy, with_budget_module(key, policy, params))


def plain_params(key: jax.Array, policy: Policy, path: str | None) -> Params:
    """The plain model of `initial_params`, fp32, to be trained as a whole."""
    params = _model_params(key, policy, path, jnp.float32)
    return {name: leaf for name, leaf in params.items() if name != "budget"}


def _model_params(key: jax.Array, policy: Policy, path: str | None, dtype: Any) -> Params:
    if path is None:
        return policy.make(lambda: qwen2.init(key, policy.learner.model))
    mesh = policy.learner.mesh
    where = None if mesh is None else parallel.sharding_of(mesh)
    return load_policy(path, dtype=dtype, sharding_of=where)[1]


def with_adapters(key: jax.Array, policy: Policy, params: Params) -> Params:
    """The parameters with low-rank adapters on a base in its own type, if the policy has any."""
    settings, shape = policy.adapter, policy.learner.model
    if settings is None:
        return params
    base, _ = adapters.split({**params, "adapter": {}})
    # One leaf after the other, so that the base is never there twice.
    base = jax.tree.map(lambda leaf: _kept_as(leaf, policy.param_dtype), base)
    params = {**params, **base}
    if settings.path is not None:
        found = peft.load_adapter(settings.path, shape, settings)
        conditioning = policy.learner.conditioning
        own = None if conditioning is None else BudgetModule(conditioning, policy.learner.b_max)
        module = peft.load_module(settings.path, shape, own)
        if module is not None:
            found["budget"] = module
        return {**params, **policy.place(jax.tree.map(jnp.asarray, found))}
    fresh = functools.partial(adapters.init, config=shape, settings=settings)
    return {**params, **policy.make(fresh, jax.random.fold_in(key, 1))}


def untrained_params(key: jax.Array, policy: Policy) -> Params:
    """Parameters of the shapes and places of `initial_params`; with adapters without the base."""
    if policy.adapter is None:
        return initial_params(key, policy, None)
    return with_adapters(key, policy, with_budget_module(key, policy, {}))


def abstract_params(policy: Policy) -> Params:
    """Shapes and types of `initial_params`, for programs that are compiled without weights."""
    shape, settings = policy.learner.model, policy.adapter
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(
        lambda key: with_budget_module(key, policy, qwen2.init(key, shape)), key
    )
    if settings is None:
        return params
    base, trained = adapters.split({**params, "adapter": {}})
    base = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, policy.param_dtype), base)
    fresh = functools.partial(adapters.init, config=shape, settings=settings)
    return {**trained, **base, **jax.eval_shape(fresh, key)}


def _kept_as(leaf: jax.Array, dtype: Any) -> jax.Array:
    """A weight in another type; the old one's memory is free again."""
    if leaf.dtype == dtype:
        return leaf
    new = jax.block_until_ready(leaf.astype(dtype))
    leaf.delete()
    return new


def with_budget_module(key: jax.Array, policy: Policy, params: Params) -> Params:
    """The parameters with a fresh budget module, if the policy is conditioned and has none yet.

    A policy that is not conditioned gets the plain model, whatever was there.
    """
    conditioning, shape = policy.learner.conditioning, policy.learner.model
    plain = {name: leaf for name, leaf in params.items() if name != "budget"}
    if conditioning is None:
        return plain
    if "budget" in params:
        return params
    fresh = policy.make(
        lambda: budget.init(key, conditioning, width=shape.hidden_size, layers=shape.num_layers)
    )
    return {**plain, "budget": fresh}


def random_head(key: jax.Array, policy: Policy) -> Params | None:
    """A fresh value head; None when the method has none."""
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


def read_base(folder: Path, config: Config, state: Path, moved: Path | None = None) -> Params:
    """The base that a checkpoint's adapters were trained on, layers stacked, and `adapter_scale`.

    `state` is that folder of the checkpoint, `moved` where `model.path` lies now if elsewhere.
    """
    dtype = jnp.dtype(param_dtype(config))
    if config.warmup.steps:
        place = Path(config.warmup.dir) if config.warmup.dir else RunPaths(folder).warmup
        params = _of_warmup(place, dtype)
    else:
        assert config.model.path is not None
        place = moved or Path(config.model.path)
        params = load_policy(place, dtype=dtype)[1]
    params.pop("budget", None)
    assert config.adapter.rank is not None
    params["adapter_scale"] = np.float32(config.adapter.alpha / config.adapter.rank)
    expected = read_meta(state).get("base_fingerprint")
    if expected not in (None, fingerprint(params)):
        raise UserError(
            f"{place}: holds other weights than those that the adapters in {folder} were trained "
            "on; put them back"
        )
    return params


def _of_warmup(place: Path, dtype: Any) -> Params:
    """Finished weights of a warm-up, on the host."""
    weights = WarmupPaths(place.absolute()).weights
    steps = steps_in(weights)
    if not steps:
        raise UserError(f"{place}: holds no finished warm-up, on which the adapters were trained")
    params = read_part(weights / str(steps[-1]) / "state")
    return dict(jax.tree.map(lambda leaf: leaf.astype(dtype), params))
