"""Which layouts are legal, and what is written instead of the others."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bacr_jax.config import MeshConfig
from bacr_jax.errors import UserError
from bacr_jax.parallel import MeshShape, resolve

# Qwen2.5-7B: 28 query heads, 4 key/value heads.
QWEN_7B = {"hidden_size": 3584, "intermediate_size": 18944, "num_kv_heads": 4}


def test_fsdp_takes_the_remaining_devices():
    assert resolve(MeshConfig(), 8, **QWEN_7B) == MeshShape(1, 8, 1, 1)
    assert resolve(MeshConfig(tensor=2), 8, **QWEN_7B) == MeshShape(1, 4, 2, 2)
    assert resolve(MeshConfig(data=2, decode_tensor=4), 8, **QWEN_7B) == MeshShape(2, 4, 1, 4)
    assert resolve(MeshConfig(), 1, **QWEN_7B) == MeshShape(1, 1, 1, 1)


@pytest.mark.parametrize(
    ("config", "devices", "says"),
    [
        (
            MeshConfig(fsdp=4),
            8,
            "found 1 x 4 x 1, whose product is not the number of devices, 8; set mesh.data=",
        ),
        (MeshConfig(data=3), 8, "found 3 x -1 x 1, .* set mesh.data=4 mesh.fsdp=2 mesh.tensor=1"),
        (MeshConfig(data=16), 8, "set mesh.data=8 mesh.fsdp=1 mesh.tensor=1"),
        (MeshConfig(tensor=8), 8, "mesh.tensor=8 .*4 key/value heads.* mesh.tensor=4"),
        (MeshConfig(decode_tensor=3), 8, "mesh.decode_tensor=3 .* set it to 4|set it to 2"),
    ],
)
def test_an_illegal_layout_is_refused_with_the_nearest_legal_one(config, devices, says):
    with pytest.raises(UserError, match=says):
        resolve(config, devices, **QWEN_7B)


def test_a_width_that_does_not_divide_is_refused():
    with pytest.raises(
        UserError, match=r"mesh.fsdp=6 does not divide .*width 64.*mesh.data=3 mesh.f"
    ):
        resolve(MeshConfig(), 6, hidden_size=64, intermediate_size=160, num_kv_heads=1)


@given(
    st.integers(1, 4),
    st.integers(-1, 8).filter(bool),
    st.integers(1, 4),
    st.integers(1, 16),
    st.sampled_from([1, 2, 4, 8]),
)
def test_what_is_offered_is_legal(data, fsdp, tensor, devices, kv_heads):
    model = {"hidden_size": 64, "intermediate_size": 160, "num_kv_heads": kv_heads}
    try:
        shape = resolve(MeshConfig(data, fsdp, tensor), devices, **model)
    except UserError as error:
        _, _, advice = str(error).rpartition("set ")
        if "mesh.data=" in advice:
            sizes = [int(part.partition("=")[2]) for part in advice.split()]
            assert math.prod(resolve(MeshConfig(*sizes), devices, **model)[:3]) == devices
        return
    assert shape.num_devices == devices and shape.row_shards == shape.data * shape.fsdp
    assert kv_heads % shape.tensor == 0 and 64 % shape.fsdp == 0
