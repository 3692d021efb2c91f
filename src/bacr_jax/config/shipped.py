"""Resolves the names of configs that ship with the package, such as `quickstart`.

The configs are in `configs/` at the root of the repository. An installed package contains them in
`bacr_jax/configs/`. The value of --config can have one of three forms:

* A *path*, such as `mine.yaml` or `./mine`: the file at this path.
* A *name*, such as `quickstart`, `methods/grpo` or `grpo` for short: the config with this name that
  ships with the package. It can be used from any working directory. If the working directory
  contains a file to which the name could also refer, that is an error.
* A *path under `configs/`*, such as `configs/quickstart.yaml`: the file at this path if it exists,
  as in a clone of the repository. Otherwise, the config that ships with the package.
"""

import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from bacr_jax.config.values import shown
from bacr_jax.errors import UserError
from bacr_jax.files import expand_home

ENDINGS = (".yaml", ".yml")
# Folder of the overlays. An overlay sets only a method, so another config must be passed first.
OVERLAYS = "methods"
# Folders of the shipped configs that are searched for a name, in this order.
CONFIGS = ("", OVERLAYS, "examples", "studies/tasks")
STUDIES = ("studies",)
# Start of a config's first line. The rest of the line is the description in `bacr configs`.
SUMMARY = "# In short: "
_FOLDER = "configs"
_NAME = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)*")
# Used instead of Path.is_file, which raises OSError for a file name that is too long.
_is_file = os.path.isfile


def root() -> Path:
    """Returns the folder with the shipped configs, in the installed package or the repository."""
    package = Path(__file__).parents[1]
    inside = package / _FOLDER
    return inside if inside.is_dir() else package.parents[1] / _FOLDER


def names(folders: Sequence[str] = CONFIGS) -> list[str]:
    """Returns the names of the shipped configs in `folders`, such as `methods/grpo`."""
    paths = [path for folder in folders for path in sorted((root() / folder).glob("*.yaml"))]
    return [path.relative_to(root()).with_suffix("").as_posix() for path in paths]


def description(name: str) -> str:
    """Returns the one-line description of a shipped config, or "" if the config has none.

    The description is the text after `SUMMARY` in the first line, or the `title` of a study.
    """
    return file_description(root() / f"{name}.yaml")


def file_description(path: Path) -> str:
    """Returns the one-line description of a config file (see `description`), or ""."""
    for line in path.read_text(encoding="utf-8").splitlines():
        for start in (SUMMARY, "title: "):
            if line.startswith(start):
                return line.removeprefix(start).strip().strip("\"'").removesuffix(".")
    return ""


def check_overlays(paths: Sequence[str | Path], *, in_python: bool = False) -> None:
    """Checks that a list of configs does not consist only of shipped overlays.

    An overlay is a config in configs/methods that sets only the keys of a method. All other keys
    would have their defaults, which do not describe a useful run.

    Args:
      paths: paths or names of configs.
      in_python: True if the paths are an argument of a Python function. The error message then
        contains a Python list instead of command-line options.

    Raises:
      UserError: if every path is a config in the folder `OVERLAYS`.
    """
    if not all(map(is_overlay, paths)):
        return
    texts = list(map(str, paths))
    if in_python:
        overlays = str(texts)
        example = str(["quickstart", *texts])
    else:
        overlays = " ".join(f"--config {text}" for text in texts)
        example = f"--config quickstart {overlays}"
    raise UserError(
        f"{overlays} sets only the method, and no other config is given; pass another config "
        f"first, for example {example}"
    )


def is_overlay(path: str | Path) -> bool:
    """True if a path or name refers to a shipped overlay, which sets only the keys of a method."""
    return locate(path).resolve().parent == (root() / OVERLAYS).resolve()


def locate(written: str | Path, folders: Sequence[str] = CONFIGS) -> Path:
    """Resolves a path, or the name of a shipped config, to a path.

    Args:
      written: the path or name, as in the value of --config.
      folders: folders of the shipped configs in which to search for a name.

    Returns:
      The path of the config. The file may not exist.

    Raises:
      UserError: if the working directory contains a file with the same name as a shipped config, or
        if `~` can't be expanded.
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
        f"{text}: this is the name of a config in the package, but also of the file "
        f"{local_files[0]} in this folder; use ./{local_files[0]} for the file, or {shipped_file} "
        "for the config"
    )


def instead_of(path: Path) -> str:
    """Suggests a shipped config with a similar name for a missing path, for error messages."""
    short = {name.rpartition("/")[2]: name for name in reversed(names())}
    written = path.name.removesuffix(".yaml")
    close = difflib.get_close_matches(written, short, n=1, cutoff=0.75)
    if close:
        return f"{shown(short[close[0]], quote=False)}, which ships with the package"
    return "the path of a YAML file"
