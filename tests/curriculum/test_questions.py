import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from bacr_jax import curriculum

rates = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=6)


class TestWeights:
    def test_eq6_by_hand(self):
        rho = jnp.array([0.5, 0.1, 0.0])
        np.testing.assert_allclose(
            curriculum.group_weights(rho, epsilon=0.0), [0.25 / 0.34, 0.09 / 0.34, 0.0], rtol=1e-6
        )
        np.testing.assert_allclose(
            curriculum.group_weights(rho, epsilon=0.02), [0.675, 0.275, 0.05], rtol=1e-6
        )

    def test_all_groups_solved_or_failed_gives_uniform_weights(self):
        weights = curriculum.group_weights(jnp.array([0.0, 1.0, 1.0, 0.0]), epsilon=0.0)
        np.testing.assert_allclose(weights, np.full(4, 0.25))

    def test_sizes_multiply_and_exclude_empty_groups(self):
        rho, sizes = jnp.array([0.5, 0.5, 0.5]), jnp.array([30, 10, 0])
        np.testing.assert_allclose(curriculum.group_weights(rho, sizes=sizes), [0.75, 0.25, 0.0])
        solved = curriculum.group_weights(jnp.ones(3), epsilon=0.0, sizes=sizes)
        np.testing.assert_allclose(solved, [0.5, 0.5, 0.0])

    @settings(max_examples=50)
    @given(rates, st.sampled_from([0.0, 0.02, 1.0]))
    def test_are_probabilities_for_every_rate(self, rho, epsilon):
        weights = curriculum.group_weights(jnp.asarray(rho, jnp.float32), epsilon=epsilon)
        assert np.isfinite(weights).all()
        assert (np.asarray(weights) >= 0).all()
        np.testing.assert_allclose(np.sum(weights), 1.0, rtol=1e-5)


class TestQuestionStream:
    GROUP_OF = jnp.array([0, 2, 2, 2, 0, 2, 3])

    def test_groups_by_weight_then_uniform_inside_and_never_from_an_empty_group(self):
        weights = jnp.array([0.5, 0.3, 0.2, 0.0])
        index = np.asarray(
            curriculum.sample_questions(jax.random.key(0), weights, self.GROUP_OF, 20_000)
        )
        # Group 1 is empty: its .3 is shared out in proportion; group 3 has weight 0.
        want = np.array([0.5 / 2, 0.2 / 4, 0.2 / 4, 0.2 / 4, 0.5 / 2, 0.2 / 4]) / 0.7
        counts = np.bincount(index, minlength=7)
        assert counts[6] == 0
        assert scipy.stats.chisquare(counts[:6], want * 20_000).pvalue > 1e-4

    def test_all_weight_on_an_empty_group_falls_back_to_the_others(self):
        weights = jnp.array([0.0, 1.0, 0.0, 0.0])
        index = curriculum.sample_questions(jax.random.key(0), weights, self.GROUP_OF, 3000)
        groups = np.bincount(np.asarray(self.GROUP_OF)[np.asarray(index)], minlength=4)
        assert groups[1] == 0
        assert scipy.stats.chisquare(groups[[0, 2, 3]]).pvalue > 1e-4

    def test_groups_of_weight_zero_are_never_drawn(self):
        drawn = curriculum.sample_groups(jax.random.key(0), jnp.array([0.0, 2.0, 6.0]), 8000)
        counts = np.bincount(np.asarray(drawn), minlength=3)
        assert counts[0] == 0
        assert scipy.stats.chisquare(counts[1:], [2000, 6000]).pvalue > 1e-4
