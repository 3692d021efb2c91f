"""Bytes on one device in each phase of an iteration, by arithmetic.

What is resident (masters, moments, decode copy, cache) follows from shapes alone. Temporaries are
modelled by what must be alive at the worst moment of the update and of a decoding step; the
factors in front of it were read off XLA's buffer assignments for A100 and are checked against
whole compiles (`tests/planning/test_against_xla.py`).
"""

import dataclasses
import math
from dataclasses import dataclass

from bacr_jax.model.compute import Remat
from bacr_jax.parallel import MeshShape
from bacr_plan import costs
from bacr_plan.costs import FP32
from bacr_plan.workload import Workload


@dataclass(frozen=True)
class MemoryPhase:
    """Bytes on one device during a phase.

    Attributes:
      resident: of the train state, which is there in every phase.
      own: arguments of the phase's program that are not part of the train state.
    """

    resident: float
    temporaries: float
    own: float = 0.0

    @property
    def peak(self) -> float:
        """Bytes at the worst moment."""
        return self.peak_with(1.0)

    def peak_with(self, factor: float) -> float:
        """The same with so many times the temporaries, where a compiler knows them better."""
        return self.resident + self.own + factor * self.temporaries


def parameter_bytes(work: Workload, layout: MeshShape) -> float:
    """Masters of what is trained, fp32."""
    return FP32 * costs.trained_parameters(work) / layout.param_shards


def state_parts(work: Workload, layout: MeshShape) -> dict[str, float]:
    """The train state by what is in it: masters, the reference policy if kept, two moments.

    Beside these the value head with its own moments, whole on every device, and the frozen base of
    adapters in its own type, which is the reference's too.
    """
    parameters = parameter_bytes(work, layout)
    return {
        "parameters": parameters,
        "reference": parameters if work.config.loss.kl_coef > 0 else 0.0,
        "optimizer": 2 * work.moment_bytes * costs.trained_parameters(work) / layout.param_shards,
        "value_head": 3.0 * FP32 * costs.head_parameters(work),
        "frozen_base": work.frozen_bytes * work.model.num_parameters / layout.param_shards,
    }


def state_bytes(work: Workload, layout: MeshShape) -> float:
    """The train state."""
    return sum(state_parts(work, layout).values())


def bounded_update_bytes(work: Workload, layout: MeshShape) -> float:
    """Copy of the trained parameters from before an update (optimizer.max_update_kl), or 0."""
    bounded = work.config.optimizer.max_update_kl is not None
    return parameter_bytes(work, layout) if bounded else 0.0


def host_snapshot_bytes(work: Workload) -> float:
    """Host memory of the state from before an update (train.undo_*), over all hosts, or 0.

    Trained parameters, two moments, and the value head with its moments. Data-parallel copies on
    one host share it.
    """
    train = work.config.train
    if train.undo_closed_answers is None and train.undo_filled_budgets is None:
        return 0.0
    parameters = (FP32 + 2 * work.moment_bytes) * costs.trained_parameters(work)
    return parameters + 3.0 * FP32 * costs.head_parameters(work)


def attention_scores(work: Workload, layout: MeshShape, rows: int) -> float:
    """One fp32 array of scores, one layer: of all branches over their trunks, and of the trunks.

    A fused kernel never makes those of the trunks. Under train.padding_free the tokens of `rows`
    full rows come from up to twice as many, and attention is between all of the tokens where
    these are fewer pairs and the kernel takes masks.
    """
    heads = work.model.num_heads / layout.tensor
    real = work.config.train.padding_free
    padded = 2 * rows if real else rows
    trunks = 0.0 if work.fused_attention else padded * heads * work.trunk**2 * FP32
    scores = padded * heads * work.cuts * work.branch * work.trunk * FP32 + trunks
    if real and not work.fused_attention:
        scores = min(scores, heads * (rows * work.row_tokens) ** 2 * FP32)
    return scores


def saved_activations(work: Workload, layout: MeshShape, rows: int) -> float:
    """What the forward pass keeps for the backward one: with full remat the input of every layer.

    Selective remat also keeps what matrix products made (`model.block.PRODUCTS`): q, k, v, the
    attention's output with two fp32 numbers a head, the stream between attention and MLP, gate, up,
    and the stream before the budget's gate.

    Without remat: norms, q, k, v, attention, its output and the residual stream; gate, up, their
    product, and silu's insides in fp32; scores of attention in both types and their mask.
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


def layer_working_set(work: Workload, layout: MeshShape, rows: int) -> float:
    """The inside of one layer during its backward pass, and its weights.

    Of the MLP: gate, up, silu, their product and a cotangent; of attention the scores, their
    exponentials in both types and the mask; half a dozen arrays as wide as the residual stream.
    This layer's weights and the next one's are gathered, and this layer's gradient, in fp32, is on
    its way to its shards. A frozen layer has none, and one that is whole here is not gathered.
    """
    model = work.model
    tokens = rows * work.row_tokens
    mlp = 5 * tokens * model.intermediate_size * work.float_bytes / layout.tensor
    stream = 6 * tokens * model.hidden_size * work.float_bytes
    scores = 3.25 * attention_scores(work, layout, rows)
    each = 2.0 * work.float_bytes + FP32
    if work.adapters:
        in_place = layout.fsdp == 1 and work.frozen_bytes == work.float_bytes
        each = 0.0 if in_place else 2.0 * work.float_bytes
    weights = model.layer_matrices / layout.tensor * each
    return mlp + stream + scores + weights


def output_working_set(work: Workload, layout: MeshShape, *, backward: bool) -> float:
    """The output head, gathered, and one chunk of scores with what becomes of it."""
    head = costs.vocabulary_matrix(work.model) / layout.tensor
    # A chunk is of no more tokens than there are.
    tokens = math.ceil(work.micro_rows / layout.row_shards) * work.row_tokens
    scored = min(work.config.model.logprob_chunk, tokens)
    chunk = scored * work.model.vocab_size / layout.tensor * FP32
    gradient = FP32 if backward and not work.adapters else 0
    return head * (work.float_bytes + gradient) + (3 if backward else 2) * chunk


def gradient_bytes(work: Workload, layout: MeshShape) -> float:
    """Gradients, fp32: one micro-batch's, and the sum of those before it."""
    accumulates = work.by_tokens or work.update_rows > work.micro_rows
    return parameter_bytes(work, layout) * (2 if accumulates else 1)


def update_phase(work: Workload, layout: MeshShape) -> MemoryPhase:
    """One update: gradients over micro-batches, then Adam.

    With several micro-batches in one program XLA casts the masters once, outside their loop, and
    keeps that copy.
    """
    rows = math.ceil(work.micro_rows / layout.row_shards)
    kept = gradient_bytes(work, layout)
    if work.update_rows > work.micro_rows and not work.by_tokens:
        kept += parameter_bytes(work, layout) * work.float_bytes / FP32
    alive = max(
        layer_working_set(work, layout, rows), output_working_set(work, layout, backward=True)
    )
    kept += saved_activations(work, layout, rows)
    copy = bounded_update_bytes(work, layout)
    return MemoryPhase(state_bytes(work, layout), kept + alive, copy)


def warmup_phases(work: Workload, layout: MeshShape) -> dict[str, MemoryPhase]:
    """The supervised warm-up before the first iteration: a step, and its accuracy measured.

    Its state is all weights in fp32 with two moments. Where a style decides its end, a copy of the
    state is trained beside it. Empty without a warm-up.
    """
    warmup = work.warmup
    if warmup is None:
        return {}
    copies = 1 if work.config.warmup.style is None else 2
    state = copies * state_bytes(warmup, layout)
    phases = {"warmup": dataclasses.replace(update_phase(warmup, layout), resident=state)}
    if work.evaluated:
        measured = rollout_phase(work.evaluation, layout)
        phases["warmup_accuracy"] = dataclasses.replace(measured, resident=state)
    return phases


def least_remat(work: Workload, layout: MeshShape, limit: float, temporaries: float = 1.0) -> Remat:
    """The model.remat that recomputes least among those whose update fits; full if none does.

    `limit`: bytes of a device that may be used; `temporaries`: factor of the update's.
    """
    for remat in ("none", "selective"):
        phase = update_phase(dataclasses.replace(work, remat=remat), layout)
        if phase.peak_with(temporaries) <= limit:
            return remat
    return "full"


def score_phase(work: Workload, layout: MeshShape) -> MemoryPhase:
    """The forward pass over a micro-batch; nothing without scoring."""
    if not work.scored:
        return MemoryPhase(state_bytes(work, layout), 0.0)
    model = work.model
    rows = math.ceil(work.micro_rows / layout.row_shards)
    tokens = rows * work.row_tokens
    mlp = 3 * tokens * model.intermediate_size * work.float_bytes / layout.tensor
    stream = tokens * model.hidden_size * work.float_bytes
    scores = 2 * attention_scores(work, layout, rows)
    weights = model.layer_matrices / layout.tensor * work.float_bytes
    alive = max(mlp, scores) + weights + output_working_set(work, layout, backward=False)
    copy = bounded_update_bytes(work, layout)
    return MemoryPhase(state_bytes(work, layout), stream + alive, copy)


def _cache_bytes(work: Workload, layout: MeshShape, tokens: int) -> float:
    """Keys and values of so many tokens of every slot of one device."""
    rows = math.ceil(work.slots / layout.slot_shards)
    return rows * tokens * costs.kv_bytes_per_token(work) / layout.decode_tensor


def trunk_cache_bytes(work: Workload, layout: MeshShape) -> float:
    """Keys and values of the trunks one device decodes."""
    return _cache_bytes(work, layout, work.trunk)


def answer_cache_bytes(work: Workload, layout: MeshShape) -> float:
    """Keys and values beside those of the trunks while answers are decoded.

    With a slot for every row all branches are decoded at once and read the trunks where they are.
    Where slots are refilled, up to half of them are answered at a time, on copies of their trunks;
    a larger share if `rollout.refill` says so, and of all slots no copy is made.
    """
    branches = _cache_bytes(work, layout, work.cuts * work.branch)
    if work.slots >= work.rows:
        return branches
    share = max(0.5, work.config.rollout.refill % 1)
    return max(branches, (trunk_cache_bytes(work, layout) + branches) * share)


def kv_cache_bytes(work: Workload, layout: MeshShape) -> float:
    """All keys and values of one device at the worst moment."""
    return trunk_cache_bytes(work, layout) + answer_cache_bytes(work, layout)


def decode_temporaries(work: Workload, layout: MeshShape) -> float:
    """A decoding step: a few arrays of scores of the vocabulary, and of attention's scores."""
    rows = math.ceil(work.slots / layout.slot_shards)
    heads = work.model.num_heads / layout.decode_tensor
    return rows * FP32 * (5 * work.model.vocab_size + 3 * heads * work.trunk)


def prefill_bytes(work: Workload, layout: MeshShape) -> float:
    """Caches and temporaries while the first prompts enter, all slots at once.

    The caches have a quarter of their length by then; the prompts' own are copied into them.
    """
    rows = math.ceil(work.slots / layout.slot_shards)
    entering = _cache_bytes(work, layout, max(work.trunk // 4, work.prompt) + work.prompt)
    mlp = 3 * work.model.intermediate_size / layout.decode_tensor
    return entering + rows * work.prompt * work.float_bytes * (mlp + 4 * work.model.hidden_size)


def rollout_phase(work: Workload, layout: MeshShape) -> MemoryPhase:
    """Decoding with every slot in use, the train state waiting beside it.

    That of an evaluation is `rollout_phase(work.evaluation, layout)`.
    """
    cache = kv_cache_bytes(work, layout)
    beside = max(decode_temporaries(work, layout), prefill_bytes(work, layout) - cache)
    own = costs.decode_copy_bytes(work, layout) + cache
    return MemoryPhase(state_bytes(work, layout), beside, own)
