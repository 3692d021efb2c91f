"""Sets a flag of XLA for NVIDIA GPUs under jaxlib 0.10.2 to 0.11.0, before XLA starts.

These versions sum the gradient of the embedding in float32 by compare-and-swap loops instead of the
GPU's atomic addition: 1 ms becomes 500 ms if many tokens are equal (jax issue 38806, xla issue
46225). 0.11.1 uses the atomic addition again. The flag allows the atomic addition, which rounds
sums below 1e-38 to zero. `train` and the doctor call this module, which does not import JAX.
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
# These packages contain XLA's compiler for GPUs. Other versions do not get the option, because LLVM
# ends the process if the option is unknown.
_COMPILERS = ("jax-cuda12-pjrt", "jax-cuda13-pjrt")
_FIRST = (0, 10, 2)
_FIXED = (0, 11, 1)
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
    """Adds the flag to XLA_FLAGS if a GPU compiler with slow additions is installed.

    XLA_FLAGS stays unchanged if it contains the flag or names a file of flags. Call this function
    before any device is used.

    Args:
      environment: environment variables, changed in place; os.environ by default.
      driver: a file that exists if NVIDIA's driver is loaded.
    """
    variables = os.environ if environment is None else environment
    compiler = slow_compiler()
    platforms = variables.get("JAX_PLATFORMS", "cuda")
    if not driver.exists() or not re.search("cuda|gpu", platforms) or compiler is None:
        return
    flags = variables.get(VARIABLE, "").strip()
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
    variables[VARIABLE] = f"{flags} {FLAG}".strip()
