"""What publications prescribe, and where a config says something else."""

import dataclasses
import runpy

import pytest
import yaml

from bacr_jax.config import io as config_io
from bacr_jax.config.checks import check
from bacr_jax.config.io import flatten
from bacr_jax.config.method_settings import DistillConfig, LossConfig
from bacr_jax.config.settings import resolve
from bacr_jax.config.shipped import names
from bacr_jax.config.values import written
from bacr_jax.methods import load_method
from bacr_jax.methods.published import COMMON, departures
from bacr_jax.methods.registry import built_in_methods, make_method, problems
from config_world import with_value
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
# Updates per batch in the publications and their code. The others do not state theirs.
UPDATES = {
    **dict.fromkeys(["grpo", "rloo", "hapo", "thinkprune", "gated_penalty"], 1),
    **dict.fromkeys(["anytime", "anytime-simplified", "elastic", "l1_exact", "l1_max", "laser"], 2),
    **dict.fromkeys(["dler", "dr_grpo", "shorter_better"], 8),
    "dapo": 16,
}
# Settings of scripts that presets leave out.
LEFT_OUT = {
    "dapo": ["loss.dual_clip=null (published: 10)"],
    "dler": ["loss.dual_clip=null (published: 10)"],
}
# What presets leave to the base config: the updates, so that methods compare at equally many a
# batch, and what no shipped config sets.
OF_THE_BASE = {
    "train.minibatches",
    *COMMON.keys() - {"optimizer.max_update_kl", "loss.importance_cap"},
}
# Settings that change the training of any method, each with a value that no publication has.
OURS = {
    "optimizer.max_update_kl": 0.01,
    "train.undo_closed_answers": 0.8,
    "train.undo_filled_budgets": 0.1,
    "loss.dual_clip": 4.0,
    "loss.importance_cap": 2.0,
    "loss.sequence_cap": 3.0,
    "loss.sequence_mask": 0.05,
    "loss.overlong_filter": True,
    "distill.coef": 1.0,
    "budget.stages": (0.9, 0.6),
    "budget.grace": 8,
    "budget.shuffle_input": True,
}
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
        "distill.coef=1 (published: 0)",
    ],
}


def over(base, preset):
    return config_io.load([PRESETS.parent / f"{base}.yaml", PRESETS / f"{preset}.yaml"])


def departures_of(config):
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


@pytest.mark.parametrize("preset", NAMES)
def test_the_updates_per_batch_of_a_publication_are_listed(preset):
    published = load_method(resolve(over("quickstart", preset)).method).published
    updates = [published[key].value for key in ["train.minibatches"] if key in published]
    assert updates == [UPDATES[name] for name in [preset] if name in UPDATES]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("preset", sorted(set(NAMES) - set(VARIANTS)))
def test_a_preset_is_what_was_published(base, preset):
    config = over(base, preset)
    found = config.train.minibatches
    published = UPDATES.get(preset, found)
    differ = [f"train.minibatches={found} (published: {published})"] if found != published else []
    assert sorted(departures_of(config)) == sorted([*LEFT_OUT.get(preset, []), *differ])


@pytest.mark.parametrize("name", built_in_methods())
def test_a_setting_that_changes_any_method_is_listed_for_every_method(name):
    """Whatever the preset: a method does not have what its publication does not have."""
    config = over("quickstart", PRESET_OF.get(name, name))
    method = make_method(resolve(config).method)
    assert OURS.keys() == COMMON.keys()
    for key, value in OURS.items():
        lines = departures(resolve(with_value(config, key, value)).method, method)
        published = written(method.published[key].value)
        assert f"{key}={written(value)} (published: {published})" in lines


def test_no_key_of_the_loss_is_forgotten():
    """V has its own loss, and all three sources of pi_old are the policy that sampled."""
    sections = {"loss": LossConfig, "distill": DistillConfig}
    keys = {
        f"{section}.{field.name}"
        for section, settings in sections.items()
        for field in dataclasses.fields(settings)
    }
    published = make_method(resolve(over("quickstart", "grpo")).method).published
    # A teacher has no effect without a coefficient.
    ours = {"loss.value_coef", "loss.old_logprobs", "distill.teacher"}
    assert keys - published.keys() == ours


def test_of_a_method_that_has_such_a_setting_its_own_value_is_published():
    for name, key, value in [
        ("thinkprune", "budget.stages", (1.0, 0.75, 0.5)),
        ("dapo", "loss.dual_clip", 10.0),
        ("grpo", "loss.dual_clip", None),
    ]:
        method = make_method(resolve(over("quickstart", name)).method)
        assert method.published[key].value == value


@pytest.mark.parametrize("base", names(("",)))
def test_no_shipped_config_sets_what_presets_leave_to_it(base):
    """Except the updates, and one config whose updates can be undone."""
    values = flatten(config_io.load([base]))
    found = {key for key, setting in COMMON.items() if values[key] != setting.value}
    undone = {"train.undo_closed_answers"} if base == "smollm2-135m" else set()
    assert found & OF_THE_BASE == undone


def test_cuts_at_random_positions_are_not_the_papers():
    config = config_io.load([PRESETS.parent / "quickstart.yaml", PRESETS / "bacr-paper.yaml"])
    random = with_value(config, "cuts.kind", "random")
    assert departures_of(random) == ["cuts.kind=random (published: even)"]


@pytest.mark.parametrize("preset", sorted(set(NAMES) - set(VARIANTS)))
def test_a_preset_with_a_divergence_writes_its_estimator(preset):
    """Else the base config would choose it, and another would be no departure."""
    config = over("quickstart", preset)
    if not config.loss.kl_coef:
        return
    keys = set(keys_of(yaml.safe_load((PRESETS / f"{preset}.yaml").read_text())))
    published = load_method(resolve(config).method).published
    assert "loss.kl_kind" in keys and "loss.kl_kind" in published


@pytest.mark.parametrize(("preset", "lines"), VARIANTS.items())
def test_a_variant_lists_what_it_changes(preset, lines):
    assert departures_of(over("quickstart", preset)) == lines


@pytest.mark.parametrize("preset", sorted(set(NAMES) - set(VARIANTS)))
def test_a_preset_writes_every_published_setting_itself(preset):
    """Else it would hold over some bases only."""
    keys = set(keys_of(yaml.safe_load((PRESETS / f"{preset}.yaml").read_text())))
    published = load_method(resolve(over("quickstart", preset)).method).published
    assert published.keys() - keys <= OF_THE_BASE


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
        "optimizer.max_update_kl=0.005 (published: null)",
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
