"""Finds configs that ship with the package by name: `quickstart`, `methods/grpo`, `studies/main`.

The configs are in `configs/` at the top of the repository, and in `bacr_jax/configs/` of an
installed package. The value of --config is one of three things:

* a *path* (`mine.yaml`, `./mine`): that file;
* a *name* (`quickstart`, `methods/grpo` or `grpo` for short): the config that ships with the
  package, from any current folder. A file of the current folder that the name could also mean is
  an error;
* the path of a shipped config in a clone (`configs/quickstart.yaml`): that file if it exists, as in
  a clone, else the config that ships with the package.
"""

import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from bacr_jax.config.values import shown
from bacr_jax.documents import expand_home
from bacr_jax.errors import UserError

ENDINGS = (".yaml", ".yml")
# Folders in which a name without a folder is searched, in this order.
CONFIGS = ("", "methods", "examples", "studies/tasks")
STUDIES = ("studies",)
_FOLDER = "configs"
_NAME = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)*")
# Unlike Path.is_file, it returns False for a name that is too long.
_is_file = os.path.isfile


def root() -> Path:
    """Returns the folder of the shipped configs, in the installed package or in the clone."""
    package = Path(__file__).parents[1]
    inside = package / _FOLDER
    return inside if inside.is_dir() else package.parents[1] / _FOLDER


def names(folders: Sequence[str] = CONFIGS) -> list[str]:
    """Returns the names of the shipped configs in `folders`, such as `methods/grpo`."""
    paths = [path for folder in folders for path in sorted((root() / folder).glob("*.yaml"))]
    return [path.relative_to(root()).with_suffix("").as_posix() for path in paths]


def locate(written: str | Path, folders: Sequence[str] = CONFIGS) -> Path:
    """Returns the file that a path, or a name in `folders`, means; the file may be missing.

    Raises:
      UserError: if a name could also mean a file of the current folder.
    """
    text = str(written)
    try:
        path = expand_home(written)
    except ValueError as error:
        raise UserError(f"{text}: {error}") from None
    if not _NAME.fullmatch(text):
        return path
    if path.suffix in ENDINGS:
        head, _, rest = text.partition("/")
        shipped_file = root() / rest
        is_shipped = head == _FOLDER and _is_file(shipped_file)
        return shipped_file if is_shipped and not os.path.exists(path) else path
    local_names = (path, *(Path(text + ending) for ending in ENDINGS))
    local_files = [file for file in local_names if _is_file(file)]
    candidates = [root() / folder / f"{text}.yaml" for folder in ("", *folders)]
    shipped_file = next((file for file in candidates if _is_file(file)), path)
    if shipped_file is path or not local_files:
        return shipped_file
    raise UserError(
        f"{text}: found the file {local_files[0]} here and a config of this name that ships with "
        f"the package; write ./{local_files[0]} for the file, {shipped_file} for the config"
    )


def instead_of(path: Path) -> str:
    """Suggests what to write instead of a missing path: a shipped config with a similar name."""
    short = {name.rpartition("/")[2]: name for name in reversed(names())}
    written = path.name.removesuffix(".yaml")
    close = difflib.get_close_matches(written, short, n=1, cutoff=0.75)
    if close:
        return f"{shown(short[close[0]], quote=False)}, which ships with the package"
    return "the path of a YAML file"
