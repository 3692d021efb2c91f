"""Builds the task of a run: tokenizer, questions, prompts, stop strings and graders.

`build_task_data` builds a `TaskData` once from the settings, on the host. The training loop and
evaluation then only handle arrays: prompts as inputs and graded outcomes as outputs.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bacr_grading import ExactGrader, VerifierGrader
from bacr_grading.pooled import PooledGrader, Texts
from bacr_grading.verifier import FAILED
from bacr_jax.config.settings import TaskSettings
from bacr_jax.errors import UserError
from bacr_jax.prompts import encoding
from bacr_jax.prompts.decode_rules import DecodeRules, decode_rules
from bacr_jax.prompts.fingerprints import encoding_fingerprints, prompts_fingerprint
from bacr_jax.prompts.formats import PromptFormat, format_for
from bacr_jax.prompts.graders import (
    OnRows,
    SharedGrader,
    Shown,
    failures,
    grade_cuts,
    grade_early,
    open_graders,
    open_rewards,
    share_grading,
    shown_and_failed,
)
from bacr_jax.prompts.markup import markup_warning
from bacr_jax.prompts.prompted_questions import PromptedQuestions, load_all_sets
from bacr_jax.prompts.stop_strings import compile_stop_string
from bacr_jax.prompts.tokenizers import answer_text, decode_ids
from bacr_jax.questions.source import RULES
from bacr_jax.types import Branches, Poll, Trunks

# Number of reference answers on which user-defined verifiers are tested before a run.
REFERENCES_TRIED = 4


@dataclass(frozen=True)
class TaskData:
    """Tokenizer, question sets, prompts and graders of a run: everything except the model.

    Attributes:
      vocab_size: number of rows of the model's embedding matrix.
      style: prompt format.
      rules: vocabulary tables used during decoding.
      train: training questions.
      holdout: held-out questions of the training set, without duplicates.
      eval: evaluation sets, keyed by their names in data.eval.
      graders: graders of correctness, keyed by `QuestionSet.graded_by`.
      graded_by: key of the current grader. This is the training set's grader unless it was changed
        with `graded_like`.
      rewards: graders of all rewards except correctness, keyed by their names in reward.weights.
    """

    tokenizer: Any
    vocab_size: int
    style: PromptFormat
    rules: DecodeRules
    train: PromptedQuestions
    holdout: PromptedQuestions
    eval: dict[str, PromptedQuestions]
    graders: dict[tuple[str, float], Any]
    graded_by: tuple[str, float] = (RULES, 0.0)
    rewards: Mapping[str, VerifierGrader] = field(default_factory=dict)

    @functools.cached_property
    def grader(self) -> Any:
        """Returns the current grader, whose work is shared among all processes."""
        return share_grading(self.graders[self.graded_by])

    @functools.cached_property
    def shared_rewards(self) -> dict[str, Any]:
        """Returns the graders in `rewards`, whose work is shared among all processes."""
        return {name: share_grading(reward) for name, reward in self.rewards.items()}

    @property
    def _user_verifiers(self) -> list[VerifierGrader]:
        """Returns the local graders that call user-defined functions."""
        used = (self.graders[self.graded_by], *self.rewards.values())
        return [grader for grader in used if isinstance(grader, VerifierGrader)]

    def graded_like(self, questions: PromptedQuestions) -> "TaskData":
        """Returns a copy of this task data whose current grader is that of `questions`."""
        return dataclasses.replace(self, graded_by=questions.set.graded_by)

    @property
    def longest_prompt(self) -> int:
        """Returns the length in tokens of the longest training or evaluation prompt."""
        sets = (self.train, *self.eval.values())
        return max(questions.longest for questions in sets)

    @property
    def verifier_digests(self) -> dict[str, str]:
        """Returns digests of the source code of user-defined verifiers, by `Verifier.named`."""
        verifiers = [grader.verifier for grader in self._user_verifiers]
        return {verifier.named: verifier.digest for verifier in verifiers}

    @functools.cached_property
    def prompt_fingerprints(self) -> dict[str, str]:
        """Returns digests of the tokenizer, the chat template and the prompts, keyed by name."""
        fingerprints = encoding_fingerprints(self.tokenizer, self.style)
        sets = {"data.train": self.train, "eval.holdout": self.holdout, **self.eval}
        for name, questions in sets.items():
            fingerprints[name] = prompts_fingerprint(questions.prompts, questions.budget_prompts)
        return fingerprints

    def markup_warning(self) -> str | None:
        """Returns a warning about questions that contain tokens of the chat template, or None."""
        sets = (self.train, self.holdout, *self.eval.values())
        texts = [questions.set.questions for questions in sets]
        return markup_warning(self.tokenizer, self.style, texts)

    def exactly_graded(self) -> "TaskData":
        """Returns a copy of this task data that grades all sets by exact string comparison."""
        exact = {graded_by: ExactGrader() for graded_by in self.graders}
        return dataclasses.replace(self, graders=exact)

    def check_verifier(self) -> None:
        """Loads user-defined verifiers in a worker process before the run starts.

        Raises:
          UserError: If a verifier cannot be loaded.
        """
        for grader in self._user_verifiers:
            grader.check(functools.partial(print, file=sys.stderr, flush=True))

    def try_verifiers(self, *, references_are_answers: bool) -> list[str]:
        """Scores some of the reference answers with user-defined verifiers, as a test.

        Args:
          references_are_answers: False if the grader may score 0 on all references, because they
            may be texts that are not answers, such as unit tests (`data.answers=verbatim`).

        Returns:
          One line with the scores of each verifier. The functions of `reward.weights` may score 0
          on all references, because they can also score the format or the thinking.

        Raises:
          UserError: If a verifier returns no score for any of the answers, or if the grader returns
            only scores of 0. The error has one line for each such verifier.
        """
        answers = self.train.set.answers
        rows = [row for row, answer in enumerate(answers) if answer][:REFERENCES_TRIED]
        if not rows:
            return []
        lines = []
        faults: list[str] = []
        for grader in self._user_verifiers:
            try:
                line, has_reward = self._try_verifier(grader, rows)
            except UserError as error:
                faults += error.lines
                continue
            is_reward = any(grader is reward for reward in self.rewards.values())
            if not has_reward and is_reward:
                line += " (right if it scores the format or the thinking)"
            elif not has_reward and references_are_answers:
                faults.append(
                    f"{line}; a policy that answers correctly would get no reward; fix this "
                    "function, or set data.answers=verbatim if the references are not answers"
                )
                continue
            lines.append(line)
        if faults:
            raise UserError(*faults)
        return lines

    def _try_verifier(self, grader: VerifierGrader, rows: list[int]) -> tuple[str, bool]:
        """Scores some reference answers of the training set with one verifier.

        Returns:
          A line with the scores, and True if at least one score is above 0.
        """
        name = grader.verifier.named
        references = [self.train.set.answers[row] for row in rows]
        questions = [self.train.set.questions[row] for row in rows]
        # If the answer format opens a LaTeX box, the box also has to be closed.
        brace = "}" if self.style.answer_open.endswith("{") else ""
        closing = brace + self.style.answer_close
        texts = [f"{self.style.answer_open}{reference}{closing}" for reference in references]
        verdicts = grader.grade(texts, references, questions=questions)
        num_failed = sum(verdict.path == FAILED for verdict in verdicts)
        if num_failed == len(verdicts):
            raise UserError(
                f"{name} returned no score for any of {len(rows)} reference answers (last error: "
                f"{grader.last_failure}); fix this function"
            )
        scores = ", ".join(f"{float(verdict.correct):.3g}" for verdict in verdicts)
        line = f"{name}: scores of reference answers: {scores}"
        if num_failed:
            line += f"; {num_failed} without a score (last error: {grader.last_failure})"
        return line, any(float(verdict.correct) > 0 for verdict in verdicts)

    @property
    def _verifiers(self) -> dict[str, Any]:
        """Returns user-defined verifiers and rewards, keyed by `Verifier.named`.

        The graders are shared among all processes. Scorers from third-party packages are excluded,
        because some of them raise on answers that they cannot parse.
        """
        pairs = [(self.graders[self.graded_by], self.grader)]
        for name, shared in self.shared_rewards.items():
            pairs.append((self.rewards[name], shared))
        verifiers = {}
        for grader, shared in pairs:
            if isinstance(grader, VerifierGrader) and not grader.verifier.third_party:
                verifiers[grader.verifier.named] = shared
        return verifiers

    def shown_to_verifiers(self) -> dict[str, Shown]:
        """Counts the answers that each verifier received and failed to score, by `Verifier.named`.

        This is a collective operation, so all processes must call it.
        """
        return {name: shown_and_failed(verifier) for name, verifier in self._verifiers.items()}

    def last_failure(self, named: str) -> str:
        """Returns the message of a verifier's most recent failure.

        This is a collective operation, so all processes must call it.
        """
        return str(self._verifiers[named].last_failure)

    def close(self) -> None:
        """Stops the worker processes of all graders."""
        for grader in (*self.graders.values(), *self.rewards.values()):
            grader.close()

    def counters(self) -> dict[str, int]:
        """Returns counts of graded answers since the start, such as `graded` and `correct`.

        They are the counters of the current grader. If the user has added reward functions,
        `rewards_failed` is the number of answers that these functions failed to score.
        """
        counters = dict(self.grader.counters())
        failed = [reward.counters()["failed"] for reward in self.shared_rewards.values()]
        if failed:
            counters["rewards_failed"] = sum(failed)
        return counters

    @property
    def own_seconds(self) -> float:
        """Returns the time in seconds that this process spent on its share of the grading.

        The time is 0 in single-process runs, which do not share the grading.
        """
        seconds = 0.0
        for grader in (self.grader, *self.shared_rewards.values()):
            if isinstance(grader, SharedGrader):
                seconds += grader.own_seconds
        return seconds

    def failures(self, before: Mapping[str, int]) -> Iterator[str]:
        """Yields a warning for each verifier that failed to score some answers.

        Args:
          before: counters of `grader` at the start of the period to report. Warnings about other
            rewards always cover the whole run.
        """
        yield from failures(self.grader, before)
        for name, reward in self.shared_rewards.items():
            yield from failures(reward, {}, f"reward.weights={name}")

    def describe_data(self, size: int | None = None) -> list[str]:
        """Returns log lines with the question sets, their sizes and the excluded questions.

        The lines contain the number of questions excluded for each reason.

        Args:
          size: maximum number of questions evaluated per set, or None for all questions.
        """
        lines = self.train.set.summary()
        lines[0] = f"training on {lines[0]}"
        if len(self.holdout):
            lines.append(f"validating on {self.holdout.set.summary()[0]}")
        for questions in self.eval.values():
            part = f"{size:,} of " if size is not None and size < len(questions) else ""
            first, *rest = questions.set.summary()
            lines += [f"evaluating on {part}{first}", *rest]
        if self.style.date:
            lines.append(f"chat template writes the date {self.style.date} (data.prompt_date)")
        warning = self.markup_warning()
        return lines if warning is None else [*lines, warning]

    def answer_texts(self, branches: Branches) -> list[list[str]]:
        """Returns the answers [B][M] at all truncation points, with the closing tag if present."""
        return self._answers(branches, lambda row, cut: self.style.answer_open)

    def responses(self, trunks: Trunks, branches: Branches) -> list[list[str]]:
        """Returns the responses [B][M]: thinking up to a truncation point, suffix and answer."""
        prompt_lengths = np.asarray(trunks.prompt_lengths)
        thinking_before_cut = np.asarray(branches.context) - prompt_lengths[:, None]

        def opening(row: int, cut: int) -> str:
            thinking = trunks.thinking_ids(row)[: thinking_before_cut[row, cut]]
            suffix = branches.forced_ids(row, cut)
            return self.style.think_open + decode_ids(self.tokenizer, [*thinking, *suffix])

        return self._answers(branches, opening)

    def _answers(self, branches: Branches, opening: Callable[[int, int], str]) -> list[list[str]]:
        """Returns the text [B][M] of each answer (branch), up to its closing tag.

        Args:
          opening: function of the indices of a row and a truncation point (cut). It returns the
            text before the sampled text.
        """
        num_rows, num_cuts = branches.sampled.shape
        texts = []
        for row in range(num_rows):
            row_texts = []
            for cut in range(num_cuts):
                text = answer_text(
                    self.tokenizer,
                    branches.answer_ids(row, cut),
                    opened=opening(row, cut),
                    closed=self.style.answer_close,
                )
                row_texts.append(text)
            texts.append(row_texts)
        return texts

    @property
    def grades_responses(self) -> bool:
        """True if the current grader receives whole responses instead of answers."""
        grader = self.graders[self.graded_by]
        return isinstance(grader, VerifierGrader) and grader.verifier.of_response

    def graded_texts(self, trunks: Trunks, branches: Branches) -> list[list[str]]:
        """Returns the texts [B][M] for the current grader: the answers or the whole responses."""
        if self.grades_responses:
            return self.responses(trunks, branches)
        return self.answer_texts(branches)

    def reward_scores(
        self, trunks: Trunks, branches: Branches, answers: Texts, questions: Texts, poll: Poll
    ) -> dict[str, np.ndarray]:
        """Returns the scores [B, M] of all responses by each grader in `rewards` (see `verify`)."""
        responses = self.responses(trunks, branches)
        scores = {}
        for name, reward in self.shared_rewards.items():
            scores[name], _ = grade_cuts(reward, responses, answers, questions, poll)
        return scores

    def verify(
        self,
        trunks: Trunks,
        branches: Branches,
        answers: Texts,
        poll: Poll = None,
        questions: Texts | None = None,
    ) -> np.ndarray:
        """Grades the answer at every truncation point (cut). Answers without closing tag are wrong.

        Args:
          trunks: prompts with thinking, for graders of whole responses.
          branches: answers at the cuts.
          answers: reference answer of each row.
          poll: callback that is called while waiting for the grader. It is never called if several
            processes share the grading, because their waiting times differ.
          questions: question of each row, which is passed to user-defined verifiers.

        Returns:
          Outcomes [B, M], float32: 1 if correct, else 0, or scores in [0, 1] for user-defined
          verifiers. Cuts that share an answer have the same outcome.
        """
        return self.grade_answers(trunks, branches, answers, questions, poll)[0]

    def grade_answers(
        self,
        trunks: Trunks,
        branches: Branches,
        answers: Texts,
        questions: Texts | None,
        poll: Poll,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the outcomes of `verify` and the grader's verdicts, both [B, M]."""
        texts = self.graded_texts(trunks, branches)
        return grade_cuts(self.grader, texts, answers, questions, poll)

    def early_grading(self, answers: Texts, questions: Texts | None = None) -> OnRows | None:
        """Returns a callback that grades each trace as soon as it is finished (`grade_early`).

        Returns None if the grader is not a `PooledGrader`, because only these take noticeable time.
        """
        grader = self.graders[self.graded_by]
        if not isinstance(grader, PooledGrader):
            return None
        return grade_early(grader, self.graded_texts, answers, questions)


def make_rules(tokenizer: Any, style: PromptFormat, vocab_size: int) -> DecodeRules:
    """Builds the vocabulary tables used during decoding for a prompt format.

    Args:
      vocab_size: number of rows of the model's embedding matrix.
    """
    stop = functools.partial(compile_stop_string, tokenizer, vocab_size=vocab_size)
    return decode_rules(
        allowed_tokens=encoding.allowed_tokens(tokenizer, style, vocab_size),
        eos_ids=encoding.eos_ids(tokenizer, style),
        think_close=stop(style.think_close),
        answer_close=stop(style.answer_close),
        forced_suffix=encoding.encode_text(tokenizer, style.forced_suffix),
        natural_suffix=encoding.encode_text(tokenizer, style.natural_suffix),
        line_breaks=encoding.line_breaks(tokenizer, vocab_size),
    )


def build_task_data(
    task: TaskSettings,
    tokenizer: Any,
    vocab_size: int,
    *,
    style: PromptFormat | None = None,
    sets: dict[str, PromptedQuestions] | None = None,
) -> TaskData:
    """Loads questions, tokenizes prompts, compiles stop strings and opens graders.

    Args:
      vocab_size: number of rows of the model's embedding matrix.
      style: prompt format, or None for the format in `task.data`.
      sets: evaluation sets. If specified, training questions and rewards are not loaded.

    Raises:
      UserError: If the data, prompts or graders cannot be used.
    """
    style = style or format_for(task.data)

    def encode(text: str) -> list[int]:
        return encoding.encode_text(tokenizer, text).tolist()

    if sets is None:
        train, holdout, tests = load_all_sets(task, tokenizer, style)
    else:
        tests = sets
        # No question is trained on, so the training set and the held-out set are empty.
        first = next(iter(sets.values()))
        train = PromptedQuestions(first.set.take([]), first.prompts.take(np.zeros(0, int)))
        holdout = train
    question_sets = [questions.set for questions in (train, holdout, *tests.values())]
    graders = open_graders(task.grader, question_sets, encode)
    rewards = open_rewards(task.grader, encode) if sets is None else {}
    return TaskData(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        style=style,
        rules=make_rules(tokenizer, style, vocab_size),
        train=train,
        holdout=holdout,
        eval=tests,
        graders=graders,
        graded_by=train.set.graded_by,
        rewards=rewards,
    )
