import inspect

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bacr_jax import advantages

unchecked = inspect.unwrap
reward_arrays = hnp.arrays(
    np.float32,
    st.sampled_from([(2, 2), (1, 4), (3, 5)]),  # each new shape is a compilation
    elements=st.sampled_from([-0.3, 0.0, 0.1, 0.7, 1.0, 1.3]),
)


class TestScale:
    A = jnp.array([[[1.0, 3.0], [1.0, 3.0]], [[0.1, 0.1], [0.1, 0.1]]])

    def test_eq14_per_question_with_a_floor(self):
        got = advantages.normalize(self.A, mode="group", floor=0.1)
        # Deviations 1 and 0: the second question is divided by the floor, and not centred.
        np.testing.assert_allclose(got, [[[1, 3], [1, 3]], [[1, 1], [1, 1]]], rtol=1e-5)

    def test_batch_rms(self):
        got = advantages.normalize(self.A, mode="batch_rms", floor=0.1)
        np.testing.assert_allclose(got, self.A / np.sqrt((20 + 0.04) / 8), rtol=1e-6)

    def test_none_changes_nothing(self):
        np.testing.assert_array_equal(advantages.normalize(self.A, mode="none", floor=0.1), self.A)

    @pytest.mark.parametrize("mode", ["group", "batch_rms", "none"])
    def test_all_zero_advantages_stay_zero(self, mode):
        got = advantages.normalize(jnp.zeros((2, 3, 4)), mode=mode, floor=0.1)
        np.testing.assert_array_equal(got, np.zeros((2, 3, 4)))

    @settings(max_examples=50)
    @given(reward_arrays, st.sampled_from(["group", "batch_rms"]))
    def test_a_question_can_grow_at_most_by_the_inverse_floor(self, a, mode):
        got = np.asarray(advantages.normalize(jnp.asarray(a)[:, :, None], mode=mode, floor=0.1))
        assert np.isfinite(got).all()
        assert (np.abs(got[..., 0]) <= np.abs(a) / 0.1 + 1e-5).all()

    def test_unknown_mode_is_refused(self):
        with pytest.raises(ValueError, match="must be batch_rms, group or none"):
            unchecked(advantages.advantage_scale)(self.A, mode="std", floor=0.1)
