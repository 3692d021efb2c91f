"""Models by their names on the Hugging Face hub, found as folders of the hub's local cache."""

import importlib
import re
from pathlib import Path
from typing import Any

from bacr_jax.documents import check_model_folder
from bacr_jax.errors import UserError, reason_of

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?")
# Files that a policy is read from, without copies of the weights in other formats.
_FILES = ("*.json", "*.safetensors", "*.jinja", "merges.txt", "LICENSE*")
_RELEASED = re.compile(r"Qwen2\.5-[\w.-]+")
# The only file needed to know a model's shape.
_SHAPE = ("config.json",)


def is_hub_name(path: str) -> bool:
    """True if a text is OWNER/NAME or OWNER/NAME@REVISION and not the path of a local file."""
    return _NAME.fullmatch(path) is not None and not Path(path).exists()


def local_folder(path: str, *, download: bool, where: str, weights: bool = True) -> str:
    """Returns the local folder of a model: the given one, or the one in the hub's cache.

    Args:
      path: a folder, or OWNER/NAME[@REVISION].
      download: True downloads files that are missing from the cache, which can be gigabytes.
      where: name of the setting, for error messages.
      weights: True needs all files of the model; False only its config.json, about a kilobyte.

    Returns:
      `path` itself if it is not a name on the hub. A folder of the cache is named by its commit,
      which identifies the weights.

    Raises:
      UserError: the model is neither a folder nor in the cache, or can't be downloaded.
    """
    if not is_hub_name(path):
        check_model_folder(path, where)
        return path
    name, _, revision = path.partition("@")
    _refuse_missing_models_folder(path, name, where)
    hub = _import_hub(path, where)
    try:
        snapshot = hub.snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=list(_FILES if weights else _SHAPE),
            local_files_only=not download,
        )
        # The cache may contain only config.json, from an earlier call without weights.
        needed = "*.safetensors" if weights else _SHAPE[0]
        if not download and not any(Path(snapshot).glob(needed)):
            raise FileNotFoundError(snapshot)
        return str(Path(snapshot))
    # The hub's errors come from several libraries: no network, unknown name, missing permission,
    # full disk.
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
    """Raises UserError unless a name is OWNER/NAME and the hub's library is installed."""
    if not _NAME.fullmatch(name) or "@" in name:
        raise UserError(f"--push {name}: is no repository of the hub; write OWNER/NAME")
    _import_hub(name, "--push")


def push(folder: Path, name: str) -> str:
    """Uploads a folder to a model repository of the hub.

    The repository is created as a private one if it does not exist. HF_TOKEN and HF_ENDPOINT are
    respected.

    Returns:
      The address of the repository.

    Raises:
      UserError: the hub refuses the upload. The folder stays on disk.
    """
    try:
        api = _import_hub(name, "--push").HfApi()
        address = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder)
        return str(address)
    # The hub's errors come from several libraries: no network, no token, missing permission.
    except Exception as error:
        raise UserError(
            f"--push {name}: the hub did not take {folder}, which is written ({reason_of(error)}); "
            f"run hf auth login, then hf upload {name} {folder}"
        ) from None


def _refuse_missing_models_folder(path: str, name: str, where: str) -> None:
    """Refuses models/NAME if it does not exist, because our configs mean a local folder by it.

    The hub has no owner called models.
    """
    owner, _, model = name.partition("/")
    if owner != "models":
        return
    how = "make it (bacr import, bacr export, hf download), or write the path of another"
    if _RELEASED.fullmatch(model):
        how = (
            f"run hf download Qwen/{model} --local-dir {path}, or write Qwen/{model} and add "
            "--download"
        )
    raise UserError(f"{where}: no folder {path!r} here; {how}")


def _import_hub(path: str, where: str) -> Any:
    """Imports huggingface_hub, which transformers depends on; raises UserError if it is missing."""
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError:
        raise UserError(
            f"{where}: {path!r} is a name of the hub, and huggingface_hub is not installed; write "
            "the path of a downloaded folder"
        ) from None
