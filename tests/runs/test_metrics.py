"""metrics.jsonl: legal JSON whatever the numbers, comparable whatever the machine."""

import errno
import json
import math
import sys
import threading
import time

import numpy as np
import pytest

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.errors import UserError
from bacr_jax.runs.folder import open_run
from bacr_jax.runs.metrics import MetricsWriter, as_json, without_timings

QUIET = config_io.override(Config(), ["output.tensorboard=false"])


@pytest.fixture
def folder(tmp_path):
    with open_run(tmp_path / "run", Config()) as folder:
        yield folder


@pytest.fixture
def shown(tmp_path):
    """What is shown beside the metrics."""
    from PIL import Image

    picture = tmp_path / "training.png"
    Image.new("RGB", (3, 2)).save(picture)
    return {
        "numbers": {"eval/ledger/greedy/8": 0.25},
        "pictures": {"training": picture},
        "traces": [{"step": 2, "text": "a | b\nc"}],
    }


def write(folder, *lines, config=QUIET):
    writer = MetricsWriter(folder, config)
    for step, metrics in lines:
        writer.write(step, metrics)
    writer.close()


class TestMetricsWriter:
    def test_a_line_holds_the_step_then_the_metrics_by_name_then_the_timings(self, folder):
        write(folder, (3, {"value/loss": 2.0, "time/learn": 1.5, "advantage/std": np.float32(0.5)}))
        text = folder.metrics.read_text()
        assert text == ('{"step": 3, "advantage/std": 0.5, "value/loss": 2.0, "time/learn": 1.5}\n')

    def test_what_is_no_number_is_written_as_text_that_reads_back(self, folder):
        write(folder, (1, {"a/nan": math.nan, "a/up": math.inf, "a/down": -np.inf, "a/n": 3}))
        refuse = lambda name: pytest.fail(f"{name} is no JSON")
        record = json.loads(folder.metrics.read_text(), parse_constant=refuse)
        assert record == {"step": 1, "a/down": "-inf", "a/n": 3.0, "a/nan": "nan", "a/up": "inf"}
        assert math.isnan(float(record["a/nan"])) and float(record["a/down"]) == -math.inf

    def test_numbers_keep_every_bit(self, folder):
        value = 0.1 + 0.2
        write(folder, (1, {"a/b": value, "a/c": np.float32(0.1)}))
        record = json.loads(folder.metrics.read_text())
        assert record["a/b"] == value and np.float32(record["a/c"]) == np.float32(0.1)

    def test_every_line_is_on_disk_before_the_next_step(self, folder):
        writer = MetricsWriter(folder, QUIET)
        for step in (1, 2):
            writer.write(step, {"a/b": 0.0})
            assert len(folder.metrics.read_text().splitlines()) == step
        writer.close()

    def test_tensorboard_gets_the_same_numbers(self, folder):
        from tensorboardX.proto.event_pb2 import Event

        write(folder, (1, {"a/b": 0.5}), (2, {"a/b": 0.25}), config=Config())
        (path,) = folder.tensorboard.iterdir()
        found = []
        for payload in records(path.read_bytes()):
            event = Event.FromString(payload)
            found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
        assert found[0][1].startswith("config")
        assert found[1:] == [(1, "a/b", 0.5), (2, "a/b", 0.25)]

    def test_tensorboard_gets_config_evaluations_pictures_and_traces(self, folder, shown):
        from tensorboardX.proto.event_pb2 import Event

        writer = MetricsWriter(folder, Config())
        writer.write(2, {"a/b": 0.5})
        for kind, found in shown.items():
            writer.show(2, kind, found)
        writer.close()
        (path,) = folder.tensorboard.iterdir()
        events = [Event.FromString(payload) for payload in records(path.read_bytes())]
        found = {v.tag: v for event in events for v in event.summary.value}
        text = lambda tag: found[f"{tag}/text_summary"].tensor.string_val[0].decode()
        assert "    method: bacr\n" in text("config")
        assert found["eval/ledger/greedy/8"].simple_value == 0.25
        picture = found["pictures/training"].image
        assert (picture.width, picture.height) == (3, 2)
        assert picture.encoded_image_string.startswith(b"\x89PNG")
        assert text("traces") == "| step | text |\n| --- | --- |\n| 2 | a \\| b c |\n"

    def test_what_can_not_be_shown_is_a_warning(self, folder, shown, capsys):
        writer = MetricsWriter(folder, Config())
        shown["pictures"]["training"].write_bytes(b"no picture")
        for kind, found in shown.items():
            writer.show(2, kind, found)
        writer.close()
        said = capsys.readouterr().err
        assert said.startswith("warning: TensorBoard: pictures can't be logged")
        assert said.count("\n") == 1

    def test_a_disk_that_is_full_for_a_moment_costs_tensorboard_a_warning(
        self, folder, monkeypatch, capsys
    ):
        from tensorboardX.event_file_writer import EventsWriter

        full, flush = [True], EventsWriter.flush

        def failing(events):
            # The package's own thread may flush before it is stopped.
            if full and threading.current_thread() is writing:
                full.clear()
                raise OSError(errno.ENOSPC, "No space left on device")
            flush(events)

        monkeypatch.setattr(EventsWriter, "flush", failing)
        # More numbers than the package's queue holds.
        numbers = {f"a/{i}": 0.5 for i in range(20)}
        lines = [(step, numbers) for step in (1, 2, 3)]
        writing = threading.Thread(
            target=lambda: write(folder, *lines, config=Config()), daemon=True
        )
        writing.start()
        writing.join(20)
        assert not writing.is_alive()
        assert len(folder.metrics.read_text().splitlines()) == 3
        warning = (
            "warning: TensorBoard: metrics of a step can't be logged ([Errno 28] No space "
            "left on device)"
        )
        assert capsys.readouterr().err == f"{warning}\n"
        (path,) = folder.tensorboard.iterdir()
        assert len(list(records(path.read_bytes()))) > 60

    def test_a_resumed_run_makes_tensorboard_forget_what_it_repeats(self, folder, shown):
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        def begun():
            (path,) = folder.tensorboard.iterdir()
            events = [Event.FromString(payload) for payload in records(path.read_bytes())]
            path.unlink()
            return [event.step for event in events if event.session_log.status == SessionLog.START]

        write(folder, (7, {"a/b": 0.5}), config=Config())
        assert begun() == [7]
        # The metrics of the step of an evaluation were written before it.
        writer = MetricsWriter(folder, Config())
        writer.show(7, "numbers", shown["numbers"])
        writer.close()
        assert begun() == [8]

    def test_without_tensorboard_there_is_no_folder_for_it(self, folder):
        write(folder, (1, {"a/b": 0.5}))
        assert not folder.tensorboard.exists()


def records(content):
    """Payloads of a TFRecord file: length (8 bytes), checksum (4), payload, checksum (4)."""
    at = 0
    while at < len(content):
        length = int.from_bytes(content[at : at + 8], "little")
        yield content[at + 12 : at + 12 + length]
        at += length + 16


class TestWandb:
    CONFIG = config_io.override(QUIET, ["output.wandb=true", "seed=3"])

    def offline_runs(self, folder):
        """Contents of the files that `wandb sync` would send; written by a process of its own."""
        paths, patience = sorted(folder.wandb.glob("offline-run-*/*.wandb")), time.monotonic() + 30
        while any(path.stat().st_size < 100 for path in paths) and time.monotonic() < patience:
            time.sleep(0.05)
        return [path.read_bytes() for path in paths]

    def test_every_line_and_the_config_are_logged_offline_too(self, folder, monkeypatch):
        pytest.importorskip("wandb", reason="the extra wandb is not installed")
        monkeypatch.setenv("WANDB_MODE", "offline")
        write(folder, (1, {"policy/loss": 0.5}), (2, {"policy/loss": 0.25}), config=self.CONFIG)
        (content,) = self.offline_runs(folder)
        for expected in (b"policy/loss", b"0.5", b"0.25", b"rollout.group_size", b"_step"):
            assert expected in content
        # The project is named after the folder.
        assert folder.path.name.encode() in content

    def test_evaluations_pictures_and_traces_are_logged_offline_too(
        self, folder, monkeypatch, shown
    ):
        pytest.importorskip("wandb", reason="the extra wandb is not installed")
        monkeypatch.setenv("WANDB_MODE", "offline")
        writer = MetricsWriter(folder, self.CONFIG)
        writer.write(2, {"a/b": 0.5})
        for kind, found in shown.items():
            writer.show(2, kind, found)
        writer.close()
        (content,) = self.offline_runs(folder)
        for expected in (b"eval/ledger/greedy/8", b"pictures/training", b"traces"):
            assert expected in content
        (files,) = folder.wandb.glob("offline-run-*/files/media")
        (table,) = files.rglob("traces*.json")
        assert json.loads(table.read_text())["data"] == [[2, "a | b\nc"]]
        assert [path.suffix for path in files.rglob("*training*.*")] == [".png"]

    def test_a_resumed_run_goes_on_under_its_id(self, folder, monkeypatch):
        pytest.importorskip("wandb", reason="the extra wandb is not installed")
        monkeypatch.setenv("WANDB_MODE", "offline")
        for step in (1, 2):
            write(folder, (step, {"a/b": 0.5}), config=self.CONFIG)
        identity = (folder.wandb / "id").read_text().strip().encode()
        runs = list(folder.wandb.glob(f"offline-run-*-{identity.decode()}"))
        assert runs and all(identity in content for content in self.offline_runs(folder))

    def test_a_missing_package_is_refused_before_a_line(self, folder, monkeypatch):
        monkeypatch.setitem(sys.modules, "wandb", None)
        with pytest.raises(UserError, match=r"pip install -e .\.\[wandb\].") as refused:
            MetricsWriter(folder, self.CONFIG)
        assert "\n" not in str(refused.value) and not folder.metrics.exists()

    def test_what_can_not_start_is_refused_in_a_line(self, folder, monkeypatch):
        pytest.importorskip("wandb", reason="the extra wandb is not installed")
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_PROJECT", "a/b")
        with pytest.raises(UserError, match="WANDB_PROJECT") as refused:
            MetricsWriter(folder, self.CONFIG)
        assert "\n" not in str(refused.value) and not (folder.wandb / "id").exists()

    def test_only_the_process_that_writes_starts_a_run(self, folder, monkeypatch):
        monkeypatch.setitem(sys.modules, "wandb", None)
        MetricsWriter(folder, self.CONFIG, writes=False).close()
        assert not folder.wandb.exists()


class TestComparison:
    def test_timings_do_not_count_and_everything_else_does(self, tmp_path):
        paths = []
        for name, metrics in {
            "one": {"time/learn": 1.0, "reward/mean": 0.1},
            "slower": {"time/learn": 9.0, "reward/mean": 0.1},
            "worse": {"time/learn": 1.0, "reward/mean": math.nextafter(0.1, 0)},
            "longer": {"time/learn": 1.0, "reward/mean": 0.1, "reward/max": 1.0},
        }.items():
            with open_run(tmp_path / name, Config()) as folder:
                write(folder, (1, metrics))
                paths.append(folder.metrics)
        one, slower, worse, longer = map(without_timings, paths)
        assert one == slower == [{"step": 1, "reward/mean": 0.1}]
        assert worse != one != longer

    def test_two_runs_that_failed_alike_are_the_same(self, tmp_path):
        for name in ("one", "other"):
            with open_run(tmp_path / name, Config()) as folder:
                write(folder, (1, {"policy/loss": math.nan}))
        one, other = (without_timings(tmp_path / n / "metrics.jsonl") for n in ("one", "other"))
        assert one == other

    @pytest.mark.parametrize(("value", "expected"), [(1.5, 1.5), (math.nan, "nan"), (7, 7)])
    def test_json_form(self, value, expected):
        assert as_json(value) == expected
