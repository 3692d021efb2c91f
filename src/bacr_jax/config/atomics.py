"""Works around slow embedding gradients on NVIDIA GPUs with jaxlib 0.10.2 to 0.11.0.

XLA in these versions accumulates the float32 gradient of the embedding matrix with compare-and-swap
loops instead of the GPU's atomic add. If many tokens of a batch are equal, the operation takes
500 ms instead of 1 ms (jax issue 38806, xla issue 46225). Version 0.11.1 uses the atomic add again.
The flag set here enables the atomic add, which flushes sums below 1e-38 to zero.

The flag must be set before XLA starts, so this module does not import JAX. `bacr train` and
`bacr doctor` call `allow_fast_additions`.
"""

import importlib.metadata
import os
import re
import sys
from collections.abc import MutableMapping
from pathlib import Path

from bacr_jax.config.gpus import has_driver
from bacr_jax.config.reproducible import VARIABLE, gpus_in_use

OPTIONS = "xla_backend_extra_options"
FLAG = f"--{OPTIONS}=-nvptx-allow-ftz-atomics"
# The packages that contain XLA's GPU compiler. The flag is set only for the affected versions, from
# _FIRST up to but excluding _FIXED, because LLVM aborts the process on an unknown option.
_COMPILERS = ("jax-cuda12-pjrt", "jax-cuda13-pjrt")
_FIRST = (0, 10, 2)
_FIXED = (0, 11, 1)


def slow_compiler() -> str | None:
    """Returns the name and version of the installed GPU compiler if it is affected, else None."""
    for name in _COMPILERS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
        if _FIRST <= numbers < _FIXED:
            return f"{name} {version}"
    return None


def allow_fast_additions(
    environment: MutableMapping[str, str] | None = None, root: Path = Path("/")
) -> None:
    """Adds the flag that enables atomic adds to XLA_FLAGS if the installed compiler needs it.

    Must be called before JAX initializes any device. If JAX has already initialized its GPUs, this
    only prints a warning. XLA_FLAGS is left unchanged if it already contains the option, or if it
    is the path of a file with flags.

    Args:
      environment: environment variables, modified in place. Defaults to `os.environ`.
      root: root folder of the file system, in which the NVIDIA driver is searched.
    """
    variables = os.environ if environment is None else environment
    compiler = slow_compiler()
    platforms = variables.get("JAX_PLATFORMS", "cuda")
    if not has_driver(root) or not re.search("cuda|gpu", platforms) or compiler is None:
        return
    flags = variables.get(VARIABLE, "").strip()
    is_file = flags and not flags.startswith("-")
    if is_file or OPTIONS in flags:
        return
    if gpus_in_use():
        print(
            f"warning: {compiler} has a bug that makes the gradient of the embedding slow, and "
            "the flag that works around it can't be set any more, because this process has "
            f"already used its GPUs; set {VARIABLE}='{FLAG}' before the start",
            file=sys.stderr,
        )
        return
    variables[VARIABLE] = f"{flags} {FLAG}".strip()
