"""Creates configs by hand or at random."""

import dataclasses
import typing
from collections.abc import Mapping

from hypothesis import strategies as st

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.values import FrozenMap

# All config keys except sections, by dotted name.
KEYS = {name: key for name, key in config_io.schema().items() if not key.is_section}


def write(folder, text, name="run.yaml"):
    """Writes text or bytes to a file and returns the path of the file."""
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def changed(**sections):
    """Returns the default config with some values changed.

    Args:
      sections: for each section, a dict of the keys to change. For a key outside of sections, such
        as `seed`, its value.
    """
    config = Config()
    for name, keys in sections.items():
        old = getattr(config, name)
        new = dataclasses.replace(old, **keys) if isinstance(keys, dict) else keys
        config = dataclasses.replace(config, **{name: new})
    return config


def with_value(config, name, value):
    """Returns the config with another value of the key `name`, such as `train.steps`."""
    first, _, rest = name.partition(".")
    new = with_value(getattr(config, first), rest, value) if rest else value
    return dataclasses.replace(config, **{first: new})


def values_of(hint):
    """Returns a Hypothesis strategy for values of a type annotation, including extreme values."""
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
    """Returns a Hypothesis strategy for dicts of up to six config keys with values of their types.

    Args:
      keep: predicate that is False for values that should not be generated.
    """
    pairs = {
        name: st.tuples(st.just(name), values_of(key.hint).filter(keep))
        for name, key in KEYS.items()
    }
    pair = st.sampled_from(sorted(KEYS)).flatmap(pairs.__getitem__)
    return st.lists(pair, max_size=6).map(dict)
