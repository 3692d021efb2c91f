"""Expected gradients on a toy whose every trace can be listed, against each method's definition.

A question of two tokens; thinking of at most two tokens, each "6" or the closing tag; an answer of
one token, "6" or "7". The implementation makes rewards, advantages and gradients of every group of
two traces, weighted by its probability; beside it stands the method's definition, written down from
log-probabilities of whole texts alone.
"""

import dataclasses
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config import ConditioningConfig
from bacr_jax.learner.batch import make_batch
from bacr_jax.learner.objective import LearnerSpec, loss_normalizers
from bacr_jax.learner.train_step import gradients
from bacr_jax.methods import GroupBatch, load_method
from bacr_jax.model import budget, qwen2, value
from bacr_jax.training.lines import credit_tokens
from bacr_jax.types import CLOSED_BY_BUDGET, CLOSED_BY_TAG, Branches, Prompts, Trunks
from methods_world import load
from rollout_world import ANSWER, CLOSE, World

WORLD = World()
PROMPT, A, B = [8, 11], 6, 7
THINKING, GROUP, B_MAX = 2, 2, 2
ALLOWED = jnp.zeros(WORLD.shape.vocab_size, bool).at[jnp.array([A, B, CLOSE])].set(True)
# Thinking may not say "7", answers may not close: what is never written has no trace in the list.
THOUGHTS = {(CLOSE,): 0, (A, CLOSE): 1, (A, A): 2}


@dataclasses.dataclass(frozen=True)
class Trace:
    """One thinking, and an answer at each cut, or one for all cuts that lie at its end."""

    thinking: tuple[int, ...]
    answers: tuple[int, ...]
    cuts: tuple[int, ...]

    @property
    def length(self):
        return THOUGHTS[self.thinking]

    @property
    def closed(self):
        return self.thinking[-1] == CLOSE

    @property
    def source(self):
        reached = [min(cut, self.length) for cut in self.cuts]
        return [reached.index(at) for at in reached]

    def parts(self):
        """(context, the tokens sampled after it) of the thinking and of each distinct answer."""
        yield PROMPT, self.thinking
        for j, source in enumerate(self.source):
            if source == j:
                kept = min(self.cuts[j], self.length)
                whole = kept == self.length and self.closed
                text = self.thinking if whole else self.thinking[:kept]
                suffix = [ANSWER] if whole else [CLOSE, ANSWER]
                yield [*PROMPT, *text, *suffix], (self.answers[j],)

    def outcome(self, j):
        """Right where the answer is 6 after a thought of length 1, else 7 with partial credit."""
        kept, answer = min(self.cuts[j], self.length), self.answers[self.source[j]]
        return {0: {A: 0.0, B: 0.5}, 1: {A: 1.0, B: 0.0}, 2: {A: 0.25, B: 1.0}}[kept][answer]

    @property
    def tokens(self):
        return sum(len(sampled) for _, sampled in self.parts())


def traces(cuts):
    found = []
    for thinking in THOUGHTS:
        for answers in itertools.product((A, B), repeat=len(cuts)):
            trace = Trace(thinking, answers, cuts)
            # An answer that serves several cuts is listed once.
            if all(answers[j] == answers[i] for j, i in enumerate(trace.source)):
                found.append(trace)
    return found
