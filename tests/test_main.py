"""`bacr COMMAND ...` hands the rest of the line to a command."""

import signal
import subprocess
import sys

import pytest

from bacr_jax import __main__
from bacr_plan import __main__ as plan


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_alone_it_lists_every_command_with_its_meaning(capsys, arguments):
    assert __main__.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == list(__main__.COMMANDS)
    assert all(len(line.split()) > 3 for line in lines)


@pytest.mark.parametrize("code", [None, 0, 1, 130])
def test_the_rest_of_the_line_and_the_exit_code_are_the_commands(monkeypatch, code):
    given = []
    monkeypatch.setattr(plan, "main", lambda rest: given.append(rest) or code)
    assert __main__.main(["plan", "--devices", "8"]) == (code or 0)
    assert given == [["--devices", "8"]]


def test_an_unknown_command_is_one_line(capsys):
    assert __main__.main(["trian"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: 'trian' is not a bacr command; use train")
    assert captured.err.count("\n") == 1 and captured.out == ""


def test_an_interrupt_while_a_command_is_imported_waits_and_is_one_line(monkeypatch, capsys):
    def imported(name):
        signal.raise_signal(signal.SIGINT)
        return pytest.fail  # whose main does not exist, and isn't asked for

    monkeypatch.setattr(__main__.importlib, "import_module", imported)
    assert __main__.main(["plan"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


# Each costs a tenth of a second or more, and no help needs one.
HEAVY = ("jax", "numpy", "transformers", "vl_convert", "orbax")


def test_help_imports_nothing_heavy():
    code = f"""
import contextlib, sys
from bacr_jax.__main__ import COMMANDS, main
for name in COMMANDS:
    with contextlib.suppress(SystemExit):
        main([name, "--help"])
    for module in {HEAVY}:
        if module in sys.modules:
            sys.exit(f"{{name}} imports {{module}}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("usage: bacr ") == len(__main__.COMMANDS)
