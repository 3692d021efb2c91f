"""What surrounds the policy in a run: questions in, verified outcomes out.

Built once from the config on the host. It knows the tokenizer, the prompts, the stop strings and
the grader, so that the training loop and the evaluation deal in arrays only.
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
from bacr_jax.parallel import processes
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
    grade_early,
    open_graders,
    open_rewards,
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

# Reference answers that a verifier is tried on.
REFERENCES_TRIED = 4


@dataclass(frozen=True)
class Questions:
    """A question set with its prompts; row i of each belongs together.

    Attributes:
      prompts: without a budget.
      told: the same up to a budget's number; None: the policy is told none in words.
    """

    set: QuestionSet
    prompts: Prompts
    told: ToldPrompts | None = None

    def __len__(self) -> int:
        return len(self.set.questions)

    def part(self, index: np.ndarray, name: str) -> "Questions":
        """The questions at these places, under a name of their own."""
        part = dataclasses.replace(self.set.take(index), name=name, left_out=())
        told = None if self.told is None else self.told.take(index)
        return Questions(part, self.prompts.take(index), told)

    def at(self, index: np.ndarray, budgets: np.ndarray) -> Prompts:
        """Prompts of questions, with each row's budget in tokens where it is told in words.

        NO_BUDGET: the row is told none.
        """
        untold = self.prompts.take(index)
        return untold if self.told is None else self.told.at(index, budgets, untold)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt, with the longest number of a budget."""
        if self.told is not None:
            return self.told.longest
        return int(np.max(self.prompts.lengths, initial=0))


@dataclass(frozen=True)
class Environment:
    """Everything a run needs around the model.

    Attributes:
      holdout: questions of the training set that are not trained on, each text once.
      graders: verifiers by what a set is graded by (`QuestionSet.graded_by`).
      graded_by: the one in use: the training set's, except after `graded_like`.
      rewards: what training credits beside correctness, by what reward.weights calls it.
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
        """The verifier in use, which several processes share."""
        return _shared(self.graders[self.graded_by])

    @functools.cached_property
    def shared_rewards(self) -> dict[str, Any]:
        """`rewards`, which several processes share."""
        return {name: _shared(own) for name, own in self.rewards.items()}

    @property
    def _own_verifiers(self) -> list[VerifierGrader]:
        used = (self.graders[self.graded_by], *self.rewards.values())
        return [grader for grader in used if isinstance(grader, VerifierGrader)]

    def graded_like(self, questions: Questions) -> "Environment":
        """This environment with the grader of a set."""
        return dataclasses.replace(self, graded_by=questions.set.graded_by)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt of all sets."""
        sets = (self.train, *self.eval.values())
        return max(questions.longest for questions in sets)

    @property
    def verifier_digests(self) -> dict[str, str]:
        """Of the sources of a verifier and rewards of one's own, by `Verifier.named`."""
        return {own.verifier.named: own.verifier.digest for own in self._own_verifiers}

    @functools.cached_property
    def prompt_fingerprints(self) -> dict[str, str]:
        """Digests of the tokenizer, of its chat template, and of the prompts of each set."""
        sets = {"data.train": self.train, "eval.holdout": self.holdout, **self.eval}
        return {
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
            "template": template_fingerprint(self.tokenizer, self.style),
            **{name: prompts_fingerprint(one.prompts, one.told) for name, one in sets.items()},
        }

    def markup_warning(self) -> str | None:
        """Returns a line about questions that contain tokens of the chat template, or None."""
        sets = (self.train, self.holdout, *self.eval.values())
        return markup_warning(self.tokenizer, self.style, [one.set.questions for one in sets])

    def exactly_graded(self) -> "Environment":
        """This environment with the grader of procedural tasks, whatever the run's is."""
        exact = {graded_by: ExactGrader() for graded_by in self.graders}
        return dataclasses.replace(self, graders=exact)

    def check_verifier(self) -> None:
        """Loads verifiers of one's own in a worker, early; UserError if one can't be loaded."""
        for grader in self._own_verifiers:
            grader.check(functools.partial(print, file=sys.stderr, flush=True))

    def try_verifiers(self) -> list[str]:
        """Lines with the scores that verifiers of one's own give to reference answers.

        UserError: one gives none of them a score.
        """
        answers, questions = self.train.set.answers, self.train.set.questions
        rows = [row for row, answer in enumerate(answers) if answer][:REFERENCES_TRIED]
        close = "}" if self.style.answer_open.endswith("{") else ""
        close += self.style.answer_close
        texts = [f"{self.style.answer_open}{answers[row]}{close}" for row in rows]
        golds = [answers[row] for row in rows]
        asked = [questions[row] for row in rows]
        lines = []
        for own in self._own_verifiers if rows else ():
            verdicts = own.grade(texts, golds, questions=asked)
            failed = [verdict.path == FAILED for verdict in verdicts]
            if all(failed):
                raise UserError(
                    f"{own.verifier.named}: gave no score to any of {len(rows)} reference answers "
                    f"(the last: {own.last_failure}); fix it"
                )
            scores = ", ".join(f"{float(verdict.correct):.3g}" for verdict in verdicts)
            lines.append(f"{own.verifier.named}: scores of reference answers: {scores}")
            if any(failed):
                lines[-1] += f"; {sum(failed)} without a score (the last: {own.last_failure})"
        return lines

    @property
    def _verifiers(self) -> dict[str, Any]:
        """A user's verifiers and rewards that several processes share, by `Verifier.named`.

        Without scorers of packages, some of which raise on answers that they can't read.
        """
        pairs = [(self.graders[self.graded_by], self.grader)]
        pairs += [(self.rewards[name], one) for name, one in self.shared_rewards.items()]
        return {
            own.verifier.named: shared
            for own, shared in pairs
            if isinstance(own, VerifierGrader) and not own.verifier.third_party
        }

    def shown_to_verifiers(self) -> dict[str, Shown]:
        """Answers shown to verifiers and failed by them, in all, by `Verifier.named`.

        All processes must call it at the same places.
        """
        return {named: shown_and_failed(one) for named, one in self._verifiers.items()}

    def last_failure(self, named: str) -> str:
        """The words of a verifier's last failure; all processes must call it at the same places."""
        return str(self._verifiers[named].last_failure)

    def close(self) -> None:
        """Ends the graders' processes."""
        for grader in (*self.graders.values(), *self.rewards.values()):
            grader.close()

    def counters(self) -> dict[str, int]:
        """Those of the grader, and how many scores the other rewards failed to give."""
        failed = [reward.counters()["failed"] for reward in self.shared_rewards.values()]
        return {**self.grader.counters(), **({"rewards_failed": sum(failed)} if failed else {})}

    @property
    def own_seconds(self) -> float:
        """What this process has spent on its share of grading; 0 where it grades alone."""
        used = (self.grader, *self.shared_rewards.values())
        return sum((one.own_seconds for one in used if isinstance(one, SharedGrader)), 0.0)

    def failures(self, before: Mapping[str, int]) -> Iterator[str]:
        """A line about each verifier that gave answers no score; `before`: of `grader`."""
        yield from failures(self.grader, before)
        for name, reward in self.shared_rewards.items():
            yield from failures(reward, {}, f"reward.weights={name}")

    def describe_data(self, size: int | None = None) -> list[str]:
        """Lines for a log: the sets, their sizes, and what was left out and why.

        Args:
          size: most questions of a set that an evaluation takes; None: all.
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
        """Text after each suffix, closing tag included if it was written; [B][M]."""
        return self._answers(branches, lambda i, j: self.style.answer_open)

    def responses(self, trunks: Trunks, branches: Branches) -> list[list[str]]:
        """What was thought up to each cut, and said after it up to the closed answer; [B][M]."""
        start, seen = np.asarray(trunks.prompt_lengths), np.asarray(branches.context)
        thought, said = np.asarray(trunks.tokens), np.asarray(branches.tokens)
        forced = np.asarray(branches.forced)

        def opened(i: int, j: int) -> str:
            suffix = said[i, j, : forced[i, j]]
            before = [*thought[i, start[i] : seen[i, j]], *suffix]
            return self.style.think_open + decode_ids(self.tokenizer, before)

        return self._answers(branches, opened)

    def _answers(self, branches: Branches, opened: Callable[[int, int], str]) -> list[list[str]]:
        """The sampled text of each branch after what opened it."""
        start = np.asarray(branches.forced)
        stop = start + np.asarray(branches.sampled)
        tokens, closed = np.asarray(branches.tokens), self.style.answer_close

        def cell(i: int, j: int) -> str:
            ids = tokens[i, j, start[i, j] : stop[i, j]].tolist()
            return answer_text(self.tokenizer, ids, opened=opened(i, j), closed=closed)

        return [[cell(i, j) for j in range(start.shape[1])] for i in range(len(start))]

    def reward_scores(
        self, trunks: Trunks, branches: Branches, answers: Texts, questions: Texts, poll: Poll
    ) -> dict[str, np.ndarray]:
        """Score [B, M] of every response by each of `rewards`; `verify` has the arguments."""
        given = self.responses(trunks, branches), answers, questions, poll
        return {name: _graded(one, *given)[0] for name, one in self.shared_rewards.items()}

    def verify(
        self, branches: Branches, answers: Texts, poll: Poll = None, questions: Texts | None = None
    ) -> np.ndarray:
        """Outcome r of every cut (1 correct, 0 not); an answer that was never closed is wrong.

        Args:
          poll: called while waiting for the grader; not by one of several processes, which wait
            for different times.
          questions: which verifiers of one's own see; their outcomes are scores in [0, 1].

        Returns:
          [B, M] float32. Cuts that share a branch share its verdict.
        """
        return self.grade_answers(branches, answers, questions, poll)[0]

    def grade_answers(
        self, branches: Branches, answers: Texts, questions: Texts | None, poll: Poll
    ) -> tuple[np.ndarray, np.ndarray]:
        """`verify`, and the grader's verdicts [B, M] that say why."""
        return _graded(self.grader, self.answer_texts(branches), answers, questions, poll)

    def early_grading(self, answers: Texts, questions: Texts | None = None) -> OnRows | None:
        """What starts on rows' answers when they are done; None: grading takes no time."""
        own = self.graders[self.graded_by]
        slow = isinstance(own, PooledGrader)
        return grade_early(own, self.answer_texts, answers, questions) if slow else None


def _shared(own: Any) -> Any:
    """A process's grader, or what several processes share in its place."""
    return SharedGrader(own) if processes.several() else own


def _graded(
    grader: Any, texts: Sequence[Texts], answers: Texts, questions: Texts | None, poll: Poll
) -> tuple[np.ndarray, np.ndarray]:
    """What `correct` is in the verdicts on texts [B][M], and the verdicts; gold answers of B."""
    b, m = len(texts), len(texts[0])
    flat = [text for row in texts for text in row]
    references = [gold for gold in answers for _ in range(m)]
    asked = None if questions is None else [text for text in questions for _ in range(m)]
    verdicts = grader.grade(flat, references, mode="strict", poll=poll, questions=asked)
    outcomes = np.array([v.correct for v in verdicts], np.float32).reshape(b, m)
    said = np.empty(b * m, object)
    said[:] = verdicts
    return outcomes, said.reshape(b, m)


def _encoded(
    config: Config, tokenizer: Any, questions: QuestionSet, style: PromptFormat
) -> Questions:
    """A set with its prompts, without the questions whose prompts are too long."""
    limit, words = config.data.max_prompt_tokens, budget_words(config, style)
    told, reason = None, f"prompt over {limit} tokens"
    if words:
        texts, largest = questions.questions, largest_told(config)
        told, dropped = told_prompts(
            tokenizer, texts, style, words, largest=largest, max_tokens=limit
        )
        questions = questions.without(dropped, reason)
    encoded, dropped = encoding.encode_prompts(
        tokenizer, questions.questions, style, max_tokens=limit
    )
    # A sentence more has made no prompt shorter.
    assert told is None or not len(dropped)
    return Questions(questions.without(dropped, reason), encoded, told)


def load_training_texts(spec: str | Sequence[str], config: Config) -> QuestionSet:
    """A training set to look for near-duplicates in; its difficulty groups mean nothing.

    UserError: unknown data, or nothing usable in it.
    """
    # Measured solve rates may lie elsewhere by now, and nothing here needs them.
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
    """The evaluation sets of a config with their prompts, by what data.eval calls them.

    No device is touched.

    Args:
      train: near-duplicates of its questions are marked; None: none are looked for.
    """

    def load(spec: str) -> QuestionSet:
        found = load_questions(spec, config.data, config.seed, split)
        return found if train is None else splits.mark_duplicates(found, train)

    style = style or format_for(config)
    return {spec: _encoded(config, tokenizer, load(spec), style) for spec in config.data.eval}


def _load_both(
    config: Config, tokenizer: Any, style: PromptFormat
) -> tuple[Questions, Questions, dict[str, Questions]]:
    """Training, held-out and evaluation sets; near-duplicates of training questions are marked.

    Held-out questions choose a checkpoint, so near-duplicates of them are marked too.
    """
    data = config.data
    train = load_questions(data.train, data, config.seed, "train")
    check_levels(train.levels, data)
    tests = {spec: load_questions(spec, data, config.seed, "test") for spec in data.eval}
    marked = lambda spec, test: test if is_made(spec) else splits.mark_duplicates(test, train)
    tests = {spec: marked(spec, test) for spec, test in tests.items()}
    encode = lambda questions: _encoded(config, tokenizer, questions, style)
    return *_split(config, encode(train), train), {s: encode(test) for s, test in tests.items()}


def _split(config: Config, encoded: Questions, train: QuestionSet) -> tuple[Questions, Questions]:
    """What is trained on, and what is held out: that is chosen from the texts of the whole set."""
    held = splits.held_out(train.questions, config.eval.holdout)
    texts = {train.questions[place] for place in np.flatnonzero(held)}
    gone = np.array([text in texts for text in encoded.set.questions], bool)
    out = np.flatnonzero(gone)
    once = out[splits.first_copies([encoded.set.questions[place] for place in out])]
    if selection_set(config) == HOLDOUT and not len(once):
        raise UserError(
            f"eval.holdout={config.eval.holdout}: at most a tenth of the questions is held out, "
            f"and {train.name} has {len(train)}; write a set of data.eval in eval.select, "
            "or eval.every=null"
        )
    rest = encoded.set.without(out, splits.REASON)
    kept = dataclasses.replace(encoded.part(np.flatnonzero(~gone), train.name), set=rest)
    return kept, encoded.part(once, f"{train.name}, {splits.REASON}")


def make_rules(tokenizer: Any, style: PromptFormat, vocab_size: int) -> DecodeRules:
    """Vocabulary facts for decoding in a format: stop strings, ends, suffixes."""
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
    """Loads questions, encodes prompts and compiles stop strings.

    Args:
      sets: evaluation sets, if only these are wanted: no training question is loaded then.
    """
    style = style or format_for(config)

    def encode(text: str) -> list[int]:
        return encoding.encode_text(tokenizer, text).tolist()

    if sets is None:
        train, holdout, tests = _load_both(config, tokenizer, style)
    else:
        # A set like the first without any question.
        first, tests = next(iter(sets.values())), sets
        train = holdout = Questions(first.set.take([]), first.prompts.take(np.zeros(0, int)))
    return Environment(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        style=style,
        rules=make_rules(tokenizer, style, vocab_size),
        train=train,
        holdout=holdout,
        eval=tests,
        graders=open_graders(
            config, [one.set for one in (train, holdout, *tests.values())], encode
        ),
        graded_by=train.set.graded_by,
        rewards=open_rewards(config, encode) if sets is None else {},
    )
