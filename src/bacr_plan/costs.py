"""Computes the costs of a run: parameters, floating-point operations, bytes moved in a step.

These are pure functions of a `Workload` and a mesh. A product of [m, k] and [k, n] matrices has
2 m k n operations; norms, activations and softmax are left out (below 1 % at these widths). XLA's
cost analysis is not used, because it counts the body of a loop once for any number of iterations.
Memory is in `memory`, seconds are in `seconds`.
"""

import math

from bacr_jax.model import value
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.parallel import MeshShape
from bacr_plan.schedule import DecodedChunk, PlannedIteration, PlannedMicroBatch
from bacr_plan.workload import SUFFIX_TOKENS, Workload

FP32 = 4


# Parameters ---------------------------------------------------------------------------------------


def vocabulary_matrix(model: Qwen2Config) -> int:
    """Returns the parameters of the embedding; the output head has as many, or is tied to it."""
    return model.vocab_size * model.hidden_size


def module_parameters(work: Workload) -> int:
    """Returns the parameters of the budget module: two [D, D] matrices and a gate per layer."""
    if not work.conditioned:
        return 0
    width = work.model.hidden_size
    layers = work.model.num_layers
    copies = layers if work.config.conditioning.sharing == "per_layer" else 1
    matrices = 2 * copies * width * width
    gates = layers * width
    return matrices + gates


def policy_parameters(work: Workload) -> int:
    """Returns the parameters of the model and of its budget module."""
    return work.model.num_parameters + module_parameters(work)


def trained_parameters(work: Workload) -> int:
    """Returns the parameters that an update changes: all, or adapters and budget module."""
    return (work.adapters or work.model.num_parameters) + module_parameters(work)


def head_parameters(work: Workload) -> int:
    """Returns the parameters of the value head: features, one hidden layer, one value."""
    if not work.value_hidden:
        return 0
    features = value.num_features(
        work.model.hidden_size,
        conditioned=work.conditioned,
        kind=work.config.value.input,
    )
    return work.value_hidden * (features + 2) + 1


# Operations ---------------------------------------------------------------------------------------


def forward_flops_per_token(model: Qwen2Config) -> int:
    """Returns the operations of a token in the matrices of all layers.

    Attention and the output head are not included.
    """
    return 2 * model.num_layers * model.layer_matrices


def attention_flops(work: Workload, batch: PlannedMicroBatch) -> float:
    """Returns the operations of attention for one row, all layers, forward pass.

    A fused causal kernel skips the half above the diagonal; XLA's attention computes and masks it.
    Branches attend to the whole padded trunk in either case.
    """
    computed_share = 0.5 if work.fused_attention else 1.0
    trunk_pairs = batch.trunk**2 * computed_share
    branch = batch.branches / max(work.cuts, 1)
    branch_pairs = batch.branches * (batch.trunk + branch)
    per_pair = 4 * work.model.num_heads * work.model.head_dim
    return work.model.num_layers * per_pair * (trunk_pairs + branch_pairs)


def output_flops_per_token(model: Qwen2Config) -> int:
    """Returns the operations of one token's logits."""
    return 2 * vocabulary_matrix(model)


def scored_tokens(work: Workload, batch: PlannedMicroBatch) -> float:
    """Returns the positions of a row that the learner computes logits for."""
    suffixes = batch.branches / work.branch * SUFFIX_TOKENS
    thinking = min(work.thinking, batch.trunk)
    return thinking + batch.branches - suffixes


def _parts_flops(work: Workload, batch: PlannedMicroBatch) -> tuple[float, float]:
    """Returns the operations of a forward pass over a micro-batch: layers, and output head.

    Without padding, only attention is computed on padded rows; or it is computed between all of the
    tokens, if these are fewer pairs and the kernel takes masks.
    """
    attention = batch.rows * attention_flops(work, batch)
    scored: float
    if batch.tokens is None:
        scored = batch.rows * scored_tokens(work, batch)
    else:
        scored = batch.tokens
        per_pair = 4 * work.model.num_layers * work.model.num_heads * work.model.head_dim
        if not work.fused_attention:
            attention = min(attention, per_pair * batch.tokens**2)
    layers = batch.positions * forward_flops_per_token(work.model) + attention
    head = scored * output_flops_per_token(work.model)
    return layers, head


def forward_flops(work: Workload, batch: PlannedMicroBatch) -> float:
    """Returns the operations of the learner's forward pass over a micro-batch."""
    layers, head = _parts_flops(work, batch)
    return layers + head


def train_flops(work: Workload, batch: PlannedMicroBatch) -> float:
    """Returns the operations of forward and backward pass over a micro-batch.

    A backward pass has twice the operations of a forward pass, and full remat adds one forward
    pass. The output head is always recomputed. A frozen matrix needs no gradient, so one of the two
    backward products is left out; the products of adapters are small in comparison.
    """
    layers, head = _parts_flops(work, batch)
    weights = 0 if work.adapters else 1
    recomputed = 1 if work.remat == "full" else 0
    return layers * (2 + weights + recomputed) + head * (3 + weights)


def _decode_flops(model: Qwen2Config, tokens: float, keys: float) -> float:
    """Returns the operations of decoding tokens.

    Args:
      keys: keys that all of the tokens together attend to.
    """
    attention = 4 * model.num_layers * model.num_heads * model.head_dim * keys
    per_token = forward_flops_per_token(model) + output_flops_per_token(model)
    return tokens * per_token + attention


def chunk_flops(work: Workload, chunk: DecodedChunk) -> float:
    """Returns the operations of a chunk of decoding, all devices.

    Every slot decodes a token; only unfinished rows have keys.
    """
    return _decode_flops(work.model, chunk.steps * chunk.slots, float(chunk.live.sum()))


def answer_flops(work: Workload, rows: int, steps: int) -> float:
    """Returns the operations of answers at every cut of so many rows, all devices."""
    trunk_lengths = work.lengths.prompts + work.lengths.thinking
    keys = float(trunk_lengths.mean())
    return rows * steps * work.cuts * _decode_flops(work.model, 1, keys)


def prefill_flops(work: Workload, rows: int, width: int) -> float:
    """Returns the operations of a prefill, all devices; logits are left out."""
    model = work.model
    attention = 2 * model.num_layers * model.num_heads * model.head_dim * width**2
    return rows * (width * forward_flops_per_token(model) + attention)


def step_flops(work: Workload, planned: PlannedIteration) -> dict[str, float]:
    """Returns the operations of one iteration on all devices, by phase.

    Padding and recomputation are included.
    """
    rollout = planned.rollout
    micro_batches = [batch for update in planned.updates for batch in update]
    trunks = sum(chunk_flops(work, chunk) for chunk in rollout.chunks)
    answers = sum(answer_flops(work, rows, steps) for rows, _, steps in rollout.answers)
    prefills = sum(prefill_flops(work, rows, width) for rows, width in rollout.prefills)
    forward = sum(forward_flops(work, batch) for batch in micro_batches)
    return {
        "update": sum(train_flops(work, batch) for batch in micro_batches),
        "score": work.scored * forward,
        "prefill": prefills,
        "decode": trunks + answers,
    }


# Bytes moved --------------------------------------------------------------------------------------


def kv_bytes_per_token(work: Workload) -> int:
    """Returns the bytes of the keys and values of one cached token, all layers."""
    model = work.model
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * work.float_bytes


def decode_copy_bytes(work: Workload, layout: MeshShape) -> float:
    """Returns the bytes of the decode copy on one device, compute type.

    The budget module has no copy; decoding reads the masters.
    """
    return work.model.num_parameters * work.float_bytes / layout.decode_tensor


def weight_bytes(work: Workload, layout: MeshShape) -> float:
    """Returns the bytes of weights that one device reads at a decoding step.

    Of an embedding that is not tied to the output head, only a few rows are read.
    """
    weights = work.model.num_parameters
    if not work.model.tie_embeddings:
        weights -= vocabulary_matrix(work.model)
    return weights * work.float_bytes / layout.decode_tensor


def logits_bytes(work: Workload, layout: MeshShape, rows: float) -> float:
    """Returns the bytes of logits moved at a decoding step, fp32.

    They are written once and read by the sampler four times.
    """
    return rows * 5 * FP32 * work.model.vocab_size / layout.decode_tensor


def key_bytes(work: Workload, layout: MeshShape, queries: int = 1) -> float:
    """Returns the bytes moved for a position of the cache at a decoding step, all layers.

    These are its key and value. XLA's products also write scores in fp32, read them three times,
    and write and read them once in the compute type; queries that share a key/value head are padded
    to a multiple of eight.

    Args:
      queries: queries of a row that read the position, one for each of its answers.
    """
    model = work.model
    moved = kv_bytes_per_token(work)
    if not work.own_keys:
        group = math.ceil(queries * model.num_heads / model.num_kv_heads / 8) * 8
        per_score = 4 * FP32 + 2 * work.float_bytes
        moved += model.num_layers * model.num_kv_heads * group * per_score
    return moved / layout.decode_tensor


def chunk_bytes(work: Workload, layout: MeshShape, chunk: DecodedChunk) -> float:
    """Returns the bytes that the slowest device moves in a chunk of decoding."""
    rows = chunk.slots / layout.slot_shards
    per_step = weight_bytes(work, layout) + logits_bytes(work, layout, rows)
    if work.own_keys:
        keys = float(chunk.tiles.max(1).sum())
    else:
        keys = float(chunk.steps * rows * chunk.length)
    return chunk.steps * per_step + keys * key_bytes(work, layout)


def answer_positions(work: Workload, length: int) -> float:
    """Returns the positions of a trunk's cache that all answers of a row together read at a step.

    In XLA's product all answers of a row are queries of one pass over the whole cache. Attention
    that reads the rows' lengths makes a pass for each answer, up to its cut. Cuts are assumed to be
    spaced evenly.

    Args:
      length: positions of the cache.
    """
    if not work.own_keys:
        return float(length)
    prompts = work.cuts * work.lengths.prompts.mean()
    thinking = (work.cuts + 1) / 2 * work.lengths.thinking.mean()
    return float(prompts + thinking)


def answer_bytes(work: Workload, layout: MeshShape, rows: int, length: int, steps: int) -> float:
    """Returns the bytes that one device moves while answers of so many rows are decoded.

    Args:
      length: positions of the caches.
    """
    device_rows = rows / layout.slot_shards
    logits = logits_bytes(work, layout, device_rows * work.cuts)
    weights_and_logits = weight_bytes(work, layout) + logits
    positions = answer_positions(work, length)
    keys = device_rows * positions * key_bytes(work, layout, work.cuts)
    return steps * (weights_and_logits + keys)


def optimizer_bytes(work: Workload, layout: MeshShape) -> float:
    """Returns the bytes that one Adam step moves on one device: master, moments, gradient."""
    per_parameter = 3 * FP32 + 4 * work.moment_bytes
    return per_parameter * trained_parameters(work) / layout.param_shards


def gathered_bytes(work: Workload, layout: MeshShape) -> float:
    """Returns the bytes that one device receives in a micro-batch from FSDP's other shards.

    The layers are gathered in the compute type for the forward pass, and again for a recomputed
    backward pass. Their gradients are sent in the compute type, too; gradients of embedding and
    output head are sent in fp32.
    """
    num_vocabulary_matrices = 1 if work.model.tie_embeddings else 2
    vocabulary = vocabulary_matrix(work.model) * num_vocabulary_matrices
    trained_vocabulary = 0 if work.adapters else vocabulary
    fp32_gradients = trained_vocabulary / layout.tensor
    parameters = policy_parameters(work) / layout.tensor
    trained = trained_parameters(work) / layout.tensor
    num_gathers = 1 if work.remat == "none" else 2
    gathers = parameters * num_gathers * work.float_bytes
    gradients = (trained - fp32_gradients) * work.float_bytes + fp32_gradients * FP32
    from_others = (layout.fsdp - 1) / layout.fsdp
    return from_others * (gathers + gradients)


def copied_bytes(work: Workload, layout: MeshShape) -> float:
    """Returns the bytes that one device receives from other copies in an update.

    It receives the sum of its shard's gradients, in fp32.
    """
    shard = trained_parameters(work) / layout.param_shards
    return 2 * FP32 * shard * (layout.data - 1) / layout.data


def decode_link_bytes(work: Workload, layout: MeshShape, rows: float) -> float:
    """Returns the bytes that one device receives at a decoding step: two sums a layer.

    Args:
      rows: rows on the device.
    """
    shards = layout.decode_tensor
    array = rows * work.model.hidden_size * work.float_bytes
    return 2 * work.model.num_layers * array * 2 * (shards - 1) / shards
