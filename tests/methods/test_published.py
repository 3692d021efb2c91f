"""What publications prescribe, and where a config says something else."""

import dataclasses
import runpy

import pytest
import yaml

from bacr_jax.config import io as config_io
from bacr_jax.config.checks import check
from bacr_jax.config.settings import resolve
from bacr_jax.methods import load_method
from bacr_jax.methods.registry import built_in_methods, problems
from methods_world import NAMES, PRESETS, load

BASES = ("quickstart", "tradeoff", "qwen2.5-7b-math")
# What of the paper's text BACR's presets of our own read otherwise, in the order of the keys.
SCHEDULE = [
    "curriculum.clip_mu=true (published: false)",
    "curriculum.pass_rate=ema (published: epoch)",
    "curriculum.update_every=10 (published: null)",
    "curriculum.weight_epsilon=0.02 (published: 0)",
]
CREDIT = [
    "advantage.baseline=shrink (published: value)",
    "advantage.credit=to_go (published: trajectory)",
    "advantage.normalise=batch_rms (published: group)",
    "value.input=trace_and_cut (published: cut)",
    "value.stop_gradient=true (published: false)",
    "value.inner_steps=10 (published: 0)",
    "value.warmup_iterations=3 (published: 0)",
    "optimizer.single_rate=false (published: true)",
    "loss.ratio=token (published: sequence)",
    "loss.aggregate=constant (published: seq_mean_token_mean)",
    "loss.entropy_coef=0.02 (published: 0.01)",
]
# Methods without a preset of their name.
PRESET_OF = {"bacr": "bacr-paper", "l1": "l1_max", "length": "laser"}
# What presets leave to the base config, so that methods compare at equally many updates a batch.
OF_THE_BASE = {"train.minibatches"}
ONE_UPDATE = ["train.minibatches=1 (published: 2)"]
# Presets that are no publication's own settings, and say so.
VARIANTS = {
    "anytime-simplified": [
        "anytime.baseline=v2 (published: brpo)",
        "anytime.answers=1 (published: 4)",
        *ONE_UPDATE,
    ],
    "bacr-full": [
        *SCHEDULE,
        "cuts.weights=[0.12, 0.12, 0.16, 0.6] (published: uniform)",
        *CREDIT,
    ],
    "bacr-bounded": [
        "budget.prior=choices (published: curriculum)",
        *SCHEDULE,
        "cuts.count=1 (published: 4)",
        "cuts.weights=last (published: uniform)",
        "advantage.baseline=constant (published: value)",
        *CREDIT[1:3],
        "advantage.score_weighted=true (published: false)",
        *CREDIT[3:],
        "optimizer.max_update_kl=0.005 (published: null)",
    ],
    "bacr-robust": [
        "budget.prior=choices (published: curriculum)",
        *SCHEDULE,
        "cuts.count=1 (published: 4)",
        "cuts.weights=last (published: uniform)",
        "advantage.baseline=constant (published: value)",
        *CREDIT[1:3],
        "advantage.score_weighted=true (published: false)",
        *CREDIT[3:],
    ],
    "bacr-weighted": [
        "budget.prior=choices (published: curriculum)",
        *SCHEDULE,
        "cuts.count=1 (published: 4)",
        "cuts.weights=last (published: uniform)",
        *CREDIT[:3],
        "advantage.score_weighted=true (published: false)",
        *CREDIT[3:],
    ],
    "self_distill": [
        "budget.prior=choices (published: curriculum)",
        *SCHEDULE,
        "cuts.count=1 (published: 4)",
        "cuts.weights=last (published: uniform)",
        "advantage.baseline=constant (published: value)",
        *CREDIT[1:3],
        "advantage.score_weighted=true (published: false)",
        *CREDIT[3:],
    ],
}


def over(base, preset):
    return config_io.load([PRESETS.parent / f"{base}.yaml", PRESETS / f"{preset}.yaml"])


def departures_of(config):
    from bacr_jax.methods.published import departures

    return departures(resolve(config).method, load_method(resolve(config).method))


def keys_of(tree, before=""):
    """Dotted keys of a mapping read from YAML."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from keys_of(value, f"{before}{name}.")
        else:
            yield before + name


@pytest.mark.parametrize("preset", ["grpo", "hapo"])
def test_the_divergence_is_the_publications(preset):
    loss = over("quickstart", preset).loss
    assert (loss.kl_coef, loss.kl_kind) == (0.04, "k3")


def test_no_method_but_those_without_a_divergence_refuses_one(tmp_path):
    load(tmp_path, "selfbudgeter", "loss.kl_coef=0.04")
    load(tmp_path, "rloo", "loss.kl_coef=0.04")


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("preset", sorted(set(NAMES) - set(VARIANTS)))
def test_a_preset_is_what_was_published(base, preset):
    config = over(base, preset)
    updates = load_method(resolve(config).method).published.get("train.minibatches")
    own = 1 if updates is None else updates.value
    found = config.train.minibatches
    differ = [f"train.minibatches={found} (published: {own})"] if own not in (1, found) else []
    assert departures_of(config) == differ


@pytest.mark.parametrize(("preset", "lines"), VARIANTS.items())
def test_a_variant_lists_what_it_changes(preset, lines):
    assert departures_of(over("quickstart", preset)) == lines


@pytest.mark.parametrize("preset", sorted(set(NAMES) - set(VARIANTS)))
def test_a_preset_writes_every_published_setting_itself(preset):
    """Else it would hold over some bases only."""
    written = set(keys_of(yaml.safe_load((PRESETS / f"{preset}.yaml").read_text())))
    published = load_method(resolve(over("quickstart", preset)).method).published
    assert set(published) - written == set(published) & OF_THE_BASE


def test_two_updates_a_batch_are_anytimereasoners_own():
    base = [PRESETS.parent / "quickstart.yaml", PRESETS / "anytime.yaml"]
    assert departures_of(config_io.load(base, ["train.minibatches=2"])) == []
    # The 7B configs have them for every method.
    assert over("qwen2.5-7b-math", "grpo").train.minibatches == 2


def test_a_method_by_its_name_alone_says_what_it_is_not(tmp_path):
    config = config_io.load([PRESETS.parent / "quickstart.yaml"], ["method=grpo"])
    assert departures_of(config) == [
        "loss.aggregate=constant (published: seq_mean_token_mean)",
        "loss.entropy_coef=0.02 (published: 0)",
        "loss.kl_coef=0 (published: 0.04)",
        "loss.kl_kind=k3+ (published: k3)",
    ]


@pytest.mark.parametrize("name", built_in_methods())
def test_every_method_publishes_keys_that_exist_with_a_source(name):
    config = over("quickstart", PRESET_OF.get(name, name))
    published = load_method(resolve(config).method).published
    assert published.keys() <= config_io.flatten(config).keys()
    assert all(setting.source for setting in published.values())


def test_a_method_of_ones_own_departs_from_nothing():
    config = config_io.load([PRESETS.parent / "quickstart.yaml"])
    config = dataclasses.replace(
        config, method=str(PRESETS.parents[1] / "examples" / "custom_method.py")
    )
    check(config, also=problems)
    assert departures_of(config) == []


def test_the_quickstart_benchmark_compares_with_grpo_as_published():
    benchmark = runpy.run_path(str(PRESETS.parents[1] / "benchmarks" / "quickstart.py"))
    command = benchmark["command"](["base.yaml", benchmark["GRPO"]], "runs/x", "seed=1")
    assert command[1:] == [
        *("--config", "base.yaml", "--config", str(PRESETS / "grpo.yaml")),
        *("output.dir=runs/x", "seed=1"),
    ]


def test_check_prints_departures(capsys):
    from bacr_jax.train import main

    with pytest.raises(SystemExit) as stop:
        main(["--config", str(PRESETS.parent / "quickstart.yaml"), "method=grpo", "--check"])
    assert stop.value.code == 0
    assert "  loss.kl_coef=0 (published: 0.04)\n" in capsys.readouterr().out
