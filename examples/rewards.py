r"""Rewards beside correctness: what a response is paid for however its answer is graded.

    bacr train --config configs/quickstart.yaml method=grpo reward.apart=true \
        "reward.weights={correct: 1, examples/rewards.py:brief: .2, examples/rewards.py:plain: .1}"

Each gets the question, the whole response (thinking, tags and answer) and the reference, and
returns a score in [0, 1]; docs/own-grader.md lists its limits. `process/grader_rewards_failed`
counts the responses to which one gave no score.
"""

# Characters that a brief response has half its score at.
HALF = 400


def brief(question: str, response: str, gold: str) -> float:
    """1 for nothing, 1/2 at `HALF` characters, and so on."""
    return HALF / (HALF + len(response))


def plain(question: str, response: str, gold: str) -> float:
    """Share of the response's distinct words: repeating them is worth nothing."""
    words = response.split()
    return len(set(words)) / len(words) if words else 0.0
