"""A run folder is made, resumed or refused, and never harmed."""

import dataclasses
import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.errors import UserError
from bacr_jax.files import append_line, read_lines, write_atomically, write_json
from bacr_jax.runs import folder as run_folder
from bacr_jax.runs.folder import (
    RunFolder,
    RunPaths,
    check_run_folder,
    free_folder,
    is_begun,
    lock_if_free,
    lock_when_free,
    open_run,
    read_config_file,
    write_config,
)
from bacr_jax.training.warmup_folder import locked


def contents(folder):
    """Every file below a folder with its bytes."""
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def reseeded(seed):
    return dataclasses.replace(Config(), seed=seed)


def refusal(path, config=None):
    with pytest.raises(UserError) as excinfo:
        open_run(path, config or Config())
    line = str(excinfo.value)
    assert line.isprintable()
    return line


class TestOpening:
    def test_a_new_folder_holds_the_resolved_config(self, tmp_path):
        path = tmp_path / "a" / "run"
        with open_run(path, reseeded(3)) as folder:
            assert config_io.load([folder.config]) == reseeded(3)
            assert folder.rollouts.is_dir()
        assert {p.name for p in path.iterdir()} == {"config.yaml", ".lock", "rollouts"}

    def test_an_empty_folder_is_used(self, tmp_path):
        with open_run(tmp_path, Config()) as folder:
            assert folder.path == tmp_path

    def test_the_run_of_the_same_config_is_opened_again_and_kept(self, tmp_path):
        with open_run(tmp_path, Config()) as folder:
            append_line(folder.metrics, {"step": 1})
        before = contents(tmp_path)
        with open_run(tmp_path, Config()) as folder:
            assert read_lines(folder.metrics) == [{"step": 1}]
        before.pop(Path(".lock"))
        after = contents(tmp_path)
        after.pop(Path(".lock"))
        assert after == before

    def test_a_renamed_folder_holds_the_same_run(self, tmp_path):
        config = lambda name: dataclasses.replace(
            Config(), output=dataclasses.replace(Config().output, dir=str(tmp_path / name))
        )
        open_run(tmp_path / "old", config("old")).__exit__(None, None, None)
        (tmp_path / "old").rename(tmp_path / "new")
        with open_run(tmp_path / "new", config("new")) as folder:
            assert folder.path.name == "new"

    @pytest.mark.parametrize("debris", [".lock", "config.yaml.0123abcd.tmp"])
    def test_what_a_kill_in_the_first_moment_leaves_is_no_obstacle(self, tmp_path, debris):
        (tmp_path / debris).write_text("seed: ")
        with open_run(tmp_path, Config()) as folder:
            assert config_io.load([folder.config]) == Config()
        assert not (tmp_path / "config.yaml.0123abcd.tmp").exists()


class TestRefusing:
    def test_another_config_is_refused_with_the_keys_that_differ(self, tmp_path):
        open_run(tmp_path, Config()).__exit__(None, None, None)
        before = contents(tmp_path)
        other = dataclasses.replace(
            reseeded(7), budget=dataclasses.replace(Config().budget, max=2048)
        )
        line = refusal(tmp_path, other)
        assert "differs in seed (0 in the folder, 7 now), budget.max (4096 in the folder, " in line
        assert line.startswith(f"output.dir={tmp_path} contains ")
        assert contents(tmp_path) == before

    def test_many_differing_keys_are_counted_not_listed(self, tmp_path):
        open_run(tmp_path, Config()).__exit__(None, None, None)
        curriculum = dataclasses.replace(Config().curriculum, alpha=0.1, beta=0.1, sigma=1.0)
        rollout = dataclasses.replace(
            Config().rollout, questions=2, group_size=2, temperature=0.5, chunk=3, slots=3
        )
        other = dataclasses.replace(Config(), curriculum=curriculum, rollout=rollout)
        assert f" and 2 more; use output.dir={tmp_path}-2 for" in refusal(tmp_path, other)
        assert "or --allow-change KEY for each key" in refusal(tmp_path, other)

    def test_a_folder_of_something_else_is_refused_and_not_touched(self, tmp_path):
        (tmp_path / "thesis.tex").write_text("precious")
        line = refusal(tmp_path)
        assert "contains no run, but other files such as 'thesis.tex'; use output.dir=" in line
        assert line.endswith(f"output.dir={tmp_path}-2")
        assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]

    def test_what_a_killed_doctor_leaves_is_no_other_file(self, tmp_path):
        left = tmp_path / ".bacr-doctor-ab12cd34" / "checkpoints"
        left.mkdir(parents=True)
        with open_run(tmp_path, Config()) as folder:
            assert folder.is_new and left.is_dir()
        (tmp_path / ".bacr-doctor-ab12cd34").rename(tmp_path / "bacr-doctor")
        (tmp_path / "config.yaml").unlink()
        assert "contains no run, but other files such as 'bacr-doctor'" in refusal(tmp_path)

    @pytest.mark.parametrize("content", [b"\xff\xfe", b"seed: [", b"unknown_key: 1", b"seed: x"])
    def test_a_spoilt_config_is_refused_and_not_touched(self, tmp_path, content):
        (tmp_path / "config.yaml").write_bytes(content)
        line = refusal(tmp_path)
        assert "contains a run whose config can't be read" in line
        assert contents(tmp_path) == {Path("config.yaml"): content}

    def test_a_file_is_no_folder(self, tmp_path):
        path = tmp_path / "file"
        path.write_text("x")
        assert "is a file; use the name of a folder" in refusal(path)
        assert "can't be used (Not a directory)" in refusal(path / "below")

    def test_a_place_where_nothing_can_be_made_is_refused(self):
        assert "can't be used (" in refusal(Path("/proc/bacr/run"))

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_a_folder_without_write_permission_is_refused(self, tmp_path):
        tmp_path.chmod(0o500)
        assert "can't be used (Permission denied)" in refusal(tmp_path / "run")

    @pytest.mark.parametrize("name", ["x" * 300, "line\nbreak" * 30])
    def test_a_name_that_can_not_be_one_is_refused(self, tmp_path, name):
        refusal(tmp_path / name)
        assert list(tmp_path.iterdir()) == []

    def test_a_full_disk_is_one_line(self, tmp_path, monkeypatch):
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        line = refusal(tmp_path / "run")
        assert "config.yaml: the file can't be written (No space left on device)" in line
        # The lock is free again and the folder counts as new.
        monkeypatch.undo()
        open_run(tmp_path / "run", Config()).__exit__(None, None, None)


HOLD = """
import sys
from pathlib import Path
from bacr_jax.config import Config
from bacr_jax.runs.folder import open_run
folder = open_run(Path(sys.argv[1]), Config())
print("held", flush=True)
sys.stdin.read()
"""


class TestFreeFolder:
    def test_it_is_the_first_number_that_no_folder_has(self, tmp_path):
        run = tmp_path / "quickstart"
        assert free_folder(f"output.dir={run}", run) == f"output.dir={run}-2"
        (tmp_path / "quickstart-2").mkdir()
        assert free_folder(f"output.dir={run}", run) == f"output.dir={run}-3"
        second = tmp_path / "quickstart-2"
        assert free_folder(f"--out {second}", second) == f"--out {run}-3"

    def test_a_number_that_is_part_of_the_name_stays(self, tmp_path):
        for name in ("gpt-2024-11", "-1", "a-1234"):
            path = tmp_path / name
            following = "gpt-2024-12" if name.startswith("gpt") else f"{name}-2"
            assert free_folder(f"output.dir={path}", path) == f"output.dir={tmp_path / following}"


class TestResuming:
    def test_how_to_deal_with_a_run_that_is_there(self, tmp_path):
        with pytest.raises(UserError, match="contains no run to continue"):
            open_run(tmp_path / "run", Config(), resume="required")
        assert not (tmp_path / "run").exists()
        open_run(tmp_path / "run", Config(), resume="never").__exit__(None, None, None)
        with pytest.raises(UserError, match=r"a run; use output\.dir=.*run-2, or"):
            open_run(tmp_path / "run", Config(), resume="never")
        open_run(tmp_path / "run", Config(), resume="required").__exit__(None, None, None)

    def test_a_named_key_may_change_and_the_folder_remembers_what_it_was(self, tmp_path):
        open_run(tmp_path, Config()).__exit__(None, None, None)
        longer = dataclasses.replace(
            reseeded(1), train=dataclasses.replace(Config().train, steps=7)
        )
        with pytest.raises(
            UserError, match=r"differs in seed \(0 in the folder, 1 now\); use"
        ) as refused:
            open_run(tmp_path, longer, allowed=["train.steps"])
        assert str(refused.value).endswith(
            f"use output.dir={tmp_path}-2 for a new run, the same config to resume, or "
            "--allow-change seed to continue with the new value"
        )
        assert config_io.load([tmp_path / "config.yaml"]) == Config()
        (tmp_path / "changes.jsonl").write_text('{"before": {"se')  # as a full disk leaves it
        for _ in range(2):
            with open_run(tmp_path, longer, allowed=["train.steps", "seed"]) as folder:
                folder.keep_config()
        assert config_io.load([tmp_path / "config.yaml"]) == longer
        assert read_lines(tmp_path / "changes.jsonl") == [
            {"before": {"seed": 0, "train.steps": None}, "now": {"seed": 1, "train.steps": 7}}
        ]

    def test_how_often_it_saves_changes_no_run(self, tmp_path):
        open_run(tmp_path, Config()).__exit__(None, None, None)
        often = dataclasses.replace(
            Config(), checkpoint=dataclasses.replace(Config().checkpoint, every=1, keep=9)
        )
        open_run(tmp_path, often).__exit__(None, None, None)

    def test_keys_of_speed_change_no_run(self, tmp_path):
        assert set(run_folder._MAY_DIFFER) >= config_io.SPEED_KEYS
        changes = {
            "output.compile_cache": "none",
            "rollout.refill": 0.75,
            "rollout.windows": 2,
            "eval.slots": 16,
        }
        assert set(changes) == config_io.SPEED_KEYS
        page = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
        listed = page.split("lets one key differ")[1].split("may always change")[0]
        open_run(tmp_path, Config()).__exit__(None, None, None)
        for key, value in changes.items():
            changed = config_io.override(Config(), {key: value})
            assert changed != Config() and f"`{key}`" in listed
            with open_run(tmp_path, changed, resume="required") as folder:
                assert folder.changed() == []

    def test_the_last_evaluation_is_forgotten(self, tmp_path):
        with open_run(tmp_path, Config()) as folder:
            for when in ("before", "during", "after"):
                append_line(folder.evaluations, {"step": 4, "when": when})
            folder.forget_last_evaluation()
            assert [r["when"] for r in read_lines(folder.evaluations)] == ["before", "during"]


class TestLock:
    def test_a_second_process_is_refused_until_the_first_is_killed(self, tmp_path):
        path = tmp_path / "run"
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert holder.stdout.readline() == "held\n"
            line = refusal(path)
            assert f"is in use by process {holder.pid} on " in line
        finally:
            holder.kill()
            holder.wait()
            holder.stdin.close()
            holder.stdout.close()
        with open_run(path, Config()) as folder:
            assert folder.config.exists()

    def test_leaving_the_folder_frees_it(self, tmp_path):
        with open_run(tmp_path, Config()):
            assert "is in use by process" in refusal(tmp_path)
        with open_run(tmp_path, Config()):
            pass

    def test_a_run_made_between_the_look_and_the_lock_is_not_taken_over(
        self, tmp_path, monkeypatch
    ):
        take, path = fcntl.flock, tmp_path / "run"

        def rival(*arguments):
            (path / "config.yaml").write_text(config_io.to_yaml(reseeded(9)))
            return take(*arguments)

        monkeypatch.setattr(fcntl, "flock", rival)
        assert "differs in seed (9 in the folder, 0 now)" in refusal(path)

    @pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL])
    def test_a_file_system_without_locks_is_one_line(self, tmp_path, monkeypatch, number):
        def refuse(*_):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", refuse)
        lines = [refusal(tmp_path / "run")]
        for lock in (lock_when_free, lock_if_free):
            with pytest.raises(UserError) as refused:
                lock(tmp_path / "run" / "a.lock")
            lines.append(str(refused.value))
        with pytest.raises(UserError) as refused, locked(tmp_path / "run", None):
            pass
        lines.append(str(refused.value))
        for line in lines:
            assert line == (
                f"{tmp_path / 'run'}: this file system does not support file locks "
                f"({os.strerror(number)}); use another folder, or mount it with flock"
            )

    def test_another_fault_of_a_lock_keeps_its_cause(self, tmp_path, monkeypatch):
        def fail(*_):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(fcntl, "flock", fail)
        assert "can't be used (Input/output error)" in refusal(tmp_path / "run")
        with pytest.raises(OSError, match="Input/output error"):
            lock_when_free(tmp_path / "a.lock")


class TestTruncation:
    @pytest.fixture
    def folder(self, tmp_path):
        with open_run(tmp_path / "run", Config()) as folder:
            for step in range(1, 6):
                append_line(folder.metrics, {"step": step, "reward/mean": step / 7})
                append_line(folder.rollouts / f"{step:06d}.jsonl", {"step": step, "text": "é"})
            append_line(folder.evaluations, {"step": 0, "when": "before"})
            append_line(folder.evaluations, {"step": 4, "when": "during"})
            yield folder

    def test_drops_what_is_later_than_the_checkpoint_and_keeps_the_rest_to_the_byte(self, folder):
        kept = b"".join(folder.metrics.read_bytes().splitlines(keepends=True)[:3])
        folder.truncate_after(3)
        assert folder.metrics.read_bytes() == kept
        assert read_lines(folder.evaluations) == [{"step": 0, "when": "before"}]
        assert sorted(p.stem for p in folder.rollouts.iterdir()) == ["000001", "000002", "000003"]

    def test_drops_a_line_that_a_kill_tore(self, folder):
        for path in (folder.metrics, folder.rollouts / "000005.jsonl"):
            with path.open("ab") as file:
                file.write(b'{"step": 5, "reward/me')
        folder.truncate_after(5)
        assert [r["step"] for r in read_lines(folder.metrics)] == [1, 2, 3, 4, 5]
        assert folder.metrics.read_bytes().endswith(b"\n")
        assert read_lines(folder.rollouts / "000005.jsonl") == [{"step": 5, "text": "é"}]

    def test_before_the_first_step_nothing_of_the_training_stays(self, folder):
        folder.truncate_after(-1)
        assert folder.metrics.read_bytes() == folder.evaluations.read_bytes() == b""
        assert list(folder.rollouts.iterdir()) == []

    def test_files_that_need_no_change_are_not_written(self, folder):
        os.utime(folder.metrics, (1, 1))
        folder.truncate_after(5)
        assert folder.metrics.stat().st_mtime == 1

    def test_a_new_folder_has_nothing_to_drop(self, tmp_path):
        with open_run(tmp_path / "new", Config()) as folder:
            folder.truncate_after(10)
            assert not folder.metrics.exists()

    @given(cut=st.integers(0, 400), step=st.integers(-1, 9))
    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_a_file_torn_anywhere_keeps_its_whole_lines(self, tmp_path, cut, step):
        lines = [json.dumps({"step": s, "note": "ü" * s}).encode() + b"\n" for s in range(8)]
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(b"".join(lines)[:cut])
        whole = [line for i, line in enumerate(lines) if len(b"".join(lines[: i + 1])) <= cut]
        RunFolder(tmp_path, None).truncate_after(step)
        assert path.read_bytes() == b"".join(whole[: step + 1])


class TestSetAside:
    def test_exports_of_later_steps_are_moved_to_a_name_that_is_free(self, tmp_path):
        folder = RunFolder(tmp_path, None)
        assert folder.exports_after(0) == folder.set_aside([]) == []
        for expected in ("before-resume", "before-resume-2", "before-resume-3"):
            for name in ("9", "20", "100", ".100.ab_12345", "hf-100"):
                (folder.exports / name).mkdir(parents=True, exist_ok=True)
                (folder.exports / name / "model").write_text(f"{expected} {name}")
            later = folder.exports_after(9)
            assert [path.name for path in later] == ["100", "20"]
            assert folder.set_aside(later) == [folder.exports / expected]
            for name in ("20", "100"):
                text = (folder.exports / expected / name / "model").read_text()
                assert text == f"{expected} {name}"
            assert folder.exports_after(9) == []
        assert (folder.exports / "9").is_dir() and (folder.exports / "hf-100").is_dir()

    def test_a_folder_that_can_not_be_moved_is_one_line(self, tmp_path):
        folder = RunFolder(tmp_path, None)
        folder.exports.mkdir()
        with pytest.raises(UserError, match=r"output\.dir=.* can't be used \(No such file"):
            folder.set_aside([folder.exports / "4"])


class TestFiles:
    def test_a_spoilt_line_in_the_middle_is_reported_not_dropped(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        for spoilt in (b"{oops\n", b"\xff\n", b"7\n"):
            path.write_bytes(b'{"step": 1}\n' + spoilt + b'{"step": 3}\n')
            with pytest.raises(UserError, match=r"metrics\.jsonl, line 2 is not a JSON object"):
                read_lines(path)

    def test_a_spoilt_last_line_counts_as_torn(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(b'{"step": 1}\n' + b"\0" * 20 + b"\n")
        assert read_lines(path) == [{"step": 1}]

    def test_a_missing_file_has_no_lines(self, tmp_path):
        assert read_lines(tmp_path / "none.jsonl") == []

    def test_a_failed_write_leaves_the_old_file(self, tmp_path, monkeypatch):
        path = tmp_path / "summary.json"
        write_json(path, {"a": 1})

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(
            UserError, match=r"summary\.json: the file can't be written \(No space left"
        ):
            write_json(path, {"a": 2})
        assert json.loads(path.read_text()) == {"a": 1}

    def test_appending_where_nothing_can_be_written_is_one_line(self, tmp_path):
        with pytest.raises(UserError, match=r"can't be written \(No such file or directory\)"):
            append_line(tmp_path / "gone" / "metrics.jsonl", {"step": 1})

    def test_appended_lines_are_there_at_once(self, tmp_path):
        path = tmp_path / "x.jsonl"
        append_line(path, {"step": 1, "text": "ä\n"})
        append_line(path, {"step": 2})
        assert path.read_text().count("\n") == 2
        assert read_lines(path) == [{"step": 1, "text": "ä\n"}, {"step": 2}]

    @pytest.mark.parametrize("write", [write_json, append_line])
    def test_numbers_that_json_does_not_have_are_never_written(self, tmp_path, write):
        with pytest.raises(ValueError, match="Out of range float"):
            write(tmp_path / "x.json", {"a": float("nan")})

    def test_the_new_text_replaces_the_old(self, tmp_path):
        write_atomically(tmp_path / "x", "a much longer text")
        write_atomically(tmp_path / "x", "short")
        assert (tmp_path / "x").read_text() == "short"
        assert [p.name for p in tmp_path.iterdir()] == ["x"]


class TestConfig:
    def test_a_run_reads_what_it_wrote(self, tmp_path):
        config = Config(seed=7)
        write_config(tmp_path / "config.yaml", config)
        assert read_config_file(tmp_path / "config.yaml") == config

    def test_the_file_of_a_run_with_a_key_that_no_longer_exists_is_refused(self, tmp_path):
        path = tmp_path / "config.yaml"
        write_config(path, Config())
        path.write_text(path.read_text().replace("\n  budget_input:", "\n  budget_inputs:"))
        with pytest.raises(
            UserError,
            match=r"config\.yaml, line \d+: conditioning\.budget_inputs: there is no such key; use "
            r"conditioning\.budget_input$",
        ):
            read_config_file(path)

    def test_one_that_was_cut_or_changed_is_refused_though_it_is_good_yaml(self, tmp_path):
        path = tmp_path / "config.yaml"
        write_config(path, Config(seed=7))
        lines = path.read_text().splitlines(keepends=True)
        for spoilt in ("".join(lines[:-3]), "".join(lines).replace("seed: 7", "seed: 8")):
            path.write_text(spoilt)
            with pytest.raises(
                UserError,
                match=r"config\.yaml was changed after the run wrote it; restore its",
            ):
                read_config_file(path)
        for empty in ("", "\n"):
            path.write_text(empty)
            with pytest.raises(
                UserError, match=r"config\.yaml, the config that the run wrote, is empty"
            ):
                read_config_file(path)
        # Written by hand: there is nothing to hold it against.
        path.write_text("seed: 3\n")
        assert read_config_file(path).seed == 3


def test_the_page_names_every_key_that_may_always_change():
    page = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
    named = page.split("Another config is refused")[1].split("may always")[0]
    in_words = ("output.dir", "mesh.", "checkpoint.")
    keys = [key for key in run_folder._MAY_DIFFER if not key.startswith(in_words)]
    assert [key for key in keys if f"`{key}`" not in named] == []


@pytest.mark.parametrize("names", [(), ("restarts.json",), ("restarts.json", ".lock")])
def test_processes_that_check_a_new_folder_at_the_same_time_do_not_disturb_each_other(
    tmp_path, monkeypatch, names
):
    """Each creates a temporary folder in it, which another process may see."""
    for name in names:
        (tmp_path / name).touch()
    answers = []
    remove = Path.rmdir

    def other_process_looks(path):
        assert path.parent == tmp_path
        answers.append(is_begun(tmp_path, "output.dir=x", "config.yaml", "run"))
        remove(path)

    monkeypatch.setattr(Path, "rmdir", other_process_looks)
    check_run_folder(tmp_path, config_io.flatten(Config()))
    assert answers == [False]


def test_a_lock_is_had_when_it_is_free_and_not_before(tmp_path, capsys):
    path, had = tmp_path / "made" / "a.lock", []
    with lock_when_free(path):
        other = threading.Thread(target=lambda: had.append(lock_when_free(path)))
        other.start()
        other.join(0.2)
        assert other.is_alive() and had == []
    other.join(20)
    had[0].close()
    assert capsys.readouterr().err == f"waiting for the process that holds {path}\n"
    lock_when_free(path).close()
    assert capsys.readouterr().err == ""


def test_evaluations_of_a_step_are_not_those_of_a_step_with_more_digits(tmp_path):
    paths = RunPaths(tmp_path)
    for step, name in ((100_000, ""), (100_000, "greedy"), (1_000_000, ""), (1_000_000, "greedy")):
        paths.evaluation_of(step, name).mkdir(parents=True)
    assert [path.name for path in paths.evaluations_of(100_000)] == [
        "step-100000",
        "step-100000-greedy",
    ]
