"""What surrounds the policy in a run: questions in, verified outcomes out.

Built once from the config on the host. It knows the tokenizer, the prompts, the stop strings and
the grader, so that the training loop and the evaluation deal in arrays only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from bacr_jax.config import Config
from bacr_jax.data.questions import QuestionSet, load_questions
from bacr_jax.grading import ExactGrader, Grader
from bacr_jax.parallel import processes
from bacr_jax.rollout.rules import DecodeRules, decode_rules
from bacr_jax.text import prompts as prompting
from bacr_jax.text.extraction import answer_text
from bacr_jax.text.stopping import compile_stop_strings
from bacr_jax.types import Branches, Prompts


@dataclass(frozen=True)
class Questions:
    """A question set with its prompts; row i of each belongs together.

    Attributes:
      set: texts, answers, levels, groups.
      prompts: tokenised prompts.
    """

    set: QuestionSet
    prompts: Prompts

    def __len__(self) -> int:
        """Number of questions."""
        return len(self.set.questions)

    def take(self, index: np.ndarray) -> Prompts:
        """Prompts of the given questions."""
        rows: Prompts = jax.tree.map(lambda x: np.asarray(x)[index], self.prompts)
        return rows


@dataclass(frozen=True)
class Environment:
    """Everything a run needs around the model.

    Attributes:
      tokenizer: encodes and decodes text.
      vocab_size: rows of the embedding.
      rules: vocabulary facts for decoding.
      train: training questions.
      eval: evaluation questions by set name.
      grader: verifies answers.
    """

    tokenizer: Any
    vocab_size: int
    rules: DecodeRules
    train: Questions
    eval: dict[str, Questions]
    grader: Any

    def answer_texts(self, branches: Branches) -> list[list[str]]:
        """Text after each bridge, closing tag included if it was written; [B][M]."""
        start = np.asarray(branches.bridge)
        stop = start + np.asarray(branches.sampled)
        tokens = np.asarray(branches.tokens)
        b, m, _ = tokens.shape
        cell = lambda i, j: tokens[i, j, start[i, j] : stop[i, j]].tolist()
        return [[answer_text(self.tokenizer, cell(i, j)) for j in range(m)] for i in range(b)]

    def verify(
        self,
        branches: Branches,
        answers: Sequence[str],
        poll: Callable[[], None] | None = None,
    ) -> np.ndarray:
        """Outcome r of every cut (1 correct, 0 not); an answer that was never closed is wrong.

        Args:
          branches: sampled answers of B rows.
          answers: gold answer of each row.
          poll: called while waiting for the grader.

        Returns:
          [B, M] float32. Cuts that share a branch share its verdict.
        """
        texts = self.answer_texts(branches)
        b, m = np.asarray(branches.sampled).shape
        flat = [text for row in texts for text in row]
        golds = [gold for gold in answers for _ in range(m)]
        outcomes = np.zeros((b, m), np.float32)
        # Deadlines make two graders differ, so several processes ask one.
        if processes.is_first():
            verdicts = self.grader.grade(flat, golds, mode="strict", poll=poll)
            outcomes = np.array([v.correct for v in verdicts], np.float32).reshape(b, m)
        return np.asarray(processes.from_first(outcomes))


def build_environment(config: Config, tokenizer: Any, vocab_size: int) -> Environment:
    """Loads questions, encodes prompts and compiles stop strings.

    Raises:
      UserError: unknown data, or nothing usable in it.
    """
    style = prompting.format_for(config)
    load = lambda spec, split: load_questions(spec, config.data, config.seed, split)

    def encode(questions: QuestionSet) -> Questions:
        encoded, dropped = prompting.encode_prompts(
            tokenizer, questions.questions, style, max_tokens=config.data.max_prompt_tokens
        )
        return Questions(questions.without(dropped), encoded)

    compiled = {
        text: compile_stop_strings(tokenizer, [text], vocab_size=vocab_size)
        for text in (style.think_close, style.answer_close)
    }
    rules = decode_rules(
        legal=prompting.legal_tokens(tokenizer, style, vocab_size),
        eos_ids=prompting.eos_ids(tokenizer, style),
        think_close=compiled[style.think_close],
        answer_close=compiled[style.answer_close],
        bridge_forced=prompting.encode_text(tokenizer, style.bridge_forced),
        bridge_natural=prompting.encode_text(tokenizer, style.bridge_natural),
    )
    exact = config.data.train == "ledger"
    return Environment(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        rules=rules,
        train=encode(load(config.data.train, "train")),
        eval={spec: encode(load(spec, "test")) for spec in config.data.eval},
        grader=ExactGrader() if exact else Grader(),
    )
