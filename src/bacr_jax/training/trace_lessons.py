"""A supervised warm-up on the traces of any source that has them, in a mixture of styles."""

import difflib
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from bacr_jax.config import Config
from bacr_jax.config.values import written
from bacr_jax.errors import UserError
from bacr_jax.prompts.encoding import encode_text
from bacr_jax.prompts.environment import Environment, Questions
from bacr_jax.questions.ledger.styles import padded
from bacr_jax.questions.ledger.supervised import CUT_SHARE, check_batch_tokens, draw_kinds
from bacr_jax.questions.question_set import QuestionSet
from bacr_jax.training.warmup import STYLE_PROBLEMS, opened_prompts
from bacr_jax.training.warmup_folder import told_budgets
from bacr_jax.types import NO_BUDGET, Prompts

# The first steps teach the longest style alone, on easy questions where some are known to be: with
# everything at once a small model stays on the plateau before induction for thousands of steps.
FIRST, FIRST_LEVEL = 0.3, 3
# Number of the random stream.
_STREAM = 5
# Batches have one of four widths, so that few shapes are compiled and little is padding.
_QUANTILES, _MULTIPLE = (0.25, 0.5, 0.75, 1.0), 8


class SftBatches:
    """Batches of a training set's traces; a batch is a function of the seed and the step alone.

    An example is prompt, trace, suffix and answer. A tenth of them end their trace early, at any
    token, and are answered all the same: the model learns to answer when its thinking is cut.
    Questions without a trace in every style that is taught, or without an answer, are left out.
    """

    def __init__(self, config: Config, environment: Environment):
        """Writes and tokenises every trace."""
        self._config, self._told = config, told_budgets(config)
        tokenizer = self._tokenizer = environment.tokenizer
        self.styles, self._weights = _styles(config, environment.train.set)
        self._questions = _traced(environment.train, self.styles)
        held_out = _traced(environment.holdout, self.styles)
        self._measured = held_out if len(held_out) else self._questions
        asked, form = self._questions.set, environment.style
        if not len(asked):
            raise UserError(
                f"warmup.steps={config.warmup.steps}: no question of {asked.name} has an answer "
                f"and a trace ({', '.join(self.styles)}); write 0, or another data.trace_column"
            )
        ids = lambda texts: tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        # A closing text of its own, such as native's, is for thinking that was cut.
        before, _, _ = form.forced_suffix.partition(form.think_close)
        close = ("\n" if before.endswith("\n") else "") + form.think_close
        self._traces = [
            ids([_trace(both, style) + close for both in asked.rows]) for style in self.styles
        ]
        end = "}" if form.answer_open.endswith("{") else ""
        end += ("\n" if form.natural_suffix.endswith("\n") else "") + form.answer_close
        self._answers = ids([answer + end for answer in asked.answers])
        suffixes = (form.natural_suffix, form.forced_suffix)
        self._suffixes = [encode_text(tokenizer, text).tolist() for text in suffixes]
        around = np.array([len(answer) for answer in self._answers]) + len(self._suffixes[1])
        told = self._questions.told
        prompts = np.asarray(self._questions.prompts.lengths)
        if told is not None:
            prompts = np.asarray(told.opened.lengths) + told.rest
        traces = np.array([[len(trace) for trace in row] for row in self._traces])
        lengths = prompts + traces + around
        widths = np.quantile(lengths, _QUANTILES, method="higher")
        self._widths = np.unique(-(-widths.astype(int) // _MULTIPLE) * _MULTIPLE)
        self._bucket = np.searchsorted(self._widths, lengths)
        check_batch_tokens(config.warmup.batch_tokens, int(self._widths[-1]))

    def batch(
        self, step: int, practice: bool = False
    ) -> tuple[Int[np.ndarray, "B S"], Bool[np.ndarray, "B S"]]:
        """Tokens of a step, and which of them are learned."""
        del practice  # no style is useless work
        settings = self._config.warmup
        rng = np.random.default_rng([self._config.seed, _STREAM, step])
        weights = np.broadcast_to(self._weights[:, None], self._bucket.shape).copy()
        if step < FIRST * settings.steps:
            weights[:-1] = 0.0
            levels = self._questions.set.levels
            weights[:, levels > max(FIRST_LEVEL, levels.min())] = 0.0
        chosen, bucket = draw_kinds(
            rng,
            self._config.seed,
            step,
            bucket_of=self._bucket.ravel(),
            weights=weights.ravel(),
            rows_in=settings.batch_tokens // self._widths,
        )
        style, row = np.divmod(chosen, self._bucket.shape[1])
        return self._written(style, row, int(self._widths[bucket]), rng)

    def _written(
        self,
        style: Int[np.ndarray, "B"],
        row: Int[np.ndarray, "B"],
        width: int,
        rng: np.random.Generator,
    ) -> tuple[Int[np.ndarray, "B S"], Bool[np.ndarray, "B S"]]:
        budgets = np.full(len(row), NO_BUDGET)
        if self._told is not None:
            budgets = rng.choice(self._told, size=len(row))
        prompts = self._questions.at(row, budgets)
        cut, share = rng.random(len(row)) < CUT_SHARE, rng.random(len(row))
        rows = []
        for i, (s, r) in enumerate(zip(style, row)):
            prompt, trace = prompts.tokens[i, : prompts.lengths[i]], self._traces[s][r]
            kept = trace[: int(share[i] * (len(trace) - 1))] if cut[i] else trace
            # The suffix is forced on the model.
            suffix, answer = self._suffixes[int(cut[i])], self._answers[r]
            rows.append([(prompt, False), (kept, True), (suffix, False), (answer, True)])
        return padded(rows, width)

    def opened(self, style: str, budget: int) -> tuple[Prompts, list[str]]:
        """Prompts that already hold the first token of a style, and their answers.

        They are of held-out questions, where there are any: few different ones are soon memorised.
        """
        index = np.arange(min(STYLE_PROBLEMS, len(self._measured)))
        texts = [_trace(self._measured.set.rows[i], style) for i in index]
        first = np.array([encode_text(self._tokenizer, text)[0] for text in texts], np.int32)
        return opened_prompts(self._measured, index, first, budget)


def _styles(config: Config, asked: QuestionSet) -> tuple[tuple[str, ...], np.ndarray]:
    """Styles that are taught, from short to long, and their weights."""
    found = {source.styles for source, _ in asked.rows if source.trace is not None}
    if len(found) != 1:
        several = "traces of different styles" if found else "no traces"
        raise UserError(
            f"warmup.steps={config.warmup.steps}: data.train={written(config.data.train)} has "
            f"{several}; write 0, or their column in data.trace_column"
        )
    (styles,) = found
    wanted = config.warmup.styles or dict.fromkeys(styles, 1.0)
    for style in wanted:
        if style not in styles:
            near = difflib.get_close_matches(style, styles, n=1, cutoff=0.0)[0]
            raise UserError(f"warmup.styles: {asked.name} has no style {style!r}; write {near}")
    taught = tuple(style for style in styles if style in wanted)
    return taught, np.array([wanted[style] for style in taught])


def _traced(questions: Questions, styles: tuple[str, ...]) -> Questions:
    """The questions that have an answer, and a trace in every style."""
    has = [
        bool(row.answer) and all(_trace((source, row), style) for style in styles)
        for source, row in questions.set.rows
    ]
    return questions.part(np.flatnonzero(has), questions.set.name)


def _trace(both: Any, style: str) -> str:
    """The trace of a row, "" where its source has none."""
    source, row = both
    text = source.trace(row, style) if source.trace is not None else ""
    if not isinstance(text, str):
        raise UserError(f"{source.name}: trace of {row.id} in the style {style} is no text")
    return text
