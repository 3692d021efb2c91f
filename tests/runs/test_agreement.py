"""Processes that were told different things are not of one run."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.io import flatten
from bacr_jax.errors import UserError
from bacr_jax.runs import agreement
from bacr_jax.runs.agreement import FREE, disagreement, start_facts

CONFIG = Config()
KEYS = list(config_io.flatten(CONFIG))
OPTIONS = {"--resume": "auto", "--allow-change": []}
HOSTS = ["one", "two", "three"]


@pytest.fixture(scope="module")
def told():
    return start_facts(flatten(CONFIG), OPTIONS)


@pytest.mark.parametrize("key", KEYS)
def test_another_value_of_any_key_is_refused_or_the_key_is_free(told, key):
    other = start_facts(flatten(CONFIG) | {key: "another"}, OPTIONS)
    line = disagreement([told, told, other], HOSTS)
    if key in FREE:
        assert line is None
    else:
        before = told[key] if len(told[key]) <= 60 else told[key][:48]
        assert line.startswith(
            "process 2 on three can't train together with process 0 on one, because these differ: "
            f"{key} ({before}"
        )
        assert '"another" in process 2)' in line


def test_free_keys_are_keys():
    assert set(FREE) <= set(KEYS)


def test_options_versions_flags_and_variables_are_compared(told, monkeypatch):
    for name in ("jax", "the code of bacr_jax", "the backend"):
        assert name in told
    monkeypatch.setenv("BACR_DETERMINISTIC", "1")
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_gpu_dump_autotune_results_to=/x-0 --xla_b=2")
    other = start_facts(flatten(CONFIG), {"--resume": "auto", "--allow-change": ["train.steps"]})
    assert other["XLA_FLAGS"] == "--xla_a=1 --xla_b=2"
    line = disagreement([told, other], HOSTS)
    for part in (
        '--allow-change ([] in process 0, ["train.steps"] in process 1)',
        "XLA_FLAGS (",
        "BACR_DETERMINISTIC (none in process 0, 1 in process 1)",
    ):
        assert part in line


def test_options_of_jax_that_change_the_rounding_are_compared(told):
    with jax.default_matmul_precision("highest"):
        line = disagreement([told, start_facts(flatten(CONFIG), OPTIONS)], HOSTS)
    assert "differ: jax_default_matmul_precision (None in process 0, highest in process 1)" in line


def test_all_lines_of_the_backends_version_are_compared(monkeypatch):
    version = "PJRT C API\ncuda 12090"
    client = SimpleNamespace(platform_version=version)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(client=client)])
    assert start_facts(flatten(CONFIG), OPTIONS)["the backend"] == "PJRT C API, cuda 12090"


def test_the_content_of_a_method_of_ones_own_counts(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("a = 1")
    config = dataclasses.replace(CONFIG, method=str(path))
    one = start_facts(flatten(config), OPTIONS)
    path.write_text("a = 2")
    assert f"the file {path}" in disagreement([one, start_facts(flatten(config), OPTIONS)], HOSTS)


def test_long_values_and_many_differences_stay_one_line():
    one = {f"key{i}": "a" * 500 for i in range(9)}
    line = disagreement([one, dict.fromkeys(one, "a" * 499)], HOSTS)
    assert len(line) < 900 and "and 5 more" in line


def test_what_one_process_can_not_use_all_hear(monkeypatch):
    monkeypatch.setattr(
        "bacr_jax.parallel.processes.texts_of_all",
        lambda text: ['{"host": "far", "facts": {}, "error": "data.dir=x: is gone"}', text],
    )
    with pytest.raises(UserError, match=r"^process 0 on far: data\.dir=x: is gone$"):
        agreement.refuse_if_processes_differ({})
