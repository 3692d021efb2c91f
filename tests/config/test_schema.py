"""What a key must state, and what the room hands out."""

import dataclasses
import typing

import bacr_jax.config
from bacr_jax.config import Config
from bacr_jax.config.fields import walk
from config_world import KEYS


def types_in(hint):
    """The types that an annotation is made of; choices are words, not numbers."""
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return set()
    return set().union(*map(types_in, inner)) if inner else {hint}


def test_every_number_has_bounds_and_nothing_else_has():
    numbers = {name for name, key in KEYS.items() if {int, float} & types_in(key.hint)}
    assert numbers == {name for name, key in KEYS.items() if key.bounds is not None}


def test_every_key_says_what_it_means_in_words():
    for name, key in walk(Config()):
        assert key.meaning == key.meaning.strip() != "", name


def test_sections_are_the_classes_that_the_room_hands_out():
    sections = {type(key.value).__name__ for _, key in walk(Config()) if key.is_section}
    handed_out = {name for name, thing in vars(bacr_jax.config).items() if isinstance(thing, type)}
    assert sections | {"Config"} == handed_out
    assert all(dataclasses.is_dataclass(getattr(bacr_jax.config, name)) for name in sections)
