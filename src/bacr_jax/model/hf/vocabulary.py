"""The tokenizer files of a folder: how many ids they use, and which files travel along."""

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from bacr_jax.errors import UserError
from bacr_jax.model.hf.hf_config import read_json

# Everything transformers may read beside weights and config.json.
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


def number_of_ids(folder: Path) -> int | None:
    """One more than the largest token id; None without tokenizer files."""
    ids: list[int] = []
    if (folder / "tokenizer.json").exists():
        raw = read_json(folder / "tokenizer.json")
        model = raw.get("model")
        known = model.get("vocab") if isinstance(model, dict) else None
        added = raw.get("added_tokens") or []
        if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
            raise _malformed(folder / "tokenizer.json", "added_tokens")
        # Unigram models list (piece, score) pairs: the place in the list is the id.
        listed = known if isinstance(known, list) else []
        ids = list(known.values()) if isinstance(known, dict) else list(range(len(listed)))
        ids += [token.get("id") for token in added]
    elif (folder / "vocab.json").exists():
        ids = list(read_json(folder / "vocab.json").values())
        if (folder / "added_tokens.json").exists():
            ids += read_json(folder / "added_tokens.json").values()
    if not all(type(number) is int and 0 <= number < 1 << 31 for number in ids):
        raise _malformed(folder, "an id")
    return max(ids) + 1 if ids else None


def _malformed(where: Path, what: str) -> UserError:
    return UserError(f"{where}: {what} is malformed in its tokenizer; copy the files again")


def check_fits(folder: Path, rows: int) -> None:
    """The tokenizer of a folder, if it has one, uses no id beyond the embedding."""
    count = number_of_ids(folder)
    if count is not None and count > rows:
        raise UserError(
            f"{folder}: its tokenizer has {count} ids but the embedding only {rows} rows; "
            "write the tokenizer that belongs to the model"
        )


def copy_companions(source: Path, out: Path, names: Sequence[str]) -> None:
    """Copies those of the named files that a folder has; UserError as `check_links`."""
    check_links(source, names)
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)


def check_links(folder: Path, names: Iterable[str]) -> None:
    """Refuses named files that are links to outside of a folder.

    Somebody else's folder may link to a private file of this machine, whose content an export would
    carry away. In the cache of the hub every file is a link to the blobs of its repository.

    UserError: names the link and where it leads.
    """
    inside = folder.resolve()
    allowed = [inside]
    repository = inside.parent.parent
    if inside.parent.name == "snapshots" and "--" in repository.name:
        allowed.append(repository / "blobs")
    for name in names:
        path = folder / name
        target = path.resolve()
        if path.is_file() and not any(target.is_relative_to(one) for one in allowed):
            raise UserError(
                f"{path}: is a link to {target}, outside of its folder, which an export would "
                "copy; put the file itself in its place"
            )


def write_chat_template(folder: Path, template: str) -> None:
    """Gives the tokenizer of a folder a chat template, and what makes it load as it is.

    Prompts of a batch end together: the padding stands on the left. transformers takes Qwen2's own
    class for every folder of this type, which adds an unknown token where none is named.
    """
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "chat_template.json").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.exists() else {}
    settings.pop("chat_template", None)
    settings["padding_side"] = "left"
    if not str(settings.get("tokenizer_class", "")).startswith("Qwen2"):
        named = [settings.get(key) for key in ("unk_token", "pad_token", "eos_token")]
        settings["unk_token"] = next((token for token in named if token), None)
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
