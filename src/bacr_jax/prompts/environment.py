"""Everything around the policy of a run: tokenizer, questions, prompts, stop strings, graders.

`build_environment` builds it once from the config, on the host. Training loop and evaluation then
need only arrays: prompts as input, verified outcomes as output.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from bacr_grading import ExactGrader, VerifierGrader
from bacr_grading.pooled import PooledGrader, Texts
from bacr_grading.verifier import FAILED
from bacr_jax.config import Config
from bacr_jax.config.derived import HOLDOUT, selection_set
from bacr_jax.errors import UserError
from bacr_jax.prompts import encoding
from bacr_jax.prompts.decode_rules import DecodeRules, decode_rules
from bacr_jax.prompts.fingerprints import (
    prompts_fingerprint,
    template_fingerprint,
    tokenizer_fingerprint,
)
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
from bacr_jax.prompts.stop_strings import compile_stop_string
from bacr_jax.prompts.tokenizers import answer_text, decode_ids
from bacr_jax.prompts.told import ToldPrompts, budget_words, largest_told, told_prompts
from bacr_jax.questions import splits
from bacr_jax.questions.groups import check_levels
from bacr_jax.questions.loaders import is_made, load_questions
from bacr_jax.questions.question_set import QuestionSet
from bacr_jax.questions.source import RULES
from bacr_jax.types import Branches, Poll, Prompts, Trunks

# Number of reference answers on which a verifier is tried.
REFERENCES_TRIED = 4


@dataclass(frozen=True)
class Questions:
    """A question set with its prompts; row i of each is the same question.

    Attributes:
      set: the questions.
      prompts: prompts without a budget.
      told: prompts up to a budget's number; None if prompts do not contain the budget.
    """

    set: QuestionSet
    prompts: Prompts
    told: ToldPrompts | None = None

    def __len__(self) -> int:
        """Returns the number of questions."""
        return len(self.set.questions)

    def part(self, index: np.ndarray, name: str) -> "Questions":
        """Returns the questions at these indices as a set with another name."""
        part = dataclasses.replace(self.set.take(index), name=name, left_out=())
        told = None if self.told is None else self.told.take(index)
        return Questions(part, self.prompts.take(index), told)

    def at(self, index: np.ndarray, budgets: np.ndarray) -> Prompts:
        """Returns prompts of questions, with each row's budget if prompts contain it.

        Args:
          index: question of each row.
          budgets: budget of each row in tokens; NO_BUDGET for a prompt without one.
        """
        untold = self.prompts.take(index)
        if self.told is None:
            return untold
        return self.told.at(index, budgets, untold)

    @property
    def longest(self) -> int:
        """Returns the tokens of the longest prompt, with the longest number of a budget."""
        if self.told is not None:
            return self.told.longest
        return int(np.max(self.prompts.lengths, initial=0))


@dataclass(frozen=True)
class Environment:
    """Everything that a run needs around the model.

    Attributes:
      vocab_size: rows of the model's embedding.
      style: prompt format.
      rules: facts about the vocabulary for decoding.
      train: training questions.
      holdout: questions of the training set that are not trained on, each text once.
      eval: evaluation sets by their names in data.eval.
      graders: grader of each distinct `QuestionSet.graded_by`.
      graded_by: key of the grader in use: the training set's, except after `graded_like`.
      rewards: graders of the rewards other than correctness, by their names in reward.weights.
    """

    tokenizer: Any
    vocab_size: int
    style: PromptFormat
    rules: DecodeRules
    train: Questions
    holdout: Questions
    eval: dict[str, Questions]
    graders: dict[tuple[str, float], Any]
    graded_by: tuple[str, float] = (RULES, 0.0)
    rewards: Mapping[str, VerifierGrader] = field(default_factory=dict)

    @functools.cached_property
    def grader(self) -> Any:
        """Returns the grader in use, whose work several processes share."""
        return share_grading(self.graders[self.graded_by])

    @functools.cached_property
    def shared_rewards(self) -> dict[str, Any]:
        """Returns the graders of `rewards`, whose work several processes share."""
        return {name: share_grading(reward) for name, reward in self.rewards.items()}

    @property
    def _user_verifiers(self) -> list[VerifierGrader]:
        """Returns the graders of this process that call a user's function."""
        used = (self.graders[self.graded_by], *self.rewards.values())
        return [grader for grader in used if isinstance(grader, VerifierGrader)]

    def graded_like(self, questions: Questions) -> "Environment":
        """Returns this environment with the grader of a set."""
        return dataclasses.replace(self, graded_by=questions.set.graded_by)

    @property
    def longest_prompt(self) -> int:
        """Returns the tokens of the longest prompt in training and evaluation sets."""
        sets = (self.train, *self.eval.values())
        return max(questions.longest for questions in sets)

    @property
    def verifier_digests(self) -> dict[str, str]:
        """Returns digests of the sources of users' verifiers and rewards, by `Verifier.named`."""
        verifiers = [grader.verifier for grader in self._user_verifiers]
        return {verifier.named: verifier.digest for verifier in verifiers}

    @functools.cached_property
    def prompt_fingerprints(self) -> dict[str, str]:
        """Returns digests of the tokenizer, its chat template, and the prompts of each set."""
        fingerprints = {
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
            "template": template_fingerprint(self.tokenizer, self.style),
        }
        sets = {"data.train": self.train, "eval.holdout": self.holdout, **self.eval}
        for name, questions in sets.items():
            fingerprints[name] = prompts_fingerprint(questions.prompts, questions.told)
        return fingerprints

    def markup_warning(self) -> str | None:
        """Returns a line about questions that contain tokens of the chat template, or None."""
        sets = (self.train, self.holdout, *self.eval.values())
        texts = [questions.set.questions for questions in sets]
        return markup_warning(self.tokenizer, self.style, texts)

    def exactly_graded(self) -> "Environment":
        """Returns this environment with the grader of procedural tasks for all sets."""
        exact = {graded_by: ExactGrader() for graded_by in self.graders}
        return dataclasses.replace(self, graders=exact)

    def check_verifier(self) -> None:
        """Loads users' verifiers in a worker before the run; raises UserError if one fails."""
        for grader in self._user_verifiers:
            grader.check(functools.partial(print, file=sys.stderr, flush=True))

    def try_verifiers(self) -> list[str]:
        """Scores some reference answers with users' verifiers.

        Returns:
          A line with the scores for each verifier.

        Raises:
          UserError: a verifier gives a score to none of the answers.
        """
        answers = self.train.set.answers
        rows = [row for row, answer in enumerate(answers) if answer][:REFERENCES_TRIED]
        if not rows:
            return []
        return [self._try_verifier(grader, rows) for grader in self._user_verifiers]

    def _try_verifier(self, grader: VerifierGrader, rows: list[int]) -> str:
        """Scores the reference answers of some training questions with one verifier."""
        name = grader.verifier.named
        references = [self.train.set.answers[row] for row in rows]
        questions = [self.train.set.questions[row] for row in rows]
        # An answer that opens a box also has to close it.
        brace = "}" if self.style.answer_open.endswith("{") else ""
        closing = brace + self.style.answer_close
        texts = [f"{self.style.answer_open}{reference}{closing}" for reference in references]
        verdicts = grader.grade(texts, references, questions=questions)
        num_failed = sum(verdict.path == FAILED for verdict in verdicts)
        if num_failed == len(verdicts):
            raise UserError(
                f"{name}: gave no score to any of {len(rows)} reference answers "
                f"(the last: {grader.last_failure}); fix it"
            )
        scores = ", ".join(f"{float(verdict.correct):.3g}" for verdict in verdicts)
        line = f"{name}: scores of reference answers: {scores}"
        if num_failed:
            line += f"; {num_failed} without a score (the last: {grader.last_failure})"
        return line

    @property
    def _verifiers(self) -> dict[str, Any]:
        """Returns users' verifiers and rewards as processes share them, by `Verifier.named`.

        Scorers of packages are left out, because some raise on answers that they can't read.
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
        """Counts the answers that verifiers received and that got no score, by `Verifier.named`.

        All processes must call it together.
        """
        return {name: shown_and_failed(verifier) for name, verifier in self._verifiers.items()}

    def last_failure(self, named: str) -> str:
        """Returns the message of a verifier's last failure; all processes must call it together."""
        return str(self._verifiers[named].last_failure)

    def close(self) -> None:
        """Ends the processes of all graders."""
        for grader in (*self.graders.values(), *self.rewards.values()):
            grader.close()

    def counters(self) -> dict[str, int]:
        """Returns the grader's counters.

        If there are other rewards, "rewards_failed" counts the answers that got no score from them.
        """
        counters = dict(self.grader.counters())
        failed = [reward.counters()["failed"] for reward in self.shared_rewards.values()]
        if failed:
            counters["rewards_failed"] = sum(failed)
        return counters

    @property
    def own_seconds(self) -> float:
        """Returns the seconds that this process spent on its share; 0 with a single process."""
        seconds = 0.0
        for grader in (self.grader, *self.shared_rewards.values()):
            if isinstance(grader, SharedGrader):
                seconds += grader.own_seconds
        return seconds

    def failures(self, before: Mapping[str, int]) -> Iterator[str]:
        """Yields a warning about each verifier from which answers got no score.

        Args:
          before: counters of `grader` at the start of the period that the warning is about. For the
            other rewards it is the whole run.
        """
        yield from failures(self.grader, before)
        for name, reward in self.shared_rewards.items():
            yield from failures(reward, {}, f"reward.weights={name}")

    def describe_data(self, size: int | None = None) -> list[str]:
        """Returns lines for a log: sets, sizes, and the questions left out with their reasons.

        Args:
          size: largest number of questions of a set in an evaluation; None for all.
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
        """Returns the text [B][M] of each answer, with its closing tag if it was written."""
        return self._answers(branches, lambda row, cut: self.style.answer_open)

    def responses(self, trunks: Trunks, branches: Branches) -> list[list[str]]:
        """Returns the response [B][M] at each cut: thinking up to the cut, suffix and answer."""
        prompt_lengths = np.asarray(trunks.prompt_lengths)
        contexts = np.asarray(branches.context)
        trunk_tokens = np.asarray(trunks.tokens)
        branch_tokens = np.asarray(branches.tokens)
        forced = np.asarray(branches.forced)

        def opening(row: int, cut: int) -> str:
            thinking = trunk_tokens[row, prompt_lengths[row] : contexts[row, cut]]
            suffix = branch_tokens[row, cut, : forced[row, cut]]
            return self.style.think_open + decode_ids(self.tokenizer, [*thinking, *suffix])

        return self._answers(branches, opening)

    def _answers(self, branches: Branches, opening: Callable[[int, int], str]) -> list[list[str]]:
        """Returns the sampled text [B][M] of each branch, up to its closing tag.

        Args:
          opening: returns the text before the sampled text of a row and cut.
        """
        starts = np.asarray(branches.forced)
        stops = starts + np.asarray(branches.sampled)
        tokens = np.asarray(branches.tokens)
        num_rows, num_cuts = starts.shape
        texts = []
        for row in range(num_rows):
            row_texts = []
            for cut in range(num_cuts):
                ids = tokens[row, cut, starts[row, cut] : stops[row, cut]].tolist()
                text = answer_text(
                    self.tokenizer,
                    ids,
                    opened=opening(row, cut),
                    closed=self.style.answer_close,
                )
                row_texts.append(text)
            texts.append(row_texts)
        return texts

    def reward_scores(
        self, trunks: Trunks, branches: Branches, answers: Texts, questions: Texts, poll: Poll
    ) -> dict[str, np.ndarray]:
        """Returns scores [B, M] of every response by each of `rewards`, as `verify` does."""
        responses = self.responses(trunks, branches)
        scores = {}
        for name, reward in self.shared_rewards.items():
            scores[name], _ = grade_cuts(reward, responses, answers, questions, poll)
        return scores

    def verify(
        self, branches: Branches, answers: Texts, poll: Poll = None, questions: Texts | None = None
    ) -> np.ndarray:
        """Grades the answer at every cut; an answer that was never closed is wrong.

        Args:
          answers: reference answer of each row.
          poll: called while waiting for the grader, but never if several processes share the
            grading, because they wait for different times.
          questions: question of each row, which users' verifiers receive.

        Returns:
          The outcomes r, [B, M] float32: 1 if correct, else 0. Users' verifiers give scores in
          [0, 1]. Cuts that share a branch share its verdict.
        """
        return self.grade_answers(branches, answers, questions, poll)[0]

    def grade_answers(
        self, branches: Branches, answers: Texts, questions: Texts | None, poll: Poll
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the outcomes of `verify`, and the grader's verdicts [B, M] with their reasons."""
        return grade_cuts(self.grader, self.answer_texts(branches), answers, questions, poll)

    def early_grading(self, answers: Texts, questions: Texts | None = None) -> OnRows | None:
        """Returns a callback that starts grading rows when they are done (`grade_early`).

        Returns None for a grader that takes no time.
        """
        grader = self.graders[self.graded_by]
        if not isinstance(grader, PooledGrader):
            return None
        return grade_early(grader, self.answer_texts, answers, questions)


def _encoded(
    config: Config, tokenizer: Any, questions: QuestionSet, style: PromptFormat
) -> Questions:
    """Encodes the prompts of a set, and leaves out questions whose prompts are too long."""
    limit = config.data.max_prompt_tokens
    reason = f"prompt over {limit} tokens"
    told = None
    words = budget_words(config, style)
    if words:
        told, dropped = told_prompts(
            tokenizer,
            questions.questions,
            style,
            words,
            largest=largest_told(config),
            max_tokens=limit,
        )
        questions = questions.without(dropped, reason)
    prompts, dropped = encoding.encode_prompts(
        tokenizer, questions.questions, style, max_tokens=limit
    )
    # A prompt without the sentence is not longer, so it fits too.
    assert told is None or not len(dropped)
    return Questions(questions.without(dropped, reason), prompts, told)


def load_training_texts(spec: str | Sequence[str], config: Config) -> QuestionSet:
    """Loads a training set in which near-duplicates are looked up.

    The difficulty groups of the result have no meaning.

    Raises:
      UserError: the data is unknown, or none of it is usable.
    """
    # The file of measured solve rates may have moved, and is not needed here.
    data = dataclasses.replace(config.data, groups="level", labels=None)
    return load_questions(spec, data, config.seed, "train")


def load_sets(
    config: Config,
    tokenizer: Any,
    *,
    split: Literal["train", "test"] = "test",
    train: QuestionSet | None = None,
    style: PromptFormat | None = None,
) -> dict[str, Questions]:
    """Loads the evaluation sets of a config with their prompts, without using a device.

    Args:
      train: training set whose near-duplicates are marked; None marks none.
      style: prompt format; None for the config's.

    Returns:
      The sets by their names in data.eval.
    """
    style = style or format_for(config)
    sets = {}
    for spec in config.data.eval:
        questions = load_questions(spec, config.data, config.seed, split)
        if train is not None:
            questions = splits.mark_duplicates(questions, train)
        sets[spec] = _encoded(config, tokenizer, questions, style)
    return sets


def _load_both(
    config: Config, tokenizer: Any, style: PromptFormat
) -> tuple[Questions, Questions, dict[str, Questions]]:
    """Loads training, held-out and evaluation sets.

    Near-duplicates of the whole training set, held-out questions included, are marked in the
    evaluation sets, because held-out questions are used to choose a checkpoint.
    """
    data = config.data
    train = load_questions(data.train, data, config.seed, "train")
    check_levels(train.levels, data)
    tests = {}
    for spec in data.eval:
        tests[spec] = load_questions(spec, data, config.seed, "test")
    for spec, test in tests.items():
        if not is_made(spec):
            tests[spec] = splits.mark_duplicates(test, train)
    encoded_train = _encoded(config, tokenizer, train, style)
    trained, holdout = _split(config, encoded_train, train)
    encoded_tests = {}
    for spec, test in tests.items():
        encoded_tests[spec] = _encoded(config, tokenizer, test, style)
    return trained, holdout, encoded_tests


def _split(config: Config, encoded: Questions, train: QuestionSet) -> tuple[Questions, Questions]:
    """Splits the training questions into those trained on and those held out.

    Held-out questions are chosen among the texts of the whole set, before long prompts are left
    out. Every copy of a held-out text is removed from training, and the first is held out.

    Args:
      encoded: the training set without questions whose prompts are too long.
      train: the whole training set.

    Raises:
      UserError: a checkpoint is to be chosen by held-out questions, but none are held out.
    """
    is_held_out = splits.held_out(train.questions, config.eval.holdout)
    held_out_texts = {train.questions[row] for row in np.flatnonzero(is_held_out)}
    questions = encoded.set.questions
    is_removed = np.array([text in held_out_texts for text in questions], bool)
    removed = np.flatnonzero(is_removed)
    first_copies = removed[splits.first_copies([questions[row] for row in removed])]
    if selection_set(config) == HOLDOUT and not len(first_copies):
        raise UserError(
            f"eval.holdout={config.eval.holdout}: at most a tenth of the questions is held out, "
            f"and {train.name} has {len(train)}; write a set of data.eval in eval.select, "
            "or eval.every=null"
        )
    trained = encoded.part(np.flatnonzero(~is_removed), train.name)
    # `without` records the removed questions and the reason.
    trained = dataclasses.replace(trained, set=encoded.set.without(removed, splits.REASON))
    return trained, encoded.part(first_copies, f"{train.name}, {splits.REASON}")


def make_rules(tokenizer: Any, style: PromptFormat, vocab_size: int) -> DecodeRules:
    """Collects the facts about the vocabulary for decoding in a format.

    Args:
      vocab_size: rows of the model's embedding.
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


def build_environment(
    config: Config,
    tokenizer: Any,
    vocab_size: int,
    *,
    style: PromptFormat | None = None,
    sets: dict[str, Questions] | None = None,
) -> Environment:
    """Loads questions, encodes prompts, compiles stop strings and opens graders.

    Args:
      vocab_size: rows of the model's embedding.
      style: prompt format; None for the config's.
      sets: evaluation sets. If they are given, training questions and rewards are not loaded.

    Raises:
      UserError: data, prompts or graders of the config can't be used.
    """
    style = style or format_for(config)

    def encode(text: str) -> list[int]:
        return encoding.encode_text(tokenizer, text).tolist()

    if sets is None:
        train, holdout, tests = _load_both(config, tokenizer, style)
    else:
        tests = sets
        # Training and held-out sets are the first set without any question.
        first = next(iter(sets.values()))
        train = Questions(first.set.take([]), first.prompts.take(np.zeros(0, int)))
        holdout = train
    question_sets = [questions.set for questions in (train, holdout, *tests.values())]
    graders = open_graders(config, question_sets, encode)
    rewards = open_rewards(config, encode) if sets is None else {}
    return Environment(
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
