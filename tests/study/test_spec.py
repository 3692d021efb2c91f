"""A study's runs have the settings that its layers give them."""

import re

import pytest

from bacr_jax.config import io as config_io
from bacr_jax.config import shipped
from bacr_jax.errors import UserError
from bacr_study.study_file import read_study
from study_world import STUDY, planned, write_study


def test_an_arm_wins_over_the_study_and_the_study_over_the_task(tmp_path):
    text = STUDY.replace("loss.entropy_coef: 0.0", "optimizer.learning_rate: 3.0e-4")
    text = text.replace("config: [base.yaml], budgets: [8, 64]", TASK)
    study = read_study(write_study(tmp_path, text))
    rates = [study.config_of("plain", arm, {}).optimizer.learning_rate for arm in ("grpo", "bacr")]
    assert rates == [1e-4, 3e-4]
    assert study.config_of("plain", "bacr", {"optimizer.learning_rate": 0.5}).optimizer == (
        study.config_of("plain", "bacr", {"optimizer.learning_rate": 0.5}).optimizer
    )
    varied = study.config_of("plain", "bacr", {"optimizer.learning_rate": 0.5})
    assert varied.optimizer.learning_rate == 0.5


TASK = "config: [base.yaml], set: {optimizer.learning_rate: 9.0}, budgets: [8, 64]"


def test_a_sweep_may_vary_one_key_or_several(tmp_path):
    one = "  bacr: {label: BACR, sweep: {key: curriculum.alpha, values: [0.1, 0.2]}}"
    text = STUDY.replace("  bacr: {label: BACR, set: {loss.entropy_coef: 0.0}}", one)
    _, runs, _ = planned(tmp_path, "seeds=[0]", text=text)
    assert [run.id for run in runs] == ["plain.grpo.0", "plain.bacr.0.1.0", "plain.bacr.0.2.0"]
    assert [run.config.curriculum.alpha for run in runs[1:]] == [0.1, 0.2]
    named = one.replace("[0.1, 0.2]", "{a: {curriculum.alpha: 0.3, curriculum.beta: 0.2}, b: {}}")
    text = STUDY.replace("  bacr: {label: BACR, set: {loss.entropy_coef: 0.0}}", named)
    _, runs, _ = planned(tmp_path, "seeds=[0]", text=text)
    assert [run.id for run in runs][1:] == ["plain.bacr.a.0", "plain.bacr.b.0"]
    assert [run.config.curriculum.alpha for run in runs[1:]] == [0.3, 0.6]


def test_keys_of_one_arm_at_one_size_win_over_its_own(tmp_path):
    text = STUDY.replace(
        "seeds: [0, 1]", "seeds: [0, 1]\n    own: {grpo: {optimizer.learning_rate: 0.5}}"
    )
    study = read_study(write_study(tmp_path, text))
    rates = {a: study.config_of("plain", a, {}).optimizer.learning_rate for a in ("grpo", "bacr")}
    assert rates["grpo"] == 0.5 != rates["bacr"]


@pytest.mark.parametrize("base", ["quickstart", "examples/own-data", "own-data"])
@pytest.mark.parametrize("preset", ["methods/grpo", "grpo"])
def test_shipped_configs_are_found_by_name_from_any_folder(tmp_path, base, preset):
    text = STUDY.replace("config: [base.yaml]", f"config: [{base}]")
    text = text.replace("{label: GRPO, set", f"{{label: GRPO, config: [{preset}], set")
    study = read_study(write_study(tmp_path, text))
    assert study.config_of("plain", "grpo", {}).method == "grpo"
    expected = config_io.load([shipped.locate(base), shipped.locate(preset)])
    assert study.config_of("plain", "grpo", {}).data == expected.data
    # A file next to the study takes precedence, and a file that does not exist has its full path.
    (tmp_path / base).parent.mkdir(exist_ok=True)
    (tmp_path / base).write_text("data: {train: ledger, eval: [ledger]}")
    assert study.config_of("plain", "bacr", {}).data.train == "ledger"
    absent = read_study(write_study(tmp_path, text.replace(f"[{base}]", f"[{base}.yaml]")))
    with pytest.raises(UserError, match=re.escape(f"{tmp_path / base}.yaml: there is no such")):
        absent.config_of("plain", "grpo", {})


@pytest.mark.parametrize("suffix", [".yaml", ".yml"])
def test_a_name_that_could_mean_a_file_next_to_the_study_is_refused(tmp_path, suffix):
    study = read_study(write_study(tmp_path, STUDY.replace("[base.yaml]", "[quickstart]")))
    own = tmp_path / f"quickstart{suffix}"
    own.write_text("seed: 7")
    with pytest.raises(UserError, match="'quickstart' is the name of a shipped config, and"):
        study.config_of("plain", "grpo", {})


EVERY_LAYER = STUDY.replace(
    "config: [base.yaml], budgets: [8, 64]",
    "config: [base.yaml], set: {optimizer.learning_rate: 9.0}, budgets: [8, 64]",
).replace("seeds: [0, 1]", "seeds: [0, 1]\n    own: {grpo: {optimizer.learning_rate: 0.5}}")


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer.learning_rate=1e-3"],
        ["optimizer={learning_rate: 1e-3}"],
        ["optimizer.learning_rate=2.0", "optimizer={learning_rate: 1e-3}"],
        [
            "optimizer.learning_rate=2.0",
            "optimizer={learning_rate: 3}",
            "optimizer.learning_rate=1e-3",
        ],
    ],
)
def test_the_command_line_wins_over_all_layers(tmp_path, overrides):
    _, runs, _ = planned(tmp_path, "seeds=[0]", text=EVERY_LAYER)
    assert [run.config.optimizer.learning_rate for run in runs] == [0.5, 1e-4]
    _, runs, _ = planned(tmp_path, "seeds=[0]", *overrides, text=EVERY_LAYER)
    assert [run.config.optimizer.learning_rate for run in runs] == [1e-3, 1e-3]
    # A run is the same whether its settings are in the file or on the command line.
    text = STUDY.replace("optimizer.learning_rate: 1.0e-4", "optimizer.learning_rate: 1.0e-3")
    _, of_file, _ = planned(tmp_path, "seeds=[0]", text=text)
    assert [run.folder for run in runs] == [run.folder for run in of_file]


# Values in the notation of YAML, and what a config has then.
VALUES = [
    ("data.prompt_date", "2026-01-31", "2026-01-31"),
    ("data.prompt_date", "'2026-01-31'", "2026-01-31"),
    ("optimizer.grad_clip", ".inf", float("inf")),
    ("warmup.learning_rate", "1e-6", 1e-6),
    ("conditioning.gate_bias", "-4", -4.0),
    ("method", "'1e3'", "1e3"),
    ("method", "'null'", "null"),
    ("model.path", "null", None),
    (
        "data.system_prompt",
        '"Think.\\nThen answer: {x}, \u00e9 # no"',
        "Think.\nThen answer: {x}, \u00e9 # no",
    ),
    ("eval.budgets", "[8, 0x10]", (8, 16)),
    ("data.eval", "[ledger, 'math: a, b']", ("ledger", "math: a, b")),
    ("budget.levels", "{low: 4, high: 8, back: 2}", {"low": 4, "high": 8, "back": 2}),
    ("output.report", "true", True),
]
LAYERS = {
    "task": ("budgets: [8, 64]", "budgets: [8, 64], set: {KEY}"),
    "study": ("1.0e-4}", "1.0e-4, KEY}"),
    "arm": ("loss.entropy_coef: 0.0", "KEY"),
    "own": ("seeds: [0, 1]", "seeds: [0, 1]\n    own: {bacr: {KEY}}"),
    "sweep": ("set: {loss.entropy_coef: 0.0}", "sweep: {key: k, values: {a: {KEY}}}"),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(("key", "written", "value"), VALUES)
def test_a_value_means_in_a_study_what_it_means_in_a_config(tmp_path, key, written, value, layer):
    before, after = LAYERS[layer]
    assert before in STUDY
    section, _, last = key.rpartition(".")
    nested = f"{section}: {{{last}: {written}}}" if section else f"{key}: {written}"
    for line in (f"{key}: {written}", nested):
        text = STUDY.replace(before, after.replace("KEY", line), 1)
        study = read_study(write_study(tmp_path, text))
        (variant,) = study.variants_of(study.arm("bacr"))
        sweep = study.sweep_of(study.arm("bacr"))
        varied = sweep.settings[variant.value] if sweep else {}
        found = config_io.flatten(study.config_of("plain", "bacr", varied))[key]
        assert found == value
        if isinstance(value, dict):
            assert list(found) == list(value)
