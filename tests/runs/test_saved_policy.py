"""A policy on disk is found, or refused in one line, before anything of it is read."""

import dataclasses
from pathlib import Path

import pytest

from bacr_client.fingerprint import write_manifest
from bacr_jax.config import Config, ModelConfig
from bacr_jax.config import io as config_io
from bacr_jax.errors import UserError
from bacr_jax.prompts.formats import FORMATS
from bacr_jax.runs import checkpoint, saved_policy
from bacr_jax.runs.folder import RunPaths
from bacr_jax.runs.saved_policy import SavedPolicy, open_policy, read_config


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints 2 and 10, and one that was never finished."""
    paths = RunPaths(tmp_path)
    paths.config.write_text(config_io.to_yaml(Config()))
    for name in ("2", "10", "30.orbax-checkpoint-tmp"):
        (paths.checkpoints / name).mkdir(parents=True)
    return tmp_path


def test_a_runs_policy_is_known_by_its_config_and_step(run):
    saved = open_policy(run, None, 2)
    assert (saved.config, saved.step) == (Config(), 2)
    assert saved.name == f"{run.name}, step 2"
    assert saved.identity["run"] == config_io.fingerprint(Config())
    assert (saved.chosen.requested, saved.chosen.newest) == (2, 10)
    assert open_policy(run, None).step == 10


def test_a_run_is_identified_by_its_weights_and_what_they_compute(run, monkeypatch):
    digests = {10: "a", 2: "b"}
    monkeypatch.setattr(checkpoint, "policy_digest", lambda state: digests[int(state.parent.name)])

    def identity(*overrides, step=10):
        RunPaths(run).config.write_text(config_io.to_yaml(config_io.override(Config(), overrides)))
        entries = open_policy(run, None, step).recorded_identity()
        return {name: value for name, value in entries.items() if name != "run"}

    first = identity()
    assert first["weights"] == "a" and identity(step=2)["weights"] == "b"
    for unchanged in ("train.steps=7", "model.remat=none", "data.train=jsonl:x", "model.path=x"):
        assert identity(unchanged) == first
    # The same weights compute something else.
    for changed in ("budget.max=77", "conditioning.input=normalised", "model.rope_theta=5"):
        assert identity(changed)["model"] != first["model"]
    # An override of the evaluation is recorded by the evaluation.
    saved = open_policy(run, None, 10)
    overridden = saved.under(config_io.override(saved.config, ["budget.max=77"]))
    assert overridden.recorded_identity() == saved.recorded_identity()


def test_every_key_of_the_model_is_in_its_identity_or_recorded_or_has_no_effect():
    elsewhere = {"path", "tokenizer", "compute_dtype", "product_dtype", "param_dtype", "attention"}
    no_effect = {"scan_layers", "remat", "logprob_chunk"}
    names = {field.name for field in dataclasses.fields(ModelConfig)} - elsewhere - no_effect
    in_identity = {key for key in saved_policy._MODEL_KEYS if key.startswith("model.")}
    assert in_identity == {f"model.{name}" for name in names}


def test_a_folders_own_format_takes_the_texts_that_are_written(run):
    saved = dataclasses.replace(open_policy(run, None, 2), style=FORMATS["boxed"])
    assert saved.under(saved.config).style is FORMATS["boxed"]
    config = config_io.override(
        saved.config, ["data.system_prompt=Be brief.", "data.template_variables={day: 1}"]
    )
    style = saved.under(config).style
    assert (style.name, style.system, dict(style.variables)) == ("boxed", "Be brief.", {"day": 1})


@pytest.mark.parametrize(
    ("override", "base"), [("old", None), ("null", None), ("new", "new"), ("data/new", "data/new")]
)
def test_the_base_of_adapters_is_read_from_the_model_path_of_now(monkeypatch, override, base):
    trained = config_io.override(Config(), ["adapter.rank=2", "model.path=old"])
    saved = SavedPolicy(Path("run"), 5, trained, {}, trained=trained)
    saved = saved.under(config_io.override(trained, [f"model.path={override}"]))
    bases = []
    monkeypatch.setattr(
        saved_policy, "read_params", lambda folder, step, *, base=None: bases.append(base)
    )
    saved.params()
    assert bases == [None if base is None else Path(base)]


def test_folders_without_a_policy_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"contains no config\.yaml"):
        read_config(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        open_policy(None, tmp_path / "none")


def test_a_folder_that_was_edited_is_refused_before_it_says_how_it_is_asked(tmp_path):
    (tmp_path / "config.json").write_text('{"thinking": {}}')
    write_manifest(tmp_path)
    (tmp_path / "config.json").write_text('{"no_thinking": {}}')
    with pytest.raises(UserError, match=r"config\.json is not the file that was exported"):
        open_policy(None, tmp_path)
