"""Paths in keys are expanded, and the path of a table is a data set."""

import re

import pytest

from bacr_jax.config import io as config_io
from bacr_jax.config.derived import mixture
from bacr_jax.config.paths import expand_paths, set_name
from bacr_jax.config.values import alternatives
from bacr_jax.errors import UserError


@pytest.fixture(autouse=True)
def home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("DATA", "/data")
    monkeypatch.setenv("OWNER", "openai")
    monkeypatch.setenv("HUB", "hf://openai")
    monkeypatch.delenv("UNSET", raising=False)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("train.jsonl", "jsonl:train.jsonl"),
        ("2*own/train.CSV", "2*csv:own/train.CSV"),
        ("~/x.parquet", "parquet:/home/me/x.parquet"),
        ("$DATA/x.json", "json:/data/x.json"),
        ("math:${DATA}/math", "math:/data/math"),
        ("1.5*jsonl:~/x.jsonl", "1.5*jsonl:/home/me/x.jsonl"),
        ("ledger", "ledger"),
        ("own.py", "own.py"),
        ("gym:chain_sum?min_terms=2", "gym:chain_sum?min_terms=2"),
        ("gsm8k:hf://openai/gsm8k", "gsm8k:hf://openai/gsm8k"),
        ("gsm8k:hf://$OWNER/gsm8k/main", "gsm8k:hf://openai/gsm8k/main"),
        ("2*gsm8k:hf://${OWNER}/gsm8k@abc", "2*gsm8k:hf://openai/gsm8k@abc"),
        ("gsm8k:$HUB/gsm8k", "gsm8k:hf://openai/gsm8k"),
    ],
)
def test_the_full_name_of_a_set(spec, name):
    assert set_name(spec) == name


@pytest.mark.parametrize("gap", ["", " "])
@pytest.mark.parametrize("number", ["2", "2.0", "0.5", ".5", "2.", "10"])
def test_a_weight_that_the_path_is_expanded_behind_is_the_weight_of_the_set(number, gap):
    for path, full_set in (("train.jsonl", "jsonl:train.jsonl"), ("gym:gcd", "gym:gcd")):
        name = set_name(f"{number}{gap}*{gap}{path}")
        assert mixture(name) == [(float(number), full_set)]
        # A stored name is read back unchanged.
        assert set_name(name) == name


@pytest.mark.parametrize("spec", ["2*", "2 * ", "1.2.3*gym:gcd", "x*gym:gcd", "*gym:gcd"])
def test_other_texts_have_no_weight(spec):
    assert mixture(spec) == [(1.0, spec)]


def is_path(key):
    """True if the meaning of a key with a text says that the text is a folder or a file."""
    means_path = re.search(r"\bfolder\b|\bFILE\.py\b|\bJSONL file\b", key.meaning)
    return str in alternatives(key.hint) and means_path is not None


PATHS = [name for name, key in config_io.schema().items() if not key.is_section and is_path(key)]


@pytest.mark.parametrize("key", PATHS)
def test_every_text_that_means_a_folder_or_a_file_is_expanded(key):
    assert expand_paths(key, "~/x") == "/home/me/x"
    assert expand_paths(key, "$DATA/x") == "/data/x"


def test_the_keys_with_paths_are_recognized():
    assert {"model.path", "distill.teacher", "data.labels", "grader", "data.dir"} <= set(PATHS)


def test_every_key_with_a_path_is_expanded():
    config = config_io.load(
        [],
        [
            *("data.train=[train.jsonl,2*~/b.csv]", "data.eval=[$DATA/test.jsonl]"),
            *("data.labels=~/labels.jsonl", "grader=~/verify.py:check", "method=$DATA/mine.py"),
            *("reward.weights={correct: 1, $DATA/r.py:f: 0.2}", "output.compile_cache=~/cache"),
        ],
    )
    assert config.data.train == ("jsonl:train.jsonl", "2*csv:/home/me/b.csv")
    assert config.data.eval == ("jsonl:/data/test.jsonl",)
    assert config.data.labels == "/home/me/labels.jsonl"
    assert config.grader == "/home/me/verify.py:check"
    assert config.method == "/data/mine.py"
    assert dict(config.reward.weights) == {"correct": 1, "/data/r.py:f": 0.2}
    assert config.output.compile_cache == "/home/me/cache"
    # A stored config is read back unchanged.
    assert config_io.override(config_io.load([], []), []) == config_io.load([], [])


def test_a_variable_that_is_not_set_is_refused_unless_a_file_has_the_name(tmp_path):
    with pytest.raises(
        UserError, match=r"^command line: data.dir=\$UNSET/x: .* \$UNSET is not set"
    ):
        config_io.load([], ["data.dir=$UNSET/x"])
    (tmp_path / "$UNSET").mkdir()
    assert expand_paths("data.dir", f"{tmp_path}/$UNSET") == f"{tmp_path}/$UNSET"


def test_other_texts_keep_their_dollars():
    assert expand_paths("data.system_prompt", "It costs $DATA.") == "It costs $DATA."
