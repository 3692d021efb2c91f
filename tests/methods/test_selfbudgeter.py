"""The declared budget: reading it, writing it for the model, and learning to write it."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bacr_jax.config import DataConfig, SelfBudgeterConfig
from bacr_jax.config import io as config_io
from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.methods import load_method, selfbudgeter
from bacr_jax.prompts.encoding import allowed_tokens, encode_prompts, encode_text, with_ids
from bacr_jax.prompts.formats import FORMATS
from bacr_jax.questions import ledger
from bacr_jax.rollout import Rollout
from bacr_jax.training.dynamic_sampling import BatchPlan
from bacr_jax.training.stages import make_group_batch
from bacr_jax.types import CLOSED_BY_BUDGET, CLOSED_BY_EOS, CLOSED_BY_TAG, Branches, Trunks
from methods_world import group_batch, load, run_of

PROMPT_FORMATS = typing.get_args(typing.get_type_hints(DataConfig)["prompt_format"])


@pytest.fixture(scope="module")
def tokenizer():
    return ledger.ledger_tokenizer()


class TestReward:
    @staticmethod
    def reward(lengths, correct, alpha, *, well_formed=1, limit=np.inf, budget=1000):
        lengths = jnp.asarray(lengths)
        full = lambda x: jnp.full(lengths.shape, x, jnp.float32)
        return selfbudgeter.declared_budget_reward(
            full(well_formed),
            full(correct),
            lengths,
            full(budget),
            full(limit),
            alpha=alpha,
            settings=SelfBudgeterConfig(),
        )

    def test_wide_tolerance(self):
        lengths = [0, 500, 1000, 2000, 7000]
        np.testing.assert_allclose(
            self.reward(lengths, 1, 6.0), [0.8147, 0.7826, 0.75, 0.6853, 0.5], atol=5e-5
        )
        np.testing.assert_allclose(
            self.reward(lengths, 0, 6.0), [-0.3147, -0.2826, -0.25, -0.1853, 0.0], atol=5e-5
        )

    def test_tight_tolerance(self):
        lengths = [500, 900, 950, 1000, 1050, 1100, 1101]
        np.testing.assert_allclose(
            self.reward(lengths, 1, 0.1), [0.5, 1, 0.9268, 0.75, 0.5732, 0.5, 0.5], atol=5e-5
        )
        np.testing.assert_allclose(
            self.reward(lengths, 0, 0.1), [-0.5, -0.5, -0.4268, -0.25, -0.0732, 0, -0.5], atol=5e-5
        )

    def test_declaring_more_than_the_limit_costs_and_bad_format_costs_most(self):
        np.testing.assert_allclose(self.reward([1000], 1, 6.0, limit=999), [0.35], atol=1e-6)
        np.testing.assert_allclose(self.reward([1000], 1, 6.0, limit=1000), [0.75], atol=1e-6)
        np.testing.assert_allclose(self.reward([1000], 1, 6.0, well_formed=0), [-1.0])

    @pytest.mark.parametrize("alpha", [6.0, 1.0, 0.1])
    def test_a_correct_answer_is_never_worse_than_a_wrong_one(self, alpha):
        lengths = np.arange(0, 9000, 50)
        worst_right = self.reward(lengths, 1, alpha, limit=1).min()
        assert worst_right >= self.reward(lengths, 0, alpha).max()

    def test_a_declared_budget_of_zero_gives_a_finite_reward(self):
        assert np.isfinite(self.reward([0, 10], 1, 0.1, budget=0)).all()

    def test_tolerance_tightens_linearly(self):
        got = [float(selfbudgeter.alpha_schedule(f)) for f in (0.0, 0.5, 1.0, 1.5)]
        np.testing.assert_allclose(got, [6.0, 3.05, 0.1, 0.1], rtol=1e-6)


class TestDeclaredBudget:
    @pytest.mark.parametrize(
        ("pieces", "found"),
        [
            ([b"1", b"8", b"h", b"a"], (18, 3)),
            ([b"007", b"h"], (7, 2)),
            ([b" 25 ", b"h4"], (25, 2)),
            ([b"0", b"h"], (0, 0)),
            ([b"h"], (0, 0)),
            ([b"1", b"+", b"2", b"h"], (0, 0)),
            ([b"1", b"8"], (0, 0)),
            ([b"1234567", b"h"], (0, 0)),
            ([], (0, 0)),
        ],
    )
    def test_is_a_positive_whole_number_before_the_tag(self, pieces, found):
        assert selfbudgeter.declared_budget(pieces, b"h") == found

    @given(st.integers(1, 999999), st.integers(1, 20))
    def test_is_found_however_the_text_is_split(self, number, size):
        text = f"{number}</budget>\n<solution>\nso 12</budget>".encode()
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        value, count = selfbudgeter.declared_budget(pieces, b"</budget>")
        assert value == number
        assert b"</budget>" in b"".join(pieces[:count])
        assert b"</budget>" not in b"".join(pieces[: count - 1])


def test_a_user_declares_the_budget_by_a_longer_prompt(tokenizer):
    prompts, _ = encode_prompts(
        tokenizer, ["4a2", "1a3b1"], FORMATS["ledger_budget"], max_tokens=20
    )
    longer = with_ids(prompts, encode_text(tokenizer, "16h"))
    for row, text in enumerate(("<bos>4a2<think>g16h", "<bos>1a3b1<think>g16h")):
        ids = longer.tokens[row, : longer.lengths[row]]
        assert tokenizer.decode(ids) == text
        assert (longer.tokens[row, longer.lengths[row] :] == 0).all()
        assert longer.question_end[row] == prompts.question_end[row]


def test_the_ledgers_tag_may_be_sampled_in_this_format_only(tokenizer):
    close = ledger.ID["h"]
    assert allowed_tokens(tokenizer, FORMATS["ledger_budget"], len(tokenizer))[close]
    assert not allowed_tokens(tokenizer, FORMATS["ledger"], len(tokenizer))[close]


def test_rewards_read_length_without_the_declaration_and_limits_by_question(tmp_path):
    config = load(tmp_path, "selfbudgeter", "rollout.group_size=2", "rollout.questions=2")
    method = load_method(resolve(config).method)
    limits = method.rejection_sft.update_state(
        method.init_state(64), np.array([0, 5] + [9] * 62), np.array([0, 1] + [1] * 62)
    )
    np.testing.assert_array_equal(limits[:3], [np.inf, 5, 9])
    batch = group_batch(
        config,
        questions=np.array([1, 0]),
        outcomes=np.ones((2, 2, 1)),
        extra={"declared": np.full((2, 2), 8), "declaration": np.full((2, 2), 2)},
        fraction=1.0,
    )
    batch = dataclasses.replace(
        batch,
        lengths=jnp.array([[10, 10], [10, 10]]),
        closed=jnp.array([[True, False], [True, True]]),
        closed_by_tag=jnp.array([[True, False], [True, True]]),
    )
    rewards = method.rewards(limits, batch)[..., 0]
    # Length 8 = declared 8: half way down the cosine from (1 - .1) 8 to (1 + .1) 8. The second
    # trace never ended. The first response to question 1 took 5 tokens, so 8 is too much, which
    # costs .4. Question 0 has no limit.
    np.testing.assert_allclose(rewards, [[0.35, -1.0], [0.75, 0.75]], atol=1e-4)


@pytest.mark.parametrize(("fraction", "reward"), [(0.0, 0.7174), (1.0, 0.5)])
def test_the_tolerance_follows_the_completed_fraction_of_training(tmp_path, fraction, reward):
    """12 tokens of a declared 8: within 6 x 8, at 52 / 96 of the cosine from -40; not within .8."""
    config = load(tmp_path, "selfbudgeter", "rollout.group_size=2", "rollout.questions=1")
    method = load_method(resolve(config).method)
    extra = {"declared": np.full((1, 2), 8), "declaration": np.full((1, 2), 2)}
    batch = dataclasses.replace(
        group_batch(config, outcomes=np.ones((1, 2, 1)), extra=extra, fraction=fraction),
        lengths=jnp.array([[14, 14]]),
        closed_by_tag=jnp.ones((1, 2), bool),
    )
    rewards = method.rewards(method.init_state(64), batch)[..., 0]
    np.testing.assert_allclose(rewards, [[reward, reward]], atol=5e-5)


@pytest.mark.slow
def test_a_solution_that_ends_with_the_turn_instead_of_its_tag_is_malformed(tmp_path, tokenizer):
    config = load(tmp_path, "selfbudgeter", "rollout.group_size=4", "rollout.questions=1")
    run, state = run_of(config, (tokenizer, len(tokenizer)))
    # "6h", then 4 tokens; how each trace ended is all that differs.
    ids = np.array([[ledger.ID[c] for c in "6h4+2="]] * 4)
    close = np.array([CLOSED_BY_TAG, CLOSED_BY_EOS, CLOSED_BY_BUDGET, CLOSED_BY_TAG])
    of_rows = lambda value: np.full(4, value)
    trunks = Trunks(ids, of_rows(0), of_rows(6), of_rows(6), close, of_rows(12), 0.0 * ids)
    answers = np.ones((4, 1), np.int32)
    branches = Branches(None, None, None, answers, answers > 0, 0 * answers, None)
    budgets = jnp.full((1, 4), 12)
    plan = BatchPlan(jnp.array([0]), jnp.array([0]), budgets, budgets[..., None])
    batch = make_group_batch(
        run, None, plan, Rollout(trunks, branches, {}), np.ones((1, 4, 1, 1)), {}, 0.0
    )
    batch = jax.tree.map(jnp.asarray, batch)
    rewards = np.asarray(run.method.rewards(state.method_state, batch))[0, :, 0]
    assert rewards[0] == rewards[3] > 0 and rewards[1] == rewards[2] == -1.0
    # It did end: filters for traces that the budget cut keep it.
    np.testing.assert_array_equal(batch.closed, [[True, True, False, True]])


def test_settings_under_which_wrong_beats_right_are_refused(tmp_path):
    with pytest.raises(UserError, match="-0.5"):
        load(tmp_path, "selfbudgeter", "selfbudgeter.budget_penalty=-0.6")
    with pytest.raises(UserError, match=r"wrong_range=\[0, -1\] is not a range"):
        load(tmp_path, "selfbudgeter", "selfbudgeter.wrong_range=[0, -1]")


@pytest.mark.parametrize("name", [name for name in FORMATS if name in PROMPT_FORMATS])
def test_a_shared_format_without_a_closing_tag_is_refused_before_training(name):
    """The first stage learns only from responses whose thinking was closed by the tag."""
    keys = ["method=selfbudgeter", f"data.prompt_format={name}", "data.train=gsm8k:somewhere"]
    settings = resolve(config_io.load([], keys)).method
    messages = [text for text in selfbudgeter.problems(settings) if "prompt_format" in text]
    assert len(messages) == (not FORMATS[name].think_close)
    assert all(f"data.prompt_format={name}: this prompt format has no" in m for m in messages)
    assert name != "boxed" or messages
