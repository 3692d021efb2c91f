"""Tests runs that train adapters: checkpoints without the base weights, resuming, and exports."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.errors import UserError
from bacr_jax.export.from_run import export
from bacr_jax.model.hf.reading import load_policy
from bacr_jax.model.qwen2 import forward, logits
from bacr_jax.runs.folder import open_run
from bacr_jax.runs.saved_policy import read_params
from bacr_jax.training.loop import Trainer
from small_config import small_config
from whole_runs import state_of

# Slow, because a run is trained and resumed. model/test_adapters.py tests the arithmetic quickly.
pytestmark = pytest.mark.slow

CHANGES = """
model: {num_layers: 2}
adapter: {rank: 2, alpha: 4}
data: {ledger: {train_size: 64}}
loss: {kl_coef: 0.1}
optimizer: {learning_rate: 1.0e-2}
train: {steps: 2, minibatches: 2}
warmup: {steps: 2, target_accuracy: 0, short_accuracy: 0, hold_accuracy: 0}
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A run of two steps that was left after each and gone on with."""
    place = tmp_path_factory.mktemp("adapters")
    settings = small_config(place, CHANGES, f"output.dir={place / 'run'}")
    sizes = []
    for _ in range(2):
        with open_run(place / "run", settings) as folder:
            trainer = Trainer(settings, folder)
            state, step = trainer.start()
            state = trainer.iterate(state, step)
            trainer.save(state, step + 1)
            trainer.checkpoints.close()
            sizes.append((trainer.run, state))
    return place, settings, sizes


def test_a_checkpoint_holds_what_is_trained_alone(world):
    place, _, ((run, _), _) = world
    saved = state_of(place / "run", 2)["train"]["policy"]
    assert set(saved) == {"adapter", "budget"}
    assert {"embed", "layers", "adapter_scale"} <= set(run.frozen)


def test_a_resumed_run_has_the_same_base_and_goes_on(world):
    _, _, ((first, one), (second, two)) = world
    jax.tree.map(np.testing.assert_array_equal, first.frozen, second.frozen)
    assert int(one.train.updates) == 2 and int(two.train.updates) == 4
    moved = lambda state: np.abs(state.train.policy["adapter"]["q_b"]).max()
    assert 0 < moved(one) != moved(two)


def test_the_policy_is_read_back_whole(world):
    place, _, (_, (run, state)) = world
    params = read_params(place / "run", 2)
    jax.tree.map(np.testing.assert_array_equal, params, run.params(state.train))


def test_another_base_is_refused(world, tmp_path):
    place, settings, _ = world
    weights = place / "run" / "warmup"
    other = dataclasses.replace(
        settings, seed=7, output=dataclasses.replace(settings.output, dir=str(tmp_path / "other"))
    )
    with open_run(tmp_path / "other", other) as folder:
        trainer = Trainer(other, folder)
        trainer.start()
        trainer.checkpoints.close()
    kept = weights.rename(place / "kept")
    (tmp_path / "other" / "warmup").rename(weights)
    try:
        with pytest.raises(UserError, match="base weights were changed after the adapters"):
            read_params(place / "run", 2)
    finally:
        weights.rename(tmp_path / "other" / "warmup")
        kept.rename(weights)


def test_exports_merged_and_as_peft(world, tmp_path):
    place, _, (_, (run, state)) = world
    files = export(place / "run", tmp_path / "hf")
    assert "budget.safetensors" in files
    _, merged = load_policy(tmp_path / "hf")
    tokens = jnp.arange(10).reshape(2, 5)
    shape = run.policy.learner.model
    scores = lambda params: logits(params, forward(params, tokens, config=shape))
    whole = run.params(state.train)
    np.testing.assert_allclose(scores(merged), scores(whole), atol=1e-4)
    files = export(place / "run", tmp_path / "peft", adapter="peft")
    assert {"adapter_config.json", "adapter_model.safetensors", "base"} <= set(files)
    size = (tmp_path / "peft" / "adapter_model.safetensors").stat().st_size
    assert size < 4 * sum(x.size for x in jax.tree.leaves(whole["adapter"])) + 8000


def test_an_export_as_peft_names_the_base_that_the_warm_up_left(world, tmp_path):
    """PEFT's own loader and the folder's two parts give the policy's numbers without a budget."""
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("peft")
    place, _, (_, (run, state)) = world
    export(place / "run", tmp_path / "peft", adapter="peft")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    base = tmp_path / "peft" / "base"
    assert config["base_model_name_or_path"] == str(base)
    _, frozen = load_policy(base)
    for name in ("embed", "final_norm"):
        np.testing.assert_array_equal(frozen[name], run.frozen[name])
    tokens = np.arange(10).reshape(2, 5)
    model = theirs.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "peft")
    with torch.no_grad():
        found = model(torch.tensor(tokens)).logits.numpy()
    whole = run.params(state.train)
    shape = run.policy.learner.model
    want = logits(whole, forward(whole, jnp.asarray(tokens), config=shape))
    np.testing.assert_allclose(found, want, atol=1e-4)


def test_an_export_as_peft_needs_adapters(world, tmp_path):
    place, _, _ = world
    text = (place / "run/config.yaml").read_text()
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole/config.yaml").write_text(
        "\n".join(line for line in text.splitlines()[1:]).replace("rank: 2", "rank: null")
    )
    with pytest.raises(UserError, match="--adapter peft: this run trained all weights"):
        export(tmp_path / "whole", tmp_path / "peft", adapter="peft")
