"""Data and a verifier of your own: the files behind configs/examples/own-data.yaml, from nothing.

    python examples/own_data.py own
    bacr train --config configs/examples/own-data.yaml

The first command writes own/train.jsonl and own/test.jsonl, as you would from what you have: sums,
their results, and two ways to each, one short and one long. `check` is the verifier: a result that
is near is worth something, which no rule of the built-in grader could know.
"""

import json
import random
import re
import sys
from pathlib import Path

# Which an answer may be away from the right one and still be worth something.
NEAR = 5


def check(question: str, answer: str, gold: str) -> float:
    """1 for the right number, less the further away the answer is, 0 for anything else."""
    if not re.fullmatch(r"\d{1,3}", answer.strip()):
        return 0.0
    return max(0.0, 1.0 - abs(int(answer) - int(gold)) / NEAR)


def row(rng: random.Random) -> dict[str, str]:
    """A question, its answer, and two traces: at once, and term by term."""
    first, *others = [rng.randint(1, 9) for _ in range(4)]
    total, steps = first, []
    for term in others:
        steps.append(f"{total}+{term}={total + term}")
        total += term
    question = "+".join(map(str, [first, *others]))
    return {"question": question, "answer": str(total), "short": "=", "long": ";".join(steps)}


def main() -> None:
    """Writes both files; no question is in both."""
    folder, rng = Path(sys.argv[1]), random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    made = {one["question"]: one for one in (row(rng) for _ in range(6000))}
    lines = [json.dumps(one) + "\n" for one in made.values()]
    (folder / "test.jsonl").write_text("".join(lines[:300]))
    (folder / "train.jsonl").write_text("".join(lines[300:]))


if __name__ == "__main__":
    main()
