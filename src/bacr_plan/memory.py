"""Computes the memory per device in each phase of an iteration with analytical formulas.

The sizes of permanent arrays (master weights, optimizer moments, weights for decoding and KV cache)
follow from their shapes. Temporaries are the arrays that must exist at the same time at the peak of
an update or of a decoding step. Their factors were derived from XLA's buffer assignments for A100.
`tests/planning/test_against_xla.py` compares them with compiled programs.
"""

import dataclasses
import math
from dataclasses import dataclass

from bacr_jax.model.compute import Remat
from bacr_jax.parallel import MeshShape
from bacr_jax.rollout.scheduler import smallest_at_least
from bacr_plan import costs, schedule
from bacr_plan.costs import FP32
from bacr_plan.workload import Workload


@dataclass(frozen=True)
class MemoryPhase:
    """Memory per device during a phase, in bytes.

    Attributes:
      resident: size of the train state, which exists in every phase.
      temporaries: maximum total size of the temporary arrays.
      own: size of other arrays that exist during the whole phase, such as the KV cache.
    """

    resident: float
    temporaries: float
    own: float = 0.0

    @property
    def peak(self) -> float:
        """Returns the peak memory in bytes."""
        return self.peak_with(1.0)

    def peak_with(self, factor: float) -> float:
        """Returns the peak memory in bytes, with the temporaries multiplied by `factor`.

        The factor is the ratio of the compiled program's temporaries to the analytical prediction.
        """
        return self.resident + self.own + factor * self.temporaries


def parameter_bytes(work: Workload, layout: MeshShape) -> float:
    """Returns the bytes per device of the fp32 master weights of all trained parameters."""
    return FP32 * costs.trained_parameters(work) / layout.param_shards


def state_parts(work: Workload, layout: MeshShape) -> dict[str, float]:
    """Returns the bytes per device of each part of the train state.

    The value head and its two moments are replicated on every device. If adapters are trained, the
    policy and the reference policy share the frozen base weights, which are counted once.
    """
    parameters = parameter_bytes(work, layout)
    moments = 2 * work.moment_bytes * costs.trained_parameters(work)
    frozen = work.frozen_bytes * work.model.num_parameters
    reference = 0.0
    if work.config.loss.kl_coef > 0:
        reference += parameters
    if work.config.distill.teacher is not None:
        # A distillation teacher is counted as a second policy of the same size, which shares no
        # weights with the trained policy.
        reference += parameters + frozen / layout.param_shards
    return {
        "parameters": parameters,
        "reference": reference,
        "optimizer": moments / layout.param_shards,
        "value_head": 3.0 * FP32 * costs.head_parameters(work),
        "frozen_base": frozen / layout.param_shards,
    }


def state_bytes(work: Workload, layout: MeshShape) -> float:
    """Returns the bytes per device of the train state."""
    parts = state_parts(work, layout)
    return sum(parts.values())


def bounded_update_bytes(work: Workload, layout: MeshShape) -> float:
    """Returns the bytes per device of the parameters that optimizer.max_update_kl stores, or 0."""
    bounded = work.config.optimizer.max_update_kl is not None
    return parameter_bytes(work, layout) if bounded else 0.0


def host_snapshot_bytes(work: Workload) -> float:
    """Returns the bytes of host memory for the snapshot of the state before an update.

    The options train.undo_* restore this snapshot to undo an update. It contains the trained
    parameters, their two moments, and the value head with its moments. Data-parallel replicas on
    the same host share it. Returns 0 if none of these options is set.
    """
    train = work.config.train
    if train.undo_closed_answers is None and train.undo_filled_budgets is None:
        return 0.0
    parameters = (FP32 + 2 * work.moment_bytes) * costs.trained_parameters(work)
    return parameters + 3.0 * FP32 * costs.head_parameters(work)


def micro_batch_rows(work: Workload, layout: MeshShape) -> float:
    """Returns the size of a device's part of a micro-batch, in traces with the maximum length.

    The number is a fraction if micro-batches are formed by tokens.
    """
    rest_rows = work.rest_tokens / work.row_tokens
    return math.ceil(work.micro_rows / layout.row_shards) + rest_rows / layout.row_shards


def attention_scores(work: Workload, layout: MeshShape, rows: float) -> float:
    """Returns the bytes of the fp32 attention scores of one layer.

    A trace (row) has a trunk (its prompt and thinking) and branches (its answers). The result
    contains the scores between branches and trunks and, without a fused kernel, the scores within
    trunks. With `train.padding_free`, the tokens of `rows` full traces may come from up to twice as
    many traces. A kernel that supports masks then computes attention between all tokens, if this
    involves fewer pairs.

    Args:
      work: the sizes of the run.
      layout: the device mesh.
      rows: number of full traces on one device, which can be a fraction.
    """
    heads = work.model.num_heads / layout.tensor
    padding_free = work.config.train.padding_free
    padded_rows = 2 * rows if padding_free else rows
    branch_tokens = work.cuts * work.branch
    scores = padded_rows * heads * branch_tokens * work.trunk * FP32
    if work.fused_attention:
        return scores
    scores += padded_rows * heads * work.trunk**2 * FP32
    if padding_free:
        tokens = rows * work.row_tokens
        scores = min(scores, heads * tokens**2 * FP32)
    return scores


def saved_activations(work: Workload, layout: MeshShape, rows: float) -> float:
    """Returns the bytes of activations that the forward pass stores for the backward pass.

    Full remat stores only the input of every layer. Selective remat also stores the results of
    matrix products (`model.block.PRODUCTS`): q, k, v, the attention output with two fp32 numbers
    per head, the residual stream between attention and MLP, gate, up, and the residual stream
    before the budget gate.

    Without remat, the stored arrays are the norms, q, k, v, attention, its output, the residual
    stream, gate, up, their product, the fp32 intermediate results of silu, and the attention scores
    in both dtypes with their mask.
    """
    model = work.model
    tokens = rows * work.row_tokens
    if work.remat == "full":
        return float(model.num_layers * tokens * model.hidden_size * work.float_bytes)
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    if work.remat == "selective":
        split = (heads + 2 * model.intermediate_size) * work.float_bytes
        split += 2 * model.num_heads * FP32
        stream = (2 + work.conditioned) * model.hidden_size * work.float_bytes
        return model.num_layers * tokens * (stream + split / layout.tensor)
    width = 6 * model.hidden_size + (heads + 6 * model.intermediate_size) / layout.tensor
    scores = 2.25 * attention_scores(work, layout, rows)
    return model.num_layers * (tokens * width * work.float_bytes + scores)


def layer_working_set(work: Workload, layout: MeshShape, rows: float) -> float:
    """Returns the bytes of one layer's temporaries and weights during its backward pass.

    The MLP needs gate, up, silu, their product and one cotangent. Attention needs the scores, their
    exponentials in both dtypes and the mask. Another six arrays have the width of the residual
    stream. The weights of this layer and of the next one are gathered while this layer's fp32
    gradient is sent to its shards. A frozen layer has no gradient, and a layer that is not sharded
    is not gathered.
    """
    model = work.model
    tokens = rows * work.row_tokens
    mlp = 5 * tokens * model.intermediate_size * work.float_bytes / layout.tensor
    stream = 6 * tokens * model.hidden_size * work.float_bytes
    scores = 3.25 * attention_scores(work, layout, rows)
    bytes_per_weight = 2.0 * work.float_bytes + FP32
    if work.adapters:
        in_place = layout.fsdp == 1 and work.frozen_bytes == work.float_bytes
        bytes_per_weight = 0.0 if in_place else 2.0 * work.float_bytes
    weights = model.layer_matrices / layout.tensor * bytes_per_weight
    return mlp + stream + scores + weights


def output_working_set(work: Workload, layout: MeshShape, *, backward: bool) -> float:
    """Returns the bytes per device of the gathered output head and one chunk of logits.

    Args:
      work: the sizes of the run.
      layout: the device mesh.
      backward: True for a pass with gradients. It stores one more array of logits and, unless only
        adapters are trained, the gradient of the output head.
    """
    head = costs.vocabulary_matrix(work.model) / layout.tensor
    tokens = micro_batch_rows(work, layout) * work.row_tokens
    # A chunk cannot have more tokens than the micro-batch.
    chunk_tokens = min(work.config.model.logprob_chunk, tokens)
    logits = chunk_tokens * work.model.vocab_size / layout.tensor * FP32
    has_gradient = backward and not work.adapters
    gradient = FP32 if has_gradient else 0
    arrays_of_logits = 3 if backward else 2
    return head * (work.float_bytes + gradient) + arrays_of_logits * logits


def gradient_bytes(work: Workload, layout: MeshShape) -> float:
    """Returns the bytes per device of the fp32 gradients.

    With several micro-batches, the gradients of the current micro-batch and the accumulated
    gradients exist at the same time.
    """
    accumulates = work.by_tokens or work.update_rows > work.micro_rows
    return parameter_bytes(work, layout) * (2 if accumulates else 1)


def update_phase(work: Workload, layout: MeshShape) -> MemoryPhase:
    """Returns the memory of an update, which accumulates gradients and then applies Adam.

    If one program processes several micro-batches, XLA converts the master weights to the compute
    dtype once, before the loop, and stores the result.
    """
    rows = micro_batch_rows(work, layout)
    stored = gradient_bytes(work, layout)
    if work.update_rows > work.micro_rows and not work.by_tokens:
        stored += parameter_bytes(work, layout) * work.float_bytes / FP32
    stored += saved_activations(work, layout, rows)
    working_set = max(
        layer_working_set(work, layout, rows),
        output_working_set(work, layout, backward=True),
    )
    copy = bounded_update_bytes(work, layout)
    return MemoryPhase(state_bytes(work, layout), stored + working_set, copy)


def warmup_phases(work: Workload, layout: MeshShape) -> dict[str, MemoryPhase]:
    """Returns the memory of the two phases of the supervised warm-up: training and evaluation.

    The state consists of all weights in fp32 with two moments. If `warmup.style` is set, a second
    copy of the state is trained at the same time.

    Returns:
      A dict with the phase "warmup" (a training step) and, if the warm-up may measure an accuracy,
      the phase "warmup_accuracy". Empty without a warm-up.
    """
    warmup = work.warmup
    if warmup is None:
        return {}
    copies = 1 if work.config.warmup.style is None else 2
    state = copies * state_bytes(warmup, layout)
    step = update_phase(warmup, layout)
    phases = {"warmup": dataclasses.replace(step, resident=state)}
    if work.evaluated and work.measures_warmup:
        measurement = rollout_phase(work.evaluation, layout)
        phases["warmup_accuracy"] = dataclasses.replace(measurement, resident=state)
    return phases


def least_remat(work: Workload, layout: MeshShape, limit: float, temporaries: float) -> Remat:
    """Returns the setting of model.remat with the least recomputation that fits into memory.

    Returns "full" if no other setting fits, without checking that "full" fits.

    Args:
      work: the sizes of the run.
      layout: the device mesh.
      limit: number of bytes that may be used per device.
      temporaries: factor for the size of temporaries, determined by compilation.
    """
    for remat in ("none", "selective"):
        changed = dataclasses.replace(work, remat=remat)
        phase = update_phase(changed, layout)
        if phase.peak_with(temporaries) <= limit:
            return remat
    return "full"


def score_phase(work: Workload, layout: MeshShape) -> MemoryPhase:
    """Returns the memory of computing the log-probabilities of a micro-batch without gradients.

    The temporaries are 0 if the run never does this.
    """
    if not work.scored:
        return MemoryPhase(state_bytes(work, layout), 0.0)
    model = work.model
    rows = micro_batch_rows(work, layout)
    tokens = rows * work.row_tokens
    mlp = 3 * tokens * model.intermediate_size * work.float_bytes / layout.tensor
    stream = tokens * model.hidden_size * work.float_bytes
    scores = 2 * attention_scores(work, layout, rows)
    weights = model.layer_matrices / layout.tensor * work.float_bytes
    head = output_working_set(work, layout, backward=False)
    working_set = max(mlp, scores) + weights + head
    copy = bounded_update_bytes(work, layout)
    return MemoryPhase(state_bytes(work, layout), stream + working_set, copy)


def _cache_bytes(work: Workload, layout: MeshShape, tokens: int) -> float:
    """Returns the bytes of the keys and values of `tokens` tokens per trace on one device."""
    rows = math.ceil(work.slots / layout.slot_shards)
    return rows * tokens * costs.kv_bytes_per_token(work) / layout.decode_tensor


def trunk_cache_bytes(work: Workload, layout: MeshShape) -> float:
    """Returns the bytes of the keys and values of prompts and thinking on one device."""
    return _cache_bytes(work, layout, work.trunk)


def answer_cache_bytes(work: Workload, layout: MeshShape) -> float:
    """Returns the bytes of keys and values on one device that are added to decode answers.

    If every trace has a decoding slot, all answers are decoded at once and read the cache of prompt
    and thinking (trunk) in place. If slots are refilled, up to half of the slots (or the fraction
    `rollout.refill`, if larger) are answered at a time, with copies of their trunks.
    """
    branches = _cache_bytes(work, layout, work.cuts * work.branch)
    if work.slots >= work.rows:
        return branches
    share = max(0.5, work.config.rollout.refill % 1)
    return max(branches, (trunk_cache_bytes(work, layout) + branches) * share)


def kv_cache_bytes(work: Workload, layout: MeshShape) -> float:
    """Returns the peak bytes of keys and values on one device."""
    return trunk_cache_bytes(work, layout) + answer_cache_bytes(work, layout)


def decode_temporaries(work: Workload, layout: MeshShape) -> float:
    """Returns the bytes of a decoding step's temporaries on one device.

    These are five arrays of logits and three arrays of attention scores, all in fp32.
    """
    rows = math.ceil(work.slots / layout.slot_shards)
    heads = work.model.num_heads / layout.decode_tensor
    return rows * FP32 * (5 * work.model.vocab_size + 3 * heads * work.trunk)


def first_cache_length(work: Workload, layout: MeshShape) -> int:
    """Returns the number of positions per trace in the caches when slots get their first prompts.

    It is the smallest of the `rollout.windows` possible lengths that contains a prompt and the
    first chunk of thinking.
    """
    needed = min(work.prompt + work.config.rollout.chunk, work.trunk)
    lengths = schedule.rollout_spec(work, layout).cache_lengths(work.prompt)
    return smallest_at_least(lengths, needed)


def prefill_bytes(work: Workload, layout: MeshShape) -> float:
    """Returns one device's bytes of caches and temporaries while all slots get their first prompts.

    The keys and values of the prompts are computed in separate caches and then copied.
    """
    rows = math.ceil(work.slots / layout.slot_shards)
    entering = _cache_bytes(work, layout, first_cache_length(work, layout) + work.prompt)
    mlp = 3 * work.model.intermediate_size / layout.decode_tensor
    return entering + rows * work.prompt * work.float_bytes * (mlp + 4 * work.model.hidden_size)


def rollout_phase(work: Workload, layout: MeshShape) -> MemoryPhase:
    """Returns the memory of decoding with a trace in every slot, including the train state.

    Pass `work.evaluation` to get the memory of an evaluation.
    """
    cache = kv_cache_bytes(work, layout)
    temporaries = max(
        decode_temporaries(work, layout),
        prefill_bytes(work, layout) - cache,
    )
    return MemoryPhase(
        resident=state_bytes(work, layout),
        temporaries=temporaries,
        own=costs.decode_copy_bytes(work, layout) + cache,
    )
