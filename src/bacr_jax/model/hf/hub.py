"""Resolves Hugging Face Hub names to folders in the local Hub cache, and uploads folders."""

import re
from pathlib import Path

from bacr_jax.errors import UserError, reason_of
from bacr_jax.files import check_model_folder

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?")
# Matches folders in the local Hub cache.
_CACHED = re.compile(r"/models--((?:(?!--)[^/])+)--([^/]+)/snapshots/([0-9a-f]{40})/?$")
# Files needed to load a policy, and the files with its license, which model cards contain. Weights
# in other formats are not downloaded.
_FILES = ("*.json", "*.safetensors", "*.jinja", "merges.txt", "LICENSE*", "README.md")
_RELEASED = re.compile(r"Qwen2\.5-[\w.-]+")
# The only file that is needed to determine a model's configuration.
_SHAPE = ("config.json",)


def is_hub_name(path: str) -> bool:
    """True if a text has the form OWNER/NAME or OWNER/NAME@REVISION and is not a local path."""
    return _NAME.fullmatch(path) is not None and not Path(path).exists()


def cached_name(folder: Path) -> tuple[str, str] | None:
    """Returns the OWNER/NAME and the commit of a folder in the Hub cache, else None."""
    cached = _CACHED.search(str(folder.absolute()))
    if cached is None:
        return None
    owner, name, commit = cached.groups()
    return f"{owner}/{name}", commit


def local_folder(path: str, *, download: bool, where: str, weights: bool = True) -> str:
    """Returns the local folder of a model: the given folder, or the one in the Hub cache.

    Args:
      path: a folder, or OWNER/NAME[@REVISION].
      download: whether to download files that are missing from the cache, which can be gigabytes.
      where: name of the setting, for error messages.
      weights: True requires all files of the model. False only requires config.json, which is about
        a kilobyte.

    Returns:
      `path` itself if it is not a Hub name. A folder in the cache is named by its commit, which
      identifies the weights.

    Raises:
      UserError: If the model is neither a folder nor in the cache, or cannot be downloaded.
    """
    if not is_hub_name(path):
        check_model_folder(path, where)
        return path
    name, _, revision = path.partition("@")
    _refuse_missing_models_folder(path, name, where)
    import huggingface_hub

    try:
        snapshot = huggingface_hub.snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=list(_FILES if weights else _SHAPE),
            local_files_only=not download,
        )
        # An earlier call without weights may have cached only config.json.
        needed = "*.safetensors" if weights else _SHAPE[0]
        if not download and not any(Path(snapshot).glob(needed)):
            raise FileNotFoundError(snapshot)
        return str(Path(snapshot))
    # The Hub raises errors from several libraries: no network, unknown name, missing permission,
    # full disk.
    except Exception as error:
        if not download:
            raise UserError(
                f"{where}: {path!r} is neither an existing folder nor a model in the local cache "
                f"of the hub; pass --download to download it, or run hf download {name} "
                f"--local-dir models/{name} and use models/{name}"
            ) from None
        raise UserError(
            f"{where}: {path!r} can't be downloaded from the hub ({reason_of(error)}); check the "
            "name and the network, or use the path of a downloaded folder"
        ) from None


def check_push(name: str) -> None:
    """Checks that a name has the form OWNER/NAME.

    Raises:
      UserError: If it has another form.
    """
    if not _NAME.fullmatch(name) or "@" in name:
        raise UserError(f"--push {name} is not the name of a repository on the hub; use OWNER/NAME")


def push(folder: Path, name: str) -> str:
    """Uploads a folder to a model repository on the Hub.

    If the repository does not exist, it is created as a private repository. HF_TOKEN and
    HF_ENDPOINT are respected.

    Returns:
      The URL of the repository.

    Raises:
      UserError: If the upload fails. The local folder is kept.
    """
    import huggingface_hub

    try:
        api = huggingface_hub.HfApi()
        address = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder)
        return str(address)
    # The Hub raises errors from several libraries: no network, no token, missing permission.
    except Exception as error:
        raise UserError(
            f"--push {name}: the upload of {folder} failed ({reason_of(error)}), but the folder "
            f"itself is complete; run hf auth login, then hf upload {name} {folder}"
        ) from None


def _refuse_missing_models_folder(path: str, name: str, where: str) -> None:
    """Raises a UserError if `path` is a missing folder models/NAME.

    The configs of this project use such paths for local folders, and "models" is not an owner on
    the Hub.
    """
    owner, _, model = name.partition("/")
    if owner != "models":
        return
    if _RELEASED.fullmatch(model):
        raise UserError(
            f"{where}: the folder {path!r} does not exist; run hf download Qwen/{model} "
            f"--local-dir {path}, or use Qwen/{model} and pass --download"
        )
    raise UserError(
        f"{where}: the folder {path!r} does not exist; create it with bacr import, bacr export or "
        "hf download, or use the path of another folder"
    )
