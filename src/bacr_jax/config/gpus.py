"""Prepares NVIDIA GPUs for JAX: detects the driver, and sets the fraction of memory that JAX uses.

`parallel.processes.check_platform` starts JAX with this fraction. `config.atomics` and `bacr
doctor` call `has_driver`. This module does not import JAX, and importing it changes nothing.
"""

import contextlib
import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path

# Fraction of a GPU's memory that JAX may use. `bacr plan` and the launch scripts use the same
# value. The rest is needed outside of JAX's memory pool for the CUDA context, NCCL's buffers and
# the workspaces of cuBLAS and cuDNN.
MEMORY_FRACTION = 0.92
_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
# If one of these variables is set, this module changes nothing. jaxlib refuses to start if both
# XLA_CLIENT_MEM_FRACTION and the variable above are set.
_CHOICES = (_FRACTION, "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR")
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
# Values of _PREALLOCATE that jaxlib reads as false.
_FALSE = ("false", "False", "0")

# Exists if the NVIDIA driver of Linux is loaded.
_LINUX_DRIVER = "proc/driver/nvidia/version"
# In WSL2, the driver of Windows provides the GPU instead, with this device and this library.
_WSL_DRIVER = ("dev/dxg", "usr/lib/wsl/lib/libcuda.so.1")


@contextlib.contextmanager
def memory_fraction() -> Iterator[None]:
    """Applies `set_memory_fraction` in the body of the context, in which JAX must start."""
    before = os.environ.get(_FRACTION)
    set_memory_fraction()
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_FRACTION, None)
        else:
            os.environ[_FRACTION] = before


def set_memory_fraction(environment: MutableMapping[str, str] | None = None) -> None:
    """Lets JAX use `MEMORY_FRACTION` of each GPU's memory instead of its default of 75 %.

    Must be called before JAX initializes its devices. It has no effect on CPUs. The environment is
    not changed if it already specifies a fraction, an allocator, or no preallocation.

    Args:
      environment: environment variables, modified in place. Defaults to `os.environ`.
    """
    variables = os.environ if environment is None else environment
    # jaxlib treats an empty value as unset.
    has_choice = any(variables.get(name) for name in _CHOICES)
    if has_choice or variables.get(_PREALLOCATE) in _FALSE:
        return
    variables[_FRACTION] = str(MEMORY_FRACTION)


def has_driver(root: Path = Path("/")) -> bool:
    """True if a driver for NVIDIA GPUs is loaded, on Linux or in WSL2.

    Args:
      root: root folder of the file system.
    """
    if (root / _LINUX_DRIVER).exists():
        return True
    return all((root / path).exists() for path in _WSL_DRIVER)
