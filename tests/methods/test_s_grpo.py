"""S-GRPO: exits of one trace, what each earns, and which tokens it teaches."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config.settings import resolve
from bacr_jax.methods import load_method, s_grpo
from bacr_jax.methods.registry import problems
from methods_world import group_batch, load, run_of


class TestFormulas:
    def test_each_right_exit_earns_half_of_the_one_before_it(self):
        right = jnp.array([[0, 1, 0, 1, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]], bool)
        own = jnp.broadcast_to(jnp.arange(5), (3, 5))
        want = [[0, 1, 0, 0.5, 0.25], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
        np.testing.assert_array_equal(s_grpo.decaying_reward(right, own), want)

    def test_exits_at_one_place_are_one_exit(self):
        """Of four cuts the last three keep the whole trace."""
        right, source = jnp.array([True, True, True, True]), jnp.array([0, 1, 1, 1])
        rewards = s_grpo.decaying_reward(right, source)
        np.testing.assert_array_equal(rewards, [1, 0.5, 0.5, 0.5])
        np.testing.assert_array_equal(
            s_grpo.serial_advantage(rewards, source), [0.25, -0.25, -0.25, -0.25]
        )

    def test_an_advantage_is_shared_by_the_tokens_of_its_response(self):
        """Exits after 2 and 6 tokens, answers of 2: 1/2 / 4 and -1/2 / 8, over two exits."""
        advantage, source = jnp.array([0.5, -0.5]), jnp.array([0, 1])
        kept, answered = jnp.array([2, 6]), jnp.array([2, 2])
        thinking, answers = s_grpo.exit_credit(advantage, kept, answered, source)
        # The first two tokens belong to both responses.
        np.testing.assert_allclose(thinking, [1 / 16 - 1 / 32, -1 / 32])
        np.testing.assert_allclose(answers, [1 / 16, -1 / 32])

    def test_the_closing_tag_belongs_to_the_whole_trace(self):
        """Two exits at the end: the segment before it and the tag after it have its credit."""
        advantage, source = jnp.array([0.5, -0.5, -0.5]), jnp.array([0, 1, 1])
        kept, answered = jnp.array([2, 6, 6]), jnp.array([2, 2, 2])
        thinking, answers = s_grpo.exit_credit(advantage, kept, answered, source)
        np.testing.assert_allclose(thinking, [1 / 32, -1 / 32, -1 / 32])
        np.testing.assert_allclose(answers, [1 / 16, -1 / 32, 0.0])


class TestMethod:
    def test_a_trace_is_compared_with_itself_alone(self, tmp_path):
        config = load(tmp_path, "s_grpo", "rollout.questions=1", "rollout.group_size=2",
                      "cuts.count=3")  # fmt: skip
        method = load_method(resolve(config).method)
        batch = dataclasses.replace(
            group_batch(config, outcomes=np.array([[[0, 1, 1], [1, 1, 1]]], float)),
            cuts=jnp.array([[[3, 6, 12], [2, 4, 12]]]),
            thinking=jnp.array([[8, 3]]),
            sampled=jnp.array([[9, 4]]),  # with the closing tag
        )
        rewards = method.rewards(None, batch)
        np.testing.assert_array_equal(rewards, [[[0, 1, 0.5], [1, 0.5, 0.5]]])
        credit = method.advantages(None, batch, rewards, None)
        # Responses of 5, 8 and 11 tokens; of the other trace, of 4 and 6.
        each = [-0.5 / 5 / 3, 0.5 / 8 / 3, 0.0]
        other = [0.25 / 4 / 2, -0.25 / 6 / 2]
        np.testing.assert_allclose(credit.answers, [[each, [*other, 0.0]]], rtol=1e-6)
        want = [[sum(each), sum(each[1:]), 0.0], [sum(other), other[1], other[1]]]
        np.testing.assert_allclose(credit.thinking, [want], rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(credit.baseline, [[[0.5] * 3, [0.75] * 3]], rtol=1e-6)
        assert float(method.metrics(None, batch)["s_grpo/exits"]) == 2.5

    def test_an_exit_at_the_end_of_the_thinking_has_the_closing_tag(self, tmp_path):
        """Six tokens of thinking and a tag: the exits keep 3 and 7 tokens, and answers have two."""
        sizes = ("rollout.questions=1", "rollout.group_size=1", "cuts.count=3")
        config = load(tmp_path, "s_grpo", *sizes)
        method = load_method(resolve(config).method)
        batch = dataclasses.replace(
            group_batch(config, outcomes=np.array([[[0, 1, 1]]], float)),
            cuts=jnp.array([[[3, 6, 12]]]),
            thinking=jnp.array([[6]]),
            sampled=jnp.array([[7]]),
        )
        credit = method.advantages(None, batch, method.rewards(None, batch), None)
        first, last = -0.5 / (3 + 2) / 2, 0.5 / (7 + 2) / 2
        np.testing.assert_allclose(credit.answers, [[[first, last, 0.0]]], rtol=1e-6)
        np.testing.assert_allclose(credit.thinking, [[[first + last, last, last]]], rtol=1e-6)

    def test_a_single_exit_is_refused(self, tmp_path):
        config = load(tmp_path, "s_grpo")
        config = dataclasses.replace(config, cuts=dataclasses.replace(config.cuts, count=1))
        assert any(
            "cuts.count=1: method=s_grpo" in line for line in problems(resolve(config).method)
        )

    @pytest.mark.slow
    def test_exits_lie_within_each_traces_own_length(self, tmp_path, ledger_tokens):
        """In a rollout, and where the method sees them."""
        from bacr_jax.training.algorithm import iterate

        config = load(tmp_path, "s_grpo", "cuts.count=4", "budget.max=12")
        run, state = run_of(config, (ledger_tokens, len(ledger_tokens)))
        _, done = iterate(run, state, 0)
        trunks, branches = done.chosen.rollout.trunks, done.chosen.rollout.branches
        cuts = np.asarray(done.chosen.plan.cuts).reshape(16, 4)
        length = np.asarray(trunks.thinking)
        assert (cuts[:, -1] == 12).all()
        assert ((cuts <= length[:, None]) | (cuts == 12)).all() and (length < 12).any()
        # Where a branch really starts: its cut, or behind the closing tag of a whole trace.
        kept = np.minimum(cuts, length[:, None])
        start = np.asarray(branches.context) - np.asarray(trunks.prompt_lengths)[:, None]
        inside = kept < length[:, None]
        np.testing.assert_array_equal(start[inside], kept[inside])
        np.testing.assert_array_equal(
            done.chosen.group_batch.answer_lengths.reshape(16, 4), branches.sampled
        )


@pytest.mark.parametrize(("length", "want"), [(40, [10, 20, 40]), (3, [1, 2, 40]), (0, [0, 0, 40])])
def test_cuts_are_moved_onto_the_trace(length, want):
    from bacr_jax.rewards import cuts_of_trace

    long = (np.array([[60000]], np.int32), np.array([50000], np.int32), np.array([65536], np.int32))
    np.testing.assert_array_equal(cuts_of_trace(*long), [[45777]])  # 60000 * 50000 is over 2^31
    got = cuts_of_trace(np.array([[10, 20, 40]]), np.array([length]), np.array([40]))
    np.testing.assert_array_equal(got, [want])
