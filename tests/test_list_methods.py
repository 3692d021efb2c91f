"""`bacr methods` lists every preset and marks published constants that are not verified."""

from bacr_jax.__main__ import main
from bacr_jax.config import io as config_io
from bacr_jax.runs.folder import write_config
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


def test_of_a_run_the_settings_are_listed_that_differ(tmp_path, capsys):
    config = config_io.load(["quickstart"], ["loss.clip_low=0.1"])
    write_config(tmp_path / "config.yaml", config)
    assert main(["methods", "--run", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        f"{tmp_path}: bacr-bounded with 1 change (BACR)",
        "differs from the preset in 1 setting",
        "  loss.clip_low=0.1 (bacr-bounded: 0.2)",
    ]
    assert lines[3] == "differs from the method's publication in 21 settings"
    assert "  cuts.count=1 (published: 4)" in lines and len(lines) == 25
    assert main(["methods", "--run", str(tmp_path / "none")]) == 2
    assert "contains no config.yaml" in capsys.readouterr().err
