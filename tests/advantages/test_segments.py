import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bacr_jax import advantages


class TestSegments:
    CUTS = jnp.array([[2, 4, 6, 7], [1, 1, 3, 3]])

    def test_a_cut_includes_its_own_token(self):
        positions = jnp.tile(jnp.arange(1, 9), (2, 1))
        got = advantages.segment_index(positions, self.CUTS)
        np.testing.assert_array_equal(got, [[0, 0, 1, 1, 2, 2, 3, 4], [0, 2, 2, 4, 4, 4, 4, 4]])

    def test_tokens_get_their_segments_advantage_and_none_after_the_last_cut(self):
        a = jnp.array([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
        got = jax.jit(advantages.scatter_segments, static_argnums=2)(a, self.CUTS, 8)
        np.testing.assert_array_equal(got, [[1, 1, 2, 2, 3, 3, 4, 0], [5, 7, 7, 0, 0, 0, 0, 0]])

    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 40))
    def test_segment_is_the_first_cut_at_or_after_the_token(self, cuts, token):
        cuts = sorted(cuts)
        got = int(advantages.segment_index(jnp.array([token]), jnp.array(cuts))[0])
        reaching = [s for s, cut in enumerate(cuts) if cut >= token]
        assert got == (reaching[0] if reaching else len(cuts))

    def test_an_answer_serving_several_cuts_collects_their_advantages(self):
        a = jnp.array([[1.0, 2.0, 4.0, 8.0], [1.0, 2.0, 4.0, 8.0]])
        source = jnp.array([[0, 1, 1, 1], [0, 0, 0, 0]])
        np.testing.assert_array_equal(
            advantages.sum_reused(a, source), [[1, 14, 0, 0], [15, 0, 0, 0]]
        )
