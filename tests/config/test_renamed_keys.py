"""Earlier names of config keys: read from the files of runs, hashed, and refused elsewhere."""

import pytest

from bacr_jax.config import Config, io, renamed_keys
from bacr_jax.errors import UserError
from bacr_jax.runs import folder as run_folder

EARLIER = """conditioning: {told: words, words: "At most {budget} tokens."}
cuts: {weights: own_budget}
rollout: {engine: own, ahead: 1, transfer: folder}
eval: {dense: 4}
"""


def sealed(path, text):
    """Writes a config file as a run writes it, with the digest of its text."""
    path.write_text(f"{run_folder._SEAL}{run_folder._digest(text)}\n{text}")
    return path


def test_the_file_of_an_earlier_run_is_read_under_the_current_names(tmp_path):
    config = run_folder.read_config_file(sealed(tmp_path / "config.yaml", EARLIER))
    assert config.conditioning.budget_input == "prompt"
    assert config.conditioning.prompt_text == "At most {budget} tokens."
    assert config.cuts.weights == "last"
    assert (config.rollout.engine, config.rollout.async_steps) == ("jax", 1)
    assert config.eval.cut_every == 4


def test_a_removed_key_is_refused_if_the_run_used_it(tmp_path):
    path = sealed(tmp_path / "config.yaml", "rollout: {transfer: nccl}\n")
    with pytest.raises(UserError, match=r"rollout\.transfer: there is no such key"):
        run_folder.read_config_file(path)


@pytest.mark.parametrize("name", sorted(renamed_keys.RENAMED))
def test_a_user_writes_the_current_name(tmp_path, name):
    current = renamed_keys.RENAMED[name].name
    path = tmp_path / "mine.yaml"
    section, _, key = name.partition(".")
    path.write_text(f"{section}: {{{key}: 1}}\n")
    # A key of which only values were renamed is refused because of the value.
    expected = rf"{name}: this key has been renamed.*{current}" if current != name else name
    with pytest.raises(UserError, match=expected):
        io.load([path])
    assert current in io.schema()


@pytest.mark.parametrize("name", sorted(renamed_keys.RENAMED))
def test_earlier_is_the_inverse_of_current(name):
    renamed = renamed_keys.RENAMED[name]
    for earlier_value in (*renamed.values, "another", 3, None):
        key, value = renamed_keys.current(name, earlier_value)
        assert renamed_keys.earlier(key, value) == (name, earlier_value)
    assert renamed_keys.current("model.path", "x") == ("model.path", "x")


def test_a_renamed_key_keeps_the_fingerprint():
    """The numbers were computed before the keys of `EARLIER` had their current names."""
    overrides = ["conditioning.budget_input=none", "cuts.weights=last", "eval.cut_every=4"]
    config = io.override(Config(), overrides)
    assert io.fingerprint(config) == "a699b85d57ca"
