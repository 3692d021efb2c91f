"""How likely a policy finds responses that somebody else wrote, token by token."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bacr_jax.errors import UserError
from bacr_jax.evaluation.ask import Session, rounded_up
from bacr_jax.learner.scoring import response_logprobs
from bacr_jax.methods import load_method
from bacr_jax.prompts.encoding import encode_text
from bacr_jax.prompts.tokenizers import decode_ids
from bacr_jax.runs import setup
from bacr_jax.types import NO_BUDGET

# Rows of one pass.
_ROWS = 16


@dataclass(frozen=True)
class ResponseScore:
    """A response and its log-probabilities.

    Attributes:
      logprobs: log-probability of each token given the prompt and the tokens before it, nats. A
        token that is never sampled has one of about -1e30.
    """

    question: str
    budget: int | None
    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    logprobs: tuple[float, ...]

    @property
    def total(self) -> float:
        """Log-probability of the whole response, nats."""
        return sum(self.logprobs)


class Scorer:
    """The policy of a session with its weights laid out for whole sequences."""

    def __init__(self, session: Session):
        """Reads the weights."""
        config = session.saved.config
        self.session = session
        learner = setup.make_policy(config, load_method(config), session.vocab_size).learner
        # One pass without a gradient keeps nothing that could be recomputed.
        self.spec = dataclasses.replace(learner, temperature=1.0, value=None, remat="none")
        self.params: Any = jax.tree.map(jnp.asarray, session.saved.params())

    def score(
        self, questions: Sequence[str], responses: Sequence[str | Sequence[int]], budget: int | None
    ) -> list[ResponseScore]:
        """Scores a response to each question.

        Args:
          responses: what follows each prompt, as a text or as ids (`Answer.tokens`).
        """
        if len(questions) != len(responses):
            raise UserError(
                f"logprobs: found {len(questions)} questions and {len(responses)} responses; write "
                "one response per question"
            )
        prompts = self.session.prompts(questions, [budget])
        ids = [self._ids(row, response) for row, response in enumerate(responses)]
        lengths = np.asarray(prompts.lengths)
        whole = lengths + np.array([len(row) for row in ids], np.int32)
        positions = self.spec.model.max_positions
        if whole.max() > positions:
            row = int(whole.argmax())
            raise UserError(
                f"response {row}: with its prompt it has {whole[row]} tokens, and the model "
                f"{positions} positions; write a shorter one"
            )
        tokens = np.zeros((len(ids), rounded_up(int(whole.max()))), np.int32)
        for row, response in enumerate(ids):
            tokens[row, : lengths[row]] = prompts.tokens[row, : lengths[row]]
            tokens[row, lengths[row] : whole[row]] = response
        told = NO_BUDGET if budget is None else budget
        found = np.concatenate(
            [
                self._pass(tokens[at : at + _ROWS], lengths[at:], whole[at:], told)
                for at in range(0, len(ids), _ROWS)
            ]
        )
        spans = [found[row, lengths[row] : whole[row]].tolist() for row in range(len(ids))]
        return [
            ResponseScore(question, budget, tuple(row), self._texts(row), tuple(span))
            for question, row, span in zip(questions, ids, spans)
        ]

    def _pass(self, tokens: Any, lengths: Any, whole: Any, told: int) -> Any:
        """Log-probabilities of up to `_ROWS` rows, padded to that many."""
        rows = len(tokens)
        pad = lambda x: np.concatenate([x[:rows], np.repeat(x[:1], _ROWS - rows, axis=0)])
        found = response_logprobs(
            self.params,
            pad(tokens),
            pad(lengths),
            pad(whole),
            np.full(_ROWS, told, np.int32),
            self.session.rules.allowed_tokens,
            spec=self.spec,
        )
        return np.asarray(found)[:rows]

    def _ids(self, row: int, response: str | Sequence[int]) -> list[int]:
        if isinstance(response, str):
            try:
                ids = encode_text(self.session.tokenizer, response).tolist()
            # Tokenizers without a token for unknown text raise this class.
            except Exception:
                raise UserError(
                    f"response {row}: the tokenizer has no tokens for {response[:80]!r}"
                ) from None
        else:
            ids = [int(token) for token in response]
        if not ids:
            raise UserError(f"response {row}: found no token; write a text or ids")
        wrong = [token for token in ids if not 0 <= token < self.session.vocab_size]
        if wrong:
            raise UserError(
                f"response {row}: found the token {wrong[0]}, but the model has "
                f"{self.session.vocab_size} ids; write its own tokenizer's"
            )
        return ids

    def _texts(self, ids: Sequence[int]) -> tuple[str, ...]:
        size = len(self.session.tokenizer)
        return tuple(decode_ids(self.session.tokenizer, [i]) if i < size else "" for i in ids)
