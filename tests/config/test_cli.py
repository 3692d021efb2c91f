"""Command lines: what is refused, and how a command ends."""

import argparse
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bacr_jax.config import cli
from bacr_jax.errors import UserError


def parser(**settings):
    made = cli.Parser(prog="x", **settings)
    cli.add_saved_policy(made)
    return made


def test_an_error_of_the_command_line_is_one_of_the_user():
    with pytest.raises(UserError, match=r"^command line: unrecognized.*; run it with --help"):
        parser().parse_args(["--oops"])
    with pytest.raises(UserError, match="; use x$"):
        parser(advice="use x").parse_args(["--oops"])


@pytest.mark.parametrize("kind", [None, Path])
@pytest.mark.parametrize("words", [["--out", ""], ["--out="], ["--out", "a", ""]])
def test_an_empty_value_is_not_taken_for_one_left_out(kind, words):
    made = parser()
    made.add_argument("--out", type=kind)
    made.add_argument("more", nargs="*", type=kind)
    with pytest.raises(UserError, match=r"argument (--out|more): the value is empty; pass a value"):
        made.parse_intermixed_args(words)


@pytest.mark.parametrize("words", [["--out", "~/x"], ["--out=~/x"]])
def test_a_path_may_begin_with_the_home_folder(monkeypatch, tmp_path, words):
    monkeypatch.setenv("HOME", str(tmp_path))
    made = parser()
    made.add_argument("--out", type=Path)
    assert made.parse_args(words).out == tmp_path / "x"
    assert made.parse_args(["--run", "~/r"]).run == tmp_path / "r"
    # A folder of this name, which is nobody's home.
    assert made.parse_args(["--out", "./~/x"]).out == Path("~/x")
    with pytest.raises(UserError, match="argument --out: ~nobody-here/x: the home folder of this"):
        made.parse_args(["--out", "~nobody-here/x"])


@pytest.mark.parametrize(
    ("words", "step"),
    [
        ([], None),
        *((["--step", word], word) for word in ("best", "newest")),
        (["--step", "007"], 7),
    ],
)
def test_a_run_with_its_step_or_a_model_names_a_policy(words, step):
    arguments = parser().parse_args(["--run", "runs/a", *words])
    cli.check_saved_policy(arguments)
    assert (arguments.run, arguments.step) == (Path("runs/a"), step)
    cli.check_saved_policy(parser().parse_args(["--model", "hf"]))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "exactly one policy is required; pass either --run DIR or --model HFDIR"),
        (
            "--run a --model b",
            "exactly one policy is required; pass either --run DIR or --model HFDIR",
        ),
        ("--model b --step 3", "only a run has checkpoints"),
        ("--run a --download", "a run contains its weights; leave the option out"),
        ("--run a --step -3", "expected the number of a step, best or newest, but found '-3'"),
        ("--run a --step 3.5", "expected the number of a step, best or newest, but found '3.5'"),
    ],
)
def test_no_policy_and_two_are_refused(words, says):
    with pytest.raises(UserError, match=says):
        cli.check_saved_policy(parser().parse_args(words.split()))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (" 12 ", 12),
        ("000100", 100),
        ("0", 0),
        ("101", None),
        ("-1", None),
        ("1.0", None),
        ("", None),
        ("\u0663", None),
        ("9" * 5000, None),
    ],
)
def test_whole_numbers_are_plain_digits(text, number):
    assert cli.whole_number(text, most=100) == number


def ending(main, capsys):
    code = cli.entry_point(main)(["word"])
    return code, capsys.readouterr().err


def test_a_command_ends_with_its_own_code_or_0(capsys):
    assert ending(lambda argv: None, capsys) == (0, "")
    assert ending(lambda argv: 75, capsys) == (75, "")
    assert ending(lambda argv: cli.failure("no\nmemory"), capsys) == (1, "error: no\\nmemory\n")


def test_bad_input_is_one_line_and_code_2(capsys):
    def bad(argv):
        raise UserError(f"found {argv[0]}\n; use another")

    def missing(argv):
        Path("/no/such").read_text()

    assert ending(bad, capsys) == (2, "error: found word\\n; use another\n")
    code, line = ending(missing, capsys)
    assert code == 2 and line.startswith("error: /no/such: No such file or directory; use")
    for full in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        assert cli.refusal(OSError(full, "said")) == 2
        line = (
            "error: the output, or a file: said; free disk space or change the permissions, or "
            "use another path\n"
        )
        assert capsys.readouterr().err == line


def test_a_reader_who_has_seen_enough_is_no_mistake():
    """As with other commands under `| head`; few lines meet the closed pipe only at the end."""
    for lines in (3, 100_000):
        program = f"""
import sys
from bacr_io.command import entry_point
def main(argv):
    sys.stdin.read()
    for line in range({lines}):
        print(line)
sys.exit(entry_point(main)([]))"""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen([sys.executable, "-c", program], **pipes)
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b"" and process.wait() == 141
        process.stderr.close()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("raise UserError('bad')", 2),
        ("return failure('no memory')", 1),
        ("print_message('stopped'); return 75", 75),
        ("return 0", 0),
    ],
)
def test_messages_without_a_reader_change_no_exit_code(body, code):
    """As of `bacr train 2>&1 | head` after `head` has ended, without its progress display."""
    program = f"""
import sys
from bacr_io.command import entry_point, failure, print_message
from bacr_io.errors import UserError
def main(argv):
    sys.stdin.read()
    {body}
sys.exit(entry_point(main)([]))"""
    reader, output = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=output, stderr=output
    )
    os.close(output)
    os.close(reader)
    process.stdin.close()
    assert process.wait(60) == code


def test_a_command_whose_streams_are_closed_does_its_work(monkeypatch):
    """As of a service: Python has None for them."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)

    def main(argv):
        return len(sys.stdin.read()) + sys.stdout.write("2") + sys.stderr.write("3")

    assert cli.entry_point(main)([]) == 2


def test_a_mistake_of_ours_keeps_its_traceback(capsys):
    mistakes = (ValueError("x"), OSError("about no file"), argparse.ArgumentTypeError("x"))
    for mistake in (*mistakes, BrokenPipeError("of a worker")):

        def broken(argv, mistake=mistake):
            raise mistake

        with pytest.raises(type(mistake)):
            cli.entry_point(broken)(None)


def test_ctrl_c_waits_for_an_import_that_would_swallow_it_and_is_not_lost():
    done, before = [], signal.getsignal(signal.SIGINT)  # a shell's background jobs ignore it
    with pytest.raises(KeyboardInterrupt), cli.uninterrupted():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            done.append("imported")
        except KeyboardInterrupt:
            done.append("swallowed")
    assert done == ["imported"]
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(ImportError), cli.uninterrupted():
        raise ImportError


# What swallows it in truth is a weak reference's callback of the import system, at times.
SWALLOWED = """
import importlib.abc, os, signal, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "jax":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                print("swallowed", flush=True)
sys.meta_path.insert(0, Finder())
from bacr_jax.train import main
sys.exit(main(sys.argv[1:]))
"""


def test_ctrl_c_while_jax_is_imported_ends_train(tmp_path):
    arguments = ["--config", "quickstart", f"output.dir={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, "-c", SWALLOWED, *arguments], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")
    assert done.stdout == "" and not (tmp_path / "run").exists()
