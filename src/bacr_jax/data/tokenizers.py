"""Tokenizers of Hugging Face folders, and from the tokens of an answer to the text graded."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bacr_jax.data.stop_strings import vocabulary
from bacr_jax.errors import UserError


def load_tokenizer(folder: str | Path | None, *, where: str) -> Any:
    """The tokenizer of a folder.

    Args:
      folder: a Hugging Face folder with a tokenizer; never a name to download.
      where: key or option that named it, for messages.

    Raises:
      UserError: no such folder, or no tokenizer that can be read in it.
    """
    if folder is None or not Path(folder).is_dir():
        raise UserError(f"{where}: no folder {str(folder)!r}; write a Hugging Face folder")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # For a Qwen2 model AutoTokenizer takes Qwen2's class even where the folder names the generic
    # one, and that class adds a token of its own.
    generic = _declared_class(Path(folder)) in ("PreTrainedTokenizerFast", "TokenizersBackend")
    reader: Any = PreTrainedTokenizerFast if generic else AutoTokenizer
    try:
        return reader.from_pretrained(str(folder))
    # Without a tokenizer in the folder, or with a damaged one: the class depends on what is wrong,
    # and the Rust reader raises plain Exception.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{where}: no tokenizer that can be read in {str(folder)!r} ({reason}); write a "
            "Hugging Face folder with tokenizer.json"
        ) from None


def _declared_class(folder: Path) -> str | None:
    """The class that tokenizer_config.json names; None if it names none or can't be read."""
    try:
        return str(json.loads((folder / "tokenizer_config.json").read_bytes())["tokenizer_class"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def decode_ids(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of ids: the bytes the stop tables saw, with nothing cleaned up or left out.

    Bytes that are no character (a row can be cut inside one) become the replacement character.
    """
    texts = vocabulary(tokenizer).texts
    return b"".join([texts[index] for index in ids]).decode(errors="replace")


def answer_text(
    tokenizer: Any, ids: Sequence[int], *, opened: str = "<answer>", closed: str = "</answer>"
) -> str:
    """Text of an answer with the tag that the suffix opened, ready to be graded.

    Args:
      tokenizer: the tokenizer that the ids belong to.
      ids: sampled answer tokens, without the suffix.
      opened: what the suffix ended with (`PromptFormat.answer_open`).
      closed: what ends the answer (`PromptFormat.answer_close`).

    Returns:
      `opened`, then the answer up to and including its first `closed`. An answer that never wrote
      `closed` is given whole, which shows a grader that it is unfinished.
    """
    body, tag, _ = decode_ids(tokenizer, ids).partition(closed)
    return opened + body + tag
