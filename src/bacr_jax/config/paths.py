"""Expands paths in the values of config keys, and data sets that are written as only a file.

`io` calls `expand_paths` on every value that a user writes. The stored config of a run therefore
contains full paths, and data sets with their kind, such as `jsonl:train.jsonl`.
"""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from bacr_jax.config.values import FrozenMap
from bacr_jax.files import expand_home

# Keys whose value is a path, which may be followed by a colon and the name of a function.
_PATHS = frozenset(
    {
        *("model.path", "model.tokenizer", "adapter.path", "data.dir", "data.labels"),
        *("warmup.dir", "output.dir", "output.compile_cache", "rollout.weights_dir"),
        *("distill.teacher", "method", "grader"),
    }
)
# Keys whose value is one data set or a list of them.
_SETS = frozenset({"data.train", "data.eval"})
# Key whose value maps rewards to weights. A reward can be written as FILE.py:function.
_REWARDS = "reward.weights"
# Weight of a set in a mixture, such as `2*` in `2*gym:gcd`.
_WEIGHT = re.compile(r"(?:\d+\.?\d*|\.\d+)\s*\*\s*(?=\S)")
# Name of a set before its path, such as `jsonl:`.
_NAME = re.compile(r"\w+:")
# Start of the name of a dataset of the Hugging Face hub, after `Path` has removed a slash.
_HUB_AS_PATH = re.compile(r"^hf:/(?!/)")
# Maps a file's extension to the name of the data set that reads such a table.
_TABLE_OF = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}


def expand_paths(key: str, value: Any) -> Any:
    """Expands ~ and environment variables in a key's value, if the key contains paths.

    A data set that is written as only a file, such as `train.jsonl`, becomes `jsonl:train.jsonl`.

    Args:
      key: dotted name of the key.
      value: value with the key's type.

    Raises:
      ValueError: if an environment variable is not set, or a user does not exist.
    """
    if key in _PATHS and isinstance(value, str):
        return expand_path(value)
    if key in _SETS:
        if isinstance(value, str):
            return set_name(value)
        return tuple(map(set_name, value))
    if key == _REWARDS and isinstance(value, Mapping):
        return FrozenMap({expand_path(name): weight for name, weight in value.items()})
    return value


def set_name(spec: str) -> str:
    """Returns the full name of a data set, for example `jsonl:train.jsonl` for `train.jsonl`.

    Args:
      spec: name of a data set, as in `data.train`. ~ and environment variables are expanded.

    Raises:
      ValueError: as for `expand_paths`.
    """
    weight, bare_set = split_weight(spec)
    name = _NAME.match(bare_set)
    path_start = 0 if name is None else name.end()
    full_set = bare_set[:path_start] + expand_path(bare_set[path_start:])
    if ":" in full_set:
        return weight + full_set
    table = _TABLE_OF.get(PurePosixPath(full_set).suffix.lower())
    if table is None:
        return weight + full_set
    return f"{weight}{table}:{full_set}"


def split_weight(spec: str) -> tuple[str, str]:
    """Splits a data set such as `2*gym:gcd` into its weight, `2*`, and the set, `gym:gcd`.

    The weight is empty if none is written.
    """
    weight = _WEIGHT.match(spec)
    if weight is None:
        return "", spec
    return weight.group(), spec[weight.end() :]


def expand_path(path: str) -> str:
    """Expands ~ and environment variables in a path, or in a name such as `hf://$OWNER/NAME`.

    Other text, such as `https://host//x`, is unchanged.

    Raises:
      ValueError: as for `expand_paths`.
    """
    if path.startswith("~") or "$" in path:
        return _HUB_AS_PATH.sub("hf://", str(expand_home(path)))
    return path
