"""Low-rank adapters: exact where they are zero, and the same model merged or as PEFT's."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bacr_jax.config import AdapterConfig, ConditioningConfig, OptimizerConfig
from bacr_jax.errors import UserError
from bacr_jax.export import policy_folder
from bacr_jax.learner import train_step as steps
from bacr_jax.learner.objective import Minibatch, loss_normalizers
from bacr_jax.learner.optimizer import keep_moments, policy_optimizer
from bacr_jax.learner.train_step import init_state, train_step
from bacr_jax.model import adapters, kv_cache
from bacr_jax.model.compute import Compute
from bacr_jax.model.hf import peft
from bacr_jax.model.hf.hf_config import BudgetModule
from bacr_jax.model.qwen2 import forward, logits
from hf_world import TINY, random_params
from learner_world import RULES, SPEC, WORLD, make_batch_by_hand

SETTINGS = AdapterConfig(rank=3, alpha=6.0, targets=("q", "v", "o", "down"))
TOKENS = jnp.asarray(np.random.default_rng(3).integers(0, TINY.vocab_size, (2, 7)))

gradients = jax.jit(steps.gradients, static_argnames="spec")


def make_adapters(config=TINY, settings=SETTINGS, seed=1, zero=False):
    fresh = adapters.init(jax.random.key(seed), config, settings)
    if not zero:
        rng = np.random.default_rng(seed)
        fresh["adapter"] = jax.tree.map(
            lambda x: jnp.asarray(0.3 * rng.standard_normal(x.shape, np.float32)), fresh["adapter"]
        )
    return fresh


BASE = random_params()
ADAPTED = {**BASE, **make_adapters()}


@functools.partial(jax.jit, static_argnames="compute")
def logits_of(params, compute):
    return logits(params, forward(params, TOKENS, config=TINY, compute=compute))


def scores(params, **how):
    return logits_of(params, Compute(**how))


decode_params = jax.jit(
    functools.partial(kv_cache.decode_params, dtype=jnp.float32, conditioned=False)
)


def test_fresh_adapters_change_no_bit():
    fresh = {**BASE, **make_adapters(zero=True)}
    for scan in (True, False):
        np.testing.assert_array_equal(scores(fresh, scan=scan), scores(BASE, scan=scan))
    jax.tree.map(np.testing.assert_array_equal, decode_params(fresh), decode_params(BASE))


def test_a_matrix_by_hand():
    kernel = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    params = {
        "adapter": {"q_a": jnp.array([[1.0], [2.0]]), "q_b": jnp.array([[10.0, -1.0]])},
        "adapter_scale": jnp.float32(0.5),
    }
    scaled = adapters.scaled(params)
    # A (0.5 B) = [[1], [2]] [[5, -0.5]]
    expected = np.array([[6.0, 1.5], [13.0, 3.0]])
    merged = adapters.merged_layer({"q_kernel": kernel, "k_kernel": kernel}, scaled)
    np.testing.assert_array_equal(merged["q_kernel"], expected)
    assert merged["k_kernel"] is kernel


@pytest.mark.parametrize("form", ["scanned", "unrolled"])
def test_adapters_compute_what_merged_weights_compute(form):
    how = {"scan": form == "scanned", "remat": "full" if form == "unrolled" else "none"}
    found = scores(ADAPTED, **how)
    np.testing.assert_allclose(found, scores(adapters.merge(ADAPTED)), atol=1e-4)
    assert np.abs(found - scores(BASE)).max() > 0.1


def test_a_decode_copy_holds_the_adapters():
    copies = [decode_params(params) for params in (ADAPTED, adapters.merge(ADAPTED), BASE)]
    close = functools.partial(np.testing.assert_allclose, atol=1e-5)
    jax.tree.map(close, copies[0], copies[1])
    kernels = [copy.layers[0]["qkv_kernel"] for copy in copies]
    assert np.abs(kernels[0] - kernels[2]).max() > 0.1


LEARNED = {
    **WORLD.params,
    **make_adapters(WORLD.shape, AdapterConfig(rank=2, alpha=4.0)),
}
FROZEN, TRAINED = adapters.split(LEARNED)


@pytest.mark.slow
def test_only_adapters_and_the_budget_module_are_trained():
    batch = jax.tree.map(jnp.asarray, make_batch_by_hand())
    spec = dataclasses.replace(SPEC, value=None)
    tx = policy_optimizer(OptimizerConfig(learning_rate=1e-2), 10)
    state = init_state(jax.tree.map(jnp.copy, TRAINED), None, tx, tx)
    totals = loss_normalizers(batch, spec=spec)
    grads, _ = gradients(state, Minibatch(batch), totals, RULES.allowed_tokens, FROZEN, spec=spec)
    assert set(grads.policy) == set(state.policy) == {"adapter", "budget"}
    size = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
    trained = size(state.policy)
    # Two moments of each, and a few counters.
    assert 2 * trained <= size(state.policy_opt) <= 2 * trained + 8
    before = jax.tree.map(np.asarray, FROZEN)
    new, *_ = train_step(
        state,
        Minibatch(batch),
        RULES.allowed_tokens,
        FROZEN,
        spec=spec,
        policy_tx=tx,
        head_tx=tx,
    )
    jax.tree.map(np.testing.assert_array_equal, before, FROZEN)
    assert all(
        np.abs(new.policy["adapter"][name] - leaf).max() > 0
        for name, leaf in TRAINED["adapter"].items()
    )


@pytest.mark.slow
def test_gradients_are_those_of_the_merged_weights():
    """dL/dB = s (A^T dL/dW), dL/dA = s (dL/dW B^T) for W' = W + s A B."""
    batch = jax.tree.map(jnp.asarray, make_batch_by_hand())
    spec = dataclasses.replace(SPEC, value=None)
    tx = optax.sgd(1.0)
    totals = loss_normalizers(batch, spec=spec)
    given = (Minibatch(batch), totals, RULES.allowed_tokens)
    own = gradients(init_state(TRAINED, None, tx, tx), *given, FROZEN, spec=spec)[0].policy
    whole = init_state(adapters.merge(LEARNED), None, tx, tx)
    of_merged = gradients(whole, *given, spec=spec)[0].policy["layers"]
    scale = float(LEARNED["adapter_scale"])
    for name in ("q", "o", "down"):
        slope = np.asarray(of_merged[f"{name}_kernel"], np.float64)
        a, b = (np.asarray(LEARNED["adapter"][f"{name}_{x}"], np.float64) for x in "ab")
        close = lambda one, other: np.testing.assert_allclose(one, other, atol=2e-5, rtol=1e-3)
        close(own["adapter"][f"{name}_a"], scale * slope @ b.transpose(0, 2, 1))
        close(own["adapter"][f"{name}_b"], scale * a.transpose(0, 2, 1) @ slope)


def test_narrow_moments_follow_wide_ones():
    wide = optax.scale_by_adam(b1=0.9, b2=0.95)
    narrow = keep_moments(wide, jnp.bfloat16)
    params = {"w": jnp.zeros(64)}
    states = [tx.init(params) for tx in (wide, narrow)]
    assert jax.tree.leaves(states[1])[1].dtype == jnp.bfloat16
    rng = np.random.default_rng(0)
    for _ in range(50):
        grads = {"w": jnp.asarray(1.0 + 0.5 * rng.standard_normal(64, np.float32))}
        steps = []
        for index, tx in enumerate((wide, narrow)):
            step, states[index] = tx.update(grads, states[index], params)
            steps.append(np.asarray(step["w"]))
    np.testing.assert_allclose(steps[1], steps[0], rtol=0.05)


def test_a_folder_of_adapters_comes_back(tmp_path):
    conditioning = ConditioningConfig()
    params = random_params(conditioning=conditioning) | make_adapters()
    module = BudgetModule(conditioning, 64)
    files = peft.save_adapter(
        tmp_path / "out", params, config=TINY, settings=SETTINGS, module=module
    )
    assert peft.CONFIG_FILE in files and "budget.safetensors" in files
    found = peft.load_adapter(tmp_path / "out", TINY, SETTINGS)
    jax.tree.map(np.testing.assert_array_equal, found["adapter"], params["adapter"])
    assert found["adapter_scale"] == 2.0
    own = peft.load_module(tmp_path / "out", TINY, module)
    jax.tree.map(np.testing.assert_array_equal, own, params["budget"])
    other = dataclasses.replace(module, b_max=32)
    with pytest.raises(UserError, match="set budget.max=64"):
        peft.load_module(tmp_path / "out", TINY, other)


def test_a_folder_of_adapters_names_its_base_wherever_it_is_read_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policy_folder.save_policy(tmp_path / "base", BASE, config=TINY)
    named = {}
    for out, how in (("one", {"base": Path("base")}), ("two", {"write_base": Path.mkdir})):
        peft.save_adapter(Path(out), ADAPTED, config=TINY, settings=SETTINGS, **how)
        raw = json.loads((tmp_path / out / peft.CONFIG_FILE).read_text())
        named[out] = raw["base_model_name_or_path"]
    assert named == {"one": str(tmp_path / "base"), "two": str(tmp_path / "two" / "base")}
    assert (tmp_path / "two" / "base").is_dir()
    cached = tmp_path / "hub" / "models--Some-One--A.model-1b" / "snapshots" / ("0a" * 20)
    peft.save_adapter(Path("hub-1"), ADAPTED, config=TINY, settings=SETTINGS, base=cached)
    raw = json.loads((tmp_path / "hub-1" / peft.CONFIG_FILE).read_text())
    assert raw["base_model_name_or_path"] == "Some-One/A.model-1b"
    assert raw["revision"] == "0a" * 20


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rank": 4}, "`r` is 3, but the config has adapter.rank=4; set adapter.rank=3"),
        (
            {"alpha": 8.0},
            "`lora_alpha` is 6.0, but the config has adapter.alpha=8; set adapter.alpha=6.0",
        ),
        ({"targets": ("q", "v")}, "`target_modules` is .*set adapter.targets="),
        ({"targets": ("q", "v", "o", "down", "up")}, "set adapter.targets="),
    ],
)
def test_other_adapters_than_the_run_asks_for_are_refused(tmp_path, change, says):
    peft.save_adapter(tmp_path / "out", ADAPTED, config=TINY, settings=SETTINGS)
    with pytest.raises(UserError, match=says) as caught:
        peft.load_adapter(tmp_path / "out", TINY, dataclasses.replace(SETTINGS, **change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("said", "good"),
    [
        (["q_proj"], False),
        (["q_proj", "v_proj", "o_proj", "down_proj", "up_proj"], False),
        (None, False),
        ("(", False),
        (r".*\.0\..*_proj", False),
        (r".*\.(q|v|o|down)_proj", True),
        (["self_attn.q_proj", "v_proj", "o_proj", "mlp.down_proj"], True),
    ],
)
def test_matrices_are_those_that_the_folder_names(tmp_path, said, good):
    peft.save_adapter(tmp_path / "out", ADAPTED, config=TINY, settings=SETTINGS)
    path = tmp_path / "out" / peft.CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": said}))
    if good:
        peft.check_adapter(tmp_path / "out", TINY, SETTINGS)
        return
    with pytest.raises(UserError, match=r"`target_modules` is .*set adapter.targets=\["):
        peft.check_adapter(tmp_path / "out", TINY, SETTINGS)


@pytest.mark.parametrize(
    "said",
    [{"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}, {"use_qalora": True},
     {"alora_invocation_tokens": [1]}],
)  # fmt: skip
def test_adapters_that_compute_something_else_are_refused(tmp_path, said):
    peft.save_adapter(tmp_path / "out", ADAPTED, config=TINY, settings=SETTINGS)
    path = tmp_path / "out" / peft.CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    with pytest.raises(UserError, match=next(iter(said))):
        peft.check_adapter(tmp_path / "out", TINY, SETTINGS)


def test_a_budget_module_that_says_not_what_it_is_for_is_refused(tmp_path):
    module = BudgetModule(ConditioningConfig(), 64)
    params = random_params(conditioning=module.conditioning) | make_adapters()
    out = tmp_path / "out"
    peft.save_adapter(out, params, config=TINY, settings=SETTINGS, module=module)
    (out / peft.MODULE_FILE).unlink()
    with pytest.raises(
        UserError, match=r"budget.safetensors.*, but not its settings .budget_module.json"
    ):
        peft.check_adapter(out, TINY, SETTINGS)
    (out / "budget.safetensors").unlink()
    peft.check_adapter(out, TINY, SETTINGS)


def test_peft_and_we_read_each_other(tmp_path):
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    policy_folder.save_policy(tmp_path / "base", BASE, config=TINY)
    peft.save_adapter(tmp_path / "ours", ADAPTED, config=TINY, settings=SETTINGS)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = theirs.PeftModel.from_pretrained(base, tmp_path / "ours")
    ids = torch.tensor(np.asarray(TOKENS))
    with torch.no_grad():
        expected = model(ids).logits.numpy()
    np.testing.assert_allclose(scores(ADAPTED), expected, atol=1e-4)
    # And back: other values, written by PEFT itself.
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.mul_(-0.5).add_(0.05)
        expected = model(ids).logits.numpy()
    model.save_pretrained(tmp_path / "theirs")
    found = peft.load_adapter(tmp_path / "theirs", TINY, SETTINGS)
    np.testing.assert_allclose(scores({**BASE, **found}), expected, atol=1e-4)
