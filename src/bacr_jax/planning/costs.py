"""What a run costs, by arithmetic: parameters, bytes moved, floating-point operations, seconds.

Pure functions of a `Workload` and a mesh. A product of [m, k] and [k, n] matrices is 2 m k n
operations; norms, activations and softmax are left out (below 1 % at these widths). Nothing here
asks XLA: its own cost analysis counts the body of a loop once, whatever the number of rounds.
Memory is in `memory`.
"""

import math

from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.parallel import MeshShape
from bacr_jax.planning.devices import Device
from bacr_jax.planning.workload import Workload

FP32 = 4

# Shares of the data-sheet ceilings that well-made programs of this kind reach: matrix products of
# a large remat + FSDP step, reads of weights and cache while decoding, collectives in a box.
# Assumptions, printed with every prediction, until they are measured.
MATMUL_SHARE = 0.45
BANDWIDTH_SHARE = 0.6
LINK_SHARE = 0.7


# Parameters ---------------------------------------------------------------------------------------


def layer_matrices(model: Qwen2Config) -> int:
    """Numbers in the matrices of one layer."""
    d, h = model.hidden_size, model.head_dim
    attention = (model.num_heads + 2 * model.num_kv_heads) * h * d + model.num_heads * h * d
    return attention + 3 * d * model.intermediate_size


def vocabulary_matrix(model: Qwen2Config) -> int:
    """Numbers in the embedding; the output head has as many, or is the same when tied."""
    return model.vocab_size * model.hidden_size


def module_parameters(work: Workload) -> int:
    """Numbers of the budget module: two [D, D] matrices and a gate per layer."""
    if not work.conditioned:
        return 0
    d, copies = work.model.hidden_size, work.model.num_layers if work.per_layer_phi else 1
    return 2 * copies * d * d + work.model.num_layers * d


def policy_parameters(work: Workload) -> int:
    """Numbers of the model and its budget module."""
    return work.model.num_parameters + module_parameters(work)


def trained_parameters(work: Workload) -> int:
    """Numbers that an update changes: adapters and budget module beside a frozen base, or all."""
    return (work.adapters or work.model.num_parameters) + module_parameters(work)


def head_parameters(work: Workload) -> int:
    """Numbers of the value head: [h_q, phi, two codes of 32] to one hidden layer to one value."""
    if not work.value_hidden:
        return 0
    features = work.model.hidden_size * (1 + work.conditioned) + 64
    return work.value_hidden * (features + 2) + 1


# Operations ---------------------------------------------------------------------------------------


def forward_flops_per_token(model: Qwen2Config) -> int:
    """Products with the matrices of all layers; neither attention nor output head."""
    return 2 * model.num_layers * layer_matrices(model)


def attention_flops(work: Workload) -> float:
    """Scores and weighted values of one row's trunk and branches, all layers, forward.

    A fused causal kernel skips the half above the diagonal; XLA's own attention computes and masks
    it. Branches see the whole padded trunk in either case.
    """
    trunk = work.padded_trunk**2 * (0.5 if work.fused_attention else 1.0)
    branches = work.cuts * work.branch * (work.padded_trunk + work.branch)
    per_pair = 4 * work.model.num_heads * work.model.head_dim
    return work.model.num_layers * per_pair * (trunk + branches)


def output_flops_per_token(model: Qwen2Config) -> int:
    """Scores of the vocabulary for one token."""
    return 2 * vocabulary_matrix(model)


def scored_tokens(work: Workload) -> float:
    """Tokens of a row that go through the output head in the learner."""
    return float(min(work.thinking, work.padded_trunk) + work.cuts * work.answer)


def forward_flops(work: Workload) -> float:
    """The learner's forward pass over one row."""
    layers = work.padded_tokens * forward_flops_per_token(work.model) + attention_flops(work)
    return layers + float(scored_tokens(work) * output_flops_per_token(work.model))


def train_flops(work: Workload) -> float:
    """Forward and backward over one row: a backward pass is two forward ones, full remat a third.

    The output head is recomputed in any case. A frozen matrix has no gradient of its own: one of
    the two backward products is left out, and the adapters' are small beside it.
    """
    layers = work.padded_tokens * forward_flops_per_token(work.model) + attention_flops(work)
    head = scored_tokens(work) * output_flops_per_token(work.model)
    weights = 0 if work.adapters else 1
    recomputed = 1 if work.remat == "full" else 0
    return layers * (2 + weights + recomputed) + head * (3 + weights)


def decode_flops_per_token(work: Workload, cache: float) -> float:
    """One token with `cache` earlier ones in the window."""
    model = work.model
    attention = 4 * model.num_layers * model.num_heads * model.head_dim * cache
    return forward_flops_per_token(model) + output_flops_per_token(model) + attention


def mean_window(work: Workload) -> float:
    """Cache positions that a decoding step reads, averaged over a trace of mean length."""
    return work.prompt + work.mean_thinking / 2


def step_flops(work: Workload) -> dict[str, float]:
    """Operations of one iteration on all devices, by phase, padding and recomputation included."""
    answers = work.rows * work.cuts * work.branch
    thinking = work.rows * work.mean_thinking
    layers = forward_flops_per_token(work.model)
    prefill_attention = (
        4 * work.model.num_layers * work.model.num_heads * work.model.head_dim * work.prompt**2 / 2
    )
    return {
        "update": work.rows * train_flops(work),
        "score": work.rows * work.scored * forward_flops(work),
        "prefill": work.rows * (work.prompt * layers + prefill_attention),
        "decode": thinking * decode_flops_per_token(work, mean_window(work))
        + answers * decode_flops_per_token(work, work.prompt + work.mean_thinking),
    }


# Bytes moved --------------------------------------------------------------------------------------


def kv_bytes_per_token(work: Workload) -> int:
    """Keys and values of one cached token, all layers."""
    model = work.model
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * work.float_bytes


def decode_copy_bytes(work: Workload, layout: MeshShape) -> float:
    """The decode copy on one device, compute type; the budget module stays with the masters.

    A sampler that reads a frozen base where it lies has a copy of the adapters alone.
    """
    copied = work.adapters if work.beside else work.model.num_parameters
    return copied * work.float_bytes / layout.decode_tensor


def decode_step_bytes(work: Workload, layout: MeshShape, window: float) -> float:
    """Bytes that one device reads to decode a token for each of its rows: weights and cache."""
    embedding = vocabulary_matrix(work.model) * work.float_bytes / layout.decode_tensor
    # Of an embedding that is not also the output head only a few rows are read.
    read = work.model.num_parameters + (work.adapters if work.beside else 0)
    weights = read * work.float_bytes / layout.decode_tensor
    weights -= 0 if work.model.tie_embeddings else embedding
    rows = math.ceil(work.slots / layout.slot_shards)
    return weights + rows * window * kv_bytes_per_token(work) / layout.decode_tensor


def decode_steps(work: Workload) -> tuple[float, float]:
    """Steps of an iteration for thinking and for answers, if slots are refilled when they end."""
    waves = work.rows / work.slots
    answers = float(math.ceil(waves) * work.branch)
    return max(waves * work.mean_thinking, work.longest_thinking), answers


def decode_bytes(work: Workload, layout: MeshShape) -> float:
    """Bytes that one device reads in an iteration's decoding."""
    thinking, answers = decode_steps(work)
    # M branches read the same trunk, and so M times its cache.
    cached = work.cuts * (work.prompt + work.mean_thinking)
    return thinking * decode_step_bytes(work, layout, mean_window(work)) + (
        answers * decode_step_bytes(work, layout, cached)
    )


def optimizer_bytes(work: Workload, layout: MeshShape) -> float:
    """Reads and writes of one Adam step on one device: master, two moments, and the gradient."""
    each = 3 * FP32 + 4 * work.moment_bytes
    return each * trained_parameters(work) / layout.param_shards


def gathered_bytes(work: Workload, layout: MeshShape) -> float:
    """Bytes that one device receives in an update: FSDP's gathers and its share of the gradients.

    Per micro-batch the layers are gathered in the compute type for the forward pass and once more
    for the recomputed backward one; gradients travel in fp32. Data-parallel copies add one
    all-reduce of the shard.
    """
    tokens = work.update_rows * work.padded_tokens
    micro_batches = math.ceil(tokens / (work.micro_rows * work.row_tokens))
    mine, trained = (n(work) / layout.tensor for n in (policy_parameters, trained_parameters))
    others = (layout.fsdp - 1) / layout.fsdp
    gathers = mine * (1 if work.remat == "none" else 2) * work.float_bytes
    per_micro_batch = others * (gathers + trained * FP32)
    copies = 2 * FP32 * trained / layout.fsdp * (layout.data - 1) / layout.data
    return micro_batches * per_micro_batch + copies


# Seconds ------------------------------------------------------------------------------------------


def step_seconds(work: Workload, layout: MeshShape, device: Device) -> dict[str, float]:
    """Predicted seconds of one iteration by phase, from the device's ceilings; grading left out.

    Products and collectives of the learner are added, not overlapped. Tensor parallelism inside a
    layer is taken as free.
    """
    flops = step_flops(work)
    rate = device.matmul_flops * MATMUL_SHARE * (1.0 if work.float_bytes == 2 else 0.5)
    bandwidth = device.memory_bandwidth * BANDWIDTH_SHARE
    links = device.link_bandwidth * LINK_SHARE
    compute = {name: count / layout.num_devices / rate for name, count in flops.items()}
    update = work.minibatches * (
        gathered_bytes(work, layout) / links + optimizer_bytes(work, layout) / bandwidth
    )
    return {
        "update": compute["update"] + update,
        "score": compute["score"],
        "prefill": compute["prefill"],
        "decode": max(decode_bytes(work, layout) / bandwidth, compute["decode"]),
    }
