r"""Example of custom rewards that are added to the correctness reward.

    bacr train --config configs/quickstart.yaml output.dir=runs/rewards \
        method=grpo reward.normalize_each=true \
        "reward.weights={correct: 1, examples/rewards.py:brief: .2, examples/rewards.py:plain: .1}"

A reward function receives the question, the complete response (thinking, tags and answer) and the
gold answer, and returns a score in [0, 1]. docs/own-grader.md lists its resource limits. The metric
`process/grader_rewards_failed` counts the responses for which a reward function returned no score.
"""

# Length of a response, in characters, at which its brevity reward is 1/2.
HALF = 400


def brief(question: str, response: str, gold: str) -> float:
    """Rewards short responses: 1 for an empty response, 1/2 for one of `HALF` characters."""
    return HALF / (HALF + len(response))


def plain(question: str, response: str, gold: str) -> float:
    """Penalizes repetition: returns the number of distinct words divided by the number of words."""
    words = response.split()
    return len(set(words)) / len(words) if words else 0.0
