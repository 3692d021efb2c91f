"""Arithmetic against XLA's GPU compiler, on the real programs; needs the extra `plan`.

    python -m pytest -m slow tests/planning/test_against_xla.py

A minute or two each on two cores.
"""

import pytest

from bacr_jax import plan
from bacr_jax.planning import compiling, costs, memory
from bacr_jax.planning.devices import DEVICES
from plan_world import SEVEN

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not compiling.can_compile_for_gpus(),
        reason='needs XLA\'s GPU compiler: pip install -e ".[plan]"',
    ),
]

CASES = {
    "7B, one box": "--devices 8",
    "7B, one micro-batch": "--devices 8 rollout.questions=2 train.micro_batch_rows=8",
    "7B, tensor 2, decode tensor 2": "--devices 8 mesh.tensor=2 mesh.decode_tensor=2",
    "7B by tokens": "--devices 8 train.micro_batch_rows=null train.micro_batch_tokens=90624",
    "7B, GRPO, short": "--devices 8 method=grpo budget.max=2048 eval.budgets=[2048]",
    "14B, one box": (
        "--devices 8 model.preset=qwen2.5-14b train.micro_batch_rows=8 rollout.slots=128"
    ),
    "1.5B, one box": "--devices 8 model.preset=qwen2.5-1.5b",
    "7B, four of 40 GB": "--devices 4 --device-memory 40",
}


@pytest.mark.parametrize("case", CASES)
def test_memory_is_within_15_percent_of_what_xla_allocates(case):
    question = plan.parse(["--config", str(SEVEN), *CASES[case].split()])
    found = plan.answer(question)
    assert found.compiled.keys() == {"train", "decode"}
    for name, phase in (("update", memory.update_phase), ("rollout", memory.rollout_phase)):
        computed = phase(found.work, found.layout).peak
        assert computed == pytest.approx(found.phases[name].peak, rel=0.15), name


def test_what_is_resident_is_exact():
    question = plan.parse(["--config", str(SEVEN), "--devices", "8"])
    found = plan.answer(question)
    train, decode = found.compiled["train"], found.compiled["decode"]
    # Beside them stand a batch and the tables of the vocabulary.
    assert memory.state_bytes(found.work, found.layout) == pytest.approx(train.arguments, rel=0.002)
    held = costs.decode_copy_bytes(found.work, found.layout) + memory.trunk_cache_bytes(
        found.work, found.layout
    )
    assert held == pytest.approx(decode.arguments, rel=0.005)


@pytest.mark.parametrize("device", DEVICES)
def test_xla_takes_every_device_description(device):
    overrides = ["model.preset=qwen2.5-0.5b", "rollout.questions=8", "rollout.slots=8"]
    question = plan.parse(["--config", str(SEVEN), "--device", device, *overrides])
    assert plan.answer(question).phases["update"].temporaries > 0
