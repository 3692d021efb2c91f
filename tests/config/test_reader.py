"""What somebody wrote becomes a record, or a line that says where it does not."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from bacr_jax.config.reader import read_dataclass
from bacr_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Arm:
    label: str
    steps: int
    rates: tuple[float, ...] = (1.0,)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    place: int = 0


def test_values_take_the_types_of_the_fields():
    found = read_dataclass(
        Arm,
        {"label": "a", "steps": 3, "rates": [1, 2.5], "config": {"seed": 1}},
        "arms[0]",
        given={"place": 4},
    )
    assert found == Arm("a", 3, (1.0, 2.5), {"seed": 1}, 4)
    assert [type(rate) for rate in found.rates] == [float, float]


@pytest.mark.parametrize(
    ("parsed", "message"),
    [
        (["a"], "arms[0]: found ['a']; use keys such as label, steps or rates"),
        ({"label": "a"}, "arms[0]: the required key steps is missing; use steps: ..."),
        ({"label": "a", "steps": "x"}, "use a whole number"),
        ({"label": "a", "steps": True}, "use a whole number"),
        ({"label": "a", "steps": 1, "config": 2}, "arms[0].config: found 2; use a mapping"),
        (
            {"label": "a", "step": 1},
            "arms[0].step: there is no such key; use one of label, steps, rates, config",
        ),
        # What the caller gives can't be written.
        ({"label": "a", "steps": 1, "place": 2}, "arms[0].place: there is no such key"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(parsed, message):
    with pytest.raises(UserError) as raised:
        read_dataclass(Arm, parsed, "arms[0]", given={"place": 0})
    assert message in str(raised.value)
