"""Writes the model of a GGUF file as a Hugging Face folder, with a model card that names the file.

`__main__` calls `write`. The modules `container`, `weights` and `tokenizer` read the GGUF file.
"""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import tokenizers
import yaml

from bacr_gguf import container, tokenizer, weights
from bacr_gguf.container import GgufFile
from bacr_jax import __version__
from bacr_jax.errors import printable
from bacr_jax.model.hf import vocabulary
from bacr_jax.model.hf.archive import SINGLE, check_free, complete_or_absent, write_file

_CARD = """\
---
{head}---

# {name}

{held}. Written by bacr_jax {version} from the GGUF file `{file}` ({size:,} bytes, SHA-256 \
`{digest}`), which says: organisation {organization}, model {basename}, license {license}.

Weights of few bits are not those of the model that was quantised, and no other type brings them \
back; float32 holds what they say exactly, bfloat16 rounds it. The file names its pre-tokenizer, \
`{pre}`, but does not say how it splits: that is bacr_jax's reading of the name.

Ask it by `bacr generate --model FOLDER --budget 128 "..."`, or load it in transformers.
"""
# Valid license identifiers for the YAML header of the model card.
_LICENSE = re.compile(r"[a-z0-9.-]+")


def write(path: Path, out: Path, *, dtype: str = "float32", tie: bool = False) -> str:
    """Converts a GGUF file to a new Hugging Face folder. If an error occurs, no folder is created.

    Args:
      path: the GGUF file.
      out: the folder to create.
      dtype: dtype of the written weights. `float32` is exact, and `bfloat16` rounds the values.
      tie: True to use the embedding as the output matrix (`weights.tied`).

    Returns:
      A one-line summary with the model class, the dtype, and the tensor types in the GGUF file.

    Raises:
      GgufError, UnicodeDecodeError: if the file is damaged or contains an unsupported model.
      UserError: if the folder exists already, cannot be written, or its matrices cannot be tied.
    """
    check_free(out)
    file = container.read(path)
    if tie:
        file = weights.tied(file)
    config = weights.hf_config(file)
    stored = weights.tensors(file, config, dtype)
    backend, token_ids = tokenizer.read(file, rows=config["vocab_size"])
    # The Hugging Face config files have no entry for the unknown token.
    special_ids = {
        f"{name}_token_id": id
        for name, id in token_ids.items()
        if name != "unk" and name not in tokenizer.TURN_ENDS
    }
    model_config = config | special_ids | {"torch_dtype": dtype}
    generation_config = special_ids | _turn_ends(token_ids)
    tokenizer_config = _tokenizer_config(backend, token_ids, config["max_position_embeddings"])
    summary = _summary(file, config["architectures"][0], dtype)
    texts = {
        "config.json": json.dumps(model_config, indent=2),
        "generation_config.json": json.dumps(generation_config, indent=2),
        "tokenizer.json": backend.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=2),
        "README.md": _card(file, summary),
    }
    template = file.setting("tokenizer.chat_template", str, "")
    with complete_or_absent(out) as folder:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        if template:
            vocabulary.write_chat_template(folder, template)
        write_file(folder / SINGLE, stored)
    return summary


def _tokenizer_config(
    backend: tokenizers.Tokenizer, token_ids: dict[str, int], max_length: int
) -> dict[str, Any]:
    """Returns the content of tokenizer_config.json.

    It contains the special tokens, the tokenizer class and the maximum input length.
    """
    settings: dict[str, Any] = {}
    for name, id in token_ids.items():
        if name not in tokenizer.TURN_ENDS:
            settings[f"{name}_token"] = backend.id_to_token(id)
    # This class uses tokenizer.json without changes.
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["model_max_length"] = max_length
    return settings


def _turn_ends(token_ids: dict[str, int]) -> dict[str, Any]:
    """Returns the `eos_token_id` entry of generation_config.json.

    It contains the ids of the tokens that end a turn (eos, eot and eom). A single id is written as
    a number, because other libraries expect this. Returns an empty dict if the file has no such
    token.
    """
    names = ("eos", *tokenizer.TURN_ENDS)
    ends = list(dict.fromkeys(token_ids[name] for name in names if name in token_ids))
    if not ends:
        return {}
    return {"eos_token_id": ends if len(ends) > 1 else ends[0]}


def _summary(file: GgufFile, architecture: str, dtype: str) -> str:
    """Returns a one-line summary: model class, dtype, and number of tensors per GGUF type."""
    counts = Counter(tensor.kind.name for tensor in file.tensors.values())
    kinds = ", ".join(f"{kind} ({count})" for kind, count in counts.most_common())
    return f"{architecture} in {dtype}, dequantised from tensors of {kinds}"


def _card(file: GgufFile, summary: str) -> str:
    """Returns the content of the model card.

    Strings from the GGUF file are escaped, so that they cannot add lines to the card.
    """
    fields = {}
    for name in ("name", "organization", "basename", "license"):
        value = file.settings.get(f"general.{name}", "unknown")
        fields[name] = printable(str(value))
    head = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if _LICENSE.fullmatch(fields["license"]):
        head["license"] = fields["license"]
    with file.path.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return _CARD.format(
        **fields,
        head=yaml.safe_dump(head, sort_keys=False),
        held=summary,
        version=__version__,
        file=printable(file.path.name),
        size=file.path.stat().st_size,
        digest=digest,
        pre=file.settings["tokenizer.ggml.pre"],
    )
