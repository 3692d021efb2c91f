"""Which samples of a problem give the same answer, so that they vote together."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int


def answer_clusters(
    answers: Sequence[Sequence[str | None]],
    correct: Bool[np.ndarray, "n samples"] | Float[np.ndarray, "n samples"],
    grader: Any,
) -> Int[np.ndarray, "n samples"]:
    """Numbers equal answers equally, within each problem.

    Right answers equal the reference and so one another. Wrong answers are equal when the grader,
    in its strict mode, takes one for the other; what equals either of two is one answer. A verifier
    of one's own may not be asked that: under scores, answers are equal when they are written alike,
    blanks aside.

    Args:
      answers: what each sample answers, problems by samples; None for no answer.
      correct: verdicts, or scores.
      grader: compares texts.

    Returns:
      0 for right answers, 1, 2, ... for wrong ones in the order of their first appearance, -1 for
      no answer. Under scores, 0, 1, 2, ... for all of them.
    """
    if correct.dtype != bool:
        return _written_alike(answers)
    wrong = [
        list(dict.fromkeys(a for a, c in zip(row, right) if a is not None and not c))
        for row, right in zip(answers, correct)
    ]
    pairs = [
        (problem, a, b)
        for problem, distinct in enumerate(wrong)
        for a, b in itertools.combinations(range(len(distinct)), 2)
    ]
    texts = [f"<answer>{wrong[problem][b]}</answer>" for problem, _, b in pairs]
    verdicts = grader.grade(texts, [wrong[problem][a] for problem, a, _ in pairs], mode="strict")
    first = [list(range(len(distinct))) for distinct in wrong]
    for (problem, a, b), verdict in zip(pairs, verdicts):
        if verdict.correct:
            old, new = first[problem][b], first[problem][a]
            first[problem] = [new if x == old else x for x in first[problem]]
    numbers = np.full(correct.shape, -1)
    for problem, row in enumerate(answers):
        places = {text: first[problem][i] for i, text in enumerate(wrong[problem])}
        names = {place: 1 + i for i, place in enumerate(dict.fromkeys(places.values()))}
        for sample, text in enumerate(row):
            if correct[problem, sample]:
                numbers[problem, sample] = 0
            elif text is not None:
                numbers[problem, sample] = names[places[text]]
    return numbers


def _written_alike(answers: Sequence[Sequence[str | None]]) -> Int[np.ndarray, "n samples"]:
    rows = []
    for row in answers:
        texts = [None if text is None else " ".join(text.split()) for text in row]
        names = {text: i for i, text in enumerate(dict.fromkeys(t for t in texts if t is not None))}
        rows.append([-1 if text is None else names[text] for text in texts])
    return np.array(rows, np.int64)
