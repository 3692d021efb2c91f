"""Computes the costs of a run: parameters, floating-point operations (FLOPs) and memory traffic.

All functions are pure functions of a `Workload` and a device mesh. The product of an [m, k] and a
[k, n] matrix takes 2 m k n FLOPs. Norms, activation functions and softmax are not counted, because
they take less than 1 % at these widths. XLA's cost analysis is not used, because it counts the body
of a loop only once, regardless of the number of iterations. `memory` computes peak memory, and
`seconds` computes durations.
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
    """Returns the number of parameters of the token embedding.

    The output head has the same number of parameters, unless it shares the embedding's parameters
    (tied embeddings).
    """
    return model.vocab_size * model.hidden_size


def module_parameters(work: Workload) -> int:
    """Returns the number of parameters of the budget module, or 0 without a budget module.

    The module has two [D, D] matrices, either shared by all layers or per layer, and a gate with D
    parameters per layer. D is the hidden size of the model.
    """
    if not work.conditioned:
        return 0
    width = work.model.hidden_size
    layers = work.model.num_layers
    copies = layers if work.config.conditioning.sharing == "per_layer" else 1
    matrices = 2 * copies * width * width
    gates = layers * width
    return matrices + gates


def policy_parameters(work: Workload) -> int:
    """Returns the number of parameters of the model, including its budget module."""
    return work.model.num_parameters + module_parameters(work)


def trained_parameters(work: Workload) -> int:
    """Returns the number of trained parameters.

    The budget module is always trained. If the run uses adapters, only the adapters are trained
    with it, otherwise the whole model.
    """
    return (work.adapters or work.model.num_parameters) + module_parameters(work)


def head_parameters(work: Workload) -> int:
    """Returns the number of parameters of the value head, or 0 without a value head.

    The value head maps input features to one hidden layer and then to a scalar.
    """
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
    """Returns the FLOPs per token of the weight matrices of all layers in a forward pass.

    Attention scores and the output head are not included.
    """
    return 2 * model.num_layers * model.layer_matrices


def attention_flops(work: Workload, batch: PlannedMicroBatch) -> float:
    """Returns the FLOPs of attention in a forward pass, for one trace and all layers.

    A fused causal kernel skips the half of the scores above the diagonal, whereas XLA's attention
    computes and then masks it. In both cases, the answers (branches) attend to the complete padded
    prompt and thinking (trunk).
    """
    computed_share = 0.5 if work.fused_attention else 1.0
    trunk_pairs = batch.trunk**2 * computed_share
    branch = batch.branches / max(work.cuts, 1)
    branch_pairs = batch.branches * (batch.trunk + branch)
    per_pair = 4 * work.model.num_heads * work.model.head_dim
    return work.model.num_layers * per_pair * (trunk_pairs + branch_pairs)


def output_flops_per_token(model: Qwen2Config) -> int:
    """Returns the FLOPs to compute the logits of one token."""
    return 2 * vocabulary_matrix(model)


def scored_tokens(work: Workload, batch: PlannedMicroBatch) -> float:
    """Returns the number of positions per trace for which the learner computes logits.

    These are the thinking and the answers, without the prompt and the forced tokens.
    """
    suffixes = batch.branches / work.branch * SUFFIX_TOKENS
    thinking = min(work.thinking, batch.trunk)
    return thinking + batch.branches - suffixes


def _parts_flops(work: Workload, batch: PlannedMicroBatch) -> tuple[float, float]:
    """Returns the FLOPs of a forward pass over a micro-batch for the layers and the output head.

    With `train.padding_free`, only attention is computed on padded traces (rows). A kernel that
    supports masks may instead compute attention between all tokens of the micro-batch, if this
    involves fewer pairs of tokens.
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
    """Returns the FLOPs of the learner's forward pass over a micro-batch."""
    layers, head = _parts_flops(work, batch)
    return layers + head


def train_flops(work: Workload, batch: PlannedMicroBatch) -> float:
    """Returns the FLOPs of the forward and backward pass over a micro-batch.

    A backward pass takes twice the FLOPs of a forward pass: half for the gradients of inputs and
    half for the gradients of weights, which frozen weights do not need. Full remat repeats the
    forward pass, and the output head is always recomputed. The small products of adapters are not
    counted.
    """
    layers, head = _parts_flops(work, batch)
    weights = 0 if work.adapters else 1
    recomputed = 1 if work.remat == "full" else 0
    return layers * (2 + weights + recomputed) + head * (3 + weights)


def _decode_flops(model: Qwen2Config, tokens: float, keys: float) -> float:
    """Returns the FLOPs to decode tokens.

    Args:
      model: the model's shape.
      tokens: number of tokens.
      keys: total number of keys that the tokens attend to, summed over the tokens.
    """
    attention = 4 * model.num_layers * model.num_heads * model.head_dim * keys
    per_token = forward_flops_per_token(model) + output_flops_per_token(model)
    return tokens * per_token + attention


def chunk_flops(work: Workload, chunk: DecodedChunk) -> float:
    """Returns the FLOPs of a chunk of decoding steps on all devices.

    All decoding slots, which contain one trace (row) each, compute one token per step. Only
    unfinished traces attend to keys.
    """
    return _decode_flops(work.model, chunk.steps * chunk.slots, float(chunk.live.sum()))


def answer_flops(work: Workload, rows: int, steps: int) -> float:
    """Returns the FLOPs of `steps` decoding steps for all answers of `rows` traces."""
    trunk_lengths = work.lengths.prompts + work.lengths.thinking
    keys = float(trunk_lengths.mean())
    return rows * steps * work.cuts * _decode_flops(work.model, 1, keys)


def prefill_flops(work: Workload, rows: int, width: int) -> float:
    """Returns the FLOPs to prefill `rows` prompts of `width` tokens, without logits."""
    model = work.model
    attention = 2 * model.num_layers * model.num_heads * model.head_dim * width**2
    return rows * (width * forward_flops_per_token(model) + attention)


def step_flops(work: Workload, planned: PlannedIteration) -> dict[str, float]:
    """Returns the FLOPs of one iteration on all devices, by phase.

    Padding and recomputation are included. The phases are "update", "score", "prefill" and
    "decode".
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
    """Returns the bytes of one token's keys and values in the KV cache, for all layers."""
    model = work.model
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * work.float_bytes


def decode_copy_bytes(work: Workload, layout: MeshShape) -> float:
    """Returns the bytes per device of the weights that are copied for decoding.

    The copy has the compute dtype. The budget module is not copied, because decoding reads its fp32
    master weights.
    """
    return work.model.num_parameters * work.float_bytes / layout.decode_tensor


def weight_bytes(work: Workload, layout: MeshShape) -> float:
    """Returns the bytes of weights that one device reads per decoding step.

    If the embedding is not tied to the output head, it is not counted, because only a few of its
    rows are read.
    """
    weights = work.model.num_parameters
    if not work.model.tie_embeddings:
        weights -= vocabulary_matrix(work.model)
    return weights * work.float_bytes / layout.decode_tensor


def logits_bytes(work: Workload, layout: MeshShape, rows: float) -> float:
    """Returns the bytes of fp32 logits that one device reads and writes per decoding step.

    The logits are written once, and the sampler reads them four times. `rows` is the number of
    sampled tokens on the device.
    """
    return rows * 5 * FP32 * work.model.vocab_size / layout.decode_tensor


def key_bytes(work: Workload, layout: MeshShape, queries: int = 1) -> float:
    """Returns the memory traffic in bytes per position of a KV cache in a decoding step.

    The key and the value of the position are read in all layers. XLA's attention also writes and
    reads attention scores: it writes them in fp32, reads them three times, and writes and reads
    them once in the compute dtype. It pads the queries that share a key/value head to a multiple of
    eight.

    Args:
      work: the sizes of the run.
      layout: the device mesh.
      queries: number of queries per trace that read the position, one for each answer of the trace.
    """
    model = work.model
    moved = kv_bytes_per_token(work)
    if not work.own_keys:
        group = math.ceil(queries * model.num_heads / model.num_kv_heads / 8) * 8
        per_score = 4 * FP32 + 2 * work.float_bytes
        moved += model.num_layers * model.num_kv_heads * group * per_score
    return moved / layout.decode_tensor


def chunk_bytes(work: Workload, layout: MeshShape, chunk: DecodedChunk) -> float:
    """Returns the memory traffic in bytes of the slowest device in a chunk of decoding steps."""
    rows = chunk.slots / layout.slot_shards
    per_step = weight_bytes(work, layout) + logits_bytes(work, layout, rows)
    if work.own_keys:
        keys = float(chunk.tiles.max(1).sum())
    else:
        keys = float(chunk.steps * rows * chunk.length)
    return chunk.steps * per_step + keys * key_bytes(work, layout)


def answer_positions(work: Workload, length: int) -> float:
    """Returns the number of cache positions that a trace's answers read per decoding step.

    With XLA's attention, all answers of a trace read the complete cache in a single pass. A kernel
    that reads only the valid positions of each trace makes one pass per answer, up to the position
    (cut) at which the answer's thinking is truncated. Cuts are assumed to be evenly spaced.

    Args:
      work: the sizes of the run.
      length: length of the cache in positions.
    """
    if not work.own_keys:
        return float(length)
    prompts = work.cuts * work.lengths.prompts.mean()
    thinking = (work.cuts + 1) / 2 * work.lengths.thinking.mean()
    return float(prompts + thinking)


def answer_bytes(work: Workload, layout: MeshShape, rows: int, length: int, steps: int) -> float:
    """Returns one device's memory traffic in bytes for decoding the answers of `rows` traces.

    Args:
      work: the sizes of the run.
      layout: the device mesh.
      rows: number of traces on all devices.
      length: length of the KV caches in positions.
      steps: number of decoding steps.
    """
    device_rows = rows / layout.slot_shards
    logits = logits_bytes(work, layout, device_rows * work.cuts)
    weights_and_logits = weight_bytes(work, layout) + logits
    positions = answer_positions(work, length)
    keys = device_rows * positions * key_bytes(work, layout, work.cuts)
    return steps * (weights_and_logits + keys)


def optimizer_bytes(work: Workload, layout: MeshShape) -> float:
    """Returns the bytes that an Adam step reads and writes on one device.

    They consist of master weights, two moments and gradients.
    """
    per_parameter = 3 * FP32 + 4 * work.moment_bytes
    return per_parameter * trained_parameters(work) / layout.param_shards


def _share_of_others(layout: MeshShape) -> float:
    """Returns the fraction of the parameters that a device receives when they are gathered."""
    return (layout.fsdp - 1) / layout.fsdp


def scored_gathered_bytes(work: Workload, layout: MeshShape) -> float:
    """Returns the bytes that one device receives from other FSDP shards to score a micro-batch.

    A forward pass gathers each layer once, in the compute dtype.
    """
    parameters = policy_parameters(work) / layout.tensor
    return _share_of_others(layout) * parameters * work.float_bytes


def gathered_bytes(work: Workload, layout: MeshShape) -> float:
    """Returns the bytes that one device receives from other FSDP shards to train a micro-batch.

    The layers are gathered in the compute dtype for the forward pass, and again for a backward pass
    with recomputation. Their gradients also have the compute dtype. The gradients of the embedding
    and the output head are sent in fp32.
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
    return _share_of_others(layout) * (gathers + gradients)


def copied_bytes(work: Workload, layout: MeshShape) -> float:
    """Returns the bytes that one device receives from other data-parallel replicas per update.

    The replicas sum the fp32 gradients of each shard with an all-reduce.
    """
    shard = trained_parameters(work) / layout.param_shards
    return 2 * FP32 * shard * (layout.data - 1) / layout.data


def decode_link_bytes(work: Workload, layout: MeshShape, rows: float) -> float:
    """Returns the bytes that one device receives from other devices per decoding step.

    Tensor parallelism needs two all-reduces per layer.

    Args:
      work: the sizes of the run.
      layout: the device mesh.
      rows: number of traces on the device.
    """
    shards = layout.decode_tensor
    array = rows * work.model.hidden_size * work.float_bytes
    return 2 * work.model.num_layers * array * 2 * (shards - 1) / shards
