"""Unsupported settings and damaged folders raise a one-line error before weights are loaded."""

import json
import shutil

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm_world import ENGINE

import bacr_vllm
from bacr_vllm import requests


def configured(folder, **how):
    """Returns the config with which vLLM would start an engine for the folder."""
    return EngineArgs(str(folder), **{**ENGINE, "max_model_len": 100, **how}).create_engine_config()


def refusal(folder, **how):
    """Returns the message of this package's error, which must be one line of vLLM's error."""
    with pytest.raises(ValueError) as refused:
        configured(folder, **how)
    lines = [line for line in str(refused.value).splitlines() if "bacr-vllm: " in line]
    assert len(lines) == 1, refused.value
    return lines[0].partition("bacr-vllm: ")[2]


def changed(folder, to, manifest=False, **changes):
    """Copies a folder, changes keys of its config.json, and returns the path of the copy.

    The copy contains the unchanged manifest.json only if `manifest` is True. None removes a key.
    """
    shutil.copytree(folder, to)
    if not manifest:
        (to / "manifest.json").unlink()
    config = json.loads((to / "config.json").read_text())
    for name, value in changes.items():
        if value is None:
            del config[name]
        else:
            config[name] = {**config[name], **value} if isinstance(value, dict) else value
    (to / "config.json").write_text(json.dumps(config))
    return to


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0", "dev", ""])
def test_other_versions_are_refused(version):
    with pytest.raises(ImportError, match=r"install vllm>=0.32,<0.34, or uninstall "):
        bacr_vllm.check_version(version)


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1.dev2+cpu"])
def test_known_versions_are_not(version):
    bacr_vllm.check_version(version)


@pytest.mark.parametrize("name", ["shared", "prompt"])
def test_what_the_engine_may_not_do(world, name, monkeypatch):
    folder = world / name / "out"
    draft = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    assert refusal(folder, speculative_config=draft).startswith("speculative decoding is not")
    how = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    assert refusal(folder, **how).startswith("pipeline parallelism is not supported; pass --ten")
    assert refusal(folder, enable_lora=True).startswith(
        "LoRA adapters are not supported; leave out --enable-lora, and serve a folder "
    )
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert refusal(folder).startswith("budgets per request need vLLM's model runner V2; set VLLM_")


def test_folders_that_are_damaged(world, tmp_path):
    folder = world / "shared" / "out"
    cases = [
        (
            {"budget_module": None},
            "config.json has no section 'budget_module'; serve a folder that bacr export wrote",
        ),
        ({"thinking": None}, "config.json has no valid section 'thinking'"),
        ({"thinking": {"closing_ids": 3}}, "config.json has no valid section 'thinking'"),
        (
            {"budget_module": {"gate": "relu"}},
            "budget_module.gate in config.json is 'relu', but must be",
        ),
        (
            {"budget_module": {"site": "middle"}},
            "budget_module.site in config.json is 'middle', but only",
        ),
        (
            {"budget_module": {"b_max": "64"}},
            "budget_module.b_max in config.json is '64', but must be",
        ),
    ]
    for number, (changes, expected) in enumerate(cases):
        assert refusal(changed(folder, tmp_path / str(number), **changes)).startswith(expected)


def test_a_folder_that_is_not_as_it_was_written(world, tmp_path):
    folder = changed(world / "shared" / "out", tmp_path / "other", manifest=True, bos_token_id=5)
    assert "config.json is not the file that was exported" in refusal(folder)


def test_a_plain_model_of_others_stays_as_it_is(world, tmp_path):
    other = changed(world / "prompt" / "out", tmp_path / "other", thinking=None)
    assert not configured(other).model_config.logits_processors
    assert len(configured(world / "prompt" / "out").model_config.logits_processors) == 1


def test_a_folder_is_known_in_every_process_by_its_name():
    name = requests.processor_name({"low": 16}, 99, "abc")
    module, _, attribute = name.partition(":")
    assert module == "bacr_vllm.requests"
    found = getattr(requests.FOLDERS, attribute.removeprefix("FOLDERS."))
    assert (found.levels, found.most, found.folder) == ({"low": 16}, 99, "abc")
    assert issubclass(found, requests.BudgetRequests)
    with pytest.raises(AttributeError):
        requests.FOLDERS.of_nothing  # noqa: B018
