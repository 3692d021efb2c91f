"""Which flags the installed XLA takes."""

import importlib.util
import subprocess
from pathlib import Path


def xla_knows(flag):
    """XLA ends a process that gives it a flag it does not know, and its versions differ."""
    (folder,) = importlib.util.find_spec("jaxlib").submodule_search_locations
    # In a process of its own: the library has hundreds of megabytes, and tests measure memory.
    library = Path(folder) / "libjax_common.so"
    return subprocess.run(["grep", "-q", flag, library], check=False).returncode == 0
