"""Published shapes and their parameter counts."""

import jax
import pytest

from bacr_jax.errors import UserError
from bacr_jax.model import qwen2
from bacr_jax.model.sizes import PRESETS, preset


@pytest.mark.parametrize("name", PRESETS)
def test_preset_counts_its_parameters(name):
    params = jax.eval_shape(lambda: qwen2.init(jax.random.key(0), PRESETS[name]))
    assert sum(x.size for x in jax.tree.leaves(params)) == PRESETS[name].num_parameters


def test_published_parameter_counts():
    # 7.62 and 0.49 billion in the model cards
    assert PRESETS["qwen2.5-7b"].num_parameters == 7_615_616_512
    assert PRESETS["qwen2.5-0.5b"].num_parameters == 494_032_768
    # of the tensors in the released files
    assert PRESETS["qwen3-0.6b"].num_parameters == 596_049_920
    assert PRESETS["deepseek-r1-distill-qwen-1.5b"].num_parameters == 1_777_088_000
    assert PRESETS["llama-3.2-1b"].num_parameters == 1_235_814_400
    assert PRESETS["llama-3.1-8b"].num_parameters == 8_030_261_248
    assert PRESETS["smollm2-135m"].num_parameters == 134_515_008


def test_an_unknown_preset_is_refused():
    with pytest.raises(
        UserError, match="'qwen2.5-4b' is not the name of a preset; use one of qwen2.5-0.5b"
    ):
        preset("qwen2.5-4b")
