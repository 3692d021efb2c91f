"""`bacr import`: a line of what was made, or one line of why not."""

import importlib.util
import json
import os
import resource
import subprocess
import sys

import pytest

import gguf_world
from bacr_gguf.__main__ import package_file
from bacr_jax.__main__ import main

FILES = {"README.md", "chat_template.jinja", "config.json", "generation_config.json"}
FILES |= {"model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def test_it_says_what_was_written_and_how_to_use_it(tmp_path, capsys):
    path, out = gguf_world.write(tmp_path / "m.gguf"), tmp_path / "out"
    assert main(["import", "--gguf", str(path), "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        f"{out}: LlamaForCausalLM in float32, dequantised from tensors of F32 (20)",
        f'ask it: bacr generate --model {out} --budget 128 "..."',
    ]
    assert said.err.startswith("dequantised 0 of 20 tensors\n")
    assert {one.name for one in out.iterdir()} == FILES


def test_its_paths_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    gguf_world.write(tmp_path / "m.gguf")
    assert main(["import", "--gguf=~/m.gguf", "--out", "~/out"]) == 0
    assert {one.name for one in (tmp_path / "out").iterdir()} == FILES


def test_a_package_can_hold_the_file(tmp_path, monkeypatch):
    info = tmp_path / "held-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: held\nVersion: 1\n")
    (info / "RECORD").write_text("held/m.gguf,,\nheld/n.txt,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert package_file("held") == tmp_path / "held/m.gguf"


@pytest.mark.parametrize("name", ["not-installed-here", "numpy"])
def test_another_package_is_refused_in_one_line(tmp_path, capsys, name):
    assert main(["import", "--from-package", name, "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --from-package {name}: found 0 GGUF files in the installed")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--out", "{}/o"], "one of the arguments --gguf --from-package is required"),
        (["--gguf", "{}/m.gguf"], "required: --out"),
        (["--gguf", "{}/m.gguf", "--out", "{}/o", "--dtype", "float16"], "invalid choice"),
        (["--gguf", "{}/none", "--out", "{}/o"], "{}/none: No such file or directory; use"),
        (["--gguf", "{}", "--out", "{}/o"], "{}: is not a regular file"),
        (
            ["--gguf", "{}/text", "--out", "{}/o"],
            "{}/text: this is not a GGUF file, because it begins with b'This'",
        ),
        (["--gguf", "{}/m.gguf", "--out", "{}"], "{} already exists"),
        (["--gguf", "{}/m.gguf", "--out", "/proc/o"], "/proc/o: the folder can't be written"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, words, line):
    gguf_world.write(tmp_path / "m.gguf")
    (tmp_path / "text").write_text("This is no model, but it is long enough for one.")
    assert main(["import", *(word.format(tmp_path) for word in words)]) == 2
    said = [one for one in capsys.readouterr().err.splitlines() if "dequantised" not in one]
    assert len(said) == 1 and line.format(tmp_path) in said[0]


def test_without_the_package_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["import", "--gguf", "m.gguf", "--out", str(tmp_path / "out")]) == 2
    assert 'pip install -e ".[gguf]"' in capsys.readouterr().err


def test_it_needs_no_jax(tmp_path):
    path = gguf_world.write(tmp_path / "m.gguf")
    code = f"""
import sys
from bacr_gguf.__main__ import main
assert main(["--gguf", {str(path)!r}, "--out", {str(tmp_path / "out")!r}]) == 0
assert not {{"jax", "torch", "transformers"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def outcome(content, folder, capsys):
    """`written` or the line that refuses a file; anything else is an error."""
    path, out = folder / "m.gguf", folder / "out"
    path.write_bytes(content)
    code = main(["import", "--gguf", str(path), "--out", str(out)])
    said = [one for one in capsys.readouterr().err.splitlines() if "dequantised" not in one]
    if code == 0:
        assert said == [] and {one.name for one in out.iterdir()} >= FILES - {"chat_template.jinja"}
        return "written"
    assert code == 2 and len(said) == 1 and said[0].startswith(f"error: {path}: "), said
    assert [one.name for one in folder.iterdir()] == ["m.gguf"]
    return said[0]


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_file_is_read_or_refused_in_one_line(tmp_path, capsys, seed):
    path = gguf_world.write(tmp_path / "whole.gguf", quantised="Q4_0")
    (tmp_path / "run").mkdir()
    outcome(gguf_world.damaged(path.read_bytes(), seed), tmp_path / "run", capsys)


PROBE = """
import json, pathlib, signal, sys, tempfile
sys.path[:0] = {path!r}
import gguf_world
from test_main import outcome

class Captured:
    def readouterr(self):
        import io
        text, sys.stderr = sys.stderr.getvalue(), io.StringIO()
        return type("Said", (), dict(err=text))

import io
sys.stderr, shown = io.StringIO(), sys.stderr
found = []
with tempfile.TemporaryDirectory() as folder:
    whole = gguf_world.write(pathlib.Path(folder) / "whole", quantised="Q4_0").read_bytes()
    for seed in range(200):
        place = pathlib.Path(folder) / str(seed)
        place.mkdir()
        # Twenty seconds of no end end the process.
        signal.alarm(20)
        found.append(outcome(gguf_world.damaged(whole, seed), place, Captured()))
        signal.alarm(0)
# Not by getrusage, which counts what the process that started this one held.
(line,) = (l for l in open("/proc/self/status") if l.startswith("VmHWM:"))
most = int(line.split()[1]) * 1024
print(json.dumps([found, most]))
"""


@pytest.mark.slow  # some ten seconds
def test_of_two_hundred_damaged_files_none_crashes_hangs_or_fills_the_memory():
    """In one process, which a hang or a crash would end."""
    here = os.path.dirname(__file__)
    paths = [here, os.path.join(here, "../support"), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(path=paths)],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30)),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found, most = json.loads(done.stdout.splitlines()[-1])
    print(f"{found.count('written')} written, {len(found)} in all, {most / 1e6:.0f} MB at most")
    assert len(found) == 200 and 10 < found.count("written") < 190
    assert most < 2 << 30
