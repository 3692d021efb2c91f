"""Models by their names on the Hugging Face hub, as folders of its local cache."""

import importlib
import re
from pathlib import Path
from typing import Any

from bacr_jax.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?")
# What a policy is read from; not the same weights in other formats.
_FILES = ("*.json", "*.safetensors", "*.jinja", "merges.txt", "LICENSE*")


def is_hub_name(path: str) -> bool:
    """Whether a text is OWNER/NAME or OWNER/NAME@REVISION, and no folder is called so."""
    return _NAME.fullmatch(path) is not None and not Path(path).exists()


def local_folder(path: str, *, download: bool, where: str) -> str:
    """The folder of a model: as it is written, or where the hub's cache keeps it.

    Args:
      path: a folder, or OWNER/NAME[@REVISION].
      download: gets what is not in the cache, gigabytes of it.
      where: the setting in the user's words, for messages.

    Returns:
      A folder; `path` itself if it is no name of the hub. The cache's folder is named by the
      commit, so that it says which weights they were.

    Raises:
      UserError: a name of the hub that is not in the cache and is not to be got, or can't be.
    """
    if not is_hub_name(path):
        return path
    name, _, revision = path.partition("@")
    hub = _hub(path, where)
    try:
        return str(
            hub.snapshot_download(
                name,
                revision=revision or None,
                allow_patterns=list(_FILES),
                local_files_only=not download,
            )
        )
    # Its errors come from several libraries: no network, no such name, no permission, a full disk.
    except Exception as error:
        if not download:
            raise UserError(
                f"{where}: found {path!r}, which is no folder here and not in the hub's cache; add "
                f"--download to get it, or run hf download {name} --local-dir models/{name} and "
                f"write models/{name}"
            ) from None
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{where}: can't get {path!r} from the hub ({reason}); check the name and the network, "
            "or write the path of a downloaded folder"
        ) from None


def _hub(path: str, where: str) -> Any:
    # transformers brings it.
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError:
        raise UserError(
            f"{where}: {path!r} is a name of the hub, and huggingface_hub is not installed; write "
            "the path of a downloaded folder"
        ) from None
