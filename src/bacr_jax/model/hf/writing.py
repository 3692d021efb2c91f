"""What is common to folders that are written: the whole of one or nothing, and values by name."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from bacr_jax.errors import UserError
from bacr_jax.model.hf.names import Entry

# As in `types`, without which `bacr import` needs no JAX.
Params = dict[str, Any]
_NUMPY = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}
BUDGET_FILE = "budget.safetensors"


def fetch(params: Params, entry: Entry, dtype: str) -> np.ndarray:
    """Values of an entry on the host, in the checkpoint's orientation."""
    values = np.asarray(entry.values_in(params))
    return (values.T if entry.transposed else values).astype(_NUMPY[dtype], copy=False)


def check_free(out: Path) -> None:
    """Nothing stands where a folder is to be written."""
    if out.exists() or out.is_symlink():
        raise UserError(f"{out}: already exists; write the name of a new folder")


@contextlib.contextmanager
def complete_or_absent(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out` that takes its name at the end, or leaves nothing."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise UserError(f"{out}: can't write there ({error.strerror})") from None
    try:
        yield temporary
        # mkdtemp makes private folders; a model folder is an ordinary one.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)
        check_free(out)
        temporary.rename(out)
    except OSError as error:
        raise UserError(f"{out}: can't write there ({error.strerror or error})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
