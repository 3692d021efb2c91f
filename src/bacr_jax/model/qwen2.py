"""Qwen2.5 with the budget embedding as an explicit input.

One Flax module, `Block`, holds a layer's parameters; pure functions stack it. What differs between
the learner, the prefill and decoding is only where keys and values live, so a block takes its
attention as a function: `attend(q, k, v) -> (output, anything)`.

Parameters (fp32 masters):

    embed       [V, D]
    layers      every leaf of Block with a leading L
    final_norm  [D]
    lm_head     [V, D]      absent when embeddings are tied
    budget      w1, w2, gate   absent without a budget module
"""

import functools
from collections.abc import Callable
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.config import ConditioningConfig
from bacr_jax.model import attention, budget
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.parallel import constrain_rows

Params = dict[str, Any]
Attend = Callable[[Array, Array, Array], tuple[Array, Any]]
Rotation = tuple[Float[Array, "B T H"], Float[Array, "B T H"]]


def rms_norm(x: Float[Array, "*B D"], scale: Float[Array, "D"], eps: float) -> Float[Array, "*B D"]:
    """Root-mean-square norm, x / rms(x) * scale.

    The normalised value is cast back before the product, as released weights expect.
    """
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return y.astype(x.dtype) * scale.astype(x.dtype)


def rotation(positions: Int[Array, "B T"], *, head_dim: int, theta: float) -> Rotation:
    """Cosines and sines of the rotary embedding, halves repeated, fp32."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "B T N H"], by: Rotation) -> Float[Array, "B T N H"]:
    """Rotates each head; component i is paired with component i + H/2 (half-split layout)."""
    cos, sin = (a[:, :, None, :].astype(x.dtype) for a in by)
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-second, first], axis=-1) * sin


def matmul(x: Float[Array, "*B D"], weight: Float[Array, "D E"]) -> Float[Array, "*B E"]:
    """One product of [rows, D] with [D, E], whatever the leading axes of x.

    With the leading axes left apart, XLA's CPU backend transposes the operands of the weight's
    gradient and takes half as long again.
    """
    rows = x.reshape(-1, x.shape[-1]) @ weight
    return rows.reshape(*x.shape[:-1], weight.shape[-1])


class Block(nn.Module):
    """A decoder layer: grouped-query attention and a gated MLP, each on a normed residual stream.

    Attributes:
      config: the model's shape.
      dtype: compute type; parameters are cast to it where they are used.
    """

    config: Qwen2Config
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        by: Rotation,
        attend: Attend,
        condition: Callable[[Array], Array] | None = None,
        site: str = "after_block",
    ) -> tuple[Float[Array, "B T D"], Any]:
        """One layer.

        Args:
          x: residual stream.
          by: rotary cosines and sines of the tokens' positions.
          attend: maps rotated q [B, T, N, H], k and v [B, T, K, H] to ([B, T, N, H], anything).
          condition: adds the gated budget embedding to the residual stream; None: plain Qwen2.5.
          site: where `condition` is applied.

        Returns:
          The residual stream after the layer, and what `attend` returned beside its output.
        """
        c = self.config
        d, h = c.hidden_size, c.head_dim
        normal, zeros, ones = (
            nn.initializers.normal(0.02),
            nn.initializers.zeros,
            nn.initializers.ones,
        )

        def weight(name: str, init: Any, *shape: int) -> Array:
            return self.param(name, init, shape, jnp.float32).astype(self.dtype)

        def project(y: Array, name: str, heads: int) -> Array:
            out = matmul(y, weight(f"{name}_kernel", normal, d, heads * h))
            out = out + weight(f"{name}_bias", zeros, heads * h)
            return out.reshape(*y.shape[:-1], heads, h)

        if condition is not None and site == "before_block":
            x = condition(x)
        y = rms_norm(x, weight("attention_norm", ones, d), c.rms_norm_eps)
        q = rotate(project(y, "q", c.num_heads), by)
        k = rotate(project(y, "k", c.num_kv_heads), by)
        v = project(y, "v", c.num_kv_heads)
        mixed, extra = attend(q, k, v)
        mixed = mixed.reshape(*mixed.shape[:-2], c.num_heads * h)
        x = x + matmul(mixed, weight("o_kernel", normal, c.num_heads * h, d))
        if condition is not None and site == "after_attention":
            x = condition(x)
        y = rms_norm(x, weight("mlp_norm", ones, d), c.rms_norm_eps)
        gate = nn.silu(matmul(y, weight("gate_kernel", normal, d, c.intermediate_size)))
        up = matmul(y, weight("up_kernel", normal, d, c.intermediate_size))
        x = x + matmul(gate * up, weight("down_kernel", normal, c.intermediate_size, d))
        if condition is not None and site == "after_block":
            x = condition(x)
        return x, extra


def init(
    key: Array,
    config: Qwen2Config,
    *,
    conditioning: ConditioningConfig | None = None,
    b_max: int = 4096,
) -> Params:
    """Random parameters, fp32, layers stacked.

    Args:
      key: PRNG key.
      config: shape.
      conditioning: adds a budget module when given.
      b_max: largest budget, for the scaled inputs of the embedding.

    Returns:
      The pytree described at the top of this module.
    """
    embed_key, layers_key, head_key, budget_key = jax.random.split(key, 4)
    normal = nn.initializers.normal(0.02)
    vocabulary = (config.vocab_size, config.hidden_size)
    x = jnp.zeros((1, 1, config.hidden_size))
    by = rotation(jnp.zeros((1, 1), jnp.int32), head_dim=config.head_dim, theta=config.rope_theta)
    identity = lambda q, k, v: (q, None)
    init_block = lambda k: Block(config).init(k, x, by, identity)["params"]
    params: Params = {
        "embed": normal(embed_key, vocabulary),
        "layers": jax.vmap(init_block)(jax.random.split(layers_key, config.num_layers)),
        "final_norm": jnp.ones(config.hidden_size),
    }
    if not config.tie_embeddings:
        params["lm_head"] = normal(head_key, vocabulary)
    if conditioning is not None:
        params["budget"] = budget.init(
            budget_key,
            conditioning,
            width=config.hidden_size,
            layers=config.num_layers,
            b_max=b_max,
        )
    return params


def apply_block(
    layer: Params,
    x: Float[Array, "B T D"],
    by: Rotation,
    attend: Attend,
    *,
    config: Qwen2Config,
    phi: Float[Array, "B D"] | None = None,
    gate: Float[Array, "D"] | None = None,
    conditioning: ConditioningConfig | None = None,
    mask: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T D"], Any]:
    """One layer with its budget gate; without `phi` no budget code is traced at all."""
    block = Block(config, x.dtype)
    if phi is None or gate is None or conditioning is None:
        return block.apply({"params": layer}, x, by, attend)
    condition = functools.partial(
        budget.add_gated, gate=gate, phi=phi, conditioning=conditioning, mask=mask
    )
    return block.apply({"params": layer}, x, by, attend, condition, conditioning.site)


def unstack(layers: Params, num_layers: int) -> list[Params]:
    """The pytree of each layer from one with stacked leaves.

    One split per leaf: its gradient is one concatenation, where the gradient of indexing would add
    up `num_layers` arrays of the full size.
    """
    leaves, structure = jax.tree.flatten(layers)
    parts = [jax.lax.split(leaf, [1] * num_layers, axis=0) for leaf in leaves]
    of_layer = lambda i: jax.tree.unflatten(structure, [part[i][0] for part in parts])
    return [of_layer(index) for index in range(num_layers)]


def run_layers(
    params: Params,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    attend: Attend,
    *,
    config: Qwen2Config,
    budget_embedding: Float[Array, "B D"] | Float[Array, "L B D"] | None = None,
    conditioning: ConditioningConfig | None = None,
    mask: Bool[Array, "B T"] | None = None,
    scan: bool = True,
    remat: bool = True,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "B T D"], Any]:
    """All layers and the final norm.

    Args:
      params: model parameters.
      x: embedded tokens in the compute type.
      positions: rotary positions.
      attend: the attention of every layer.
      config: shape.
      budget_embedding: phi(b), shared or per layer; None gives exactly plain Qwen2.5.
      conditioning: how phi joins the stream; needed with `budget_embedding`.
      mask: positions that receive phi.
      scan: one compiled layer, looped; False unrolls (faster for small models on CPUs).
      remat: recompute each layer in the backward pass instead of storing its inside.
      mesh: keeps rows split over its devices, so that weights travel and activations don't.

    Returns:
      Final-norm output, and what `attend` returned beside its output, stacked over layers.
    """
    by = rotation(positions, head_dim=config.head_dim, theta=config.rope_theta)
    per_layer: Params = {"layer": params["layers"]}
    shared = None
    if budget_embedding is not None:
        per_layer["gate"] = params["budget"]["gate"]
        if budget_embedding.ndim == 3:
            per_layer["phi"] = budget_embedding
        else:
            shared = budget_embedding

    def body(x: Array, inputs: Params) -> tuple[Array, Any]:
        return apply_block(
            inputs["layer"],
            constrain_rows(x, mesh),
            by,
            attend,
            config=config,
            phi=inputs.get("phi", shared),
            gate=inputs.get("gate"),
            conditioning=conditioning,
            mask=mask,
        )

    if remat:
        # Inside a scan the loop already keeps the compiler from merging the two computations.
        body = jax.checkpoint(body, prevent_cse=not scan)
    if scan:
        x, extra = jax.lax.scan(body, x, per_layer)
    else:
        extras = []
        for layer in unstack(per_layer, config.num_layers):
            x, extra = body(x, layer)
            extras.append(extra)
        extra = jax.tree.map(lambda *leaves: jnp.stack(leaves), *extras)
    x = constrain_rows(x, mesh)
    return rms_norm(x, params["final_norm"], config.rms_norm_eps), extra


def embed_tokens(params: Params, tokens: Int[Array, "*B"], dtype: Any) -> Float[Array, "*B D"]:
    """Rows of the embedding, in the compute type."""
    return params["embed"][tokens].astype(dtype)


def output_head(params: Params) -> Float[Array, "V D"]:
    """The matrix that maps final states to logits: the embedding itself when tied."""
    return params["lm_head"] if "lm_head" in params else params["embed"]


def logits(params: Params, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """Scores of every vocabulary row, fp32 accumulation."""
    head = output_head(params).astype(hidden.dtype)
    return jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=jnp.float32)


def padded_positions(real: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """Positions that count real tokens only, from 0; padding before the first one stands at 0."""
    return jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0)


def forward(
    params: Params,
    tokens: Int[Array, "B T"],
    *,
    config: Qwen2Config,
    lengths: Int[Array, "B"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    real: Bool[Array, "B T"] | None = None,
    budget_embedding: Float[Array, "B D"] | Float[Array, "L B D"] | None = None,
    conditioning: ConditioningConfig | None = None,
    mask: Bool[Array, "B T"] | None = None,
    dtype: Any = jnp.float32,
    implementation: attention.Implementation = "xla",
    scan: bool = True,
    remat: bool = False,
    mesh: Mesh | None = None,
) -> Float[Array, "B T D"]:
    """Final states of padded rows; see `run_layers` for the other arguments.

    Rows padded on the right need nothing: causality hides the padding. Rows padded elsewhere say
    which tokens are real and where they stand (`padded_positions`).

    Args:
      params: model parameters.
      tokens: ids.
      config: shape.
      lengths: real tokens per right-padded row.
      positions: rotary positions; 0, 1, 2 ... by default.
      real: tokens that may be attended to; all by default.
      budget_embedding: phi(b), or None.
      conditioning: how phi joins the stream.
      mask: positions that receive phi.
      dtype: compute type.
      implementation: of the attention.
      scan: loop over layers.
      remat: recompute layers in the backward pass.
      mesh: of the rows.

    Returns:
      Final-norm states; `logits` turns them into scores. States of padding are meaningless.

    Raises:
      UserError: the attention implementation cannot do what is asked.
    """
    chex.assert_rank(tokens, 2)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    attend = lambda q, k, v: (
        attention.causal_attention(
            q, k, v, implementation=implementation, lengths=lengths, real=real
        ),
        None,
    )
    hidden, _ = run_layers(
        params,
        embed_tokens(params, tokens, dtype),
        positions,
        attend,
        config=config,
        budget_embedding=budget_embedding,
        conditioning=conditioning,
        mask=mask,
        scan=scan,
        remat=remat,
        mesh=mesh,
    )
    return hidden


def forward_tree(
    params: Params,
    trunk: Int[Array, "B S"],
    branches: Int[Array, "B M A"],
    context: Int[Array, "B M"],
    *,
    config: Qwen2Config,
    lengths: Int[Array, "B"] | None = None,
    budget_embedding: Float[Array, "B D"] | Float[Array, "L B D"] | None = None,
    conditioning: ConditioningConfig | None = None,
    trunk_mask: Bool[Array, "B S"] | None = None,
    dtype: Any = jnp.float32,
    implementation: attention.Implementation = "xla",
    scan: bool = True,
    remat: bool = True,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "B S D"], Float[Array, "B M A D"]]:
    """One pass over trunks and all their branches.

    Equal to running every branch as its own full sequence trunk[:context] + branch, at the cost of
    S + M A instead of about M (S + A) tokens a row.

    Args:
      params: model parameters.
      trunk: prompt and thinking, right-padded, position == index.
      branches: suffix and answer of each cut, right-padded.
      context: trunk tokens each branch sees; the branch's positions continue from there.
      config: shape.
      lengths: real trunk tokens per row.
      budget_embedding: phi(b); branches use their trunk's.
      conditioning: how phi joins the stream.
      trunk_mask: trunk positions that receive phi; branch tokens always do.
      dtype: compute type.
      implementation: of the trunk's attention.
      scan: loop over layers.
      remat: recompute layers in the backward pass.
      mesh: of the rows.

    Returns:
      Final states of the trunk and of the branches.
    """
    chex.assert_rank([trunk, branches, context], [2, 3, 2])
    b, s = trunk.shape
    _, m, a = branches.shape
    tokens = jnp.concatenate([trunk, branches.reshape(b, m * a)], axis=1)
    branch_positions = (context[:, :, None] + jnp.arange(a)).reshape(b, m * a)
    trunk_positions = jnp.broadcast_to(jnp.arange(s), (b, s))
    mask = None
    if trunk_mask is not None:
        mask = jnp.concatenate([trunk_mask, jnp.ones((b, m * a), bool)], axis=1)
    attend = lambda q, k, v: (
        attention.tree_attention(
            q, k, v, context, trunk_length=s, implementation=implementation, lengths=lengths
        ),
        None,
    )
    hidden, _ = run_layers(
        params,
        embed_tokens(params, tokens, dtype),
        jnp.concatenate([trunk_positions, branch_positions], axis=1),
        attend,
        config=config,
        budget_embedding=budget_embedding,
        conditioning=conditioning,
        mask=mask,
        scan=scan,
        remat=remat,
        mesh=mesh,
    )
    return hidden[:, :s], hidden[:, s:].reshape(b, m, a, hidden.shape[-1])
