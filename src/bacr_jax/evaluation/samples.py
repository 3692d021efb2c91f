"""Drawing and grading answers at a budget: the one place where a policy is evaluated.

An evaluation is a list of cells (a decoding and a budget). The rows of a cell, problem by problem
and sample by sample, are drawn in batches whose composition is fixed beforehand, so that an
evaluation that was interrupted and continued gives what an uninterrupted one gives.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from bacr_jax.config import EvalConfig
from bacr_jax.data.environment import Environment, Questions
from bacr_jax.data.prompts import PromptFormat, encode_text, with_declaration
from bacr_jax.data.tokenizers import decode_ids
from bacr_jax.grading import LENIENT
from bacr_jax.model.kv_cache import DecodeParams
from bacr_jax.parallel import processes
from bacr_jax.rollout import RolloutSpec, generate, sampling_params
from bacr_jax.types import CLOSED_BY_BUDGET, CLOSED_BY_EOS, CLOSED_BY_TAG, Prompts

GREEDY, SAMPLED = "greedy", "sampled"
CLOSE_NAMES = {CLOSED_BY_BUDGET: "budget", CLOSED_BY_TAG: "tag", CLOSED_BY_EOS: "end of turn"}


@dataclass(frozen=True)
class EvalSetting:
    """Answers that are averaged together.

    Attributes:
      mode: GREEDY or SAMPLED.
      budget: thinking tokens of each answer.
      samples: answers per problem.
    """

    mode: str
    budget: int
    samples: int


@dataclass(frozen=True)
class Sample:
    """One answer to one problem, with its verdicts.

    Attributes:
      set: name of the set.
      id: identifier of the problem in the set.
      mode: GREEDY or SAMPLED.
      budget: thinking tokens allowed.
      sample: number of the answer, 0 .. samples - 1.
      level: of the problem, 1 .. 5; 0: unknown.
      subject: of the problem; empty: unknown.
      text: everything after the prompt: thinking, forced suffix, answer.
      extracted: the answer that the grader found.
      gold: the reference answer.
      correct: lenient verdict.
      strict: strict verdict, the one that rewards use.
      path: what decided the verdict.
      timed_out: the grader's deadline passed.
      thinking_tokens: sampled thinking, without a closing tag.
      total_tokens: everything after the prompt, forced tokens and tags included.
      closed_by: what ended the thinking: "budget" (it was forced), "tag" or "end of turn".
      finished: the answer was closed.
    """

    set: str
    id: str
    mode: str
    budget: int
    sample: int
    level: int
    subject: str
    text: str
    extracted: str | None
    gold: str
    correct: bool
    strict: bool
    path: str
    timed_out: bool
    thinking_tokens: int
    total_tokens: int
    closed_by: str
    finished: bool

    @property
    def key(self) -> tuple[str, str, int, str, int]:
        """What the sample answers: set, mode, budget, problem, number."""
        return self.set, self.mode, self.budget, self.id, self.sample

    def to_json(self) -> dict[str, Any]:
        """As a JSON record."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Sample":
        """From a record of `to_json`.

        Raises:
          ValueError: other fields than a sample has.
        """
        if set(record) != {field.name for field in dataclasses.fields(cls)}:
            raise ValueError("other fields than a sample has")
        return cls(**record)


@dataclass(frozen=True)
class Decoder:
    """A policy ready to answer.

    Attributes:
      params: decoding parameters.
      spec: rollout shapes; its thinking width holds every budget asked for.
      phi_of: budget embedding; None for an unconditioned policy.
    """

    params: DecodeParams
    spec: RolloutSpec
    phi_of: Callable[[jax.Array], jax.Array] | None


def subset(questions: Questions, size: int | None, seed: int) -> Int[np.ndarray, "n"]:
    """Places of the problems evaluated: all, or a fixed random subset in their order."""
    n = len(questions)
    if size is None or size >= n:
        return np.arange(n)
    return np.sort(np.random.default_rng([seed, 7]).choice(n, size, replace=False))


def cells_of(config: EvalConfig, *, greedy: bool = True) -> list[EvalSetting]:
    """Cells in the order in which they are evaluated: greedy ones first, budgets rising."""
    found = [EvalSetting(GREEDY, budget, 1) for budget in config.budgets] if greedy else []
    if config.samples:
        found += [EvalSetting(SAMPLED, budget, config.samples) for budget in config.budgets]
    return found


def batches(problems: int, cell: EvalSetting, most: int | None) -> list[Int[np.ndarray, "rows"]]:
    """Row numbers of a cell (problem x samples + sample), in batches of at most `most`."""
    rows = np.arange(problems * cell.samples)
    return [rows] if most is None else [rows[i : i + most] for i in range(0, len(rows), most)]


def declaration(
    tokenizer: Any, style: PromptFormat, config: EvalConfig, budget: int
) -> Int[np.ndarray, "n"]:
    """What follows the prompt of a policy that opens with a budget, if it is given that budget."""
    if not style.budget_close or config.budget_tag == "declared":
        return np.zeros(0, np.int32)
    return encode_text(tokenizer, f"{budget}{style.budget_close}")


def with_declared_budget(
    prompts: Prompts, tokenizer: Any, style: PromptFormat, config: EvalConfig, budget: int
) -> Prompts:
    """Prompts with the budget in them, where the format has a place for it.

    All budgets of the config give prompts of one width.
    """
    write = lambda b: declaration(tokenizer, style, config, b)
    given = write(budget)
    if not len(given):
        return prompts
    longer = with_declaration(prompts, given)
    # All budgets in one width, so that nothing is compiled for each.
    width = max(len(write(b)) for b in (*config.budgets, budget)) - len(given)
    tokens: Any = np.pad(np.asarray(longer.tokens), ((0, 0), (0, width)))
    return dataclasses.replace(longer, tokens=tokens)


def _for_grader(text: str, style: PromptFormat) -> str:
    """The text with the tag that ends thinking for the grader, whatever the format's own is."""
    return text.replace(style.think_close, "</think>", 1) if style.think_close else text


def draw(
    decoder: Decoder,
    environment: Environment,
    questions: Questions,
    chosen: Int[np.ndarray, "n"],
    rows: Int[np.ndarray, "rows"],
    cell: EvalSetting,
    key: jax.Array,
    *,
    name: str,
    config: EvalConfig,
    poll: Callable[[], None] | None = None,
) -> list[Sample]:
    """Answers and grades some rows of a cell.

    Args:
      decoder: the policy.
      environment: tokenizer, rules and grader.
      questions: the set.
      chosen: places of the problems evaluated.
      rows: row numbers, as `batches` gives them.
      cell: decoding and budget.
      key: of the evaluation; what a sample says depends on it, its row number and its budget.
      name: of the set, for the records.
      config: temperature and nucleus of sampled answers, and what a budget tag holds.
      poll: called regularly, so that a caller can stop by raising.

    Returns:
      A sample per row, in their order.
    """
    greedy, style = cell.mode == GREEDY, environment.style
    places = chosen[rows // cell.samples]
    budgets = np.full(len(rows), cell.budget, np.int32)
    rollout = generate(
        decoder.params,
        with_declared_budget(
            questions.take(places), environment.tokenizer, style, config, cell.budget
        ),
        budgets,
        budgets[:, None],
        jax.random.fold_in(key, cell.budget),
        spec=decoder.spec,
        rules=environment.rules,
        sampling=sampling_params(0.0)
        if greedy
        else sampling_params(config.temperature, config.top_p),
        phi_of=decoder.phi_of,
        rows=rows.astype(np.int32),
        poll=poll,
    )
    trunks, branches = jax.tree.map(np.asarray, (rollout.trunks, rollout.branches))
    begin = trunks.prompt_lengths
    end = begin + trunks.sampled
    written = branches.forced[:, 0] + branches.sampled[:, 0]

    def text_of(i: int) -> str:
        thinking = trunks.tokens[i, begin[i] : end[i]].tolist()
        answer = branches.tokens[i, 0, : written[i]].tolist()
        return decode_ids(environment.tokenizer, thinking + answer)

    texts = [text_of(i) for i in range(len(rows))]
    data = questions.set
    references = [data.answers[place] for place in places]
    grader = environment.graded_like(questions).grader
    graded_texts = [_for_grader(text, style) for text in texts]
    # Several processes wait for their graders for different times: none may poll there.
    polled = None if processes.several() else poll
    verdicts = grader.grade(graded_texts, references, mode=LENIENT, poll=polled)
    return [
        Sample(
            set=name,
            id=data.ids[place],
            mode=cell.mode,
            budget=cell.budget,
            sample=int(row % cell.samples),
            level=int(data.levels[place]),
            subject=data.subjects[place],
            text=text,
            extracted=verdict.extracted,
            gold=gold,
            correct=verdict.correct,
            strict=verdict.strict,
            path=verdict.path,
            timed_out=verdict.timed_out,
            thinking_tokens=int(trunks.thinking[i]),
            total_tokens=int(trunks.sampled[i] + written[i]),
            closed_by=CLOSE_NAMES[int(trunks.close[i])],
            finished=bool(branches.finished[i, 0]),
        )
        for i, (row, place, text, gold, verdict) in enumerate(
            zip(rows, places, texts, references, verdicts, strict=True)
        )
    ]
