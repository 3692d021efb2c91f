"""Budget-adaptive curriculum reasoning for language models, in JAX."""

import os
import sys
import types

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


# `python -m bacr_jax.COMMAND` has this name until the command itself is found.
if sys.argv[:1] == ["-m"]:
    sys.excepthook = _interrupted_at_the_start

__version__ = "0.1.0"
