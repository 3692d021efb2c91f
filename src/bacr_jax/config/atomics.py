"""A flag of XLA for NVIDIA GPUs under jaxlib 0.10.2 to 0.11.0, set before XLA starts.

These versions add float32 numbers into an array, the gradient of the embedding, by loops of
compare-and-swap instead of the GPU's own addition: 1 ms becomes 500 ms where many tokens are the
same (jax issue 38806, xla issue 46225). 0.11.1 has the fast one again. The flag allows it, which
rounds sums below 1e-38 to zero. `train` and the doctor call this; it needs no JAX.
"""

import importlib.metadata
import os
import re
import sys
from collections.abc import MutableMapping
from pathlib import Path

from bacr_jax.config.reproducible import VARIABLE, gpus_in_use

OPTIONS = "xla_backend_extra_options"
FLAG = f"--{OPTIONS}=-nvptx-allow-ftz-atomics"
# XLA's compiler for GPUs is in these packages. LLVM ends a process of a version that does not know
# the option, so others never get it.
_COMPILERS = ("jax-cuda12-pjrt", "jax-cuda13-pjrt")
_FIRST, _FIXED = (0, 10, 2), (0, 11, 1)
_DRIVER = Path("/proc/driver/nvidia/version")


def slow_compiler() -> str | None:
    """Returns name and version of an installed GPU compiler with slow additions, or None."""
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
    environment: MutableMapping[str, str] | None = None, driver: Path = _DRIVER
) -> None:
    """Adds the flag to XLA_FLAGS where GPUs would add slowly without it.

    A value of the same flag that the user wrote stays, and so does a file of flags. Call it before
    any device is used.

    Args:
      environment: the process's environment by default.
      driver: a file that NVIDIA's driver makes.
    """
    here = os.environ if environment is None else environment
    compiler = slow_compiler()
    platforms = here.get("JAX_PLATFORMS", "cuda")
    if not driver.exists() or not re.search("cuda|gpu", platforms) or compiler is None:
        return
    flags = here.get(VARIABLE, "").strip()
    is_file = flags and not flags.startswith("-")
    if is_file or OPTIONS in flags:
        return
    if gpus_in_use():
        print(
            f"warning: {compiler} computes gradients of the embedding slowly, and this process has "
            f"used its GPUs already; set {VARIABLE}='{FLAG}' before",
            file=sys.stderr,
        )
        return
    here[VARIABLE] = f"{flags} {FLAG}".strip()
