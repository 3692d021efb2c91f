"""Creates graded samples for tests of evaluations and reports."""

import numpy as np

from bacr_jax.evaluation.samples import GREEDY, SAMPLED, EvalSetting, Sample, graded
from bacr_jax.questions.question_set import QuestionSet

GOLD = "4"


def sample(problem, number, answer, budget=8, mode=SAMPLED, strict=None, thinking=5, **fields):
    """Returns a graded sample, which is correct if its answer is `GOLD`.

    Args:
      problem: index of the problem.
      number: index of the sample among the samples of the problem.
      answer: extracted answer.
      strict: strict verdict. None if it equals the lenient verdict.
      thinking: number of thinking tokens.
      fields: further fields of `Sample`.
    """
    correct = answer == GOLD
    return Sample(
        **{
            "set": "ours",
            "id": f"p{problem}",
            "mode": mode,
            "budget": budget,
            "cut": None,
            "sample": number,
            "level": 1 + problem % 2,
            "subject": "algebra" if problem < 2 else "",
            "text": "",
            "extracted": answer,
            "gold": GOLD,
            "correct": correct,
            "strict": correct if strict is None else strict,
            "path": "string",
            "timed_out": False,
            "thinking_tokens": thinking,
            "forced_tokens": 2,
            "answer_tokens": 2,
            "total_tokens": thinking + 4,
            "closed_by": "budget" if thinking == budget else "tag",
            "finished": True,
            **fields,
        }
    )


def drawn(rows, budget=8, mode=SAMPLED, **fields):
    """Returns the graded samples of one evaluation setting.

    Args:
      rows: for each problem, a list of the answers to it.
    """
    made = [
        sample(i, j, answer, budget=budget, mode=mode, **fields)
        for i, row in enumerate(rows)
        for j, answer in enumerate(row)
    ]
    return graded(made, EvalSetting(mode, budget, len(rows[0])))


def near_results(budgets=(8, 16)):
    """Returns greedy answers to four problems, by evaluation setting. The third answer is wrong."""
    rows = [[GOLD], [GOLD], ["1"], [GOLD]]
    thinking = lambda problem: problem + 1
    made = {}
    for budget in budgets:
        setting = EvalSetting(GREEDY, budget, 1)
        made[setting] = graded(
            [
                sample(i, 0, row[0], budget=budget, mode=GREEDY, thinking=thinking(i))
                for i, row in enumerate(rows)
            ],
            setting,
        )
    return made


def near_problems(duplicates, compared_with="train"):
    """Returns the question set that `near_results` answers.

    Args:
      duplicates: for each of the four questions, True if it is a near-duplicate of a question of
        the set `compared_with`.
    """
    blank = np.zeros(4, np.int32)
    return QuestionSet(
        "ours", list("abcd"), [GOLD] * 4, blank, blank, [f"p{i}" for i in range(4)],
        duplicates=np.array(duplicates), compared_with=compared_with,
    )  # fmt: skip
