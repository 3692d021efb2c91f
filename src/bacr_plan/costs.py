"""What a run costs, by arithmetic: parameters, floating-point operations, bytes of a step.

Pure functions of a `Workload` and a mesh. A product of [m, k] and [k, n] matrices is 2 m k n
operations; norms, activations and softmax are left out (below 1 % at these widths). Nothing here
asks XLA: its own cost analysis counts the body of a loop once, whatever the number of rounds.
Memory is in `memory`, seconds are in `seconds`.
"""

import math

from bacr_jax.model import value
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.parallel import MeshShape
from bacr_plan.schedule import Chunk, Iteration, Padded
from bacr_plan.workload import SUFFIX_TOKENS, Workload

FP32 = 4


# Parameters ---------------------------------------------------------------------------------------


def vocabulary_matrix(model: Qwen2Config) -> int:
    """Numbers in the embedding; the output head has as many, or is the same when tied."""
    return model.vocab_size * model.hidden_size


def module_parameters(work: Workload) -> int:
    """Numbers of the budget module: two [D, D] matrices and a gate per layer."""
    if not work.conditioned:
        return 0
    d, layers = work.model.hidden_size, work.model.num_layers
    copies = layers if work.config.conditioning.sharing == "per_layer" else 1
    return 2 * copies * d * d + layers * d


def policy_parameters(work: Workload) -> int:
    """Numbers of the model and its budget module."""
    return work.model.num_parameters + module_parameters(work)


def trained_parameters(work: Workload) -> int:
    """Numbers that an update changes: adapters and budget module beside a frozen base, or all."""
    return (work.adapters or work.model.num_parameters) + module_parameters(work)


def head_parameters(work: Workload) -> int:
    """Numbers of the value head: what it reads to one hidden layer to one value."""
    if not work.value_hidden:
        return 0
    width, kind = work.model.hidden_size, work.config.value.input
    features = value.num_features(width, conditioned=work.conditioned, kind=kind)
    return work.value_hidden * (features + 2) + 1


# Operations ---------------------------------------------------------------------------------------


def forward_flops_per_token(model: Qwen2Config) -> int:
    """Products with the matrices of all layers; neither attention nor output head."""
    return 2 * model.num_layers * model.layer_matrices


def attention_flops(work: Workload, made: Padded) -> float:
    """Scores and weighted values of one row's trunk and branches, all layers, forward.

    A fused causal kernel skips the half above the diagonal; XLA's own attention computes and masks
    it. Branches see the whole padded trunk in either case.
    """
    trunk = made.trunk**2 * (0.5 if work.fused_attention else 1.0)
    branches = made.branches * (made.trunk + made.branches / max(work.cuts, 1))
    per_pair = 4 * work.model.num_heads * work.model.head_dim
    return work.model.num_layers * per_pair * (trunk + branches)


def output_flops_per_token(model: Qwen2Config) -> int:
    """Scores of the vocabulary for one token."""
    return 2 * vocabulary_matrix(model)


def scored_tokens(work: Workload, made: Padded) -> float:
    """Positions of a row that go through the output head in the learner."""
    suffixes = made.branches / work.branch * SUFFIX_TOKENS
    return min(work.thinking, made.trunk) + made.branches - suffixes


def _parts_flops(work: Workload, made: Padded) -> tuple[float, float]:
    """The learner's forward pass over a micro-batch: layers, and output head.

    Of real tokens attention alone is computed on padded rows, or between all of the tokens where
    these are fewer pairs and the kernel takes masks.
    """
    attention = made.rows * attention_flops(work, made)
    scored = made.rows * scored_tokens(work, made)
    if made.tokens is not None:
        scored = made.tokens
        pairs = 4 * work.model.num_layers * work.model.num_heads * work.model.head_dim
        if not work.fused_attention:
            attention = min(attention, pairs * made.tokens**2)
    layers = made.positions * forward_flops_per_token(work.model) + attention
    return layers, scored * output_flops_per_token(work.model)


def forward_flops(work: Workload, made: Padded) -> float:
    """The learner's forward pass over a micro-batch."""
    layers, head = _parts_flops(work, made)
    return layers + head


def train_flops(work: Workload, made: Padded) -> float:
    """Forward and backward over a micro-batch: a backward pass is two forward ones.

    Full remat adds a third. The output head is recomputed in any case. A frozen matrix has no
    gradient of its own: one of the two backward products is left out, and the adapters' are small
    beside it.
    """
    layers, head = _parts_flops(work, made)
    weights = 0 if work.adapters else 1
    recomputed = 1 if work.remat == "full" else 0
    return layers * (2 + weights + recomputed) + head * (3 + weights)


def _decode_flops(model: Qwen2Config, tokens: float, keys: float) -> float:
    """Operations of sampled tokens that see so many keys, all of them together."""
    attention = 4 * model.num_layers * model.num_heads * model.head_dim * keys
    return tokens * (forward_flops_per_token(model) + output_flops_per_token(model)) + attention


def chunk_flops(work: Workload, chunk: Chunk) -> float:
    """Operations of a chunk of decoding, all devices: every slot's token, and live rows' keys."""
    return _decode_flops(work.model, chunk.steps * chunk.slots, float(chunk.live.sum()))


def answer_flops(work: Workload, rows: int, steps: int) -> float:
    """Operations of answers at every cut of so many rows, all devices."""
    at_end = float((work.lengths.prompts + work.lengths.thinking).mean())
    return rows * steps * work.cuts * _decode_flops(work.model, 1, at_end)


def prefill_flops(work: Workload, rows: int, width: int) -> float:
    """Operations of a prefill, all devices; one position of each row gets logits."""
    model = work.model
    attention = 2 * model.num_layers * model.num_heads * model.head_dim * width**2
    return rows * (width * forward_flops_per_token(model) + attention)


def step_flops(work: Workload, made: Iteration) -> dict[str, float]:
    """Operations of one iteration on all devices, by phase, padding and recomputation included."""
    parts = [one for update in made.updates for one in update]
    trunks = sum(chunk_flops(work, chunk) for chunk in made.rollout.chunks)
    answers = sum(answer_flops(work, rows, steps) for rows, _, steps in made.rollout.answers)
    return {
        "update": sum(train_flops(work, one) for one in parts),
        "score": work.scored * sum(forward_flops(work, one) for one in parts),
        "prefill": sum(prefill_flops(work, *one) for one in made.rollout.prefills),
        "decode": trunks + answers,
    }


# Bytes moved --------------------------------------------------------------------------------------


def kv_bytes_per_token(work: Workload) -> int:
    """Keys and values of one cached token, all layers."""
    model = work.model
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * work.float_bytes


def decode_copy_bytes(work: Workload, layout: MeshShape) -> float:
    """The decode copy on one device, compute type; the budget module stays with the masters."""
    return work.model.num_parameters * work.float_bytes / layout.decode_tensor


def weight_bytes(work: Workload, layout: MeshShape) -> float:
    """Bytes of weights that one device reads at a decoding step.

    Of an embedding that is not also the output head only a few rows are read.
    """
    read = work.model.num_parameters
    if not work.model.tie_embeddings:
        read -= vocabulary_matrix(work.model)
    return read * work.float_bytes / layout.decode_tensor


def logits_bytes(work: Workload, layout: MeshShape, rows: float) -> float:
    """Bytes of logits at a decoding step: written, then read by the sampler four times, fp32."""
    return rows * 5 * FP32 * work.model.vocab_size / layout.decode_tensor


def key_bytes(work: Workload, layout: MeshShape, queries: int = 1) -> float:
    """Bytes read for a position of the cache at a decoding step: its key and value, all layers.

    XLA's products also write scores in fp32, read them three times, and write and read them once in
    the compute type; queries that share a key/value head are padded to a multiple of eight.
    `queries` of a row read the position, one for each of its answers.
    """
    model = work.model
    read = kv_bytes_per_token(work)
    if not work.own_keys:
        group = math.ceil(queries * model.num_heads / model.num_kv_heads / 8) * 8
        each = 4 * FP32 + 2 * work.float_bytes
        read += model.num_layers * model.num_kv_heads * group * each
    return read / layout.decode_tensor


def chunk_bytes(work: Workload, layout: MeshShape, chunk: Chunk) -> float:
    """Bytes that the slowest device moves in a chunk of decoding."""
    rows = chunk.slots / layout.slot_shards
    fixed = weight_bytes(work, layout) + logits_bytes(work, layout, rows)
    window = float(chunk.steps * rows * chunk.length)
    keys = float(chunk.tiles.max(1).sum()) if work.own_keys else window
    return chunk.steps * fixed + keys * key_bytes(work, layout)


def answer_positions(work: Workload, length: int) -> float:
    """Positions of its trunk's cache that a row's answers read at a step, all of them together.

    In XLA's product all answers of a row are queries of one pass over the whole cache. Attention
    that is told lengths passes over it once for each answer, up to its cut; cuts lie evenly.
    """
    if not work.own_keys:
        return float(length)
    rows = work.lengths
    return float(work.cuts * rows.prompts.mean() + (work.cuts + 1) / 2 * rows.thinking.mean())


def answer_bytes(work: Workload, layout: MeshShape, rows: int, length: int, steps: int) -> float:
    """Bytes that one device moves while answers of so many rows are decoded."""
    mine = rows / layout.slot_shards
    fixed = weight_bytes(work, layout) + logits_bytes(work, layout, mine * work.cuts)
    positions = answer_positions(work, length)
    return steps * (fixed + mine * positions * key_bytes(work, layout, work.cuts))


def optimizer_bytes(work: Workload, layout: MeshShape) -> float:
    """Reads and writes of one Adam step on one device: master, two moments, and the gradient."""
    each = 3 * FP32 + 4 * work.moment_bytes
    return each * trained_parameters(work) / layout.param_shards


def gathered_bytes(work: Workload, layout: MeshShape) -> float:
    """Bytes that one device receives in a micro-batch: FSDP's gathers and its share of gradients.

    The layers are gathered in the compute type for the forward pass and once more for the
    recomputed backward one; their gradients travel in the compute type too, those of embedding and
    output head in fp32.
    """
    vocabulary = vocabulary_matrix(work.model) * (1 if work.model.tie_embeddings else 2)
    mine = policy_parameters(work) / layout.tensor
    own = (0 if work.adapters else vocabulary) / layout.tensor
    trained = trained_parameters(work) / layout.tensor
    others = (layout.fsdp - 1) / layout.fsdp
    gathers = mine * (1 if work.remat == "none" else 2) * work.float_bytes
    gradients = (trained - own) * work.float_bytes + own * FP32
    return others * (gathers + gradients)


def copied_bytes(work: Workload, layout: MeshShape) -> float:
    """Bytes that one device receives in an update from other copies: its shard's sum, in fp32."""
    shard = trained_parameters(work) / layout.param_shards
    return 2 * FP32 * shard * (layout.data - 1) / layout.data


def decode_link_bytes(work: Workload, layout: MeshShape, rows: float) -> float:
    """Bytes that one device receives at a decoding step with tensor shards: two sums a layer."""
    shards = layout.decode_tensor
    each = rows * work.model.hidden_size * work.float_bytes
    return 2 * work.model.num_layers * each * 2 * (shards - 1) / shards
