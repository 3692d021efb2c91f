"""Models by their names on the Hugging Face hub, as folders of its local cache."""

import importlib
import re
from pathlib import Path
from typing import Any

from bacr_jax.documents import check_model_folder
from bacr_jax.errors import UserError, reason_of

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?")
# What a policy is read from; not the same weights in other formats.
_FILES = ("*.json", "*.safetensors", "*.jinja", "merges.txt", "LICENSE*")
_RELEASED = re.compile(r"Qwen2\.5-[\w.-]+")
_SHAPE = ("config.json",)


def is_hub_name(path: str) -> bool:
    """Whether a text is OWNER/NAME or OWNER/NAME@REVISION, and no folder is called so."""
    return _NAME.fullmatch(path) is not None and not Path(path).exists()


def local_folder(path: str, *, download: bool, where: str, weights: bool = True) -> str:
    """The folder of a model: as it is written, or where the hub's cache keeps it.

    Args:
      path: a folder, or OWNER/NAME[@REVISION].
      download: gets what is not in the cache, gigabytes of it.
      where: the setting in the user's words, for messages.
      weights: what the model is read from; False: its config.json alone, a kilobyte.

    Returns:
      A folder; `path` itself if it is no name of the hub. The cache's folder is named by the
      commit, so that it says which weights they were.
    """
    if not is_hub_name(path):
        check_model_folder(path, where)
        return path
    name, _, revision = path.partition("@")
    _refuse_folder_of_ours(path, name, where)
    hub = _hub(path, where)
    try:
        found = Path(
            hub.snapshot_download(
                name,
                revision=revision or None,
                allow_patterns=list(_FILES if weights else _SHAPE),
                local_files_only=not download,
            )
        )
        # The cache also knows folders of which no more than the shape was got.
        if not download and not any(found.glob("*.safetensors" if weights else _SHAPE[0])):
            raise FileNotFoundError(found)
        return str(found)
    # Its errors come from several libraries: no network, no such name, no permission, a full disk.
    except Exception as error:
        if not download:
            raise UserError(
                f"{where}: found {path!r}, which is no folder here and not in the hub's cache; add "
                f"--download to get it, or run hf download {name} --local-dir models/{name} and "
                f"write models/{name}"
            ) from None
        raise UserError(
            f"{where}: can't get {path!r} from the hub ({reason_of(error)}); check the name and "
            "the network, or write the path of a downloaded folder"
        ) from None


def check_push(name: str) -> None:
    """Refuses what is no OWNER/NAME to push to, by a UserError."""
    if not _NAME.fullmatch(name) or "@" in name:
        raise UserError(f"--push {name}: is no repository of the hub; write OWNER/NAME")
    _hub(name, "--push")


def push(folder: Path, name: str) -> str:
    """Uploads a folder to a model repository of the hub, a private one if it is new; its address.

    HF_TOKEN and HF_ENDPOINT are honoured. UserError: the hub doesn't take it; the folder stays.
    """
    try:
        api = _hub(name, "--push").HfApi()
        address = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder)
        return str(address)
    # Its errors come from several libraries: no network, no token, no right.
    except Exception as error:
        raise UserError(
            f"--push {name}: the hub did not take {folder}, which is written ({reason_of(error)}); "
            f"run hf auth login, then hf upload {name} {folder}"
        ) from None


def _refuse_folder_of_ours(path: str, name: str, where: str) -> None:
    """Refuses models/NAME that is not there: a folder of our configs, and nobody's on the hub."""
    owner, _, model = name.partition("/")
    if owner == "models":
        how = "make it (bacr import, bacr export, hf download), or write the path of another"
        if _RELEASED.fullmatch(model):
            how = f"run hf download Qwen/{model} --local-dir {path}, or write Qwen/{model} and add "
            how += "--download"
        raise UserError(f"{where}: no folder {path!r} here; {how}")


def _hub(path: str, where: str) -> Any:
    # transformers brings it.
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError:
        raise UserError(
            f"{where}: {path!r} is a name of the hub, and huggingface_hub is not installed; write "
            "the path of a downloaded folder"
        ) from None
