"""Arithmetic against XLA's GPU compiler, on the real programs; needs the extra `plan`.

    python -m pytest -m slow tests/planning/test_against_xla.py

A minute or two each on two cores.
"""

import pytest

from bacr_plan import __main__ as plan
from bacr_plan import compiling, costs, memory
from bacr_plan.devices import DEVICES
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


def planned_by(*arguments):
    return plan.answer(plan.parse(["--config", str(SEVEN), *arguments]))


@pytest.mark.parametrize("case", CASES)
def test_memory_is_within_15_percent_of_what_xla_allocates(case):
    planned = planned_by(*CASES[case].split())
    assert planned.compilation.programs.keys() == {"train", "decode"}
    for name, phase in (("update", memory.update_phase), ("rollout", memory.rollout_phase)):
        computed = phase(planned.work, planned.layout).peak
        assert computed == pytest.approx(planned.phases[name].peak, rel=0.15), name


def test_what_is_resident_is_exact():
    planned = planned_by("--devices", "8")
    programs, sizes = planned.compilation.programs, (planned.work, planned.layout)
    # Beside them stand a batch and the tables of the vocabulary.
    state = memory.state_bytes(*sizes)
    assert state == pytest.approx(programs["train"].arguments, rel=0.002)
    held = costs.decode_copy_bytes(*sizes) + memory.trunk_cache_bytes(*sizes)
    assert held == pytest.approx(programs["decode"].arguments, rel=0.005)


@pytest.mark.parametrize("device", DEVICES)
def test_xla_takes_every_device_description(device):
    overrides = ["model.preset=qwen2.5-0.5b", "rollout.questions=8", "rollout.slots=8"]
    assert planned_by("--device", device, *overrides).phases["update"].temporaries > 0
