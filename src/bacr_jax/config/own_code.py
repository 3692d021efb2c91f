"""Files of one's own that a config names: loaded and called, and refused in one line."""

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bacr_jax.documents import nearest
from bacr_jax.errors import UserError


def module_of_file(key: str, name: str) -> Any:
    """The module of a Python file that the config's `key` names, imported as by `guarded`."""
    path = Path(name)
    if not path.is_file():
        write = nearest(path, "the path of a Python file")
        raise UserError(f"{key}: no file {name!r}; write {write}")
    module_name = f"bacr_{key.partition('.')[0]}_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    run = spec.loader.exec_module
    return guarded(key, name, "the import", lambda: run(module) or module)


def guarded(key: str, name: str, what: str, call: Callable[[], Any]) -> Any:
    """The result of somebody's code; UserError: where it stumbled, or tried to end the process.

    Of "the import" ImportError and SyntaxError pass: its caller knows what to write instead.
    """
    try:
        return call()
    except (Exception, SystemExit) as error:
        passing = (ImportError, SyntaxError) if what == "the import" else ()
        if isinstance(error, (UserError, *passing)):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if Path(frame.filename).stem == Path(name).stem]
        last = [*frames, *theirs][-1]
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UserError(
            f"{key}: {what} of {name!r} raised {type(error).__name__}: {reason} "
            f"({Path(last.filename).name}, line {last.lineno}); fix the file"
        ) from error
