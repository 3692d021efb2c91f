"""From the tokens of an answer to the text that is graded."""

from collections.abc import Sequence
from typing import Any

from bacr_jax.data.stop_strings import vocabulary


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


def answer_content(text: str, *, opened: str = "<answer>", closed: str = "</answer>") -> str | None:
    """What stands between the tags of `answer_text`, stripped; None if it was never closed."""
    body, tag, _ = text.removeprefix(opened).partition(closed)
    return body.strip() if tag else None
