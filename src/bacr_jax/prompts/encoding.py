"""Questions in a prompt format, as text and as tokens; and the ids that a format lets be sampled.

A chat template may open thinking itself, as R1's does; then `think_open` is not written again.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from bacr_jax.config.values import shown
from bacr_jax.errors import UserError
from bacr_jax.prompts.chat_template import check_variables, render, turn_end
from bacr_jax.prompts.formats import THINK_CLOSE, THINK_OPEN, PromptFormat
from bacr_jax.prompts.stop_strings import vocabulary
from bacr_jax.prompts.tokenizers import is_refusal
from bacr_jax.types import Prompts

# Stands for the question while the chat template is rendered: a private-use character.
_PLACEHOLDER = "\ue000"
# Likewise for a system message.
_SYSTEM = "\ue002"


def frame(tokenizer: Any, style: PromptFormat, said: str = "") -> tuple[str, str]:
    """Text before and after the question; the prompt is their concatenation around it.

    `said` stands at the end of the user's message; with a chat template in a paragraph of its own.

    Raises:
      UserError: the format needs a chat template and the tokenizer has none, or one that does not
        give the question back as it is, or opens thinking that the format never closes.
    """
    head, tail = _rendered(tokenizer, style, said)
    return head, tail if _opens(tail) else tail + style.think_open


def user_message(style: PromptFormat, question: str, said: str) -> str:
    """The message of a chat, or the whole text of another format but for what opens thinking."""
    paragraph = "\n\n" if said and style.chat else ""
    return style.before + question + style.after + paragraph + said


def opener(tokenizer: Any, style: PromptFormat) -> str:
    """Who opens thinking, in words."""
    if _opens(_rendered(tokenizer, style, "")[1]):
        return "the chat template"
    return "the prompt format" if style.think_open else "no tag"


def _opens(tail: str) -> bool:
    """Whether the text behind the question ends by opening thinking."""
    return tail.rstrip().endswith(THINK_OPEN)


def _rendered(tokenizer: Any, style: PromptFormat, said: str) -> tuple[str, str]:
    """`frame` before the format opens thinking."""
    user = content = user_message(style, _PLACEHOLDER, said)
    if style.chat:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                f"tokenizer: found no chat template, which the prompt format {style.name!r} needs; "
                "write the folder of an Instruct model"
            )
        check_variables(tokenizer, style.variables)
        content = render(tokenizer, style, style.system, user)
        _check_thinking(tokenizer, style, content)
    pieces = content.split(_PLACEHOLDER)
    if len(pieces) != 2:
        raise UserError(
            f"tokenizer: found a chat template that writes the question {len(pieces) - 1} times; "
            "write one that keeps the user's message as it is"
        )
    if style.chat:
        _check_system(tokenizer, style, user, content)
    return pieces[0], pieces[1]


def _check_system(tokenizer: Any, style: PromptFormat, user: str, content: str) -> None:
    """The system message is written as it is; where there is to be none, there is none."""
    times = content.count(style.system) - user.count(style.system)
    if style.system and times != 1:
        raise UserError(
            f"tokenizer: found a chat template that writes the system message {times} times, which "
            "says how to answer; write one that keeps it as it is"
        )
    if not style.bare:
        return
    try:
        whole = render(tokenizer, style, _SYSTEM, user).partition(_PLACEHOLDER)[0]
    except UserError:
        # It takes no system message.
        return
    without = content.partition(_PLACEHOLDER)[0]
    before, _, after = whole.partition(_SYSTEM)
    inside = without.removeprefix(before).removesuffix(after)
    around = len(without) == len(before + inside + after)
    # A token that begins every text is no message.
    for added in tokenizer.added_tokens_decoder.values():
        before, inside = (text.replace(added.content, "") for text in (before, inside))
    if around and (own := inside.strip() or before.strip()):
        raise UserError(
            f"data.system_prompt='': the chat template writes a system message of its own where "
            f"none is given, {shown(own)}; write a text"
        )


def _check_thinking(tokenizer: Any, style: PromptFormat, content: str) -> None:
    """Tags that the format takes for granted are there, and what the template opens is closed."""
    tags = (THINK_OPEN, THINK_CLOSE) if style.name == "native" else ()
    if missing := [tag for tag in tags if tag.encode() not in vocabulary(tokenizer)]:
        raise UserError(
            f"data.prompt_format=native: the tokenizer has no token {missing[0]}, so its model was "
            "not trained to think in tags; write think_answer"
        )
    if _opens(content) and style.think_close != THINK_CLOSE:
        raise UserError(
            f"tokenizer: its chat template opens {THINK_OPEN}, which the prompt format "
            f"{style.name!r} never closes; write data.prompt_format=native"
        )


def encode_prompts(
    tokenizer: Any,
    questions: Sequence[str],
    style: PromptFormat,
    *,
    max_tokens: int,
    around: tuple[str, str] | None = None,
    more: int = 0,
) -> tuple[Prompts, Int[np.ndarray, "dropped"]]:
    """Tokenises questions in their format.

    Args:
      around: text before and after each question; the format's own if None (`frame`).
      more: tokens that each prompt will get later on, which count as its own.

    Returns:
      Prompts of the questions kept, in their order, as numpy arrays, and the indices of those left
      out because they are longer than `max_tokens`.
    """
    head, tail = around or frame(tokenizer, style)
    bodies = [question.strip() for question in questions]
    if not bodies:
        raise UserError("data: found no question; write a set with at least one")
    for row, body in enumerate(bodies):
        if not body:
            raise UserError(f"question {row}: found an empty text; write a question")
    ids, offsets = _tokenise(tokenizer, bodies, head, tail)
    spans = []
    for row, (body, where) in enumerate(zip(bodies, offsets, strict=True)):
        # A token belongs to the question if it holds any of its characters.
        begin, end = np.array(where, int).reshape(-1, 2).T
        inside = np.flatnonzero((begin < len(head) + len(body)) & (end > len(head)))
        if not len(inside):
            raise UserError(
                f"question {row}: the tokenizer makes no token of {shown(body)}; write the "
                "tokenizer that the model was trained with"
            )
        spans.append((inside[0], inside[-1] + 1))
    lengths = np.array([len(row) for row in ids], np.int32)
    fits = lengths + more <= max_tokens
    kept = np.flatnonzero(fits)
    if not len(kept):
        raise UserError(
            f"data.max_prompt_tokens={max_tokens}: found {len(ids)} prompts of "
            f"{lengths.min() + more} tokens or more; write a larger number"
        )
    tokens = np.zeros((len(kept), lengths[kept].max()), np.int32)
    for row, index in enumerate(kept):
        tokens[row, : lengths[index]] = ids[index]
    # Numpy arrays: the host picks rows out of them; they go to the device batch by batch.
    arrays: tuple[Any, ...] = (tokens, lengths[kept], *np.array(spans, np.int32)[kept].T)
    return Prompts(*arrays), np.flatnonzero(~fits)


def _tokenise(
    tokenizer: Any, bodies: list[str], head: str, tail: str
) -> tuple[list[list[int]], list[Any]]:
    """Ids of each prompt, and the characters that each id covers."""
    # The limits are ours: a warning about the folder's own would be a second line.
    options = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
    try:
        encoded = tokenizer([head + body + tail for body in bodies], **options)
    # Tokenizers without a token for unknown text raise Exception, and do not say for which row; a
    # panic of the Rust library is no Exception.
    except BaseException as error:
        if not is_refusal(error):
            raise
        for row, body in enumerate(bodies):
            try:
                tokenizer(head + body + tail, **options)
            except BaseException as own:
                if not is_refusal(own):
                    raise
                raise UserError(
                    f"question {row}: the tokenizer has no tokens for {body[:80]!r}; write a "
                    "question of the kind the model was trained on"
                ) from error
        raise
    return encoded["input_ids"], encoded["offset_mapping"]


def encode_text(tokenizer: Any, text: str) -> Int[np.ndarray, "n"]:
    """Ids of a piece of text (a suffix), without anything added."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return np.asarray(ids, np.int32)


def with_ids(prompts: Prompts, ids: Int[np.ndarray, "*B n"]) -> Prompts:
    """Prompts with ids behind the last one of each row, the same for all or each row's own.

    Of a policy that declares its budget they are the number and the closing tag.
    """
    count = ids.shape[-1]
    longer: Any = prompts.padded(prompts.tokens.shape[1] + count)
    at = np.asarray(prompts.lengths)[:, None] + np.arange(count)
    longer.tokens[np.arange(len(at))[:, None], at] = ids
    return dataclasses.replace(longer, lengths=np.asarray(prompts.lengths) + count)


def eos_ids(tokenizer: Any, style: PromptFormat) -> tuple[int, ...]:
    """Returns the ids that end the model's turn.

    They are those that its folder names, the tokenizer's end token, the format's, and the token
    with which the chat template ends an answer: a model was trained to write that one, whatever
    generation_config.json names.

    UserError: the tokenizer has none of them.
    """
    texts = vocabulary(tokenizer)
    ends = [*style.turn_end, tokenizer.eos_token or ""]
    if style.chat and getattr(tokenizer, "chat_template", None):
        ends.append(turn_end(tokenizer, style))
    wanted = {end.encode() for end in ends if end}
    named = getattr(tokenizer, "turn_ends", ())
    found = tuple(i for i, text in enumerate(texts) if text in wanted or i in named)
    if not found:
        raise UserError(
            f"tokenizer: found neither an end token nor any of {list(style.turn_end)}; set "
            "eos_token in its tokenizer_config.json"
        )
    return found


def line_breaks(tokenizer: Any, vocab_size: int) -> Bool[np.ndarray, "V"]:
    """Ids whose text holds a line break, where a grace window may end."""
    found = np.zeros(vocab_size, bool)
    texts = vocabulary(tokenizer)
    found[: len(texts)] = [b"\n" in text for text in texts]
    return found


def allowed_tokens(tokenizer: Any, style: PromptFormat, vocab_size: int) -> Bool[np.ndarray, "V"]:
    """True at the ids that may be sampled, of the `vocab_size` rows of the model's embedding.

    Ids beyond the tokenizer (models pad their vocabulary) and markup (added tokens, such as those
    that open a turn or a tool call) may not, unless it ends the turn or belongs to the format.
    """
    texts = vocabulary(tokenizer)
    allowed = np.zeros(vocab_size, bool)
    allowed[: len(texts)] = [bool(text) for text in texts]
    written = style.think_close + style.forced_suffix + style.natural_suffix + style.answer_close
    for index, added in tokenizer.added_tokens_decoder.items():
        allowed[index] = added.content in written
    unused = {text.encode() for text in style.unused}
    allowed[[index for index, text in enumerate(texts) if text in unused]] = False
    allowed[list(eos_ids(tokenizer, style))] = True
    return allowed
