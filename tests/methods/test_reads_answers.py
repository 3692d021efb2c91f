"""Rewards of a method of one's own may see what the answers say."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from bacr_jax.questions import ledger
from bacr_jax.rollout import Rollout
from bacr_jax.training.dynamic_sampling import BatchPlan
from bacr_jax.training.stages import make_group_batch
from bacr_jax.types import CLOSED_BY_TAG, Branches, Trunks
from methods_world import load, run_of


def test_what_a_method_reads_in_answers_is_where_its_rewards_are_made(tmp_path):
    tokenizer = ledger.ledger_tokenizer()
    config = load(tmp_path, "grpo", "rollout.group_size=2", "rollout.questions=1")
    run, _ = run_of(config, (tokenizer, len(tokenizer)))
    seen = []

    def read(texts):
        seen.extend(texts)
        return {"sevens": np.array([sum(text.count("7") for text in row) for row in texts])}

    run = dataclasses.replace(run, method=dataclasses.replace(run.method, read_answers=read))
    of_rows = lambda value: np.full(2, value)
    thinking = np.array([[ledger.ID["4"]] * 3] * 2)
    close = of_rows(CLOSED_BY_TAG)
    trunks = Trunks(
        thinking, of_rows(0), of_rows(3), of_rows(3), close, of_rows(12), 0.0 * thinking
    )
    # The forced tag, then what was sampled: "7" and its closing tag, or "5" and nothing.
    spelled = [["<answer>", "7", "</answer>"], ["<answer>", "5", "5"]]
    tokens = np.array([[[ledger.ID[piece] for piece in row]] for row in spelled])
    counts = lambda *values: np.array(values)[:, None]
    branches = Branches(
        tokens, counts(3, 3), counts(1, 1), counts(2, 1), counts(True, False), counts(0, 0), None
    )
    budgets = jnp.full((1, 2), 12)
    plan = BatchPlan(jnp.array([0]), jnp.array([0]), budgets, budgets[..., None])
    batch = make_group_batch(
        run, None, plan, Rollout(trunks, branches, {}), np.ones((1, 2, 1, 1)), {}, 0.0
    )
    assert seen == [["<answer>7</answer>"], ["<answer>5"]]
    assert batch.extra["sevens"].tolist() == [[1, 0]]
