"""Budget-adaptive curriculum reasoning for language models, in JAX.

For notebooks and scripts: `bacr_jax.load(folder)` gives a policy to ask, `bacr_jax.train(config)`
trains one. Importing the package imports neither JAX nor anything of its own; what is used is
imported then.
"""

import importlib
import os
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bacr_jax.facade import Policy, load

    __version__: str

__all__ = ["Policy", "__version__", "load", "train"]

# transformers is used for tokenizers and folders only; its advice to install PyTorch is noise here.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def _interrupted_at_the_start(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    """Ctrl-C while a command is still being imported: a line instead of a traceback."""
    if issubclass(kind, KeyboardInterrupt):
        print("error: interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


# `python -m bacr_jax.COMMAND` has this name until the command itself is found; so has the command
# of another package that imports this one. Before the arguments stands the module.
_asked = "".join(sys.orig_argv[-len(sys.argv) :][:1]).rpartition("-m")[2]
if sys.argv[:1] == ["-m"] and _asked.partition(".")[0] == __name__:
    sys.excepthook = _interrupted_at_the_start


def __getattr__(name: str) -> Any:
    """What is imported when it is first used."""
    if name in ("load", "Policy"):
        return getattr(importlib.import_module("bacr_jax.facade"), name)
    # The module of the command, which can be called.
    if name == "train":
        return importlib.import_module("bacr_jax.train")
    if name == "__version__":
        from importlib.metadata import version

        return version("bacr_jax")
    raise AttributeError(f"module 'bacr_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
