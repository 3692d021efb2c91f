"""A config is named after the method preset whose values it has."""

import pytest

from bacr_jax.config import io as config_io
from bacr_jax.config import shipped
from bacr_jax.config.io import flatten
from bacr_jax.config.presets import Preset, method_text, preset_of

PRESETS = shipped.names((shipped.OVERLAYS,))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_found_in_a_config_that_it_was_written_over(name):
    config = config_io.load(["quickstart", name])
    assert preset_of(flatten(config)) == Preset(name.rpartition("/")[2])


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("quickstart", "bacr-bounded"),
        ("tradeoff", "bacr-bounded"),
        ("gym", "bacr-bounded"),
        ("qwen2.5-7b-math", "bacr-bounded"),
        ("smollm2-135m", "bacr-bounded with 1 change"),
    ],
)
def test_shipped_configs_follow_the_recommended_preset_without_naming_its_file(name, preset):
    assert preset_of(flatten(config_io.load([name]))).text == preset


def test_a_changed_value_is_counted_and_listed():
    config = config_io.load(["quickstart"], ["loss.clip_low=0.1", "reward.coefficient=0.5"])
    preset = preset_of(flatten(config))
    assert preset.text == "bacr-bounded with 2 changes"
    assert preset.changes == (
        "reward.coefficient=0.5 (bacr-bounded: 0.3)",
        "loss.clip_low=0.1 (bacr-bounded: 0.2)",
    )
    assert method_text(preset_of(flatten(config)), "BACR") == "bacr-bounded with 2 changes (BACR)"


def test_a_method_of_the_users_own_and_one_far_from_every_preset_have_no_preset():
    own = config_io.load(["quickstart"], ["method=mine.py"])
    assert preset_of(flatten(own)) is None and method_text(None, "Mine") == "Mine"
    far = config_io.load(["quickstart"], ["method=anytime"])
    assert preset_of(flatten(far)) is None
