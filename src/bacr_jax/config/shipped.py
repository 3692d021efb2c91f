"""Configs that ship with the package, by name: `quickstart`, `methods/grpo`, `studies/main`.

They lie in `configs/` at the top of the repository and in `bacr_jax/configs/` of an installed
package. What is written after --config is one of three things:

* a *path* (`mine.yaml`, `./mine`): the file there;
* a *name* (`quickstart`, `methods/grpo` or `grpo` for short): the config that ships with the
  package, in whichever folder one is. If the current folder holds a file that the name could mean
  too, it is refused;
* the path of a shipped config in a clone (`configs/quickstart.yaml`): that file if it is there, as
  it is in a clone, else the shipped one.
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
# Where a name without a folder is looked for, in this order.
CONFIGS, STUDIES = ("", "methods", "examples", "studies/tasks"), ("studies",)
_FOLDER = "configs"
_NAME = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)*")
# Unlike Path's method of the same name it has an answer to a name that is too long.
_is_file = os.path.isfile


def root() -> Path:
    """The folder of the shipped configs: in the installed package, or in the clone around it."""
    package = Path(__file__).parents[1]
    inside = package / _FOLDER
    return inside if inside.is_dir() else package.parents[1] / _FOLDER


def names(folders: Sequence[str] = CONFIGS) -> list[str]:
    """Names of the configs that ship, of `CONFIGS` or `STUDIES`: `quickstart`, `methods/grpo`."""
    found = [path for folder in folders for path in sorted((root() / folder).glob("*.yaml"))]
    return [path.relative_to(root()).with_suffix("").as_posix() for path in found]


def locate(written: str | Path, folders: Sequence[str] = CONFIGS) -> Path:
    """The file that a path or a name in `CONFIGS` or `STUDIES` means; it need not be there.

    UserError: a name that also could mean a file of the current folder.
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
        ours = root() / rest
        return ours if head == _FOLDER and not os.path.exists(path) and _is_file(ours) else path
    own = [file for file in (path, *(Path(text + e) for e in ENDINGS)) if _is_file(file)]
    there = [root() / folder / f"{text}.yaml" for folder in ("", *folders)]
    ours = next((file for file in there if _is_file(file)), path)
    if ours is path or not own:
        return ours
    raise UserError(
        f"{text}: found the file {own[0]} here and a config of this name that ships with the "
        f"package; write ./{own[0]} for the one, {ours} for the other"
    )


def instead_of(path: Path) -> str:
    """What to write instead of a path where nothing is: a shipped config that may be meant."""
    short = {name.rpartition("/")[2]: name for name in reversed(names())}
    written = path.name.removesuffix(".yaml")
    close = difflib.get_close_matches(written, short, n=1, cutoff=0.75)
    if close:
        return f"{shown(short[close[0]], quote=False)}, which ships with the package"
    return "the path of a YAML file"
