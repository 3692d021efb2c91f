"""Work and traffic of a run, against numbers worked out by hand and against XLA's count."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.model import qwen2
from bacr_jax.model.compute import Compute
from bacr_jax.model.sizes import PRESETS, Qwen2Config
from bacr_plan import costs, seconds
from bacr_plan.devices import DEVICES
from bacr_plan.lengths import Lengths
from bacr_plan.schedule import DecodedChunk, PlannedMicroBatch, Schedule
from plan_world import mesh, workload

# Parameters of the released checkpoints.
SEVEN_B, FOURTEEN_B = 7_615_616_512, 14_770_033_664
# A row of 1,024 + 4,096 tokens and four branches of 136.
WHOLE = PlannedMicroBatch(1, 5120, 544)


def test_the_released_counts_come_out():
    plain = workload(conditioned=False)
    assert costs.policy_parameters(plain) == SEVEN_B
    larger = workload("model.preset=qwen2.5-14b", conditioned=False)
    assert costs.policy_parameters(larger) == FOURTEEN_B


def test_the_budget_module_is_two_squares_and_a_gate_per_layer():
    assert costs.policy_parameters(workload()) == SEVEN_B + 2 * 3584**2 + 28 * 3584
    per_layer = workload("conditioning.sharing=per_layer")
    assert costs.policy_parameters(per_layer) == SEVEN_B + 28 * (2 * 3584**2 + 3584)


def test_the_budget_modules_count_is_that_of_its_arrays():
    shape = Qwen2Config(64, 16, 32, 3, 2, 1, 8)
    from bacr_jax.config import ConditioningConfig

    make = lambda: qwen2.init(jax.random.key(0), shape, conditioning=ConditioningConfig())
    arrays = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(make)))
    # 2 x 16^2 for the embedding, 3 x 16 for the gates.
    assert arrays == shape.num_parameters + 2 * 256 + 48


@pytest.mark.parametrize("kind", ["cut", "trace_and_cut"])
def test_the_value_heads_count_is_that_of_its_arrays(kind):
    from bacr_jax.model import value

    features = value.num_features(3584, conditioned=True, kind=kind)
    make = lambda: value.init(jax.random.key(0), num_features=features, hidden_size=1024)
    arrays = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(make)))
    assert costs.head_parameters(workload(f"value.input={kind}")) == arrays
    assert costs.head_parameters(workload(value_hidden=0)) == 0


@pytest.mark.parametrize(("size", "bytes_per_token"), [("7b", 57_344), ("14b", 196_608)])
def test_keys_and_values_of_a_token(size, bytes_per_token):
    # 2 x 28 layers x 4 heads x 128 x 2 bytes; 2 x 48 x 8 x 128 x 2.
    assert costs.kv_bytes_per_token(workload(f"model.preset=qwen2.5-{size}")) == bytes_per_token


def test_products_of_a_7b_layer():
    # q and o 3584^2 each, k and v 3584 x 512 each, three matrices of 3584 x 18944.
    assert PRESETS["qwen2.5-7b"].layer_matrices == 233_046_016
    assert costs.forward_flops_per_token(PRESETS["qwen2.5-7b"]) == 2 * 28 * 233_046_016


def test_a_causal_kernel_does_half_of_the_trunk():
    fused, plain = workload(), workload(fused_attention=False)
    trunk = 4 * 28 * 28 * 128 * 5120**2
    flops = lambda work: costs.attention_flops(work, WHOLE)
    assert flops(plain) - flops(fused) == trunk / 2


def test_branches_see_their_trunk_and_themselves():
    none, four = PlannedMicroBatch(1, 5120, 0), WHOLE
    flops = lambda made: costs.attention_flops(workload(), made)
    assert flops(four) - flops(none) == 4 * 28 * 28 * 128 * 4 * 136 * (5120 + 136)


def test_remat_adds_a_forward_pass_of_the_layers():
    with_remat, without = workload(), workload("model.remat=none")
    head = costs.scored_tokens(without, WHOLE) * costs.output_flops_per_token(without.model)
    # 4,096 thinking tokens and 128 of each of four answers.
    assert costs.scored_tokens(without, WHOLE) == 4096 + 4 * 128
    layers = costs.forward_flops(without, WHOLE) - head
    more = costs.train_flops(with_remat, WHOLE) - costs.train_flops(without, WHOLE)
    assert more == pytest.approx(layers)


@pytest.mark.parametrize(("kv_heads", "tied"), [(4, False), (2, True)])
def test_the_forward_count_is_that_of_xla(kv_heads, tied):
    # Without a loop XLA counts everything; wide enough that norms and softmax hardly matter.
    shape = Qwen2Config(512, 256, 1024, 2, 4, kv_heads, 64, tie_embeddings=tied)
    sizes = {"cuts": 1, "prompt": 16, "thinking": 96}
    off = {"conditioned": False, "value_hidden": 0, "fused_attention": False}
    work = workload("rollout.answer_tokens=8", **off, **sizes, model=shape)
    params = jax.eval_shape(lambda: qwen2.init(jax.random.key(0), shape))
    ids = lambda *size: jax.ShapeDtypeStruct(size, jnp.int32)

    def scores(params, trunk, branches, context):
        trunk, branch = qwen2.forward_tree(
            params,
            qwen2.Tree(trunk, branches, context),
            config=shape,
            compute=Compute(scan=False, remat="none"),
        )
        return qwen2.logits(params, trunk[:, :96]), qwen2.logits(params, branch[:, :, :8])

    lowered = jax.jit(scores).lower(params, ids(1, 112), ids(1, 1, work.branch), ids(1, 1))
    counted = lowered.cost_analysis()["flops"]
    made = PlannedMicroBatch(1, 112, work.branch)
    assert costs.forward_flops(work, made) == pytest.approx(counted, rel=0.05)


def phases(*overrides, layout=None, device="a100-80", **changed):
    work = workload(*overrides, **changed)
    return seconds.step_seconds(work, layout or mesh(), DEVICES[device])


def test_old_scores_are_only_computed_when_a_batch_is_used_twice():
    assert phases("train.minibatches=1")["score"] == 0
    assert phases("train.minibatches=1", "loss.kl_coef=0.1")["score"] > 0


def test_a_decoding_step_reads_the_weights_and_the_windows_of_its_rows():
    # 64 of 512 rows on a device; everything but the embedding's 152064 x 3584.
    work, weights = workload(own_keys=False), 2 * (SEVEN_B - 152_064 * 3584)
    live = np.full((16, 8), 100)
    moved = costs.chunk_bytes(work, mesh(), DecodedChunk(512, 1280, live, live))
    logits = 64 * 5 * 4 * 152_064
    # Scores of 4 x 8 query heads a layer, 22 bytes each: 31 % more than keys and values.
    position = 57_344 + 28 * 4 * 8 * (4 * 4 + 2 * 2)
    assert moved == 16 * (weights + logits + 64 * 1280 * position)


def test_rows_that_read_their_own_keys_wait_for_the_slowest_device():
    work, weights = workload(own_keys=True), 2 * (SEVEN_B - 152_064 * 3584)
    tiles = np.full((16, 8), 6400)
    tiles[:, 3] = 12_800
    moved = costs.chunk_bytes(work, mesh(), DecodedChunk(512, 5120, tiles, tiles))
    assert moved == 16 * (weights + 64 * 5 * 4 * 152_064 + 12_800 * 57_344)


def test_answers_of_a_row_read_its_cache_once():
    one, four = (workload("rollout.attention=xla", cuts=cuts) for cuts in (1, 4))
    assert costs.answer_positions(one, 1280) == costs.answer_positions(four, 1280) == 1280
    # Seven query heads share a key/value head: four answers are 28 queries, padded to 32.
    assert costs.key_bytes(four, mesh(), 4) == 57_344 + 28 * 4 * 32 * (4 * 4 + 2 * 2)


def test_answers_that_are_told_lengths_read_it_once_each_up_to_their_cut():
    work = workload(draw=lambda: Lengths(np.array([100]), np.array([400]), np.ones((1, 4))))
    assert work.own_keys and work.cuts == 4
    # Four prompts, and 100 + 200 + 300 + 400 thinking tokens.
    assert costs.answer_positions(work, 5120) == 4 * 100 + 1000


def test_one_device_sends_nothing():
    assert costs.gathered_bytes(workload(), mesh(fsdp=1)) == 0
    assert costs.scored_gathered_bytes(workload(), mesh(fsdp=1)) == 0


def test_scoring_gathers_every_weight_once():
    # All but an eighth, or all but a quarter of one of two tensor shards, 2 bytes each.
    params = costs.policy_parameters(workload())
    assert costs.scored_gathered_bytes(workload(), mesh()) == 7 / 8 * 2 * params
    assert costs.scored_gathered_bytes(workload(), mesh(fsdp=4, tensor=2)) == 3 / 4 * params


def test_gradients_travel_in_the_compute_type_but_those_of_the_vocabulary():
    # Each micro-batch: all but an eighth of two gathers and the gradients.
    params = costs.policy_parameters(workload())
    vocabulary = 2 * 152_064 * 3584
    by_hand = 7 / 8 * (2 * 2 * params + 2 * (params - vocabulary) + 4 * vocabulary)
    assert costs.gathered_bytes(workload(), mesh()) == by_hand


def test_data_parallel_copies_send_gradients_once_an_update():
    # Round once, both ways, half of it each, 4 bytes.
    two = mesh(data=2, fsdp=1)
    assert costs.copied_bytes(workload(), two) == 4.0 * costs.policy_parameters(workload())
    assert costs.gathered_bytes(workload(), two) == costs.copied_bytes(workload(), mesh()) == 0


def test_faster_devices_are_faster_and_more_of_them_too():
    total = lambda name, layout: sum(phases(device=name, layout=layout).values())
    eight, sixteen = mesh(), mesh(fsdp=16)
    assert total("h200", eight) < total("h100", eight) < total("a100-80", eight)
    assert total("a100-80", sixteen) < total("a100-80", eight)


def test_an_update_takes_its_operations_over_the_rate():
    work, device = workload("train.minibatches=1"), DEVICES["h100"]
    taken = seconds.step_seconds(work, mesh(fsdp=1), device)
    # 512 rows, all padded to the longest, and Adam on top.
    products = 512 * costs.train_flops(work, WHOLE) / (989e12 * 0.5)
    adam = 28 * costs.policy_parameters(work) / (3350e9 * 0.7)
    assert taken["update"] == pytest.approx(products + adam)


def test_a_decoding_step_takes_its_bytes_over_the_bandwidth():
    # 8 rows a device: too few for products to take longer.
    work, device = workload(own_keys=True, slots=64), DEVICES["a100-80"]
    keys = np.full((16, 8), 128)
    made = Schedule(chunks=[DecodedChunk(64, 5120, keys, keys)])
    taken = seconds.rollout_seconds(work, mesh(), device, made)["decode"]
    moved = costs.chunk_bytes(work, mesh(), made.chunks[0])
    assert taken == pytest.approx(moved / (2039e9 * 0.7))


def test_tensor_shards_read_a_part_of_the_weights_and_wait_for_sums():
    work, device = workload(own_keys=True, slots=64), DEVICES["a100-80"]
    keys = np.full((16, 2), 128)
    made = Schedule(chunks=[DecodedChunk(64, 5120, keys, keys)])
    four = mesh(decode_tensor=4)
    taken = seconds.rollout_seconds(work, four, device, made)["decode"]
    read = costs.chunk_bytes(work, four, made.chunks[0]) / (2039e9 * 0.7)
    # Two sums a layer: 20 microseconds, and 32 rows of 3,584 numbers round three of four.
    sent = 56 * 32 * 3584 * 2 * 2 * 3 / 4 / (300e9 * 0.7)
    assert taken == pytest.approx(read + 16 * (56 * 20e-6 + sent))


def test_an_evaluation_is_the_sum_of_its_calls():
    work = workload("eval.size=16", "rollout.slots=16")
    price = lambda *calls: seconds.evaluation_seconds(
        dataclasses.replace(work, evaluated=calls), mesh(), DEVICES["a100-80"]
    )
    few, many = (16, 512), (64, 512)
    assert price((few,), (many,)) == pytest.approx(price((few,)) + price((many,)))
    assert price(((16, 2048),)) > price((few,)) > 0
    # Slots that one part leaves empty are filled from the next.
    odd = (24, 512)
    assert price((odd, (8, 512))) < 0.8 * price((odd,), ((8, 512),))
    # Four sets at four budgets, greedily and sampled four times; held-out questions, greedily.
    of_set = tuple((n, b) for n in (16, 64) for b in (512, 1024, 2048, 4096))
    held_out = tuple((256, b) for b in (512, 1024, 2048, 4096))
    assert work.evaluated == ((of_set,) * 4 + (held_out,))
    # And the traces of a dense curve, greedy ones and sampled ones.
    dense = workload("eval.size=16", "rollout.slots=16", "eval.cut_every=512")
    curve = (of_set, ((16, 4096), (64, 4096))) * 4
    assert dense.evaluated == (*curve, held_out, ((256, 4096),))
    # Without evaluations on the way held-out questions choose nothing.
    assert workload("eval.size=16", "eval.every=null").evaluated == (of_set,) * 4
    # So many answers of each set: AIME has 30 problems, here 16, and GSM8K is asked greedily.
    each = "{math500: 4, gsm8k: 0, aime24: 8, minerva_math: 4}"
    own = workload("eval.size=16", "rollout.slots=16", f"eval.samples={each}")
    of = lambda samples: tuple((16 * n, b) for n in (1, *samples) for b in (512, 1024, 2048, 4096))
    expected = {"math500": of([4]), "gsm8k": of([]), "aime24": of([8]), "minerva_math": of([4])}
    sets = [spec.partition(":")[0] for spec in own.config.data.eval]
    assert own.evaluated == (*(expected[name] for name in sets), held_out)
    of_own = seconds.evaluation_seconds(own, mesh(), DEVICES["a100-80"])
    assert of_own == pytest.approx(price(*own.evaluated)) != price(*work.evaluated)


def test_many_rows_on_few_weights_take_their_products():
    work, device = workload(own_keys=True), DEVICES["a100-80"]
    keys = np.full((16, 2), 128)
    made = Schedule(chunks=[DecodedChunk(512, 5120, keys, keys)])
    four = mesh(decode_tensor=4)
    taken = seconds.rollout_seconds(work, four, device, made)["decode"]
    products = costs.chunk_flops(work, made.chunks[0]) / (8 * 312e12 * 0.5)
    assert costs.chunk_bytes(work, four, made.chunks[0]) / (2039e9 * 0.7) < products
    sent = 56 * 256 * 3584 * 2 * 2 * 3 / 4 / (300e9 * 0.7)
    assert taken == pytest.approx(products + 16 * (56 * 20e-6 + sent))
