"""Imports and calls the user's Python files that a config refers to.

Exceptions in the user's code become a `UserError` with a one-line message.
"""

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bacr_jax.errors import UserError
from bacr_jax.files import nearest


def module_of_file(key: str, name: str) -> Any:
    """Imports a Python file of the user as a module.

    Args:
      key: the config key that contains the path, for error messages.
      name: path of the file.

    Raises:
      UserError: if the file is missing, or if its code raises (see `guarded`).
      ImportError, SyntaxError: from the user's code, unchanged.
    """
    path = Path(name)
    if not path.is_file():
        write = nearest(path, "the path of a Python file")
        raise UserError(f"{key}: there is no file {name!r}; use {write}")
    module_name = f"bacr_{key.partition('.')[0]}_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    execute = spec.loader.exec_module
    guarded(key, name, "the import", lambda: execute(module))
    return module


def guarded(key: str, name: str, what: str, call: Callable[[], Any]) -> Any:
    """Calls the user's code and returns its result.

    Args:
      key: the config key that contains the path of the file, for the error message.
      name: path of the file.
      what: description of the call for the error message, such as "the import". If it is exactly
        "the import", ImportError and SyntaxError are re-raised unchanged, because the caller
        reports them with a better message.
      call: function that runs the user's code.

    Raises:
      UserError: if the code raises an exception or calls `sys.exit`. The message contains the line
        number in the user's file.
    """
    try:
        return call()
    except (Exception, SystemExit) as error:
        passing = (ImportError, SyntaxError) if what == "the import" else ()
        if isinstance(error, (UserError, *passing)):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        frames_in_file = [frame for frame in frames if Path(frame.filename).stem == Path(name).stem]
        last = [*frames, *frames_in_file][-1]
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UserError(
            f"{key}: {what} of {name!r} raised {type(error).__name__}: {reason} "
            f"({Path(last.filename).name}, line {last.lineno}); fix the file"
        ) from error
