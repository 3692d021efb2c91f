"""Budget-adaptive curriculum reasoning for language models, in JAX.

In notebooks and scripts, `bacr_jax.train(config)` trains a policy and `bacr_jax.load(folder)` loads
one. Importing the package imports neither JAX nor any of its submodules. They are imported on first
use.
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

# transformers is used only for tokenizers and model folders, so its advice to install PyTorch does
# not apply.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def _interrupted_at_the_start(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    """Exception hook that prints one line instead of a traceback for Ctrl-C during imports."""
    if issubclass(kind, KeyboardInterrupt):
        print("error: interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


# With `python -m bacr_jax.COMMAND`, `sys.argv[0]` is "-m" until Python has located the module. It
# is also "-m" if a module of another package is run and imports this package. The name of the
# module that is run is therefore read from `sys.orig_argv`.
_asked = "".join(sys.orig_argv[-len(sys.argv) :][:1]).rpartition("-m")[2]
if sys.argv[:1] == ["-m"] and _asked.partition(".")[0] == __name__:
    sys.excepthook = _interrupted_at_the_start


def __getattr__(name: str) -> Any:
    """Imports public names when they are first accessed."""
    if name in ("load", "Policy"):
        return getattr(importlib.import_module("bacr_jax.facade"), name)
    # The module is callable; see `train._CallableModule`.
    if name == "train":
        return importlib.import_module("bacr_jax.train")
    if name == "__version__":
        from importlib.metadata import version

        return version("bacr_jax")
    raise AttributeError(f"module 'bacr_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
