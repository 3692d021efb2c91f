"""Facts about GPUs."""

import pytest

from bacr_jax.errors import UserError
from bacr_plan import devices


def test_shared_memory_and_caches_are_those_of_the_programming_guide():
    ampere = devices.target_config(devices.DEVICES["a100-80"])
    assert "shared_memory_per_core: 167936" in ampere
    assert "shared_memory_per_block_optin: 166912" in ampere
    hopper = devices.target_config(devices.DEVICES["h100"])
    assert "shared_memory_per_core: 233472" in hopper
    assert "cuda_compute_capability { major: 9 minor: 0 }" in hopper


@pytest.mark.parametrize("name", devices.DEVICES)
def test_a_target_is_a_balanced_text_proto_of_its_own_device(name):
    text = devices.target_config(devices.DEVICES[name])
    assert text.count("{") == text.count("}")
    assert f'device_description_str: "{devices.DEVICES[name].name}"' in text


@pytest.mark.parametrize(
    ("memory", "name"),
    [(16, "a10"), (24, "rtx-4090"), (30, "rtx-5090"), (40, "a100-40"), (48, "a100-80")]
    + [(80, "a100-80"), (141, "h200"), (150, "b200")],
)
def test_the_smallest_device_with_enough_memory(memory, name):
    assert devices.smallest_with(memory) == name


def test_more_memory_than_any_device_has_is_taken_for_the_largest():
    assert devices.smallest_with(1000.0) == "b200"


def test_only_some_capabilities_hold_2048_threads():
    for name, device in devices.DEVICES.items():
        threads = 2048 if device.capability in {(8, 0), (9, 0), (10, 0)} else 1536
        assert f"threads_per_core_limit: {threads}\n" in devices.target_config(device), name


def test_unknown_devices_are_refused():
    with pytest.raises(UserError, match="use one of rtx-4090, a10, l4, rtx-5090, a100-40"):
        devices.find("v100")
