"""Work and traffic of a run, against numbers worked out by hand and against XLA's count."""

import jax
import jax.numpy as jnp
import pytest

from bacr_jax.model import qwen2
from bacr_jax.model.sizes import PRESETS, Qwen2Config
from bacr_jax.planning import costs
from bacr_jax.planning.devices import DEVICES
from plan_world import mesh, workload

# Parameters of the released checkpoints.
SEVEN_B, FOURTEEN_B = 7_615_616_512, 14_770_033_664


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


def test_the_value_heads_count_is_that_of_its_arrays():
    from bacr_jax.model import value

    features = value.num_features(3584, conditioned=True, kind="trace_and_cut")
    make = lambda: value.init(jax.random.key(0), num_features=features, hidden_size=1024)
    arrays = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(make)))
    assert costs.head_parameters(workload()) == arrays
    assert costs.head_parameters(workload(value_hidden=0)) == 0


@pytest.mark.parametrize(("size", "bytes_per_token"), [("7b", 57_344), ("14b", 196_608)])
def test_keys_and_values_of_a_token(size, bytes_per_token):
    # 2 x 28 layers x 4 heads x 128 x 2 bytes; 2 x 48 x 8 x 128 x 2.
    assert costs.kv_bytes_per_token(workload(f"model.preset=qwen2.5-{size}")) == bytes_per_token


def test_products_of_a_7b_layer():
    # q and o 3584^2 each, k and v 3584 x 512 each, three matrices of 3584 x 18944.
    assert costs.layer_matrices(PRESETS["qwen2.5-7b"]) == 233_046_016
    assert costs.forward_flops_per_token(PRESETS["qwen2.5-7b"]) == 2 * 28 * 233_046_016


def test_a_causal_kernel_does_half_of_the_trunk():
    fused, plain = workload(cuts=1), workload(cuts=1, fused_attention=False)
    trunk = 4 * 28 * 28 * 128 * 5120**2
    assert costs.attention_flops(plain) - costs.attention_flops(fused) == trunk / 2


def test_remat_adds_a_forward_pass_of_the_layers():
    with_remat, without = workload(), workload("model.remat=none")
    head = costs.scored_tokens(without) * costs.output_flops_per_token(without.model)
    layers = costs.forward_flops(without) - head
    assert costs.train_flops(with_remat) - costs.train_flops(without) == pytest.approx(layers)


@pytest.mark.parametrize(("kv_heads", "tied"), [(4, False), (2, True)])
def test_the_forward_count_is_that_of_xla(kv_heads, tied):
    # Without a loop XLA counts everything; wide enough that norms and softmax hardly matter.
    shape = Qwen2Config(512, 256, 1024, 2, 4, kv_heads, 64, tie_embeddings=tied)
    work = workload(cuts=1, conditioned=False, value_hidden=0, fused_attention=False)
    import dataclasses

    work = dataclasses.replace(work, model=shape, prompt=16, thinking=96, answer=8)
    params = jax.eval_shape(lambda: qwen2.init(jax.random.key(0), shape))
    ids = lambda *size: jax.ShapeDtypeStruct(size, jnp.int32)

    def scores(params, trunk, branches, context):
        trunk, branch = qwen2.forward_tree(
            params, trunk, branches, context, config=shape, scan=False, remat="none"
        )
        return qwen2.logits(params, trunk[:, :96]), qwen2.logits(params, branch[:, :, :8])

    lowered = jax.jit(scores).lower(params, ids(1, 112), ids(1, 1, work.branch), ids(1, 1))
    assert costs.forward_flops(work) == pytest.approx(lowered.cost_analysis()["flops"], rel=0.05)


def test_a_step_is_the_sum_over_its_rows():
    one, two = workload("rollout.questions=32"), workload("rollout.questions=64")
    for phase, flops in costs.step_flops(two).items():
        assert flops == pytest.approx(2 * costs.step_flops(one)[phase])


def test_old_scores_are_only_computed_when_a_batch_is_used_twice():
    assert costs.step_flops(workload("train.minibatches=1"))["score"] == 0
    assert costs.step_flops(workload("train.minibatches=1", "loss.kl_coef=0.1"))["score"] > 0


def test_a_decoding_step_reads_the_weights_and_the_cache_of_its_rows():
    # 64 of 512 rows on a device; everything but the embedding's 152064 x 3584.
    weights = 2 * (SEVEN_B - 152_064 * 3584)
    read = costs.decode_step_bytes(workload(), mesh(), window=1000.0)
    assert read == weights + 64 * 1000 * 57_344


def test_one_device_sends_nothing():
    assert costs.gathered_bytes(workload(), mesh(fsdp=1)) == 0


def test_data_parallel_copies_send_gradients_only():
    # One micro-batch or many: the gradient of a shard goes round once, 4 bytes twice, half of it.
    params = costs.policy_parameters(workload())
    assert costs.gathered_bytes(workload(), mesh(data=2, fsdp=1)) == 4.0 * params


def test_faster_devices_are_faster_and_more_of_them_too():
    work = workload()
    total = lambda name, layout: sum(costs.step_seconds(work, layout, DEVICES[name]).values())
    eight, sixteen = mesh(), mesh(fsdp=16)
    assert total("h200", eight) < total("h100", eight) < total("a100-80", eight)
    assert total("a100-80", sixteen) < total("a100-80", eight)


def test_an_update_takes_its_operations_over_the_rate():
    work, device = workload("train.minibatches=1"), DEVICES["h100"]
    seconds = costs.step_seconds(work, mesh(fsdp=1), device)
    # Eight copies of an H100 would need an eighth; a single one all of it, and Adam on top.
    products = costs.step_flops(work)["update"] / (989e12 * costs.MATMUL_SHARE)
    adam = 28 * costs.policy_parameters(work) / (3350e9 * costs.BANDWIDTH_SHARE)
    assert seconds["update"] == pytest.approx(products + adam)
