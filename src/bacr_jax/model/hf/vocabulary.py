"""Reads the token ids in a folder's tokenizer files, and copies these files for exports."""

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bacr_jax.errors import UserError
from bacr_jax.model.hf.hf_config import read_json

# Files that transformers may load in addition to the weights and config.json.
GENERATION = ("generation_config.json",)
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)

# Exclusive upper bound of token ids, which are 32-bit integers.
_ID_LIMIT = 1 << 31


def number_of_ids(folder: Path) -> int | None:
    """Returns the largest token id plus one, or None if the folder has no tokenizer files.

    Raises:
      UserError: If a tokenizer file is malformed.
    """
    ids: list[Any] = []
    if (folder / "tokenizer.json").exists():
        ids = _ids_of_tokenizer(folder / "tokenizer.json")
    elif (folder / "vocab.json").exists():
        ids = list(read_json(folder / "vocab.json").values())
        if (folder / "added_tokens.json").exists():
            ids += read_json(folder / "added_tokens.json").values()
    if not all(type(number) is int and 0 <= number < _ID_LIMIT for number in ids):
        raise _malformed(folder, "a token id")
    return max(ids) + 1 if ids else None


def _ids_of_tokenizer(path: Path) -> list[Any]:
    """Returns the ids of all tokens in a tokenizer.json, without validating them."""
    raw = read_json(path)
    model = raw.get("model")
    tokens = model.get("vocab") if isinstance(model, dict) else None
    added = raw.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise _malformed(path, "`added_tokens`")
    ids: list[Any] = []
    if isinstance(tokens, dict):
        ids += tokens.values()
    elif isinstance(tokens, list):
        # Unigram models store a list of (piece, score) pairs, whose index is the token id.
        ids += range(len(tokens))
    ids += [token.get("id") for token in added]
    return ids


def _malformed(where: Path, what: str) -> UserError:
    """Builds the error for a malformed part of a tokenizer file."""
    return UserError(
        f"{where}: {what} of the tokenizer is not valid; replace the tokenizer files by undamaged "
        "copies"
    )


def check_fits(folder: Path, rows: int) -> None:
    """Checks that the embedding matrix has a row for every id of the folder's tokenizer.

    Raises:
      UserError: If the tokenizer has more ids than `rows`.
    """
    count = number_of_ids(folder)
    if count is not None and count > rows:
        raise UserError(
            f"{folder}: the tokenizer has {count} token ids, but the embedding has only {rows} "
            "rows; use the tokenizer that belongs to the model"
        )


def copy_companions(source: Path, out: Path, names: Sequence[str]) -> None:
    """Copies the given files, skipping files that do not exist.

    Raises:
      UserError: If `check_links` raises it.
    """
    check_links(source, names)
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)


def check_links(folder: Path, names: Iterable[str]) -> None:
    """Rejects files that are symbolic links to targets outside of a folder.

    A downloaded folder could contain a link to a private file on this machine, whose content would
    be published by an export. In the Hub cache, every file is a link to a blob of its repository,
    which is allowed.

    Raises:
      UserError: If a file is such a link. The message contains the link and its target.
    """
    inside = folder.resolve()
    allowed_folders = [inside]
    repository = inside.parent.parent
    if inside.parent.name == "snapshots" and "--" in repository.name:
        allowed_folders.append(repository / "blobs")
    for name in names:
        path = folder / name
        target = path.resolve()
        is_allowed = any(target.is_relative_to(allowed) for allowed in allowed_folders)
        if path.is_file() and not is_allowed:
            raise UserError(
                f"{path} is a symbolic link to {target}, a file outside of the folder, which an "
                "export does not copy; replace the link by the file itself"
            )


def write_chat_template(folder: Path, template: str) -> None:
    """Writes a chat template for a folder's tokenizer, along with the settings that it requires.

    The padding side is set to left, because the prompts of a batch must end at the same position.
    transformers loads every folder of this model type with Qwen2's tokenizer class, which adds an
    unknown token unless one is set. An existing special token is therefore set as the unknown
    token.
    """
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "chat_template.json").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.exists() else {}
    settings.pop("chat_template", None)
    settings["padding_side"] = "left"
    if not str(settings.get("tokenizer_class", "")).startswith("Qwen2"):
        candidates = [settings.get(key) for key in ("unk_token", "pad_token", "eos_token")]
        settings["unk_token"] = next((token for token in candidates if token), None)
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
