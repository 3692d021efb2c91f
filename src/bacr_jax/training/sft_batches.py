"""Builds supervised batches for the warm-up from the reasoning traces of a training set.

`initialize` uses `SftBatches` for every training set except the ledger, a synthetic task. The
ledger generates its own batches (`questions.ledger.supervised`).
"""

import difflib
import hashlib
import json
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from bacr_jax.config.settings import WarmupSettings
from bacr_jax.config.values import shown, written
from bacr_jax.errors import UserError, printable
from bacr_jax.prompts.encoding import encode_text, tokenize
from bacr_jax.prompts.formats import PromptFormat
from bacr_jax.prompts.markup import reserved_texts
from bacr_jax.prompts.prompted_questions import PromptedQuestions
from bacr_jax.prompts.task_data import TaskData
from bacr_jax.questions.ledger.styles import padded
from bacr_jax.questions.ledger.supervised import CUT_SHARE, check_batch_tokens, draw_kinds
from bacr_jax.questions.question_set import QuestionSet
from bacr_jax.training.warmup import STYLE_PROBLEMS, opened_prompts, prompt_budgets
from bacr_jax.types import NO_BUDGET, Prompts

# The first `FIRST` share of the steps trains only on the longest style. If the difficulty levels of
# the questions are known, these steps use only questions up to level `FIRST_LEVEL`. If a small
# model starts with all styles and levels at once, its loss stays on a plateau for thousands of
# steps before induction emerges.
FIRST = 0.3
FIRST_LEVEL = 3
# Folded into the run's seed to draw these batches.
_STREAM = 5
# Batches have at most four widths, at these quantiles of the example lengths. This limits both the
# number of compiled shapes and the padding.
_QUANTILES = (0.25, 0.5, 0.75, 1.0)
# Widths are rounded up to a multiple of this number of tokens.
_MULTIPLE = 8


class SftBatches:
    """Supervised batches of reasoning traces. Each batch depends only on the seed and the step.

    An example consists of prompt, trace, suffix and answer. The suffix is the text that the
    decoding loop forces between trace and answer. In a tenth of the examples the trace is truncated
    at a random token, so that the model learns to answer when its thinking is truncated. Questions
    without an answer or without a trace in every style are left out.

    Attributes:
      styles: names of the trace styles, from short to long. A style is one of several ways of
        writing down the reasoning.
    """

    def __init__(self, settings: WarmupSettings, task_data: TaskData):
        """Tokenizes all traces and answers.

        Raises:
          UserError: no question has an answer and a trace in every style, a trace or an answer
            contains a tag or can't be tokenized, or the longest example has more tokens than
            `warmup.batch_tokens`.
        """
        self._settings = settings
        self._budgets = prompt_budgets(settings)
        self._tokenizer = task_data.tokenizer
        self.styles, self._weights = _styles(settings, task_data.train.set)
        self._questions = _with_traces(task_data.train, self.styles)
        held_out = _with_traces(task_data.holdout, self.styles)
        self._measured = held_out if len(held_out) else self._questions
        questions = self._questions.set
        style_format = task_data.style
        if not len(questions):
            raise UserError(
                f"warmup.steps={settings.warmup.steps}: the warm-up needs questions with an "
                f"answer and a trace in each style ({', '.join(self.styles)}), but "
                f"{questions.name} contains none; set warmup.steps=0, or set another "
                "data.trace_column"
            )
        self._reserved = reserved_texts(self._tokenizer, style_format, task_data.rules)
        self._traces, self._answers = self._token_ids(questions, style_format)
        if len(held_out):
            # Check these traces before training, because `opened` reads them after it.
            self._token_ids(held_out.set, style_format)
        # Index 0 is for complete traces, index 1 for truncated traces.
        self._suffixes = [
            encode_text(self._tokenizer, text).tolist()
            for text in (style_format.natural_suffix, style_format.forced_suffix)
        ]
        lengths = self._example_lengths()
        widths = np.quantile(lengths, _QUANTILES, method="higher")
        # Round up to a multiple of `_MULTIPLE`.
        self._widths = np.unique(-(-widths.astype(int) // _MULTIPLE) * _MULTIPLE)
        self._bucket = np.searchsorted(self._widths, lengths)
        check_batch_tokens(settings.warmup.batch_tokens, int(self._widths[-1]))

    @property
    def texts_digest(self) -> str:
        """Returns a hash of the token ids of all traces and answers."""
        ids = json.dumps([self._traces, self._answers])
        return hashlib.sha256(ids.encode()).hexdigest()[:12]

    def _token_ids(
        self, questions: QuestionSet, style_format: PromptFormat
    ) -> tuple[list[list[list[int]]], list[list[int]]]:
        """Checks and tokenizes the traces and answers of questions, with the text that ends each.

        Returns:
          The token ids of the traces, by style and question, and of the answers.

        Raises:
          UserError: a text contains a tag, or the tokenizer can't encode it.
        """
        closing = _closing_text(style_format)
        trace_ids = []
        for style in self.styles:
            traces = [_trace(source_row, style) for source_row in questions.rows]
            trace_ids.append(self._encode(traces, closing, questions, style))
        # Blanks around an answer have no meaning. A verbatim reference may contain them.
        answers = [answer.strip() for answer in questions.answers]
        ending = _answer_ending(style_format)
        return trace_ids, self._encode(answers, ending, questions)

    def _encode(
        self, texts: list[str], ending: str, questions: QuestionSet, style: str | None = None
    ) -> list[list[int]]:
        """Checks and tokenizes a text of each question, with an ending.

        Args:
          style: style of the texts if they are traces, or None for answers.
        """

        def name(row: int) -> str:
            source, question = questions.rows[row]
            kind = "answer" if style is None else "trace"
            in_style = "" if style is None else f" in the style {style}"
            return f"{source.name}: the {kind} of {printable(question.id)}{in_style}"

        def refusal(row: int) -> str:
            return (
                f"{name(row)} is {shown(texts[row])}, which the tokenizer can't encode, because "
                "its vocabulary lacks some of these characters; write it without them"
            )

        for tag in self._reserved:
            rows = [row for row, text in enumerate(texts) if tag in text]
            if rows:
                others = f" (and {len(rows) - 1:,} others)" if len(rows) > 1 else ""
                raise UserError(
                    f"{name(rows[0])}{others} contains {tag!r}, which is a tag of the prompt "
                    "format or a control token; write only the text between the tags"
                )
        with_ending = [text + ending for text in texts]
        ids: list[list[int]] = tokenize(self._tokenizer, with_ending, refusal)["input_ids"]
        return ids

    def _example_lengths(self) -> Int[np.ndarray, "styles n"]:
        """Returns the maximum number of tokens of each example, by style and question."""
        budget_prompts = self._questions.budget_prompts
        if budget_prompts is None:
            prompts = np.asarray(self._questions.prompts.lengths)
        else:
            prompts = np.asarray(budget_prompts.opened.lengths) + budget_prompts.rest
        traces = np.array([[len(trace) for trace in of_style] for of_style in self._traces])
        answers = np.array([len(answer) for answer in self._answers])
        longest_suffix = len(self._suffixes[1])
        return prompts + traces + answers + longest_suffix

    def batch(
        self, step: int, practice: bool = False
    ) -> tuple[Int[np.ndarray, "B S"], Bool[np.ndarray, "B S"]]:
        """Returns the tokens and the loss mask of a training step.

        Args:
          step: number of steps before this step.
          practice: ignored. In batches of the ledger task, True selects more short traces.
        """
        del practice
        settings = self._settings.warmup
        rng = np.random.default_rng([self._settings.seed, _STREAM, step])
        weights = np.broadcast_to(self._weights[:, None], self._bucket.shape).copy()
        if step < FIRST * settings.steps:
            weights[:-1] = 0.0
            levels = self._questions.set.levels
            weights[:, levels > max(FIRST_LEVEL, levels.min())] = 0.0
        examples, bucket = draw_kinds(
            rng,
            self._settings.seed,
            step,
            bucket_of=self._bucket.ravel(),
            weights=weights.ravel(),
            rows_in=settings.batch_tokens // self._widths,
        )
        styles, questions = np.divmod(examples, self._bucket.shape[1])
        return self._make_rows(styles, questions, int(self._widths[bucket]), rng)

    def _make_rows(
        self,
        styles: Int[np.ndarray, "B"],
        questions: Int[np.ndarray, "B"],
        width: int,
        rng: np.random.Generator,
    ) -> tuple[Int[np.ndarray, "B S"], Bool[np.ndarray, "B S"]]:
        """Returns the tokens and the loss mask of examples.

        Args:
          styles: index of each example's style.
          questions: index of each example's question.
          width: number of tokens to which the examples are padded.
          rng: generator of random budgets and truncations.
        """
        budgets = np.full(len(questions), NO_BUDGET)
        if self._budgets is not None:
            budgets = rng.choice(self._budgets, size=len(questions))
        prompts = self._questions.at(questions, budgets)
        is_cut = rng.random(len(questions)) < CUT_SHARE
        remaining_share = rng.random(len(questions))
        rows = []
        for row, (style, question) in enumerate(zip(styles, questions)):
            prompt = prompts.tokens[row, : prompts.lengths[row]]
            trace = self._traces[style][question]
            if is_cut[row]:
                trace = trace[: int(remaining_share[row] * (len(trace) - 1))]
            suffix = self._suffixes[int(is_cut[row])]
            answer = self._answers[question]
            # Exclude the suffix from the loss, because the decoding loop forces its tokens.
            rows.append([(prompt, False), (trace, True), (suffix, False), (answer, True)])
        return padded(rows, width)

    def opened(self, style: str, budget: int) -> tuple[Prompts, list[str]]:
        """Returns prompts that end with the first token of a trace, and their reference answers.

        Held-out questions are used if they exist, because a small number of training questions is
        soon memorized.

        Args:
          style: style of the traces from which the first tokens are taken.
          budget: budget to write into the prompts, if the prompt format contains budgets.
        """
        index = np.arange(min(STYLE_PROBLEMS, len(self._measured)))
        texts = [_trace(self._measured.set.rows[question], style) for question in index]
        first = np.array([encode_text(self._tokenizer, text)[0] for text in texts], np.int32)
        return opened_prompts(self._measured, index, first, budget)


def _closing_text(style_format: PromptFormat) -> str:
    """Returns the text that closes a complete trace.

    The text is the closing tag, with a newline before it if the format also closes truncated traces
    with a newline. Some formats, such as `native`, close truncated traces with a longer text. That
    text is not used for complete traces.
    """
    before_tag, _, _ = style_format.forced_suffix.partition(style_format.think_close)
    newline = "\n" if before_tag.endswith("\n") else ""
    return newline + style_format.think_close


def _answer_ending(style_format: PromptFormat) -> str:
    """Returns the text that ends an answer: brace, newline and tag, as the format requires."""
    brace = "}" if style_format.answer_open.endswith("{") else ""
    newline = "\n" if style_format.natural_suffix.endswith("\n") else ""
    return brace + newline + style_format.answer_close


def _styles(settings: WarmupSettings, questions: QuestionSet) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns the trace styles to train on, from short to long, and their sampling weights."""
    available = {source.styles for source, _ in questions.rows if source.trace is not None}
    if len(available) != 1:
        problem = "traces of different styles" if available else "no traces"
        raise UserError(
            f"warmup.steps={settings.warmup.steps}: the warm-up needs traces, but "
            f"data.train={written(settings.data.train)} has {problem}; set warmup.steps=0, or set "
            "data.trace_column to their column"
        )
    (styles,) = available
    weights = settings.warmup.styles or dict.fromkeys(styles, 1.0)
    for style in weights:
        if style not in styles:
            near = difflib.get_close_matches(style, styles, n=1, cutoff=0.0)[0]
            raise UserError(
                f"warmup.styles: {style!r} is not a trace style of {questions.name}; use {near}"
            )
    selected = tuple(style for style in styles if style in weights)
    return selected, np.array([weights[style] for style in selected])


def _with_traces(questions: PromptedQuestions, styles: tuple[str, ...]) -> PromptedQuestions:
    """Returns the questions that have an answer and a trace in every style."""
    complete = []
    for source_row in questions.set.rows:
        _, row = source_row
        complete.append(bool(row.answer) and all(_trace(source_row, style) for style in styles))
    return questions.part(np.flatnonzero(complete), questions.set.name)


def _trace(source_row: Any, style: str) -> str:
    """Returns the trace of a question in one style, or "" if its source has no traces.

    Args:
      source_row: (source, row of the source that contains the question), as in `QuestionSet.rows`.
    """
    source, row = source_row
    text = source.trace(row, style) if source.trace is not None else ""
    if not isinstance(text, str):
        raise UserError(
            f"{source.name}: the trace of {row.id} in the style {style} is not a string; return "
            "strings"
        )
    return text
