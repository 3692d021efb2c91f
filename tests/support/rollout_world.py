"""Creates a small random policy, decoding rules and prompts, for tests of rollouts.

The vocabulary has 16 tokens. Tokens 0 to 5 are special: padding, the tags and the end of the turn.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bacr_client import BudgetRules
from bacr_client.rules import StopString
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
# Tokens that may be sampled.
LEGAL = np.array([i not in (PAD, OPEN) for i in range(VOCAB)])


@dataclass
class Table:
    """The transition table of a stop string, as in `decode_rules.Automaton`."""

    next_state: Any
    opens: Any


def one_token(token):
    """Returns the table of a stop string that consists of one token."""
    next_state, opens = np.zeros((2, VOCAB), np.int32), np.zeros((2, VOCAB), bool)
    next_state[0, token], next_state[1], opens[0, token] = 1, 1, True
    return Table(next_state, opens)


def two_tokens(firsts, seconds):
    """Returns the table of stop strings of two tokens: one of `firsts`, then one of `seconds`."""
    next_state, opens = np.zeros((3, VOCAB), np.int32), np.zeros((3, VOCAB), bool)
    next_state[:2, firsts] = 1
    next_state[1, seconds] = 2
    next_state[2] = 2
    opens[:2, firsts] = True
    return Table(next_state, opens)


def make_rules(think_close=None, allowed_tokens=LEGAL):
    """Returns decoding rules.

    Args:
      think_close: table of the closing tag of the thinking. None for the token `CLOSE`.
    """
    return decode_rules(
        allowed_tokens=allowed_tokens,
        eos_ids=[EOS],
        think_close=think_close or one_token(CLOSE),
        answer_close=one_token(ANSWER_CLOSE),
        forced_suffix=[CLOSE, ANSWER],
        natural_suffix=[ANSWER],
    )


def make_budget_rules():
    """Returns the rules of `make_rules` as a client of a server receives them."""

    def one_token_string(token):
        return StopString("", {token: 1}, {}, 1)

    return BudgetRules(
        think_close=one_token_string(CLOSE),
        answer_close=one_token_string(ANSWER_CLOSE),
        ends=frozenset({EOS}),
        line_breaks=frozenset(),
        closing=(CLOSE, ANSWER),
        natural=(ANSWER,),
        never=frozenset(np.flatnonzero(~LEGAL).tolist()),
        cap=12,
        grace=0,
        answer_tokens=3,
        vocab_size=VOCAB,
    )


def make_prompts(lengths, width, seed=0):
    """Returns prompts of the given lengths with random tokens, padded to `width` with zeros."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(6, VOCAB, (len(lengths), width))
    lengths = np.asarray(lengths)
    tokens[np.arange(width) >= lengths[:, None]] = 0
    return Prompts(tokens, lengths, np.zeros(len(lengths), int), lengths)


def quarters(budgets):
    """Returns truncation points at 1/4, 1/2, 3/4 and all of each budget, rounded up."""
    return np.ceil(np.asarray(budgets)[:, None] * np.arange(1, 5) / 4).astype(int)


def no_cuts(rows):
    """Returns an empty array of truncation points, so that no answers are sampled."""
    return np.zeros((rows, 0), int)


# Jitted, because otherwise each random initialization of a weight would be a separate program.
init = jax.jit(qwen2.init, static_argnames=("config", "conditioning"))


@functools.cache
def plain_world():
    """Returns the policy that most tests share, with the default settings of `World`."""
    return World()


class World:
    """A random policy with a budget embedding, and everything that a rollout needs.

    Attributes:
      shape: sizes of the model.
      conditioning: settings of the budget embedding.
      params: parameters of the policy.
      decode: copy of the parameters in the layout for decoding.
      phi_of: function from budgets [B] to their embeddings.
    """

    def __init__(self, conditioning=None, num_kv_heads=1):
        self.shape = Qwen2Config(
            VOCAB, 16, 32, 2, 2, num_kv_heads, 8, rope_theta=1e4, tie_embeddings=True
        )
        self.conditioning = conditioning or ConditioningConfig()
        params = init(jax.random.key(0), self.shape, conditioning=self.conditioning)
        # Increase the logits, because mistakes are hard to notice if all tokens are equally likely.
        params["embed"] = params["embed"] * 30
        w2 = params["budget"]["w2"]
        params["budget"]["w2"] = jax.random.normal(jax.random.key(1), w2.shape)
        self.params = params
        cut = functools.partial(kv_cache.decode_params, dtype=jnp.float32, conditioned=True)
        self.decode = jax.jit(cut)(params)
        self.phi_of = jax.jit(
            lambda b: budget.embed(params["budget"], b, conditioning=self.conditioning, b_max=12)
        )

    def spec(self, slots=4, **changes):
        """Returns settings of a rollout that compile few programs.

        All caches have the same length, and the answers of two or four rows are sampled at once.

        Args:
          slots: number of traces that are decoded at the same time.
          changes: fields of `RolloutSpec` with other values.
        """
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
        """Returns settings of a rollout in which slots and caches change often.

        There are only two slots, chunks are short, caches have two possible lengths, and a slot is
        refilled as soon as its trace ends.
        """
        return self.spec(2, **{"chunk": 3, "windows": 2, "refill": 0.01, **changes})

    def roll(self, prompts, budgets, *, params=None, cuts=None, key=3, temperature=1.0, **changes):
        """Samples a rollout with this policy and returns it.

        Args:
          params: parameters for decoding. None for this policy's.
          cuts: truncation points of each trace. None for `quarters`.
          key: PRNG key or its seed.
          changes: fields of `RolloutRequest`, `SamplingSetup` and `Callbacks` with other values.
        """
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
