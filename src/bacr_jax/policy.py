"""From a config to the policy of a run: shapes, parameters, compiled-form settings."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bacr_jax.config import Config
from bacr_jax.errors import UserError
from bacr_jax.interop import load_policy, read_config
from bacr_jax.learner.objective import LearnerSpec
from bacr_jax.methods import Method
from bacr_jax.model import budget, kv_cache, qwen2, value
from bacr_jax.model.kv_cache import DecodeParams
from bacr_jax.model.sizes import Qwen2Config, preset
from bacr_jax.rollout.generate import RolloutSpec

Params = dict[str, Any]


def model_shape(config: Config, vocab_size: int) -> Qwen2Config:
    """The shape that `config.model` describes."""
    model = config.model
    if model.path is not None:
        return read_config(model.path)
    if model.preset != "custom":
        return preset(model.preset)
    return Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim or model.hidden_size // model.num_heads,
        rope_theta=model.rope_theta,
        tie_embeddings=model.tie_embeddings,
    )


def vocabulary_rows(config: Config, tokenizer_size: int) -> int:
    """Embedding rows of the model: the preset's (padded), or just the tokenizer's ids.

    Raises:
      UserError: the tokenizer has more ids than the model has rows.
    """
    rows = model_shape(config, tokenizer_size).vocab_size
    if tokenizer_size > rows:
        raise UserError(
            f"model.tokenizer: has {tokenizer_size} ids, but model.preset={config.model.preset} "
            f"has only {rows} embedding rows; write the model's own tokenizer"
        )
    return rows


def _implementation(config: Config) -> Any:
    if config.model.attention != "auto":
        return config.model.attention
    on_gpu = jax.default_backend() == "gpu"
    return "cudnn" if on_gpu and config.model.compute_dtype == "bfloat16" else "xla"


@dataclasses.dataclass(frozen=True)
class Policy:
    """Settings of the policy under a method.

    Attributes:
      learner: compiled form of the learner.
      rollout: compiled form of training rollouts.
      evaluation: compiled form of evaluation rollouts (its budgets may be larger).
      b_max: scale of the budget codes.
    """

    learner: LearnerSpec
    rollout: RolloutSpec
    evaluation: RolloutSpec
    b_max: int

    def decode_params(self, params: Params) -> DecodeParams:
        """Parameters laid out for decoding."""
        conditioned = self.learner.conditioning is not None
        return _decode_params(params, self.learner.dtype, conditioned)

    def plain_decode_params(self, params: Params) -> DecodeParams:
        """The same for the plain model, whether or not a budget module is there."""
        return _decode_params(params, self.learner.dtype, False)

    def phi_of(self, params: Params) -> Callable[[jax.Array], jax.Array] | None:
        """A function from budgets to phi(b) under these parameters; None without conditioning."""
        conditioning = self.learner.conditioning
        if conditioning is None:
            return None
        return lambda budgets: _embed(params["budget"], budgets, conditioning, self.b_max)


def _decode_params_fn(params: Params, dtype: Any, conditioned: bool) -> DecodeParams:
    return kv_cache.decode_params(params, dtype=dtype, conditioned=conditioned)


def _embed_fn(params: Params, budgets: jax.Array, conditioning: Any, b_max: int) -> jax.Array:
    return budget.embed(params, budgets, conditioning=conditioning, b_max=b_max)


_decode_params = jax.jit(_decode_params_fn, static_argnums=(1, 2))
_embed = jax.jit(_embed_fn, static_argnums=(2, 3))


def make_policy(config: Config, method: Method, vocab_size: int) -> Policy:
    """Collects the settings of a run under a method."""
    shape = model_shape(config, vocab_size)
    dtype = jnp.dtype(config.model.compute_dtype)
    conditioning = config.conditioning if method.conditioned else None
    implementation = _implementation(config)
    learner = LearnerSpec(
        model=shape,
        conditioning=conditioning,
        loss=config.loss,
        value=config.value if method.uses_value else None,
        b_max=config.budget.max,
        temperature=config.rollout.temperature,
        dtype=dtype,
        implementation=implementation,
        scan=config.model.scan_layers,
        remat=config.model.remat,
        chunk=config.model.logprob_chunk,
    )
    rows = config.rollout.questions * config.rollout.group_size
    rollout = RolloutSpec(
        config=shape,
        conditioning=conditioning,
        max_thinking=config.budget.max,
        answer_tokens=config.rollout.answer_tokens,
        slots=config.rollout.slots or rows,
        chunk=config.rollout.chunk,
        dtype=dtype,
        implementation=implementation,
    )
    longest = max(config.budget.max, *config.eval.budgets)
    evaluation = dataclasses.replace(rollout, max_thinking=longest)
    return Policy(learner, rollout, evaluation, config.budget.max)


def initial_params(key: jax.Array, policy: Policy, path: str | None) -> Params:
    """Parameters to start from: a Hugging Face folder's, or random ones; fp32.

    Args:
      key: of what is random.
      policy: settings.
      path: the folder; one that holds a budget module already keeps it.
    """
    if path is None:
        params = qwen2.init(key, policy.learner.model)
    else:
        _, params = load_policy(path, dtype=jnp.float32)
    return with_budget_module(key, policy, params)


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
    fresh = budget.init(
        key,
        conditioning,
        width=shape.hidden_size,
        layers=shape.num_layers,
        b_max=policy.b_max,
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
        cut_input=settings.cut_input,
    )
    return value.init(key, num_features=width, hidden_size=settings.hidden_size)
