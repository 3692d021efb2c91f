"""A GGUF file becomes a Hugging Face folder that says where it came from."""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

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


def write(path: Path, out: Path, *, dtype: str = "float32") -> str:
    """Writes a new folder, in float32 or rounded to bfloat16, whole or not at all; what it holds.

    Raises:
      ValueError: the file can't be used (`Unusable`; text that is not UTF-8), or `out` not be
        written (`UserError`); nothing is left of it.
    """
    check_free(out)
    file = container.read(path)
    config = weights.hf_config(file)
    stored = weights.tensors(file, config, dtype)
    backend, special = tokenizer.read(file, rows=config["vocab_size"])
    named = {name: index for name, index in special.items() if name not in tokenizer.TURN_ENDS}
    ids = {f"{name}_token_id": index for name, index in named.items() if name != "unk"}
    settings: dict[str, Any] = {f"{x}_token": backend.id_to_token(i) for x, i in named.items()}
    # The class takes tokenizer.json as it stands.
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {"model_max_length": config["max_position_embeddings"]}
    kinds = Counter(tensor.kind.name for tensor in file.tensors.values()).most_common()
    held = f"{config['architectures'][0]} in {dtype}, dequantised from tensors of "
    held += ", ".join(f"{kind} ({count})" for kind, count in kinds)
    texts = {
        "config.json": json.dumps(config | ids | {"torch_dtype": dtype}, indent=2),
        "generation_config.json": json.dumps(ids | _turn_ends(special), indent=2),
        "tokenizer.json": backend.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(settings, indent=2),
        "README.md": _card(file, held),
    }
    with complete_or_absent(out) as folder:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        if template := file.setting("tokenizer.chat_template", str, ""):
            vocabulary.write_chat_template(folder, template)
        write_file(folder / SINGLE, stored)
    return held


def _turn_ends(special: dict[str, int]) -> dict[str, Any]:
    """Returns generation_config.json's eos_token_id: eos, and other ids that end a turn.

    One id is a number, as readers expect; without any id there is no entry.
    """
    names = ("eos", *tokenizer.TURN_ENDS)
    ends = list(dict.fromkeys(special[name] for name in names if name in special))
    if not ends:
        return {}
    return {"eos_token_id": ends if len(ends) > 1 else ends[0]}


def _card(file: GgufFile, held: str) -> str:
    """The text of the model card; what the file says stands in it as it is, on one line."""
    names = ("name", "organization", "basename", "license")
    said = {x: printable(str(file.settings.get(f"general.{x}", "unknown"))) for x in names}
    head = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if re.fullmatch(r"[a-z0-9.-]+", said["license"]):
        head["license"] = said["license"]
    with file.path.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    said |= {"file": printable(file.path.name), "pre": file.settings["tokenizer.ggml.pre"]}
    said |= {"head": yaml.safe_dump(head, sort_keys=False), "held": held, "digest": digest}
    return _CARD.format(**said, size=file.path.stat().st_size, version=__version__)
