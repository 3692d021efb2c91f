"""A small random policy over a ledger-like vocabulary, and its decoding rules, for tests."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bacr_jax.config import ConditioningConfig
from bacr_jax.model import budget, kv_cache, qwen2
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.prompts.decode_rules import decode_rules
from bacr_jax.rollout import (
    Callbacks,
    RolloutRequest,
    RolloutSpec,
    SamplingSetup,
    generate,
    sampling_params,
)
from bacr_jax.types import Prompts

VOCAB, PAD, OPEN, CLOSE, ANSWER, ANSWER_CLOSE, EOS = 16, 0, 1, 2, 3, 4, 5
LEGAL = np.array([i not in (PAD, OPEN) for i in range(VOCAB)])


@dataclass
class Table:
    next_state: Any
    opens: Any


def one_token(token):
    """The automaton of a stop string that is a single token."""
    next_state, opens = np.zeros((2, VOCAB), np.int32), np.zeros((2, VOCAB), bool)
    next_state[0, token], next_state[1], opens[0, token] = 1, 1, True
    return Table(next_state, opens)


def two_tokens(firsts, seconds):
    """An automaton that accepts one of `firsts` followed at once by one of `seconds`."""
    next_state, opens = np.zeros((3, VOCAB), np.int32), np.zeros((3, VOCAB), bool)
    next_state[:2, firsts] = 1
    next_state[1, seconds] = 2
    next_state[2] = 2
    opens[:2, firsts] = True
    return Table(next_state, opens)


def make_rules(think_close=None, allowed_tokens=LEGAL):
    return decode_rules(
        allowed_tokens=allowed_tokens,
        eos_ids=[EOS],
        think_close=think_close or one_token(CLOSE),
        answer_close=one_token(ANSWER_CLOSE),
        forced_suffix=[CLOSE, ANSWER],
        natural_suffix=[ANSWER],
    )


def make_prompts(lengths, width, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(6, VOCAB, (len(lengths), width))
    lengths = np.asarray(lengths)
    tokens[np.arange(width) >= lengths[:, None]] = 0
    return Prompts(tokens, lengths, np.zeros(len(lengths), int), lengths)


def quarters(budgets):
    """Cuts at a quarter, a half, three quarters and all of each budget."""
    return np.ceil(np.asarray(budgets)[:, None] * np.arange(1, 5) / 4).astype(int)


def no_cuts(rows):
    return np.zeros((rows, 0), int)


# One program, and not one of each draw.
init = jax.jit(qwen2.init, static_argnames=("config", "conditioning"))


@functools.cache
def plain_world():
    """The one that most tests share."""
    return World()


class World:
    """A conditioned policy with everything a rollout needs."""

    def __init__(self, conditioning=None, num_kv_heads=1):
        self.shape = Qwen2Config(
            VOCAB, 16, 32, 2, 2, num_kv_heads, 8, rope_theta=1e4, tie_embeddings=True
        )
        self.conditioning = conditioning or ConditioningConfig()
        params = init(jax.random.key(0), self.shape, conditioning=self.conditioning)
        params["embed"] = params["embed"] * 30  # far from uniform, so mistakes show
        w2 = params["budget"]["w2"]
        params["budget"]["w2"] = jax.random.normal(jax.random.key(1), w2.shape)
        self.params = params
        cut = functools.partial(kv_cache.decode_params, dtype=jnp.float32, conditioned=True)
        self.decode = jax.jit(cut)(params)
        self.phi_of = jax.jit(
            lambda b: budget.embed(params["budget"], b, conditioning=self.conditioning, b_max=12)
        )

    def spec(self, slots=4, **changes):
        """Few programs: caches of one length, rows answered by two or four."""
        settings = {
            "conditioning": self.conditioning,
            "max_thinking": 12,
            "answer_tokens": 3,
            "chunk": 5,
            "windows": 1,
            "refill": 0.5,
        }
        return RolloutSpec(self.shape, slots=slots, **{**settings, **changes})

    def tight(self, **changes):
        """Two slots, short chunks, caches that grow and shrink, a refill as soon as a row ends."""
        return self.spec(2, **{"chunk": 3, "windows": 2, "refill": 0.01, **changes})

    def roll(self, prompts, budgets, *, params=None, cuts=None, key=3, temperature=1.0, **changes):
        """`generate` with this policy; without `cuts`, quarters."""
        given = {
            "spec": self.spec(),
            "rules": make_rules(),
            "sampling": sampling_params(temperature),
            "phi_of": self.phi_of,
        }
        given |= changes
        of = lambda record: {
            field.name: given.pop(field.name)
            for field in dataclasses.fields(record)
            if field.name in given
        }
        cuts = quarters(budgets) if cuts is None else cuts
        rows = RolloutRequest(np.asarray(budgets), cuts, **of(RolloutRequest))
        sampler, callbacks = SamplingSetup(**of(SamplingSetup)), Callbacks(**of(Callbacks))
        assert not given, given
        key = jax.random.key(key) if isinstance(key, int) else key
        return generate(params or self.decode, prompts, rows, key, sampler, callbacks)
