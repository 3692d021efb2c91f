"""Loads a policy once, samples its answers at given budgets, and scores given responses.

`bacr generate` and `bacr_jax.load` use this module. It does not grade answers.
"""

import collections
import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from bacr_jax.config.derived import cap
from bacr_jax.config.settings import resolve
from bacr_jax.config.values import shown
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
from bacr_jax.prompts.budget_prompt import budget_words, make_budget_prompts
from bacr_jax.prompts.encoding import encode_prompts, encode_text
from bacr_jax.prompts.formats import PromptFormat
from bacr_jax.prompts.task_data import make_rules
from bacr_jax.prompts.tokenizers import answer_text, decode_ids
from bacr_jax.rollout import (
    Callbacks,
    Rollout,
    RolloutRequest,
    RolloutSpec,
    SamplingSetup,
    generate,
    sampling_params,
)
from bacr_jax.runs import setup
from bacr_jax.runs.saved_policy import SavedPolicy
from bacr_jax.types import NO_BUDGET, Poll, Prompts

# Called with the index of an answer in the rollout, its thinking text so far, and its answer text
# so far. The answer text includes the forced tokens before the answer.
Watch = Callable[[int, str, str], Any]

# Minimum width of prompts and budgets. Widths are rounded up to a power of two, so that the next
# question can reuse the compiled programs.
_SMALLEST_WIDTH = 32
# Maximum number of rows for which the KV cache is allocated at full length from the start. With few
# rows, the cache is small at full length, and decoding then needs only one compiled program.
_FEW_ROWS = 16
# Number of responses that are scored in one forward pass.
_ROWS_OF_A_PASS = 16


@dataclass(frozen=True)
class Answer:
    """The answer of a policy to a question at a budget.

    Attributes:
      question: the question.
      budget: thinking budget in tokens, or None if the policy received no budget.
      sample: index of the sample, starting at 0.
      thinking: text of the thinking.
      thinking_tokens: number of thinking tokens, without the closing tag.
      forced_tokens: number of tokens inserted between the thinking and the answer.
      answer_tokens: number of sampled answer tokens, including the closing tag.
      answer: text of the answer, without its tags.
      answer_text: text of the answer with its tags. The closing tag is missing if the answer was
        not closed.
      closed_by: reason why the thinking ended: "tag", "budget", or "end of turn" (an end token).
      finished: True if the answer was closed within `rollout.answer_tokens` tokens.
      tokens: token ids after the prompt: the thinking with its closing tag, the forced tokens and
        the answer.
    """

    question: str
    budget: int | None
    sample: int
    thinking: str
    thinking_tokens: int
    forced_tokens: int
    answer_tokens: int
    answer: str
    answer_text: str
    closed_by: str
    finished: bool
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class ResponseScore:
    """The log-probabilities that a policy assigns to the tokens of a given response.

    Attributes:
      question: the question.
      budget: thinking budget in tokens, or None if the policy received no budget.
      tokens: token ids of the response.
      texts: text of each token.
      logprobs: log-probability of each token given the prompt and the preceding tokens, in nats. It
        is about -1e30 for a token that can't be sampled.
    """

    question: str
    budget: int | None
    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    logprobs: tuple[float, ...]

    @property
    def total(self) -> float:
        """Returns the log-probability of the full response in nats."""
        return sum(self.logprobs)


class Session:
    """A policy that is loaded once and can answer any number of questions.

    `ask` samples answers, and `score` computes the log-probabilities of given responses.
    """

    def __init__(self, saved: SavedPolicy, style: PromptFormat):
        """Loads the tokenizer. The weights are loaded with the first question."""
        self.saved = saved
        self.style = style
        self.tokenizer = saved.tokenizer()
        check_grace(saved.config.budget.grace, self.tokenizer)
        self.vocab_size = setup.vocabulary_rows(saved.config.model, len(self.tokenizer))
        self.rules = make_rules(self.tokenizer, style, self.vocab_size)

    def default_sampling(self) -> tuple[float, float]:
        """Returns the temperature and top-p of a single answer if the user specifies neither.

        A model that was trained to think (prompt format `native`) is sampled with
        `eval.temperature` and `eval.top_p`. All others are decoded greedily.
        """
        if not self.style.is_native:
            return 0.0, 1.0
        evaluation = self.saved.config.eval
        return evaluation.temperature, evaluation.top_p

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
        """Samples the answers to all questions at all budgets in one rollout.

        Args:
          questions: questions to answer.
          budgets: thinking budgets in tokens. None means no budget, and limits the thinking to
            `budget.cap` tokens.
          samples: number of answers per question and budget.
          temperature: sampling temperature. 0 selects the most likely token.
          top_p: cumulative probability for nucleus sampling.
          seed: random seed.
          watch: function that is called during decoding for each answer with new tokens. The
            arguments are the index of the answer, its thinking text so far, and its answer text so
            far.
          poll: called regularly. It may raise an exception to stop.

        Returns:
          The answers, ordered by question, then budget, then sample.

        Raises:
          UserError: if a prompt or a budget is too long.
        """
        limit_without_budget = cap(self.saved.config.budget)
        limits = np.array(
            [limit_without_budget if budget is None else budget for budget in budgets], np.int32
        )
        prompts = self.prompts(questions, budgets)
        largest = self._largest_budget(prompts, budgets, limits)
        shape = (len(questions), len(budgets), samples)
        # Indices of the question, budget and sample of each row.
        q_index, b_index, s_index = (axis.ravel() for axis in np.indices(shape))
        prompts = prompts.take(b_index * len(questions) + q_index)
        row_limits = limits[b_index]
        rows = RolloutRequest(_as_numbers(budgets)[b_index], row_limits[:, None], limits=row_limits)
        decoder = self._decoder
        sampler = SamplingSetup(
            self._spec_for(len(row_limits), largest),
            self.rules,
            sampling_params(temperature, top_p),
            decoder.phi_of,
        )
        rollout = generate(
            decoder.params,
            prompts.padded(rounded_up(prompts.tokens.shape[1])),
            rows,
            jax.random.key(seed),
            sampler,
            Callbacks(poll) if watch is None else _watching(self.tokenizer, watch, poll),
        )
        return [
            self._answer(rollout, row, questions[q], budgets[b], int(s))
            for row, (q, b, s) in enumerate(zip(q_index, b_index, s_index))
        ]

    def _spec_for(self, num_rows: int, largest_budget: int) -> RolloutSpec:
        """Returns rollout settings with sizes rounded up, so that compiled programs are reused.

        Args:
          num_rows: number of answers to sample.
          largest_budget: largest thinking budget in tokens.
        """
        spec = self._decoder.spec
        slots = min(1 << (num_rows - 1).bit_length(), spec.slots)
        spec = dataclasses.replace(spec, max_thinking=rounded_up(largest_budget), slots=slots)
        if slots <= _FEW_ROWS:
            spec = dataclasses.replace(spec, windows=1, refill=1.0)
        return spec

    def prompts(self, questions: Sequence[str], budgets: Sequence[int | None]) -> Prompts:
        """Encodes the prompt of every question at every budget, ordered by budget, then question.

        Raises:
          UserError: if a prompt has more than `data.max_prompt_tokens` tokens.
        """
        config = self.saved.config
        style = self.style
        max_tokens = config.data.max_prompt_tokens
        prompts, dropped = encode_prompts(self.tokenizer, questions, style, max_tokens=max_tokens)
        words = budget_words(resolve(config).task.budget_text, style)
        numbers = _as_numbers(budgets)
        if words and not len(dropped):
            budget_prompts, dropped = make_budget_prompts(
                self.tokenizer,
                questions,
                style,
                words,
                largest=int(numbers.max(initial=0)),
                max_tokens=max_tokens,
            )
        if len(dropped):
            raise UserError(
                f"question {dropped[0]}: its prompt has more tokens than the limit "
                f"data.max_prompt_tokens={max_tokens}; ask a shorter question, or set a larger "
                "limit"
            )
        if words:
            index = np.tile(np.arange(len(questions)), len(budgets))
            row_budgets = np.repeat(numbers, len(questions))
            return budget_prompts.at(index, row_budgets, prompts.take(index))
        present_budgets = tuple(budget for budget in budgets if budget is not None)
        eval_config = dataclasses.replace(config.eval, budgets=present_budgets)
        return stacked(
            [
                with_declared_budget(prompts, self.tokenizer, style, eval_config, number)
                for number in numbers.tolist()
            ]
        )

    def _largest_budget(
        self, prompts: Prompts, budgets: Sequence[int | None], limits: Int[np.ndarray, "n"]
    ) -> int:
        """Checks that all sequences fit into the model and returns the largest entry of `limits`.

        Args:
          prompts: the tokens of the prompts.
          budgets: budgets of the prompts, for the error message.
          limits: maximum number of thinking tokens of each prompt: its budget, or the cap if it has
            no budget.

        Raises:
          UserError: if prompt, thinking and answer can exceed the model's number of positions.
        """
        config = self.saved.config
        largest = max(int(limits.max()), 1)
        positions = setup.model_shape(config.model, self.vocab_size).max_positions
        free = positions - setup.positions_needed(
            prompt=int(np.max(prompts.lengths)),
            forced=self.rules.suffix_length,
            answers=config.rollout.answer_tokens,
            grace=config.budget.grace,
        )
        if largest > free:
            names = ",".join("none" if budget is None else str(budget) for budget in budgets)
            raise UserError(
                f"--budget {names}: next to the prompt and the answer, the model's {positions} "
                f"positions leave room for only {max(free, 0)} thinking tokens; use a smaller "
                "budget" + (", or a smaller budget.cap" if None in budgets else "")
            )
        return largest

    @functools.cached_property
    def _decoder(self) -> Decoder:
        """Returns the decoder of the policy. The first access loads the weights onto the device.

        `max_thinking=1` has no effect, because each question sets its own limit.
        """
        return open_decoder(self.saved, self.vocab_size, max_thinking=1)

    def _answer(
        self, rollout: Rollout, row: int, question: str, budget: int | None, sample: int
    ) -> Answer:
        """Extracts one answer from a rollout.

        Args:
          row: index of the answer in the rollout.
        """
        trunks = rollout.trunks
        branches = rollout.branches
        thinking_ids = trunks.thinking_ids(row)
        forced_ids = branches.forced_ids(row, 0)
        answer_ids = branches.answer_ids(row, 0)
        style = self.style
        sampled_text = answer_text(self.tokenizer, answer_ids, opened="", closed=style.answer_close)
        return Answer(
            question=question,
            budget=budget,
            sample=sample,
            thinking=decode_ids(self.tokenizer, thinking_ids),
            thinking_tokens=int(trunks.thinking[row]),
            forced_tokens=len(forced_ids),
            answer_tokens=len(answer_ids),
            answer=sampled_text.removesuffix(style.answer_close).strip(),
            answer_text=style.answer_open + sampled_text,
            closed_by=CLOSE_NAMES[int(trunks.close[row])],
            finished=bool(branches.finished[row, 0]),
            tokens=(*thinking_ids, *forced_ids, *answer_ids),
        )

    def score(
        self, questions: Sequence[str], responses: Sequence[str | Sequence[int]], budget: int | None
    ) -> list[ResponseScore]:
        """Computes the token log-probabilities of responses given the prompts of their questions.

        Args:
          questions: one question per response.
          responses: responses as texts or sequences of token ids.
          budget: thinking budget of all prompts, or None for no budget.

        Raises:
          UserError: if a response is neither a text nor a sequence of token ids, is empty, is too
            long, or contains ids outside the vocabulary.
        """
        responses_ids = [self._response_ids(row, text) for row, text in enumerate(responses)]
        if len(questions) != len(responses):
            raise UserError(
                f"logprobs: found {len(questions)} questions and {len(responses)} responses; pass "
                "one response per question"
            )
        prompts = self.prompts(questions, [budget])
        starts = np.asarray(prompts.lengths)
        ends = starts + np.array([len(ids) for ids in responses_ids], np.int32)
        spec, params = self._scoring
        positions = spec.model.max_positions
        if ends.max() > positions:
            row = int(ends.argmax())
            raise UserError(
                f"response {row}: the prompt and the response together have {ends[row]} tokens, "
                f"but the model has only {positions} positions; use a shorter response"
            )
        tokens = np.zeros((len(responses), rounded_up(int(ends.max()))), np.int32)
        for row, ids in enumerate(responses_ids):
            tokens[row, : starts[row]] = prompts.tokens[row, : starts[row]]
            tokens[row, starts[row] : ends[row]] = ids
        budget_numbers = np.repeat(_as_numbers([budget]), _ROWS_OF_A_PASS)

        def score_rows(index: Int[np.ndarray, "n"]) -> jax.Array:
            return response_logprobs(
                params,
                tokens[index],
                starts[index],
                ends[index],
                budget_numbers,
                self.rules.allowed_tokens,
                spec=spec,
            )

        logprobs = in_portions(score_rows, np.arange(len(responses)), _ROWS_OF_A_PASS)
        scores = []
        for row, (question, ids) in enumerate(zip(questions, responses_ids)):
            row_logprobs = logprobs[row, starts[row] : ends[row]].tolist()
            scores.append(
                ResponseScore(
                    question, budget, tuple(ids), self._token_texts(ids), tuple(row_logprobs)
                )
            )
        return scores

    @functools.cached_property
    def _scoring(self) -> tuple[LearnerSpec, Any]:
        """Returns the settings of the forward pass that scores full sequences, and the weights."""
        settings = resolve(self.saved.config)
        method = load_method(settings.method)
        learner = setup.make_policy(settings.policy, method, self.vocab_size).learner
        # Rematerialization is disabled, because no gradients are computed here.
        spec = dataclasses.replace(learner, temperature=1.0, value=None, remat="none")
        return spec, jax.tree.map(jnp.asarray, self.saved.params())

    def _response_ids(self, row: int, response: str | Sequence[int]) -> list[int]:
        """Returns the token ids of a response. Raises UserError if they are empty or invalid."""
        if isinstance(response, str):
            try:
                ids = encode_text(self.tokenizer, response).tolist()
            # Some tokenizers raise a plain Exception if they have no token for unknown
            # text.
            except Exception:
                raise UserError(
                    f"response {row}: the tokenizer can't encode the text {response[:80]!r}; use "
                    "another text, or pass token ids"
                ) from None
        else:
            try:
                ids = [operator.index(token) for token in response]
            except TypeError:
                raise UserError(
                    f"response {row}: found {shown(response)}; pass a text, or a list of token ids"
                ) from None
        if not ids:
            raise UserError(
                f"response {row}: the response is empty; pass at least one token, as a text or as "
                "token ids"
            )
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise UserError(
                    f"response {row}: the token id {token} is not one of the model's "
                    f"{self.vocab_size} token ids; encode the response with the model's own "
                    "tokenizer"
                )
        return ids

    def _token_texts(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Decodes each token separately. Ids outside the tokenizer's vocabulary become ""."""
        size = len(self.tokenizer)
        return tuple(decode_ids(self.tokenizer, [i]) if i < size else "" for i in ids)


def _as_numbers(budgets: Sequence[int | None]) -> Int[np.ndarray, "n"]:
    """Returns budgets as an array, with NO_BUDGET in place of None."""
    return np.array([NO_BUDGET if budget is None else budget for budget in budgets], np.int32)


def rounded_up(number: int) -> int:
    """Rounds a number up to a power of two, but at least to 32."""
    return max(1 << (number - 1).bit_length(), _SMALLEST_WIDTH)


def _watching(tokenizer: Any, watch: Watch, poll: Poll) -> Callbacks:
    """Returns rollout callbacks that pass the texts of all answers to `watch` during sampling.

    A character that consists of several tokens is passed only after all of them were sampled.
    """
    thinking: dict[int, list[int]] = collections.defaultdict(list)
    last_texts: dict[int, tuple[str, str]] = {}

    def decode(ids: Sequence[int]) -> str:
        return decode_ids(tokenizer, ids).rstrip("\N{REPLACEMENT CHARACTER}")

    def report(row: int, answer: Sequence[int]) -> None:
        texts = (decode(thinking[row]), decode(answer))
        if last_texts.get(row) != texts:
            last_texts[row] = texts
            watch(row, *texts)

    def on_thinking(row: int, tokens: np.ndarray) -> None:
        thinking[row] += tokens.tolist()
        report(row, [])

    def on_answer(row: int, tokens: np.ndarray) -> None:
        report(row, tokens.tolist())

    return Callbacks(poll, on_tokens=on_thinking, on_answer=on_answer)
