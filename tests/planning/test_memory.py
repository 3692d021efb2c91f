"""Memory of a run: what is resident by hand, and how it moves with devices and portions."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bacr_jax.config import io as config_io
from bacr_jax.config.shipped import locate
from bacr_plan import costs, memory
from bacr_plan.workload import sizes_of
from plan_world import mesh, workload

SEVEN_B = 7_615_616_512
POLICY = SEVEN_B + 2 * 3584**2 + 28 * 3584


def test_masters_and_moments_are_twelve_bytes_a_parameter_over_the_shards():
    plain = workload(value_hidden=0)
    assert memory.state_bytes(plain, mesh(fsdp=8)) == 12 * POLICY / 8
    assert memory.state_bytes(plain, mesh(fsdp=4, tensor=2)) == 12 * POLICY / 8
    assert memory.state_bytes(plain, mesh(data=2, fsdp=4)) == 12 * POLICY / 4


def test_a_reference_policy_is_four_bytes_more():
    plain = workload("loss.kl_coef=0.1", value_hidden=0)
    assert memory.state_bytes(plain, mesh()) == 16 * POLICY / 8


def test_a_teacher_is_one_more_policy_unless_it_is_the_policy_itself():
    plain = workload(value_hidden=0)
    folder = workload("distill.coef=1", "distill.teacher=folder", value_hidden=0)
    assert memory.state_bytes(folder, mesh()) == 16 * POLICY / 8
    itself = workload("distill.coef=1", value_hidden=0)
    assert memory.state_bytes(itself, mesh()) == 12 * POLICY / 8
    assert folder.scored == itself.scored == plain.scored + 1


def test_a_bounded_update_keeps_the_parameters_from_before_it_and_scores_64_traces_again():
    plain, bounded = workload(), workload("optimizer.max_update_kl=0.01")
    update_rows = plain.rows // plain.config.train.minibatches
    assert update_rows > 64
    assert bounded.scored == pytest.approx(plain.scored + 64 / update_rows)
    difference = memory.update_phase(bounded, mesh()).peak - memory.update_phase(plain, mesh()).peak
    assert difference == 4 * POLICY / 8
    assert memory.rollout_phase(bounded, mesh()).peak == memory.rollout_phase(plain, mesh()).peak
    assert memory.bounded_update_bytes(plain, mesh()) == 0.0


def test_of_adapters_a_bounded_update_keeps_the_adapters_alone():
    bounded = workload("optimizer.max_update_kl=0.01", adapters=10**6, frozen_bytes=2)
    trained = costs.trained_parameters(bounded)
    assert trained < POLICY / 100
    assert memory.bounded_update_bytes(bounded, mesh()) == 4 * trained / 8


def test_the_state_that_may_come_back_is_in_host_memory():
    plain = workload(value_hidden=0)
    watched = workload("train.undo_closed_answers=0.9", value_hidden=0)
    assert memory.host_snapshot_bytes(plain) == 0.0
    # Parameters and two moments, of all shards.
    assert memory.host_snapshot_bytes(watched) == 12 * POLICY
    assert memory.update_phase(watched, mesh()).peak == memory.update_phase(plain, mesh()).peak


def test_accumulation_keeps_a_second_gradient():
    one = workload("rollout.questions=4", "train.micro_batch_rows=16")
    many = workload("train.micro_batch_rows=16")
    assert memory.gradient_bytes(one, mesh()) == 4 * POLICY / 8
    assert memory.gradient_bytes(many, mesh()) == 8 * POLICY / 8


def test_remat_keeps_the_input_of_every_layer():
    # 2 rows of 5120 + 4 x (8 + 128) tokens, 28 layers of 3584 numbers of 2 bytes.
    saved = memory.saved_activations(workload(), mesh(), 2)
    assert saved == 2 * 5664 * 28 * 3584 * 2


def test_selective_remat_keeps_what_products_made():
    # q, attention, the stream twice and before the gate; k and v; gate and up; 2 x 28 statistics.
    saved = memory.saved_activations(workload("model.remat=selective"), mesh(), 2)
    assert saved == 2 * 5664 * 28 * (2 * (5 * 3584 + 2 * 512 + 2 * 18944) + 4 * 2 * 28)
    # The two tensor shards of a layer hold half of the heads and of the MLP each.
    split = memory.saved_activations(workload("model.remat=selective"), mesh(fsdp=4, tensor=2), 2)
    assert saved - split == 5664 * 28 * (2 * (2 * 3584 + 2 * 512 + 2 * 18944) + 4 * 2 * 28)


def test_the_least_that_fits_is_recomputed():
    peak = lambda remat: memory.update_phase(workload(f"model.remat={remat}"), mesh()).peak
    choice = lambda limit: memory.least_remat(workload(), mesh(), limit, temporaries=1.0)
    assert choice(peak("none")) == "none"
    assert choice(peak("none") - 1) == choice(peak("selective")) == "selective"
    assert choice(peak("selective") - 1) == choice(0.0) == "full"


def test_the_cache_holds_trunks_and_branches_of_the_rows_of_a_device():
    assert memory.trunk_cache_bytes(workload(), mesh()) == 64 * 5120 * 57_344
    assert memory.answer_cache_bytes(workload(), mesh()) == 64 * 544 * 57_344
    # Two devices share the heads of twice the rows.
    assert memory.kv_cache_bytes(workload(), mesh(decode_tensor=2)) == 64 * 5664 * 57_344


def test_refilled_slots_are_answered_on_copies_of_half_of_the_trunks():
    half = workload("rollout.slots=256")
    assert memory.answer_cache_bytes(half, mesh()) == 32 * (5120 + 544) / 2 * 57_344
    more = workload("rollout.slots=256", "rollout.refill=0.75")
    assert memory.answer_cache_bytes(more, mesh()) == 24 * (5120 + 544) * 57_344


@pytest.mark.parametrize("prompt", [16, 1024, 4096])
@pytest.mark.parametrize("windows", [1, 2, 3, 4, 7, 64])
def test_prompts_enter_caches_of_the_first_length_that_contains_them(windows, prompt):
    work = workload(f"rollout.windows={windows}", prompt=prompt)
    # The caches have room for 1, 2, ... of `windows` equal parts of a trunk, rounded up.
    lengths = [math.ceil(work.trunk * part / windows) for part in range(1, windows + 1)]
    length = next(n for n in lengths if n >= prompt + work.config.rollout.chunk)
    assert memory.first_cache_length(work, mesh()) == length
    beyond_caches = memory.prefill_bytes(work, mesh()) - 64 * (length + prompt) * 57_344
    # What the prompts need besides the caches does not depend on their length.
    assert beyond_caches == pytest.approx(64 * prompt * 2 * (3 * 18_944 + 4 * 3584))


def test_the_cache_has_room_for_the_longest_evaluation():
    longer = workload("eval.budgets=[8192]")
    assert memory.trunk_cache_bytes(longer, mesh()) == 64 * (1024 + 4096) * 57_344
    evaluation = longer.evaluation
    assert memory.trunk_cache_bytes(evaluation, mesh()) == 64 * (1024 + 8192) * 57_344


def test_an_evaluation_refills_its_slots_and_answers_once():
    """Its rows are more than the slots, however many the slots of training are."""
    evaluation = workload("eval.slots=1024").evaluation
    assert (evaluation.slots, evaluation.rows) == (1024, 10_000)
    # 128 rows a device; copies of half of them, with one answer of 136 tokens for each.
    trunks, answer = 128 * 5120 * 57_344, 128 * 136 * 57_344
    assert memory.kv_cache_bytes(evaluation, mesh()) == trunks + (trunks + answer) / 2
    assert workload("rollout.slots=256").evaluation.slots == 256
    # A dense trace is answered at every 512 tokens, at eight places at once.
    dense = workload("eval.cut_every=512").evaluation
    assert memory.answer_cache_bytes(dense, mesh()) == (64 * (5120 + 8 * 136) * 57_344) / 2


def test_a_decode_copy_is_two_bytes_a_parameter():
    assert costs.decode_copy_bytes(workload(), mesh()) == 2 * SEVEN_B
    assert costs.decode_copy_bytes(workload(), mesh(decode_tensor=4)) == SEVEN_B / 2


def test_naive_attention_stores_the_scores_of_the_trunk():
    fused = memory.attention_scores(workload(), mesh(), 1)
    assert fused == 28 * 544 * 5120 * 4
    plain = workload(fused_attention=False)
    assert memory.attention_scores(plain, mesh(), 1) == fused + 28 * 5120**2 * 4


PHASES = (memory.update_phase, memory.score_phase, memory.rollout_phase)


@pytest.mark.parametrize("phase", PHASES)
@settings(max_examples=15)
@given(shards=st.sampled_from([1, 2, 4, 8, 16]), tensor=st.sampled_from([1, 2, 4]))
def test_more_devices_need_less_each(phase, shards, tensor):
    work = workload()
    fewer, more = mesh(fsdp=shards, tensor=tensor), mesh(fsdp=2 * shards, tensor=tensor)
    assert phase(work, more).peak < phase(work, fewer).peak


@settings(max_examples=4)
@given(rows=st.sampled_from([8, 16, 32, 64]))
def test_larger_micro_batches_need_more(rows):
    work = workload()
    peak = lambda rows: memory.update_phase(dataclasses.replace(work, micro_rows=rows), mesh()).peak
    assert peak(rows) < peak(2 * rows)


@given(slots=st.integers(1, 62))
@settings(max_examples=10)
def test_more_refilled_slots_need_more(slots):
    work = workload()
    peak = lambda slots: memory.rollout_phase(dataclasses.replace(work, slots=slots), mesh()).peak
    assert peak(8 * slots) < peak(8 * slots + 8)


def test_keeping_all_activations_needs_more_than_recomputing_them():
    needs = lambda *keys: memory.update_phase(workload(*keys), mesh()).peak
    assert needs("model.remat=none") > 2 * needs("model.remat=full")


WARMUP = ("warmup.steps=500", "warmup.batch_tokens=65536")


def test_a_warm_up_keeps_all_weights_and_two_moments_in_float32():
    """Also of a run that trains adapters, or keeps its moments in 16 bits."""
    for keys in ((), ("adapter.rank=16",), ("optimizer.moment_dtype=bfloat16",)):
        phases = memory.warmup_phases(workload(*WARMUP, *keys), mesh())
        assert {phase.resident for phase in phases.values()} == {12 * SEVEN_B / 8}
        # Gradients of all weights, and what one batch of 65,536 tokens or less keeps.
        step = phases["warmup"]
        rows = 65_536 // (1024 + 4096 + 8 + 128)
        kept = math.ceil(rows / 8) * (1024 + 4096 + 8 + 128) * 28 * 3584 * 2
        assert step.temporaries > 4 * SEVEN_B / 8 + kept
    adapters = workload(*WARMUP, "adapter.rank=16")
    largest = max(phase.peak for phase in memory.warmup_phases(adapters, mesh()).values())
    assert largest > 2 * memory.update_phase(adapters, mesh()).peak


def test_a_warm_up_that_ends_by_a_style_trains_a_copy_beside():
    keys = ("warmup.style=steps", "data.ledger.variant=redundant")
    one = memory.warmup_phases(workload(*WARMUP), mesh())["warmup"]
    two = memory.warmup_phases(workload(*WARMUP, *keys), mesh())["warmup"]
    assert two.resident == 2 * one.resident


def test_a_warm_up_is_no_phase_of_a_run_without_one():
    assert memory.warmup_phases(workload(), mesh()) == {}


def test_rows_of_real_tokens_are_attended_in_up_to_twice_as_many_rows():
    work = workload(fused_attention=False)
    plain, real = (work.by_real_tokens(90624, padding_free=free) for free in (False, True))
    one = mesh(fsdp=1)
    assert memory.attention_scores(real, one, 8) == 2 * memory.attention_scores(plain, one, 8)
    # Between all 5,664 tokens of one full row there are fewer pairs than in two padded rows.
    assert memory.attention_scores(real, one, 1) == 28 * 5664**2 * 4


@pytest.mark.parametrize("keys", [(), ("train.padding_free=true",)])
def test_memory_is_planned_for_all_tokens_of_a_micro_batch(keys):
    """One token less than two longest traces: two shorter traces fill the micro-batch as well."""
    config = config_io.load([locate("r1-distill-1.5b-math")], keys)
    row_tokens = sizes_of(config, 1)[0].row_tokens
    temporaries = {"update": [], "score": []}
    for tokens in (row_tokens, 2 * row_tokens - 1, 2 * row_tokens):
        changed = config_io.override(config, [f"train.micro_batch_tokens={tokens}"])
        work, layout = sizes_of(changed, 1)
        temporaries["update"].append(memory.update_phase(work, layout).temporaries)
        temporaries["score"].append(memory.score_phase(work, layout).temporaries)
    for one_row, nearly_two, two in temporaries.values():
        assert one_row < nearly_two == pytest.approx(two, rel=1e-3) or two == 0


def test_a_suggested_micro_batch_is_as_large_as_its_traces():
    config = config_io.load([locate("r1-distill-1.5b-math")], ())
    work, layout = sizes_of(config, 1)
    assert work.rest_tokens == config.train.micro_batch_tokens - 2 * work.row_tokens > 0
    assert 2.0 < memory.micro_batch_rows(work, layout) < 3.0
    exact = work.with_micro_rows(2)
    assert memory.micro_batch_rows(exact, layout) == 2.0
    assert exact.micro_batch(2) == {"train.micro_batch_tokens": 2 * work.row_tokens}
