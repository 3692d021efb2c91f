"""Example of a custom data set and a custom verifier, for configs/examples/own-data.yaml.

    python examples/own_data.py own
    bacr train --config configs/examples/own-data.yaml

The first command generates own/train.jsonl and own/test.jsonl. Each row has a sum, its result, and
two worked solutions, a short one and a long one. `check` is the verifier. It gives partial credit
for a result that is close to the correct one, which the built-in grader does not support.
"""

import json
import random
import re
import sys
from pathlib import Path

# Results that differ from the correct one by less than this number receive partial credit.
NEAR = 5


def check(question: str, answer: str, gold: str) -> float:
    """Returns 1 for the correct number, less the larger its error is, and 0 for anything else."""
    if not re.fullmatch(r"\d{1,3}", answer.strip()):
        return 0.0
    return max(0.0, 1.0 - abs(int(answer) - int(gold)) / NEAR)


def row(rng: random.Random) -> dict[str, str]:
    """Returns a question, its answer, and two traces: without steps, and adding term by term."""
    first, *others = [rng.randint(1, 9) for _ in range(4)]
    total, steps = first, []
    for term in others:
        steps.append(f"{total}+{term}={total + term}")
        total += term
    question = "+".join(map(str, [first, *others]))
    return {"question": question, "answer": str(total), "short": "=", "long": ";".join(steps)}


def main() -> None:
    """Writes the training and the test set, which have no question in common."""
    folder, rng = Path(sys.argv[1]), random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    made = {one["question"]: one for one in (row(rng) for _ in range(6000))}
    lines = [json.dumps(one) + "\n" for one in made.values()]
    (folder / "test.jsonl").write_text("".join(lines[:300]))
    (folder / "train.jsonl").write_text("".join(lines[300:]))


if __name__ == "__main__":
    main()
