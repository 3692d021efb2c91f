"""Configs made by hand or at random."""

import dataclasses
import typing
from collections.abc import Mapping

from hypothesis import strategies as st

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.values import FrozenMap

KEYS = {name: key for name, key in config_io.schema().items() if not key.is_section}


def write(folder, text, name="run.yaml"):
    """A file of a test."""
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def changed(**sections):
    """The default config with some sections changed."""
    config = Config()
    for name, keys in sections.items():
        old = getattr(config, name)
        new = dataclasses.replace(old, **keys) if isinstance(keys, dict) else keys
        config = dataclasses.replace(config, **{name: new})
    return config


def with_value(config, name, value):
    """The config with one value replaced, by its dotted key."""
    first, _, rest = name.partition(".")
    new = with_value(getattr(config, first), rest, value) if rest else value
    return dataclasses.replace(config, **{first: new})


def values_of(hint):
    """Values of an annotation, extreme ones included."""
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return st.lists(values_of(typing.get_args(hint)[0]), max_size=5).map(tuple)
    if typing.get_origin(hint) is Mapping:
        names, inner = map(values_of, typing.get_args(hint))
        return st.dictionaries(names, inner, max_size=3).map(FrozenMap)
    if typing.get_args(hint):
        return st.one_of([values_of(member) for member in typing.get_args(hint)])
    return {
        int: st.one_of(st.integers(-2, 70), st.integers(-(2**63) + 1, 2**63 - 1)),
        float: st.one_of(st.floats(), st.floats(-1, 2)),
        bool: st.booleans(),
        str: st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=9),
        type(None): st.none(),
    }[hint]


def values_by_key(keep=lambda value: True):
    """A few keys, each with a value of its type."""
    pairs = {
        name: st.tuples(st.just(name), values_of(key.hint).filter(keep))
        for name, key in KEYS.items()
    }
    pair = st.sampled_from(sorted(KEYS)).flatmap(pairs.__getitem__)
    return st.lists(pair, max_size=6).map(dict)
