"""Qwen2.5 with the budget embedding as an explicit input.

`block.Block` holds a layer's parameters; the pure functions here stack it.

Parameters (fp32 masters):

    embed       [V, D]
    layers      every leaf of Block with a leading L
    final_norm  [D]
    lm_head     [V, D]      absent when embeddings are tied
    budget      w1, w2, gate   absent without a budget module

A frozen base may be of another type and have low-rank adapters beside it (`adapters`); its layers
may then be a list of one pytree each.
"""

from collections.abc import Callable
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from bacr_jax.config import ConditioningConfig
from bacr_jax.model import adapters, attention, budget
from bacr_jax.model.block import (
    Block,
    Params,
    Remat,
    apply_block,
    rematerialised,
    rms_norm,
    rotation,
)
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.parallel import ROW_AXES, constrain_embedded, constrain_rows


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


def unstack(layers: Params, num_layers: int) -> list[Params]:
    """The pytree of each layer from one with stacked leaves.

    One split per leaf: its gradient is one concatenation, where the gradient of indexing would add
    up `num_layers` arrays of the full size.
    """
    leaves, structure = jax.tree.flatten(layers)
    parts = [jax.lax.split(leaf, [1] * num_layers, axis=0) for leaf in leaves]
    of_layer = lambda i: jax.tree.unflatten(structure, [part[i][0] for part in parts])
    return [of_layer(index) for index in range(num_layers)]


def _layer_inputs(
    params: Params, phi: Array | None, which: Array | None
) -> tuple[Params, Array | None]:
    """What differs from layer to layer, with a leading L, and the phi that all layers share."""
    shared_rank = 2 if which is None else 3
    per_layer: Params = {"layer": params["layers"]}
    if (adapter := adapters.scaled(params)) is not None:
        per_layer["adapter"] = adapter
    if phi is None:
        return per_layer, None
    per_layer["gate"] = params["budget"]["gate"]
    return (per_layer, phi) if phi.ndim == shared_rank else ({**per_layer, "phi": phi}, None)


def _each_layer(per_layer: Params, num_layers: int) -> list[Params]:
    """The inputs of each layer, whether the parameters of the layers are stacked or a list."""
    layers = per_layer["layer"]
    if isinstance(layers, dict):
        return unstack(per_layer, num_layers)
    rest = unstack({k: v for k, v in per_layer.items() if k != "layer"}, num_layers)
    return [{**inputs, "layer": layer} for inputs, layer in zip(rest, layers)]


def run_layers(
    params: Params,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    attend: Callable[[Array, Array, Array], Array],
    *,
    config: Qwen2Config,
    budget_embedding: Float[Array, "*L B D"] | Float[Array, "*L B P D"] | None = None,
    conditioning: ConditioningConfig | None = None,
    mask: Bool[Array, "B T"] | None = None,
    which: Float[Array, "B T P"] | None = None,
    length: int | None = None,
    scan: bool = True,
    remat: Remat = "full",
    mesh: Mesh | None = None,
    row_axes: tuple[str, ...] = ROW_AXES,
) -> Float[Array, "B T D"]:
    """All layers and the final norm.

    Args:
      params: model parameters.
      x: embedded tokens in the compute type.
      positions: rotary positions.
      attend: the attention of every layer, from rotated q, k and v to its output.
      config: shape.
      budget_embedding: phi(b), shared or per layer; None gives exactly plain Qwen2.5.
      conditioning: how phi joins the stream; needed with `budget_embedding`.
      mask: positions that receive phi.
      which: which of P embeddings each position is told, where rows have several.
      length: bound of positions that are known at run time only (`rotation`).
      scan: one compiled layer, looped; False unrolls (faster for small models on CPUs).
      remat: what the backward pass recomputes of a layer: full: all of it; selective: all but its
        matrix products, which are kept; none: nothing.
      mesh: keeps rows split over its devices, so that weights travel and activations don't.
      row_axes: axes of the mesh that rows are split over.

    Returns:
      Final-norm output.
    """
    by = rotation(positions, head_dim=config.head_dim, theta=config.rope_theta, length=length)
    per_layer, shared = _layer_inputs(params, budget_embedding, which)
    stacked = isinstance(params["layers"], dict)

    def body(x: Array, inputs: Params) -> tuple[Array, None]:
        x, _ = apply_block(
            inputs["layer"],
            constrain_rows(x, mesh, over=row_axes),
            by,
            lambda q, k, v: (attend(q, k, v), None),
            config=config,
            phi=inputs.get("phi", shared),
            gate=inputs.get("gate"),
            conditioning=conditioning,
            mask=mask,
            which=which,
            adapter=inputs.get("adapter"),
        )
        return x, None

    body = rematerialised(body, remat, prevent_cse=not (scan and stacked))
    if scan and stacked:
        x, _ = jax.lax.scan(body, x, per_layer)
    else:
        # The layers are alike: one is traced, differentiated and lowered for all of them.
        body = jax.jit(body)
        for inputs in _each_layer(per_layer, config.num_layers):
            x, _ = body(x, inputs)
    x = constrain_rows(x, mesh, over=row_axes)
    return rms_norm(x, params["final_norm"], config.rms_norm_eps)


def embed_tokens(params: Params, tokens: Int[Array, "*B"], dtype: Any) -> Float[Array, "*B D"]:
    """Rows of the embedding, in the compute type."""
    return params["embed"][tokens].astype(dtype)


def output_head(params: Params) -> Float[Array, "V D"]:
    """The language-model head, final states to logits: the embedding itself when tied."""
    return params["lm_head"] if "lm_head" in params else params["embed"]


def logits(params: Params, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """Scores of every vocabulary row, fp32 accumulation."""
    lm_head = output_head(params).astype(hidden.dtype)
    return jnp.einsum("...d,vd->...v", hidden, lm_head, preferred_element_type=jnp.float32)


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
    remat: Remat = "none",
    mesh: Mesh | None = None,
) -> Float[Array, "B T D"]:
    """Final states of padded rows.

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
      remat: what the backward pass recomputes (`run_layers`).
      mesh: of the rows.

    Returns:
      Final-norm states; `logits` turns them into scores. States of padding are meaningless.
    """
    chex.assert_rank(tokens, 2)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    attend = lambda q, k, v: attention.causal_attention(
        q, k, v, implementation=implementation, lengths=lengths, real=real
    )
    return run_layers(
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


def _tree_rows(
    trunk: Int[Array, "B S"],
    branches: Int[Array, "B M A"],
    context: Int[Array, "B M"],
    trunk_mask: Bool[Array, "B S"] | None,
    packing: Int[Array, "B F"] | None,
) -> tuple[Int[Array, "B T"], Int[Array, "B T"], Bool[Array, "B T"] | None]:
    """Tokens, positions and mask of trunks and their branches as one row each, T = S + M A."""
    chex.assert_rank([trunk, branches, context], [2, 3, 2])
    b, s = trunk.shape
    _, m, a = branches.shape
    branch_tokens = branches.reshape(b, m * a)
    branch_positions = (context[:, :, None] + jnp.arange(a)).reshape(b, m * a)
    if packing is not None:
        pick = lambda x: jnp.take_along_axis(x, packing, axis=1, mode="clip")
        branch_tokens, branch_positions = pick(branch_tokens), pick(branch_positions)
    tokens = jnp.concatenate([trunk, branch_tokens], axis=1)
    trunk_positions = jnp.broadcast_to(jnp.arange(s), (b, s))
    positions = jnp.concatenate([trunk_positions, branch_positions], axis=1)
    if trunk_mask is None:
        return tokens, positions, None
    branch_mask = jnp.ones(branch_tokens.shape, bool)
    return tokens, positions, jnp.concatenate([trunk_mask, branch_mask], axis=1)


def _told(
    trunk: int, b: int, m: int, a: int, branch_of: Int[Array, "B F"] | None
) -> Float[Array, "B T P"]:
    """One-hot: positions of the trunk are told embedding 0, those of branch j embedding 1 + j."""
    if branch_of is None:
        branch_of = jnp.broadcast_to(jnp.repeat(jnp.arange(m), a), (b, m * a))
    index = jnp.pad(1 + branch_of, ((0, 0), (trunk, 0)))
    return jax.nn.one_hot(index, 1 + m)


def forward_tree(
    params: Params,
    trunk: Int[Array, "B S"],
    branches: Int[Array, "B M A"],
    context: Int[Array, "B M"],
    *,
    config: Qwen2Config,
    lengths: Int[Array, "B"] | None = None,
    budget_embedding: Float[Array, "*L B D"] | None = None,
    branch_embedding: Float[Array, "*L B M D"] | None = None,
    conditioning: ConditioningConfig | None = None,
    trunk_mask: Bool[Array, "B S"] | None = None,
    packing: Int[Array, "B F"] | None = None,
    dtype: Any = jnp.float32,
    implementation: attention.Implementation = "xla",
    scan: bool = True,
    remat: Remat = "full",
    mesh: Mesh | None = None,
    row_axes: tuple[str, ...] = ROW_AXES,
) -> tuple[Float[Array, "B S D"], Float[Array, "B M A D"] | Float[Array, "B F D"]]:
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
      budget_embedding: phi(b) of each trunk.
      branch_embedding: phi(b_j) of each branch; None: branches use their trunk's.
      conditioning: how phi joins the stream.
      trunk_mask: trunk positions that receive phi; branch tokens always do.
      packing: index m A + a of the branch tokens to run, a branch's together and in order, -1 for
        none; None runs all M A.
      dtype: compute type.
      implementation: of the trunk's attention.
      scan: loop over layers.
      remat: what the backward pass recomputes (`run_layers`).
      mesh: of the rows.
      row_axes: axes of the mesh that rows are split over.

    Returns:
      Final states of the trunk and of the branches, or of the packed tokens of branches.
    """
    s = trunk.shape[1]
    tokens, positions, mask = _tree_rows(trunk, branches, context, trunk_mask, packing)
    # Rounded down: -1 stays -1.
    branch_of = None if packing is None else packing // branches.shape[2]
    attend = lambda q, k, v: attention.tree_attention(
        q,
        k,
        v,
        context,
        trunk_length=s,
        branch_of=branch_of,
        implementation=implementation,
        lengths=lengths,
    )
    which = None
    if budget_embedding is not None and branch_embedding is not None:
        parts = (budget_embedding[..., None, :], branch_embedding)
        budget_embedding = jnp.concatenate(parts, axis=-2)
        b, m, a = branches.shape
        which = _told(s, b, m, a, branch_of)
    hidden = run_layers(
        params,
        constrain_embedded(embed_tokens(params, tokens, dtype), mesh, over=row_axes),
        positions,
        attend,
        config=config,
        budget_embedding=budget_embedding,
        conditioning=conditioning,
        mask=mask,
        which=which,
        length=s + branches.shape[2] if branches.size else None,
        scan=scan,
        remat=remat,
        mesh=mesh,
        row_axes=row_axes,
    )
    shape = branches.shape if packing is None else packing.shape
    of_trunk, of_branches = jax.lax.split(hidden, [s, hidden.shape[1] - s], axis=1)
    return of_trunk, of_branches.reshape(*shape, hidden.shape[-1])
