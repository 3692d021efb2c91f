"""Which weights of a run must not change before it is resumed, and which may."""

import dataclasses
import shutil

import jax
import pytest

import hf_world
from bacr_jax.config import AdapterConfig, Config, LossConfig, ModelConfig, WarmupConfig
from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.export import policy_folder
from bacr_jax.export.policy_folder import BudgetInput
from bacr_jax.learner.spec import LearnerSpec
from bacr_jax.model import adapters
from bacr_jax.model.hf import peft
from bacr_jax.model.hf.hf_config import BudgetModule
from bacr_jax.runs import initial
from bacr_jax.runs.setup import Policy
from bacr_jax.training.origin import check_origin, weights_from_files
from hf_world import TINY

MODULE = BudgetModule(Config().conditioning, 12)
LORA = AdapterConfig(rank=2, alpha=4.0)


def write_model(folder, seed, module):
    params = hf_world.random_params(TINY, seed, conditioning=module and module.conditioning)
    policy_folder.save_policy(folder, params, config=TINY, budget=BudgetInput(module))


def write_adapters(folder, seed, module):
    params = hf_world.random_params(TINY, seed, conditioning=MODULE.conditioning)
    params |= adapters.init(jax.random.key(seed), TINY, LORA)
    peft.save_adapter(folder, params, config=TINY, settings=LORA, module=module)


class Start:
    """The beginning of a run, whose files can be written anew."""

    def __init__(self, place, kind, trained=()):
        self.place, self.model = place, str(place / "model")
        self.module_in, self.is_lora = trained, kind != "whole"
        adapter = LORA if self.is_lora else AdapterConfig()
        if kind == "peft":
            adapter = dataclasses.replace(LORA, path=str(place / "adapters"))
        self.warm = kind == "warm-up"
        config = Config(
            model=ModelConfig(path=self.model),
            adapter=adapter,
            warmup=WarmupConfig(steps=int(self.warm)),
        )
        self.settings = resolve(config).policy
        spec = LearnerSpec(TINY, MODULE.conditioning, LossConfig(), None, MODULE.b_max)
        self.policy = Policy(spec, None, None, adapter=adapter if self.is_lora else None)
        self.write("model", 0)
        self.write("adapters", 0)

    def write(self, what, seed):
        shutil.rmtree(self.place / what, ignore_errors=True)
        write = write_model if what == "model" else write_adapters
        write(self.place / what, seed, MODULE if what in self.module_in else None)

    def params(self, seed):
        """The initial weights; other seeds draw others, as other numbers of devices do."""
        key = jax.random.key(seed)
        if not self.warm:
            return initial.initial_params(key, self.policy, self.model)
        params = initial.plain_params(key, self.policy, self.model)
        params = initial.with_budget_module(key, self.policy, params)
        return initial.with_adapters(key, self.policy, params)

    def origin(self, seed=0, recorded=()):
        frozen, trained = adapters.split(self.params(seed))
        return check_origin(self.settings, trained, frozen, dict(recorded), "here")


# Kinds of runs, and the folders that have a budget module.
KINDS = [
    ("whole", []),
    ("whole", ["model"]),
    ("lora", []),
    ("lora", ["model"]),
    ("warm-up", []),
    ("peft", []),
    ("peft", ["adapters"]),
]


@pytest.mark.parametrize(("kind", "trained"), KINDS)
def test_what_is_drawn_may_differ_and_no_file_may(tmp_path, kind, trained):
    start = Start(tmp_path, kind, trained)
    recorded = start.origin()
    # On another number of devices the drawn weights differ by rounding.
    assert start.origin(seed=1, recorded=recorded) == recorded
    for what in ["model", "adapters"] if kind == "peft" else ["model"]:
        start.write(what, 5)
        with pytest.raises(UserError, match="here: these weights were changed since the start"):
            start.origin(recorded=recorded)
        start.write(what, 0)


@pytest.mark.parametrize(("kind", "trained"), KINDS)
def test_a_budget_module_of_a_file_is_one_of_the_weights(tmp_path, kind, trained):
    start = Start(tmp_path, kind, trained)
    names = weights_from_files(start.settings, start.params(0)).keys()
    assert ("budget" in names) == bool(trained)
    assert ("adapter" in names) == (kind == "peft")
    assert {"embed", "layers", "final_norm"} <= names


def test_a_random_model_has_no_file_that_could_change():
    settings = resolve(Config()).policy
    params = hf_world.random_params()
    assert check_origin(settings, params, {}, {}, "here") == {}
    recorded = {"start_fingerprint": "0123456789ab"}
    assert check_origin(settings, params, {}, recorded, "here") == {}
