"""What made a state: equal for equal runs, and a line for what keeps a resume from being exact."""

import builtins
import dataclasses
import io
import json
import platform
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from bacr_jax.config import Config, DataConfig
from bacr_jax.config import io as config_io
from bacr_jax.config.io import flatten
from bacr_jax.errors import UserError
from bacr_jax.model.sizes import Qwen2Config, RopeScaling
from bacr_jax.questions.question_set import QuestionSet
from bacr_jax.runs import provenance as provenance_module
from bacr_jax.runs.provenance import (
    VERSIONED,
    check_same_inputs,
    check_same_prompts,
    check_same_questions,
    differences,
    provenance,
)

BLANK = np.zeros(2, np.int32)
QUESTIONS = QuestionSet("ours", ["1+1", "2+2"], ["2", "4"], BLANK, BLANK, ["a", "b"])


def made_from(config, *inputs, **prompts):
    """The provenance of a run with this config."""
    return provenance(config_io.flatten(config), config_io.fingerprint(config), *inputs, **prompts)


def test_it_is_json_and_names_seed_software_and_devices():
    made = made_from(Config(seed=7), QUESTIONS, None)
    assert json.loads(json.dumps(made)) == made
    assert made["seed"] == made["config"]["seed"] == 7
    assert set(made["versions"]) == set(VERSIONED) and made["versions"]["jax"] == jax.__version__
    assert made["devices"][0] == jax.device_count() and made["mesh"] == {}


def test_a_mesh_is_told_by_its_axes():
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "fsdp"))
    assert made_from(Config(), QUESTIONS, mesh)["mesh"] == {"data": 1, "fsdp": 1}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ids", ["a", "c"]),
        ("questions", ["1+1", "2 + 2"]),
        ("answers", ["2", "5"]),
        ("groups", np.array([0, 1])),
    ],
)
def test_data_are_known_by_ids_questions_answers_and_groups(field, value):
    print_of = lambda questions: made_from(Config(), questions, None)["data_fingerprint"]
    assert print_of(dataclasses.replace(QUESTIONS, **{field: value})) != print_of(QUESTIONS)
    assert print_of(dataclasses.replace(QUESTIONS, name="theirs")) == print_of(QUESTIONS)


def made_with_sets(train, *evaluated, folder=""):
    """Returns the provenance of a run whose `data.eval` has one table for each evaluation set."""
    entries = tuple(f"jsonl:{folder}{index}.jsonl" for index in range(len(evaluated)))
    config = dataclasses.replace(Config(), data=DataConfig(eval=entries))
    return made_from(config, train, None, evaluated)


def test_other_questions_are_refused():
    others = dataclasses.replace(QUESTIONS, answers=["2", "5"])
    made = lambda train, *evaluated: made_with_sets(train, *evaluated)
    check = lambda then, now: check_same_questions(then, now, "ledger", Path("run"))
    check(made(QUESTIONS, QUESTIONS), made(QUESTIONS, QUESTIONS))
    with pytest.raises(UserError, match="data.train=ledger: the questions differ from"):
        check(made(QUESTIONS), made(others))
    for now in ((), (others,), (QUESTIONS, dataclasses.replace(QUESTIONS, name="more"))):
        with pytest.raises(
            UserError,
            match="data.eval: the questions of (ours|more) have changed since the last evaluation "
            "of the run in ",
        ):
            check(made(QUESTIONS, QUESTIONS), made(QUESTIONS, *now))


FIRST = QUESTIONS
SECOND = dataclasses.replace(QUESTIONS, answers=["2", "5"])
OTHER = dataclasses.replace(QUESTIONS, answers=["3", "5"])


def check_sets(then, now):
    check_same_questions(then, now, "ledger", Path("runs/a"))


def test_each_of_several_sets_with_equal_names_is_compared():
    then = made_with_sets(QUESTIONS, FIRST, SECOND)
    assert list(then["evaluated_fingerprints"]) == ["jsonl:0.jsonl", "jsonl:1.jsonl"]
    check_sets(then, made_with_sets(QUESTIONS, FIRST, SECOND))
    for now in ((OTHER, SECOND), (SECOND, SECOND), (SECOND, FIRST)):
        with pytest.raises(UserError, match="the questions of jsonl:0.jsonl have changed"):
            check_sets(then, made_with_sets(QUESTIONS, *now))
    with pytest.raises(UserError, match="the questions of jsonl:1.jsonl have changed"):
        check_sets(then, made_with_sets(QUESTIONS, FIRST, OTHER))
    # Only sets with equal names are known by their entries.
    named = dataclasses.replace(OTHER, name="theirs")
    mixed = made_with_sets(QUESTIONS, FIRST, SECOND, named)["evaluated_fingerprints"]
    assert list(mixed) == ["jsonl:0.jsonl", "jsonl:1.jsonl", "theirs"]


def test_moved_files_with_the_same_questions_are_accepted():
    then = made_with_sets(QUESTIONS, FIRST, SECOND)
    check_sets(then, made_with_sets(QUESTIONS, FIRST, SECOND, folder="moved/"))
    with pytest.raises(UserError, match="the questions of jsonl:0.jsonl have changed"):
        check_sets(then, made_with_sets(QUESTIONS, OTHER, SECOND, folder="moved/"))


def test_a_changed_file_of_a_method_is_refused_and_another_file_is_not():
    made = lambda **files: made_from(Config(), QUESTIONS, None) | {"method_fingerprints": files}
    check_sets(made(**{"method=own.py": "11"}), made(**{"method=own.py": "11"}))
    check_sets(made(**{"method=own.py": "11"}), made(**{"method=other.py": "22"}))
    with pytest.raises(
        UserError, match="^method=own.py: the code of the method was changed after the run in"
    ) as said:
        check_sets(made(**{"method=own.py": "11"}), made(**{"method=own.py": "22"}))
    assert str(said.value).endswith("another name and pass --allow-change method")


def test_another_content_of_a_file_that_grades_is_refused_and_another_file_is_not():
    files = {"grader=mine.py:check": "11", "reward.weights=mine.py:brief": "22"}
    made = lambda files: made_from(Config(), QUESTIONS, None, (), files)
    check = lambda then, now: check_same_questions(then, now, "ledger", Path("runs/a"))
    check(made(files), made(files))
    check(made(files), made({"reward.weights=other.py:brief": "33"}))
    with pytest.raises(
        UserError, match="^reward.weights=mine.py:brief: the code that grades"
    ) as said:
        check(made(files), made(files | {"reward.weights=mine.py:brief": "33"}))
    assert str(said.value).endswith("another name and pass --allow-change reward.weights")


def test_a_resume_that_is_not_exact_says_what_changed():
    then = made_from(Config(), QUESTIONS, None)
    assert list(differences(then, then)) == []
    # What the config says is not looked at here: a resume refuses another one.
    now = {**then, "seed": 1, "versions": {"jax": "0.1"}, "devices": [8, "H100"]}
    of_versions, of_devices = differences(then, now)
    assert of_versions.startswith("note: versions changed from {'jax': ")
    assert "to {'jax': '0.1'};" in of_versions
    assert "devices changed from [" in of_devices and "to [8, 'H100'];" in of_devices
    assert all("not be bit-identical" in line for line in (of_versions, of_devices))


@pytest.mark.parametrize(
    ("group", "name"),
    [
        *(("versions", name) for name in ("grain", "sympy", "latex2sympy2_extended")),
        ("machine", "processor"),
        ("switches", "jax_default_matmul_precision"),
        ("switches", "jax_disable_most_optimizations"),
    ],
)
def test_software_hardware_and_options_that_changed_are_noted(group, name):
    now = made_from(Config(), QUESTIONS, None)
    then = now | {group: now[group] | {name: "another"}}
    (note,) = differences(then, now)
    before, after = {name: "another"}, {name: now[group][name]}
    assert note.startswith(f"note: {group} changed from {before} to {after}; the run continues")
    # An entry of another kind of device is not compared.
    del then[group][name]
    assert list(differences(then, now)) == []


def test_the_driver_and_the_versions_of_the_backend_belong_to_a_gpu(monkeypatch):
    client = SimpleNamespace(platform_version="PJRT C API\ncuda 12090")
    gpu = SimpleNamespace(platform="gpu", client=client)
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    monkeypatch.setattr(provenance_module, "driver", lambda: "NVRM version: 550")
    assert provenance_module.machine() == {
        "backend": "PJRT C API, cuda 12090",
        "driver": "NVRM version: 550",
    }


def test_the_rounding_of_products_is_recorded():
    with jax.default_matmul_precision("highest"):
        made = made_from(Config(), QUESTIONS, None)
    assert made["switches"]["jax_default_matmul_precision"] == "highest"
    # Versions of JAX may rename an option, which would then be recorded as None.
    assert made["switches"]["jax_disable_most_optimizations"] in ("True", "False")


EPYC = (
    "processor\t: 0\ncpu family\t: 25\nmodel name\t: AMD EPYC\n\nprocessor\t: 1\ncpu family\t: 25\n"
)


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        (EPYC, "{machine} AMD EPYC, family 25"),
        ("processor\t: 0\nBogoMIPS\t: 50.00\n", "{machine}"),
        (None, "{machine}"),
    ],
)
def test_the_processor_has_its_model_and_family_where_the_system_gives_them(
    monkeypatch, cpuinfo, expected
):
    def open_cpuinfo(path, *_, **__):
        assert path == "/proc/cpuinfo"
        if cpuinfo is None:
            raise FileNotFoundError(path)
        return io.StringIO(cpuinfo)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", open_cpuinfo)
        processor = provenance_module.processor()
    assert processor == expected.format(machine=platform.machine())


SHAPE = Qwen2Config(27, 16, 24, 3, 4, 2, 4)
ROPE_SCALING = RopeScaling(8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rope_theta": 5e5}, "rope_theta is 500000.0 instead of 1000000.0"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps is 0.001 instead of 1e-06"),
        ({"rope_scaling": ROPE_SCALING}, "rope_scaling is {.*8192} instead of None"),
        ({"tie_embeddings": True}, "tie_embeddings is True instead of False"),
        ({"qkv_bias": False, "qk_norm": True}, "qkv_bias is False instead of True, qk_norm is"),
        ({"num_heads": 2, "head_dim": 8}, "num_heads is 2 instead of 4, head_dim is 8 instead"),
        # A larger limit of positions does not change what the weights compute.
        ({"max_positions": 99}, None),
        ({}, None),
    ],
)
def test_another_config_json_is_refused_by_its_fields(change, says):
    config = config_io.override(Config(), ["model.path=base"])
    made = lambda shape: made_from(config, QUESTIONS, None, model=shape)
    then = json.loads(json.dumps(made(SHAPE)))
    now = made(dataclasses.replace(SHAPE, **change))
    check = lambda then, config: check_same_inputs(then, now, flatten(config), Path("runs/a"))
    # A custom model is described by the config, and changed with --allow-change.
    check(then, Config())
    if says is None:
        return check(then, config)
    with pytest.raises(UserError, match=f"^model.path=base: its config.json .* runs/a .*{says}"):
        return check(then, config)


PROMPTS = {"tokenizer": "a", "template": "b", "data.train": "c", "ours": "d"}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tokenizer", "the vocabulary of its tokenizer differs"),
        ("template", "its chat template differs from the one"),
        ("data.train", "the prompts of data.train have different token ids"),
        ("ours", "the prompts of ours have different token ids"),
    ],
)
def test_another_tokenizer_template_or_prompt_is_refused(name, says):
    then = made_from(Config(), QUESTIONS, None, prompts=PROMPTS)
    check = lambda now, *changed: check_same_prompts(
        then, now, flatten(config_io.override(Config(), changed)), Path("runs/a")
    )
    check(PROMPTS)
    # A policy is opened without the prompts of its training.
    check({"tokenizer": "a"})
    with pytest.raises(UserError, match=rf"^model.path=None: .*{says}.* runs/a\b"):
        check(PROMPTS | {name: "x"})
    # What was changed on purpose changes prompts, and no tokenizer.
    brief = "data.system_prompt=Be brief."
    if name == "tokenizer":
        with pytest.raises(UserError, match=says):
            check(PROMPTS | {name: "x"}, brief)
    else:
        check(PROMPTS | {name: "x"}, brief)
