"""A decoder with the budget embedding as an explicit input: Qwen2.5, Qwen3 or Llama.

`block.Block` holds a layer's parameters; the pure functions here stack it.

Parameters (fp32 masters):

    embed       [V, D]
    layers      every leaf of Block with a leading L
    final_norm  [D]
    lm_head     [V, D]      absent when embeddings are tied
    budget      w1, w2, gate   absent without a budget module

A frozen base may be of another type and have low-rank adapters beside it (`adapters`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bacr_jax.config import ConditioningConfig
from bacr_jax.model import adapters, attention, budget
from bacr_jax.model.block import Block, apply_block, rematerialised, rms_norm, rotation
from bacr_jax.model.budget import Conditioned
from bacr_jax.model.compute import Compute
from bacr_jax.model.real_tokens import RealTokens
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.parallel import constrain_embedded, constrain_rows
from bacr_jax.types import Params


def init(
    key: Array, config: Qwen2Config, *, conditioning: ConditioningConfig | None = None
) -> Params:
    """Random parameters, fp32, layers stacked."""
    embed_key, layers_key, head_key, budget_key = jax.random.split(key, 4)
    normal = nn.initializers.normal(0.02)
    vocabulary = (config.vocab_size, config.hidden_size)
    x = jnp.zeros((1, 1, config.hidden_size))
    zero = jnp.zeros((1, 1), jnp.int32)
    rotary = rotation(zero, config)

    def init_block(key: Array) -> Params:
        return Block(config).init(key, x, rotary, lambda q, k, v: (q, None))["params"]

    params: Params = {
        "embed": normal(embed_key, vocabulary),
        "layers": jax.vmap(init_block)(jax.random.split(layers_key, config.num_layers)),
        "final_norm": jnp.ones(config.hidden_size),
    }
    if not config.tie_embeddings:
        params["lm_head"] = normal(head_key, vocabulary)
    if conditioning is not None:
        params["budget"] = budget.init(
            budget_key, conditioning, width=config.hidden_size, layers=config.num_layers
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


def _layer_inputs(params: Params, conditioned: Conditioned | None) -> Params:
    """What differs from layer to layer, with a leading L."""
    per_layer: Params = {"layer": params["layers"]}
    if (adapter := adapters.scaled(params)) is not None:
        per_layer["adapter"] = adapter
    if conditioned is not None:
        per_layer["conditioned"] = {"gate": conditioned.gate}
        if conditioned.per_layer:
            per_layer["conditioned"]["phi"] = conditioned.phi
    return per_layer


def run_layers(
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    attend: Callable[[Array, Array, Array], Array],
    *,
    config: Qwen2Config,
    conditioned: Conditioned | None = None,
    length: int | None = None,
    compute: Compute = Compute(),
) -> Float[Array, "B T D"]:
    """Embedding, all layers and the final norm.

    Args:
      conditioned: the rows' budgets; None gives exactly the plain model.
      length: bound of positions that are known at run time only (`rotation`).
    """
    x = params["embed"][tokens].astype(compute.dtype)
    x = constrain_embedded(x, compute.mesh, over=compute.row_axes)
    rotary = rotation(positions, config, length=length)
    per_layer = _layer_inputs(params, conditioned)

    def body(x: Array, inputs: Params) -> tuple[Array, None]:
        own = conditioned
        if own is not None:
            own = dataclasses.replace(own, **inputs["conditioned"])
        x, _ = apply_block(
            inputs["layer"],
            constrain_rows(x, compute.mesh, over=compute.row_axes),
            rotary,
            lambda q, k, v: (attend(q, k, v), None),
            config=config,
            conditioned=own,
            adapter=inputs.get("adapter"),
            product_dtype=compute.product_dtype,
        )
        return x, None

    body = rematerialised(body, compute.remat, prevent_cse=not compute.scan)
    if compute.scan:
        x, _ = jax.lax.scan(body, x, per_layer)
    else:
        # The layers are alike: one is traced, differentiated and lowered for all of them.
        body = jax.jit(body)
        for inputs in unstack(per_layer, config.num_layers):
            x, _ = body(x, inputs)
    x = constrain_rows(x, compute.mesh, over=compute.row_axes)
    return rms_norm(x, params["final_norm"], config.rms_norm_eps)


def output_head(params: Params) -> Float[Array, "V D"]:
    """The language-model head, final states to logits: the embedding itself when tied."""
    return params["lm_head"] if "lm_head" in params else params["embed"]


def logits(params: Params, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """Scores of every vocabulary row, fp32 accumulation."""
    lm_head = output_head(params).astype(hidden.dtype)
    return jnp.einsum("...d,vd->...v", hidden, lm_head, preferred_element_type=jnp.float32)


def forward(
    params: Params,
    tokens: Int[Array, "B T"],
    *,
    config: Qwen2Config,
    lengths: Int[Array, "B"] | None = None,
    conditioned: Conditioned | None = None,
    compute: Compute = Compute(),
) -> Float[Array, "B T D"]:
    """Final-norm states of rows padded on the right; causality hides the padding.

    `logits` turns them into scores. States of padding are meaningless.
    """
    chex.assert_rank(tokens, 2)
    attend = functools.partial(
        attention.causal_attention, implementation=compute.implementation, lengths=lengths
    )
    return run_layers(
        params,
        tokens,
        jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape),
        attend,
        config=config,
        conditioned=conditioned,
        compute=compute,
    )


class Tree(NamedTuple):
    """Trunks and the branches that leave them.

    Attributes:
      trunk: prompt and thinking, right-padded, position == index.
      branches: suffix and answer of each cut, right-padded.
      context: trunk tokens each branch sees; the branch's positions continue from there.
      packing: index m A + a of the branch tokens to run, a branch's together and in order, -1 for
        none; None runs all M A.
      lengths: tokens of each trunk, which cuDNN's kernel asks for.
    """

    trunk: Int[Array, "B S"]
    branches: Int[Array, "B M A"]
    context: Int[Array, "B M"]
    packing: Int[Array, "B F"] | None = None
    lengths: Int[Array, "B"] | None = None

    @property
    def branch_of(self) -> Int[Array, "B F"] | None:
        """The branch of each packed token; rounded down: -1 stays -1."""
        return None if self.packing is None else self.packing // self.branches.shape[2]


def _tree_rows(tree: Tree) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Tokens and positions of trunks and their branches as one row each, T = S + M A."""
    trunk, branches, context, packing, _ = tree
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
    return tokens, jnp.concatenate([trunk_positions, branch_positions], axis=1)


def _listed_conditioned(conditioned: Conditioned, real: RealTokens) -> Conditioned:
    """The same for a list of tokens, each of which names its row's embedding."""
    mask = None if conditioned.mask is None else real.listed(conditioned.mask)
    index = jax.nn.one_hot(real.row, real.slot.shape[0])[None]
    phi = jnp.expand_dims(conditioned.phi, -3)
    return dataclasses.replace(conditioned, phi=phi, mask=mask, index=index)


def tree_states(
    params: Params,
    tree: Tree,
    *,
    config: Qwen2Config,
    conditioned: Conditioned | None = None,
    real: RealTokens | None = None,
    compute: Compute = Compute(),
) -> Float[Array, "B T D"] | Float[Array, "1 U D"]:
    """Final states of trunks and branches, side by side as `forward_tree` returns them.

    Args:
      real: the tokens of these rows; only attention then sees padding, and the states are of this
        list.
    """
    s, branches = tree.trunk.shape[1], tree.branches
    tokens, positions = _tree_rows(tree)
    if conditioned is not None and conditioned.mask is not None:
        of_branches = ((0, 0), (0, tokens.shape[1] - s))
        mask = jnp.pad(conditioned.mask, of_branches, constant_values=True)
        conditioned = dataclasses.replace(conditioned, mask=mask)
    of_rows = functools.partial(
        attention.tree_attention,
        context=tree.context,
        trunk_length=s,
        branch_of=tree.branch_of,
        implementation=compute.implementation,
        lengths=tree.lengths,
    )
    attend: Callable[..., Array] = of_rows
    if real is not None:
        tokens, positions = real.listed(tokens), real.listed(positions)
        conditioned = conditioned and _listed_conditioned(conditioned, real)
        one_device = compute.mesh is None or compute.mesh.size == 1
        takes_masks = compute.implementation == "xla" and one_device and tree.packing is None
        if takes_masks and real.has_fewer_pairs:
            visible = real.visible(tree.context, s)[None]
            attend = functools.partial(attention.masked_attention, visible=visible)
        else:
            attend = lambda *listed: real.listed(of_rows(*map(real.spread, listed)))
    return run_layers(
        params,
        tokens,
        positions,
        attend,
        config=config,
        conditioned=conditioned,
        length=s + branches.shape[2] if branches.size else None,
        compute=compute,
    )


def forward_tree(
    params: Params,
    tree: Tree,
    *,
    config: Qwen2Config,
    conditioned: Conditioned | None = None,
    compute: Compute = Compute(),
) -> tuple[Float[Array, "B S D"], Float[Array, "B M A D"] | Float[Array, "B F D"]]:
    """One pass over trunks and all their branches.

    Equal to running every branch as its own full sequence trunk[:context] + branch, at the cost of
    S + M A instead of about M (S + A) tokens a row.

    Args:
      conditioned: phi(b) of each row; None for the plain model. The mask is the trunk's: branch
        tokens always receive phi.

    Returns:
      Final states of the trunk and of the branches, or of the packed tokens of branches.
    """
    hidden = tree_states(params, tree, config=config, conditioned=conditioned, compute=compute)
    s = tree.trunk.shape[1]
    shape = tree.branches.shape if tree.packing is None else tree.packing.shape
    of_trunk, of_branches = jax.lax.split(hidden, [s, hidden.shape[1] - s], axis=1)
    return of_trunk, of_branches.reshape(*shape, hidden.shape[-1])
