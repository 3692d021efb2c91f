"""What a key must state, and what the room hands out."""

import dataclasses
import re
import typing
from pathlib import Path

import bacr_jax.config
from bacr_jax.config import Config, OptimizerConfig
from bacr_jax.config.fields import walk
from bacr_jax.learner.optimizer import schedule
from bacr_jax.methods import registry
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


def test_the_section_of_a_method_names_every_method_that_reads_it():
    folder = Path(registry.__file__).parent
    for name, key in walk(Config()):
        if not (key.is_section and key.meaning.startswith("method")):
            continue
        texts = {path.stem: path.read_text() for path in folder.glob("*.py")}
        readers = {stem for stem, text in texts.items() if f"config.{name}" in text}
        assert set(re.findall(r"\w+", key.meaning)) - {"method", "methods", "and"} == readers


def test_the_warm_up_of_the_learning_rate_is_counted_in_updates():
    """Two updates per step: the rate has risen after half as many steps."""
    assert "train.minibatches per step" in KEYS["optimizer.warmup_steps"].meaning
    config = OptimizerConfig(warmup_steps=10, schedule="constant")
    rate = schedule(config, 100)
    minibatches = 2
    assert float(rate(4 * minibatches)) < 1.0 == float(rate(5 * minibatches))
