"""Records as a page, an object and an overlay."""

import yaml

from bacr_doctor.records import (
    Record,
    format_record,
    ok_or_broken,
    overlay_keys,
    to_json_object,
)
from bacr_jax.config import io as config_io

KERNEL = {"rollout.attention": "xla"}
BROKEN = Record("broken", "off by 3", "report it", KERNEL, name="decode cudnn")


def test_what_is_wrong_makes_a_record_broken_and_its_line_names_the_keys():
    assert ok_or_broken("fine", [], {"a": 1}) == Record("ok", "fine", values={"a": 1})
    assert ok_or_broken("seen", ["off"], {}).status == "broken"
    first, *rest = format_record(BROKEN).splitlines()
    assert first.split() == ["broken", "decode", "cudnn", "off", "by", "3"]
    assert [one.strip() for one in rest] == ["-> report it", "-> set rollout.attention=xla"]


def test_a_line_holds_no_control_characters_of_others():
    assert "\x1b" not in format_record(Record("ok", "\x1b[31mred", name="x"))


def test_the_overlay_is_a_config_of_what_is_not_well(tmp_path):
    warned = Record("warn", "", keys={"loss.importance_cap": 2.0})
    keys = overlay_keys([BROKEN, warned, Record("ok", "", keys={"model.remat": "full"})])
    assert keys == {**KERNEL, "loss.importance_cap": 2.0}
    file = tmp_path / "fit.yaml"
    file.write_text(yaml.safe_dump(keys))
    config = config_io.load(["quickstart", file])
    assert (config.rollout.attention, config.loss.importance_cap) == ("xla", 2.0)
    # Nothing to go round is a file that changes nothing.
    file.write_text(yaml.safe_dump({}))
    assert config_io.load(["quickstart", file]) == config_io.load(["quickstart"])


def test_the_object_holds_every_check():
    said = to_json_object(
        [BROKEN, ok_or_broken("seen", ["NaN"], {"off": float("nan")})], seconds=1.0
    )
    assert said["checks"][1]["values"] == {"off": "NaN"}
    assert said["overlay"] == KERNEL and said["checks"][0]["name"] == "decode cudnn"
