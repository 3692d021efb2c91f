"""`bacr methods` lists every preset and marks published constants that are not verified."""

from bacr_jax.__main__ import main
from methods_world import PRESETS


def test_every_preset_has_a_line_and_unchecked_constants_are_marked(capsys):
    assert main(["methods"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(lines) == {path.stem for path in PRESETS.glob("*.yaml")}
    marked = {name for name, line in lines.items() if "not verified: " in line}
    # docs/methods.md names the same presets.
    assert marked == {"effort", "gfpo", "hapo", "s_grpo", "selfbudgeter", "thinkprune"}
    assert "length.keep_fraction" in lines["gfpo"]
    assert "selfbudgeter.correct_range" in lines["selfbudgeter"]
    assert lines["dapo"].split() == ["dapo", "DAPO"]
