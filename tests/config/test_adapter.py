"""Which settings of adapters go together."""

import pytest

from bacr_jax.config import io as config_io
from bacr_jax.config.adapter import param_dtype
from bacr_jax.config.checks import check
from bacr_jax.errors import UserError


def test_the_base_has_the_compute_type_and_trained_weights_are_float32():
    of = lambda *overrides: param_dtype(config_io.load([], list(overrides)))
    assert of() == "float32"
    assert of("adapter.rank=4") == "bfloat16"
    assert of("adapter.rank=4", "model.compute_dtype=float32") == "float32"
    assert of("adapter.rank=4", "model.param_dtype=float32") == "float32"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["model.param_dtype=bfloat16"], "write float32, or adapter.rank=32"),
        (["adapter.path=somewhere"], "adapter.path: found a folder, but adapter.rank=null"),
        (["adapter.rank=0"], "adapter.rank: found 0"),
        (["adapter.rank=4", "adapter.targets=[q,q]"], "adapter.targets: write each matrix once"),
        (["adapter.rank=4", "adapter.targets=[]"], "adapter.targets"),
        (["adapter.rank=4", "adapter.targets=[w]"], "adapter.targets"),
        (
            ["adapter.rank=4", "adapter.decode=beside", "model.param_dtype=float32"],
            "write model.param_dtype=bfloat16",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(overrides, says):
    with pytest.raises(UserError) as caught:
        check(config_io.load([], overrides))
    assert says in str(caught.value) and "\n" not in str(caught.value)
