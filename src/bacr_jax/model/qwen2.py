"""A decoder (Qwen2.5, Qwen3 or Llama) that takes the budget embedding as an explicit input.

`block.Block` defines the parameters of a layer. The pure functions in this module stack layers.

Parameters (fp32 master weights):

    embed       [V, D]
    layers      every parameter of Block with a leading axis L
    final_norm  [D]
    lm_head     [V, D]         absent if embeddings are tied
    budget      w1, w2, gate   absent without a budget module

A frozen base model can have a different dtype, and has additional parameters for its low-rank
adapters (see `adapters`).
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
    """Initializes random parameters in fp32, with stacked layers.

    Args:
      conditioning: settings of the new budget module (the embedding of the budget and its gates).
        None initializes a model without a budget module.
    """
    embed_key, layers_key, head_key, budget_key = jax.random.split(key, 4)
    normal = nn.initializers.normal(0.02)
    vocabulary = (config.vocab_size, config.hidden_size)
    x = jnp.zeros((1, 1, config.hidden_size))
    position = jnp.zeros((1, 1), jnp.int32)
    rotary = rotation(position, config)

    def init_block(key: Array) -> Params:
        # Parameters do not depend on attention, so any function with the right output shapes can be
        # used.
        return Block(config).init(key, x, rotary, lambda q, k, v: (q, None))["params"]

    embed = normal(embed_key, vocabulary)
    layer_keys = jax.random.split(layers_key, config.num_layers)
    params: Params = {
        "embed": embed,
        "layers": jax.vmap(init_block)(layer_keys),
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
    """Splits a pytree with stacked leaves into one pytree per layer.

    Each leaf is split with a single operation, whose gradient is a single concatenation. The
    gradient of indexing would be a sum of `num_layers` full-size arrays.
    """
    leaves, structure = jax.tree.flatten(layers)
    slices = [jax.lax.split(leaf, [1] * num_layers, axis=0) for leaf in leaves]
    trees = []
    for index in range(num_layers):
        layer_leaves = [leaf_slices[index][0] for leaf_slices in slices]
        trees.append(jax.tree.unflatten(structure, layer_leaves))
    return trees


def _layer_inputs(params: Params, conditioned: Conditioned | None) -> Params:
    """Collects all inputs that differ between layers, with a leading axis L.

    Returns:
      A dictionary with the parameters ("layer"), the scaled adapters ("adapter") if the model has
      any, and the fields of `Conditioned` that differ between layers ("conditioned") if there is a
      budget.
    """
    per_layer: Params = {"layer": params["layers"]}
    adapter = adapters.scaled(params)
    if adapter is not None:
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
    """Runs tokens through the embedding, all layers and the final norm.

    Args:
      attend: attention as a function of q [B, T, N, H], k and v [B, T, K, H].
      conditioned: budget embeddings of the rows of the batch. None runs exactly the model without
        budget conditioning.
      length: upper bound of `positions`, for positions that are only known at run time (see
        `rotation`). None computes the rotary embedding directly from the positions.

    Returns:
      Hidden states after the final norm.
    """
    x = params["embed"][tokens].astype(compute.dtype)
    x = constrain_embedded(x, compute.mesh, over=compute.row_axes)
    rotary = rotation(positions, config, length=length)
    per_layer = _layer_inputs(params, conditioned)

    def body(x: Array, inputs: Params) -> tuple[Array, None]:
        layer_conditioned = conditioned
        if layer_conditioned is not None:
            layer_conditioned = dataclasses.replace(layer_conditioned, **inputs["conditioned"])
        x, _ = apply_block(
            inputs["layer"],
            constrain_rows(x, compute.mesh, over=compute.row_axes),
            rotary,
            lambda q, k, v: (attend(q, k, v), None),
            config=config,
            conditioned=layer_conditioned,
            adapter=inputs.get("adapter"),
            product_dtype=compute.product_dtype,
        )
        return x, None

    body = rematerialised(body, compute.remat, prevent_cse=not compute.scan)
    if compute.scan:
        x, _ = jax.lax.scan(body, x, per_layer)
    else:
        # Under jit, a single layer is traced, differentiated and lowered for all layers.
        body = jax.jit(body)
        for inputs in unstack(per_layer, config.num_layers):
            x, _ = body(x, inputs)
    x = constrain_rows(x, compute.mesh, over=compute.row_axes)
    return rms_norm(x, params["final_norm"], config.rms_norm_eps)


def output_head(params: Params) -> Float[Array, "V D"]:
    """Returns the matrix from final states to logits: lm_head, or the embedding matrix if tied."""
    return params["lm_head"] if "lm_head" in params else params["embed"]


def logits(params: Params, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """Computes the logits of all vocabulary entries, accumulated in fp32."""
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
    """Computes the hidden states after the final norm for right-padded rows.

    Padding is not visible to real tokens, because attention is causal. The states of padding are
    meaningless. Use `logits` to compute logits from the states.

    Args:
      lengths: number of real tokens per row, with which cuDNN skips padding. None computes padding
        too.
      conditioned: budget embeddings of the rows, or None for a model without budget conditioning.
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
    """A batch of B token trees.

    A tree consists of a prompt with its thinking (the trunk, S tokens) and M answers (branches, A
    tokens each). Each branch continues the thinking from a truncation point (cut).

    Attributes:
      trunk: token ids of prompt and thinking, right-padded. The index equals the position.
      branches: token ids of the suffix and answer at each cut, right-padded.
      context: number of trunk tokens visible to each branch. The positions of the branch continue
        from there.
      packing: flat index m * A + a of each branch token to compute (token a of branch m), and -1
        for unused positions. The tokens of a branch must be contiguous and in order. None computes
        all M A tokens.
      lengths: number of real tokens of each trunk. cuDNN does not compute the padding after them.
        If None, outputs are computed at all positions.
    """

    trunk: Int[Array, "B S"]
    branches: Int[Array, "B M A"]
    context: Int[Array, "B M"]
    packing: Int[Array, "B F"] | None = None
    lengths: Int[Array, "B"] | None = None

    @property
    def branch_of(self) -> Int[Array, "B F"] | None:
        """Returns the index of each packed token's branch, -1 if unused. None without packing."""
        if self.packing is None:
            return None
        # Unused entries are -1, and floor division keeps -1.
        return self.packing // self.branches.shape[2]


def _tree_rows(tree: Tree) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Returns the tokens and positions of each tree as one row: first the trunk, then its branches.

    The trunk is a prompt with its thinking (S tokens). The M branches are answers that continue the
    thinking from different points (A tokens each). The length of a row is T = S + M A, or T = S + F
    if `Tree.packing` selects only F of the branch tokens.
    """
    trunk, branches, context, packing, _ = tree
    chex.assert_rank([trunk, branches, context], [2, 3, 2])
    b, s = trunk.shape
    _, m, a = branches.shape
    branch_tokens = branches.reshape(b, m * a)
    branch_positions = (context[:, :, None] + jnp.arange(a)).reshape(b, m * a)
    if packing is not None:
        take = functools.partial(jnp.take_along_axis, indices=packing, axis=1, mode="clip")
        branch_tokens = take(branch_tokens)
        branch_positions = take(branch_positions)
    tokens = jnp.concatenate([trunk, branch_tokens], axis=1)
    trunk_positions = jnp.broadcast_to(jnp.arange(s), (b, s))
    positions = jnp.concatenate([trunk_positions, branch_positions], axis=1)
    return tokens, positions


def _listed_conditioned(conditioned: Conditioned, real: RealTokens) -> Conditioned:
    """Converts the budget embeddings of padded rows for use with a list of real tokens.

    The list is a single row of the U real (not padding) tokens of all rows. `Conditioned.index`
    selects the embedding of each token's original row.
    """
    mask = None
    if conditioned.mask is not None:
        mask = real.listed(conditioned.mask)
    num_rows = real.slot.shape[0]
    index = jax.nn.one_hot(real.row, num_rows)[None]
    phi = jnp.expand_dims(conditioned.phi, -3)
    return dataclasses.replace(conditioned, phi=phi, mask=mask, index=index)


def _with_branches_masked_in(conditioned: Conditioned, num_branch_tokens: int) -> Conditioned:
    """Extends the mask of a budget embedding from the trunk to the answers (branches).

    The embedding phi is always added to branch tokens, so their mask is True.
    """
    if conditioned.mask is None:
        return conditioned
    pad = ((0, 0), (0, num_branch_tokens))
    mask = jnp.pad(conditioned.mask, pad, constant_values=True)
    return dataclasses.replace(conditioned, mask=mask)


def _attend_list(
    tree: Tree, real: RealTokens, attend_rows: Callable[..., Array], compute: Compute
) -> Callable[..., Array]:
    """Returns the attention function for a list of the real (not padding) tokens of all rows.

    If possible, the attention is computed on the list, with a mask of the visible tokens. This
    requires XLA's attention, one device, no packed branches, and at most as many pairs of tokens as
    in the padded rows. Otherwise, the attention (and nothing else) is computed on padded rows.

    Args:
      attend_rows: attention function for padded rows.
    """
    one_device = compute.mesh is None or compute.mesh.size == 1
    takes_masks = compute.implementation == "xla" and one_device and tree.packing is None
    if takes_masks and real.has_fewer_pairs:
        visible = real.visible(tree.context, tree.trunk.shape[1])[None]
        return functools.partial(attention.masked_attention, visible=visible)

    def attend_spread(q: Array, k: Array, v: Array) -> Array:
        rows = attend_rows(real.spread(q), real.spread(k), real.spread(v))
        return real.listed(rows)

    return attend_spread


def tree_states(
    params: Params,
    tree: Tree,
    *,
    config: Qwen2Config,
    conditioned: Conditioned | None = None,
    real: RealTokens | None = None,
    compute: Compute = Compute(),
) -> Float[Array, "B T D"] | Float[Array, "1 U D"]:
    """Computes the final hidden states of token trees, with trunk and branches in one row.

    `forward_tree` returns the same states of the trunk (prompt and thinking) and the branches
    (answers) separately.

    Args:
      conditioned: budget embeddings of the rows, as in `forward_tree`.
      real: positions of the real (not padding) tokens. All layers are computed only for these
        tokens, except that attention may include padding. None computes the padded rows.

    Returns:
      The states of the padded rows [B, T, D], or of the list of U real tokens [1, U, D] if `real`
      is specified.
    """
    trunk_length = tree.trunk.shape[1]
    tokens, positions = _tree_rows(tree)
    if conditioned is not None:
        conditioned = _with_branches_masked_in(conditioned, tokens.shape[1] - trunk_length)
    attend: Callable[..., Array] = functools.partial(
        attention.tree_attention,
        context=tree.context,
        trunk_length=trunk_length,
        branch_of=tree.branch_of,
        implementation=compute.implementation,
        lengths=tree.lengths,
    )
    if real is not None:
        tokens = real.listed(tokens)
        positions = real.listed(positions)
        if conditioned is not None:
            conditioned = _listed_conditioned(conditioned, real)
        attend = _attend_list(tree, real, attend, compute)
    max_length = None
    if tree.branches.size:
        max_length = trunk_length + tree.branches.shape[2]
    return run_layers(
        params,
        tokens,
        positions,
        attend,
        config=config,
        conditioned=conditioned,
        length=max_length,
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
    """Runs prompts with their thinking (trunks) and all their answers (branches) in a single pass.

    The results are the same as for running each branch as a separate sequence trunk[:context] +
    branch. A row has S + M A tokens instead of about M (S + A).

    Args:
      conditioned: budget embedding phi(b) of each row, or None for a model without budget
        conditioning. A mask only covers the trunk, because phi is always added to branch tokens.

    Returns:
      Final hidden states of the trunk, and of the branches or packed branch tokens.
    """
    hidden = tree_states(params, tree, config=config, conditioned=conditioned, compute=compute)
    trunk_length = tree.trunk.shape[1]
    sizes = [trunk_length, hidden.shape[1] - trunk_length]
    trunk_states, branch_states = jax.lax.split(hidden, sizes, axis=1)
    shape = tree.branches.shape if tree.packing is None else tree.packing.shape
    return trunk_states, branch_states.reshape(*shape, hidden.shape[-1])
