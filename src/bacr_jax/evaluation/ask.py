"""A policy that stays on its device: what it answers at budgets, how likely it finds texts."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from bacr_jax.config.derived import cap
from bacr_jax.errors import UserError
from bacr_jax.evaluation.decoder import (
    Decoder,
    check_grace,
    open_decoder,
    stacked,
    with_declared_budget,
)
from bacr_jax.evaluation.samples import CLOSE_NAMES
from bacr_jax.learner.scoring import in_portions, response_logprobs
from bacr_jax.learner.spec import LearnerSpec
from bacr_jax.methods import load_method
from bacr_jax.prompts.encoding import encode_prompts, encode_text
from bacr_jax.prompts.environment import make_rules
from bacr_jax.prompts.formats import PromptFormat
from bacr_jax.prompts.tokenizers import answer_text, decode_ids
from bacr_jax.prompts.told import budget_words, told_prompts
from bacr_jax.rollout import Listeners, Rollout, Rows, Sampler, generate, sampling_params
from bacr_jax.runs import setup
from bacr_jax.runs.open import SavedPolicy
from bacr_jax.types import NO_BUDGET, Poll, Prompts

# Row, its thinking so far, its answer so far (with what was forced before it).
Watch = Callable[[int, str, str], Any]

# Prompts and budgets are rounded up to a power of two from here on, so that the next question finds
# its programs compiled.
_SMALLEST = 32
# With so few rows a cache that holds the longest from the start reads little and compiles once.
_FEW_ROWS = 16
# Responses that are scored in one pass.
_ROWS_OF_A_PASS = 16


@dataclass(frozen=True)
class Answer:
    """What the policy said to a question at a budget.

    Attributes:
      budget: thinking tokens that it was told; None: none.
      sample: number of the answer, from 0.
      thinking_tokens: its length, without a closing tag.
      forced_tokens: tokens put between thinking and answer.
      answer_tokens: sampled answer, its closing tag included.
      answer: text of the answer, without what closes it.
      closed_by: what ended the thinking: tag, budget or end of turn.
      finished: the answer was closed before rollout.answer_tokens.
      tokens: ids of everything after the prompt: thinking with its closing tag, forced, answer.
    """

    question: str
    budget: int | None
    sample: int
    thinking: str
    thinking_tokens: int
    forced_tokens: int
    answer_tokens: int
    answer: str
    closed_by: str
    finished: bool
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class ResponseScore:
    """A response that somebody else may have written, and its log-probabilities.

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


class Session:
    """A policy that was read once and answers question after question."""

    def __init__(self, saved: SavedPolicy, style: PromptFormat):
        """Reads the tokenizer; weights are read with the first question."""
        self.saved, self.style = saved, style
        self.tokenizer = saved.tokenizer()
        check_grace(saved.config, self.tokenizer)
        self.vocab_size = setup.vocabulary_rows(saved.config, len(self.tokenizer))
        self.rules = make_rules(self.tokenizer, style, self.vocab_size)

    def ask(
        self,
        questions: Sequence[str],
        budgets: Sequence[int | None],
        *,
        samples: int = 1,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        watch: Watch | None = None,
        poll: Poll = None,
    ) -> list[Answer]:
        """Decodes all answers together.

        Args:
          budgets: thinking tokens; None: the policy is told none and thinks up to budget.cap
            tokens.
          watch: called after every chunk for each row that went on, with its texts so far.

        Returns:
          Answers question by question, budget by budget, sample by sample.
        """
        most = cap(self.saved.config)
        limits = np.array([most if budget is None else budget for budget in budgets], np.int32)
        prompts, shape = self.prompts(questions, budgets), (len(questions), len(budgets), samples)
        longest = self._longest(prompts, budgets, limits)
        question, budget, sample = (axis.ravel() for axis in np.indices(shape))
        rows = budget * len(questions) + question
        limit = limits[budget]
        prompts, decoder = prompts.take(rows), self._decoder
        # Sizes that other questions will have too.
        slots = min(1 << (len(rows) - 1).bit_length(), decoder.spec.slots)
        sizes: dict[str, Any] = {"max_thinking": rounded_up(longest), "slots": slots}
        if slots <= _FEW_ROWS:
            sizes |= {"windows": 1, "refill": 1.0}
        rollout = generate(
            decoder.params,
            prompts.padded(rounded_up(prompts.tokens.shape[1])),
            Rows(_told(budgets)[budget], limit[:, None], limits=limit),
            jax.random.key(seed),
            Sampler(
                dataclasses.replace(decoder.spec, **sizes),
                self.rules,
                sampling_params(temperature, top_p),
                decoder.phi_of,
            ),
            Listeners(poll) if watch is None else _live(self.tokenizer, watch, poll),
        )
        return [
            self._answer(rollout, row, questions[q], budgets[b], int(s))
            for row, (q, b, s) in enumerate(zip(question, budget, sample))
        ]

    def prompts(self, questions: Sequence[str], budgets: Sequence[int | None]) -> Prompts:
        """The prompts of all questions at the first budget, then those at the second, and so on."""
        config, style = self.saved.config, self.style
        most = config.data.max_prompt_tokens
        prompts, dropped = encode_prompts(self.tokenizer, questions, style, max_tokens=most)
        words = budget_words(config, style)
        told = _told(budgets)
        if words and not len(dropped):
            waiting, dropped = told_prompts(
                self.tokenizer,
                questions,
                style,
                words,
                largest=int(told.max(initial=0)),
                max_tokens=most,
            )
        if len(dropped):
            raise UserError(
                f"question {dropped[0]}: its prompt has more than data.max_prompt_tokens={most} "
                "tokens; write a shorter question or a larger number"
            )
        if not words:
            given = tuple(budget for budget in budgets if budget is not None)
            how = self.tokenizer, style, dataclasses.replace(config.eval, budgets=given)
            return stacked([with_declared_budget(prompts, *how, b) for b in told.tolist()])
        index = np.tile(np.arange(len(questions)), len(budgets))
        return waiting.at(index, np.repeat(told, len(questions)), prompts.take(index))

    def _longest(
        self, prompts: Prompts, budgets: Sequence[int | None], limits: Int[np.ndarray, "n"]
    ) -> int:
        """The largest budget, which the model's positions must hold behind the prompts."""
        config, longest = self.saved.config, max(int(limits.max()), 1)
        positions = setup.model_shape(config, self.vocab_size).max_positions
        free = positions - int(np.max(prompts.lengths)) - config.rollout.answer_tokens
        free -= config.budget.grace
        if longest > free:
            written = ",".join("none" if budget is None else str(budget) for budget in budgets)
            raise UserError(
                f"--budget {written}: the model's {positions} positions leave {free} for thinking; "
                "write a smaller budget" + (", or budget.cap" if None in budgets else "")
            )
        return longest

    @functools.cached_property
    def _decoder(self) -> Decoder:
        return open_decoder(self.saved, self.vocab_size, max_thinking=1)

    def _answer(
        self, rollout: Rollout, row: int, question: str, budget: int | None, sample: int
    ) -> Answer:
        trunks, branches = rollout.trunks, rollout.branches
        forced, answered = int(branches.forced[row, 0]), int(branches.sampled[row, 0])
        thinking = trunks.tokens[row, trunks.prompt_lengths[row] :][: trunks.sampled[row]].tolist()
        after = branches.tokens[row, 0, : forced + answered].tolist()
        return Answer(
            question=question,
            budget=budget,
            sample=sample,
            thinking=decode_ids(self.tokenizer, thinking),
            thinking_tokens=int(trunks.thinking[row]),
            forced_tokens=forced,
            answer_tokens=answered,
            answer=answer_text(
                self.tokenizer,
                after[forced:],
                opened=self.style.answer_open,
                closed=self.style.answer_close,
            ),
            closed_by=CLOSE_NAMES[int(trunks.close[row])],
            finished=bool(branches.finished[row, 0]),
            tokens=(*thinking, *after),
        )

    def score(
        self, questions: Sequence[str], responses: Sequence[str | Sequence[int]], budget: int | None
    ) -> list[ResponseScore]:
        """How likely the policy finds responses, texts or ids, each behind its prompt."""
        if len(questions) != len(responses):
            raise UserError(
                f"logprobs: found {len(questions)} questions and {len(responses)} responses; write "
                "one response per question"
            )
        prompts = self.prompts(questions, [budget])
        ids = [self._ids(row, response) for row, response in enumerate(responses)]
        lengths = np.asarray(prompts.lengths)
        whole = lengths + np.array([len(row) for row in ids], np.int32)
        spec, params = self._scoring
        positions = spec.model.max_positions
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
        told = np.repeat(_told([budget]), _ROWS_OF_A_PASS)

        def of_rows(index: Int[np.ndarray, "n"]) -> jax.Array:
            given = tokens[index], lengths[index], whole[index], told
            return response_logprobs(params, *given, self.rules.allowed_tokens, spec=spec)

        found = in_portions(of_rows, np.arange(len(ids)), _ROWS_OF_A_PASS)
        spans = [found[row, lengths[row] : whole[row]].tolist() for row in range(len(ids))]
        return [
            ResponseScore(question, budget, tuple(row), self._texts(row), tuple(span))
            for question, row, span in zip(questions, ids, spans)
        ]

    @functools.cached_property
    def _scoring(self) -> tuple[LearnerSpec, Any]:
        """Settings, and weights laid out for whole sequences."""
        config = self.saved.config
        learner = setup.make_policy(config, load_method(config), self.vocab_size).learner
        # One pass without a gradient keeps nothing that could be recomputed.
        spec = dataclasses.replace(learner, temperature=1.0, value=None, remat="none")
        return spec, jax.tree.map(jnp.asarray, self.saved.params())

    def _ids(self, row: int, response: str | Sequence[int]) -> list[int]:
        if isinstance(response, str):
            try:
                ids = encode_text(self.tokenizer, response).tolist()
            # Tokenizers without a token for unknown text raise this class.
            except Exception:
                raise UserError(
                    f"response {row}: the tokenizer has no tokens for {response[:80]!r}"
                ) from None
        else:
            ids = [int(token) for token in response]
        if not ids:
            raise UserError(f"response {row}: found no token; write a text or ids")
        wrong = [token for token in ids if not 0 <= token < self.vocab_size]
        if wrong:
            raise UserError(
                f"response {row}: found the token {wrong[0]}, but the model has "
                f"{self.vocab_size} ids; write its own tokenizer's"
            )
        return ids

    def _texts(self, ids: Sequence[int]) -> tuple[str, ...]:
        size = len(self.tokenizer)
        return tuple(decode_ids(self.tokenizer, [i]) if i < size else "" for i in ids)


def _told(budgets: Sequence[int | None]) -> Int[np.ndarray, "n"]:
    return np.array([NO_BUDGET if budget is None else budget for budget in budgets], np.int32)


def rounded_up(number: int) -> int:
    """The power of two that holds a number, 32 or more."""
    return max(1 << (number - 1).bit_length(), _SMALLEST)


def _live(tokenizer: Any, watch: Watch, poll: Poll) -> Listeners:
    """Tells the texts of rows while they come; a character waits until all its tokens are there."""
    thoughts: dict[int, list[int]] = collections.defaultdict(list)
    said: dict[int, list[str]] = {}

    def tell(row: int, answer: Sequence[int]) -> None:
        parts = thoughts[row], answer
        texts = [decode_ids(tokenizer, ids).rstrip("\N{REPLACEMENT CHARACTER}") for ids in parts]
        if said.get(row) != texts:
            said[row] = texts
            watch(row, *texts)

    def thought(row: int, tokens: np.ndarray) -> None:
        thoughts[row] += tokens.tolist()
        tell(row, [])

    return Listeners(
        poll, on_tokens=thought, on_answer=lambda row, tokens: tell(row, tokens.tolist())
    )
