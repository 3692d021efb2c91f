"""Formats questions as prompts, tokenizes them, and determines which tokens may be sampled.

Some chat templates, such as DeepSeek-R1's, already open the thinking section. In this case,
`think_open` is not added a second time.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
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

# Placeholder for the question while the chat template is rendered: a private-use character.
_PLACEHOLDER = "\ue000"
# Placeholder for a system message while the chat template is rendered.
_SYSTEM = "\ue002"


def frame(tokenizer: Any, style: PromptFormat, user_suffix: str = "") -> tuple[str, str]:
    """Returns the prompt text before and after the question.

    Args:
      user_suffix: text at the end of the user message, such as a sentence with the budget. With a
        chat template, it is a separate paragraph.

    Raises:
      UserError: If the format requires a chat template that is missing, that modifies the question,
        or that opens a thinking section which the format never closes.
    """
    head, tail = _render_frame(tokenizer, style, user_suffix)
    if not _opens_thinking(tail):
        tail += style.think_open
    return head, tail


def user_message(style: PromptFormat, question: str, user_suffix: str) -> str:
    """Returns the user message for chat formats, or the whole prompt for other formats.

    The result does not contain the format's `think_open`.

    Args:
      user_suffix: text at the end of the message, such as a sentence with the budget.
    """
    paragraph = "\n\n" if user_suffix and style.chat else ""
    return style.before + question + style.after + paragraph + user_suffix


def opener(tokenizer: Any, style: PromptFormat) -> str:
    """Returns a description of what opens the thinking section, for messages to the user."""
    _, tail = _render_frame(tokenizer, style, "")
    if _opens_thinking(tail):
        return "the chat template"
    return "the prompt format" if style.think_open else "no tag"


def _opens_thinking(text: str) -> bool:
    """True if a text ends with the opening tag of the thinking section, ignoring whitespace."""
    return text.rstrip().endswith(THINK_OPEN)


def _render_frame(tokenizer: Any, style: PromptFormat, user_suffix: str) -> tuple[str, str]:
    """Returns the text before and after the question, without the format's `think_open`."""
    user = user_message(style, _PLACEHOLDER, user_suffix)
    content = user
    if style.chat:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                f"tokenizer: it has no chat template, which the prompt format {style.name!r} "
                "needs; use the folder of an Instruct model"
            )
        check_variables(tokenizer, style.variables)
        content = render(tokenizer, style, style.system, user)
        _check_thinking(tokenizer, style, content)
    pieces = content.split(_PLACEHOLDER)
    if len(pieces) != 2:
        raise UserError(
            "tokenizer: the prompt that the chat template writes contains the question "
            f"{len(pieces) - 1} times; use a template that writes the user's message once and "
            "unchanged"
        )
    if style.chat:
        _check_system(tokenizer, style, user, content)
    return pieces[0], pieces[1]


def _check_system(tokenizer: Any, style: PromptFormat, user: str, content: str) -> None:
    """Checks the system message in a rendered chat template.

    Spaces and line breaks around the message don't matter, because many templates remove them.

    Args:
      user: user message.
      content: rendered text.

    Raises:
      UserError: If the template does not write the format's system message exactly once, or writes
        a default system message although the format forbids one (`PromptFormat.bare`).
    """
    system = style.system.strip()
    times = content.count(system) - user.count(system)
    if system and times != 1:
        raise UserError(
            "tokenizer: the prompt that the chat template writes contains the system message "
            f"{times} times, although this message defines the format of the answer; use a "
            "template that writes it once and unchanged"
        )
    if not style.bare:
        return
    message = _default_system(tokenizer, style, user, content)
    if message:
        raise UserError(
            "data.system_prompt='': without a system message, the chat template inserts the "
            f"default message {shown(message)}; set data.system_prompt to a text"
        )


def _default_system(tokenizer: Any, style: PromptFormat, user: str, content: str) -> str:
    """Returns the default system message of a template, or an empty string.

    The default message is found by rendering the template with and without a system message, and
    comparing the texts before the question. Text that surrounds the system message in both cases is
    not part of the default message.

    Args:
      user: user message.
      content: text rendered without a system message.
    """
    try:
        with_system = render(tokenizer, style, _SYSTEM, user)
    except UserError:
        # The template rejects system messages, so it does not have a default one.
        return ""
    without = content.partition(_PLACEHOLDER)[0]
    before, _, after = with_system.partition(_PLACEHOLDER)[0].partition(_SYSTEM)
    inside = without.removeprefix(before).removesuffix(after)
    if len(without) != len(before + inside + after):
        return ""
    # A special token at the beginning of every text is not part of a message.
    for added in tokenizer.added_tokens_decoder.values():
        before = before.replace(added.content, "")
        inside = inside.replace(added.content, "")
    return inside.strip() or before.strip()


def _check_thinking(tokenizer: Any, style: PromptFormat, content: str) -> None:
    """Checks the thinking tags of a chat format.

    Args:
      content: rendered chat template.

    Raises:
      UserError: If the vocabulary lacks a tag required by the native format, or if the template
        opens a thinking section that the format never closes.
    """
    tags = (THINK_OPEN, THINK_CLOSE) if style.is_native else ()
    missing = [tag for tag in tags if tag.encode() not in vocabulary(tokenizer)]
    if missing:
        raise UserError(
            f"data.prompt_format=native: the tokenizer has no token {missing[0]}, so its model "
            "was not trained to put its thinking between tags; set "
            "data.prompt_format=think_answer"
        )
    if _opens_thinking(content) and style.think_close != THINK_CLOSE:
        raise UserError(
            f"tokenizer: the chat template begins the thinking with {THINK_OPEN}, but the prompt "
            f"format {style.name!r} does not end it with {THINK_CLOSE}; set "
            "data.prompt_format=native"
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
    """Formats and tokenizes questions.

    Args:
      max_tokens: maximum prompt length. Longer prompts are excluded.
      around: text before and after each question, or None to use `frame`.
      more: number of tokens that the caller will append to each prompt. They count towards
        `max_tokens`.

    Returns:
      Prompts of the remaining questions in the original order, as NumPy arrays, and the indices of
      questions that are excluded because their prompts are too long.

    Raises:
      UserError: If no question remains, or a question is empty or has no tokens.
    """
    head, tail = around or frame(tokenizer, style)
    bodies = [question.strip() for question in questions]
    if not bodies:
        raise UserError("data: the set contains no question; use a set with at least one question")
    for row, body in enumerate(bodies):
        if not body:
            raise UserError(f"question {row} is empty; use a non-empty text")
    ids, offsets = _tokenise(tokenizer, bodies, head, tail)
    spans = []
    for row, (body, token_offsets) in enumerate(zip(bodies, offsets, strict=True)):
        span = _question_span(token_offsets, len(head), len(head) + len(body))
        if span is None:
            raise UserError(
                f"question {row}: the tokenizer encodes {shown(body)} to zero tokens; use the "
                "tokenizer that the model was trained with"
            )
        spans.append(span)
    lengths = np.array([len(row) for row in ids], np.int32)
    fits = lengths + more <= max_tokens
    kept_rows = np.flatnonzero(fits)
    if not len(kept_rows):
        raise UserError(
            f"data.max_prompt_tokens={max_tokens}: all {len(ids)} prompts are longer, with "
            f"{lengths.min() + more} tokens or more; set a larger number"
        )
    tokens: Any = np.zeros((len(kept_rows), lengths[kept_rows].max()), np.int32)
    for row, index in enumerate(kept_rows):
        tokens[row, : lengths[index]] = ids[index]
    kept_lengths: Any = lengths[kept_rows]
    starts, ends = np.array(spans, np.int32)[kept_rows].T
    # The arrays stay on the host, where rows are selected and copied to the device per batch.
    prompts = Prompts(tokens, kept_lengths, starts, ends)
    return prompts, np.flatnonzero(~fits)


def _question_span(offsets: Any, start: int, end: int) -> tuple[int, int] | None:
    """Returns the range [first, last) of tokens that overlap with the question.

    Args:
      offsets: (start, end) character offsets of each token.
      start: offset of the first character of the question.
      end: offset after the last character of the question.

    Returns:
      The token range, or None if no token overlaps with the question.
    """
    begins, ends = np.array(offsets, int).reshape(-1, 2).T
    inside = np.flatnonzero((begins < end) & (ends > start))
    if not len(inside):
        return None
    return int(inside[0]), int(inside[-1]) + 1


def _tokenise(
    tokenizer: Any, bodies: list[str], head: str, tail: str
) -> tuple[list[list[int]], list[Any]]:
    """Tokenizes prompts. Returns the token ids of each prompt and their character offsets.

    Args:
      bodies: question of each prompt.
      head: text before each question.
      tail: text after each question.

    Raises:
      UserError: If the tokenizer cannot encode a question.
    """

    def refusal(row: int) -> str:
        return (
            f"question {row}: the tokenizer can't encode {bodies[row][:80]!r}, because its "
            "vocabulary lacks some of these characters; use questions of the kind that the model "
            "was trained on"
        )

    texts = [head + body + tail for body in bodies]
    encoded = tokenize(tokenizer, texts, refusal, return_offsets_mapping=True)
    return encoded["input_ids"], encoded["offset_mapping"]


def tokenize(
    tokenizer: Any, texts: list[str], refusal: Callable[[int], str], **options: Any
) -> Mapping[str, list[Any]]:
    """Tokenizes texts without adding special tokens.

    Args:
      refusal: maps the index of a text that the tokenizer cannot encode to an error message.
      options: further options of the tokenizer.

    Raises:
      UserError: If the tokenizer cannot encode a text.
    """
    # Text lengths are checked against our limits. `verbose` would add a warning about the
    # tokenizer's limit.
    options = {"add_special_tokens": False, "verbose": False, **options}
    try:
        encoded: Mapping[str, list[Any]] = tokenizer(texts, **options)
    # Tokenizers without an unknown token raise Exception without the index of the text. A panic in
    # the Rust library is not an Exception.
    except BaseException as error:
        if not is_refusal(error):
            raise
        row = _first_refused(tokenizer, texts, options)
        if row is None:
            raise
        raise UserError(refusal(row)) from error
    return encoded


def _first_refused(tokenizer: Any, texts: list[str], options: dict[str, Any]) -> int | None:
    """Returns the index of the first text that the tokenizer cannot encode, or None."""
    for row, text in enumerate(texts):
        try:
            tokenizer(text, **options)
        except BaseException as error:
            if not is_refusal(error):
                raise
            return row
    return None


def encode_text(tokenizer: Any, text: str) -> Int[np.ndarray, "n"]:
    """Tokenizes a text, such as a suffix, without adding special tokens."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return np.asarray(ids, np.int32)


def suffix_length(tokenizer: Any, style: PromptFormat) -> int:
    """Returns the largest number of tokens that are forced between thinking and answer."""
    texts = (style.forced_suffix, style.natural_suffix)
    return max(len(encode_text(tokenizer, text)) for text in texts)


def with_ids(prompts: Prompts, ids: Int[np.ndarray, "*B n"]) -> Prompts:
    """Appends the same token ids, or different ids per row, to each of B prompts.

    For example, if responses begin with a declared budget, the ids are its number and closing tag.
    """
    count = ids.shape[-1]
    longer: Any = prompts.padded(prompts.tokens.shape[1] + count)
    lengths: Any = np.asarray(prompts.lengths)
    rows = np.arange(len(lengths))[:, None]
    positions = lengths[:, None] + np.arange(count)
    longer.tokens[rows, positions] = ids
    return dataclasses.replace(longer, lengths=lengths + count)


def eos_ids(tokenizer: Any, style: PromptFormat) -> tuple[int, ...]:
    """Returns the token ids that end the model's turn.

    These are the ids in generation_config.json, the tokenizer's EOS token, the end tokens of the
    prompt format, and the token with which the chat template ends an assistant message. The model
    was trained to generate this token, even if generation_config.json specifies a different one.

    Raises:
      UserError: If the tokenizer has none of these tokens.
    """
    texts = vocabulary(tokenizer)
    ends = [*style.turn_end, tokenizer.eos_token or ""]
    if style.chat and getattr(tokenizer, "chat_template", None):
        ends.append(turn_end(tokenizer, style))
    end_texts = {end.encode() for end in ends if end}
    folder_ends = getattr(tokenizer, "turn_ends", ())
    ids = tuple(
        index for index, text in enumerate(texts) if text in end_texts or index in folder_ends
    )
    if not ids:
        raise UserError(
            "tokenizer: it has no end token (eos_token), and none of the tokens "
            f"{list(style.turn_end)}; set eos_token in its tokenizer_config.json"
        )
    return ids


def line_breaks(tokenizer: Any, vocab_size: int) -> Bool[np.ndarray, "V"]:
    """Returns a mask of the token ids whose text contains a line break.

    In a run with a grace window, thinking may continue beyond its budget until such a token.
    """
    has_break = np.zeros(vocab_size, bool)
    texts = vocabulary(tokenizer)
    has_break[: len(texts)] = [b"\n" in text for text in texts]
    return has_break


def allowed_tokens(tokenizer: Any, style: PromptFormat, vocab_size: int) -> Bool[np.ndarray, "V"]:
    """Returns a mask of the token ids that may be sampled, of length `vocab_size`.

    Two kinds of ids are excluded: ids without a token (models pad their vocabulary), and added
    tokens that are markup, such as the start of a turn or of a tool call. Added tokens that end the
    turn or belong to the prompt format are allowed.
    """
    texts = vocabulary(tokenizer)
    allowed = np.zeros(vocab_size, bool)
    allowed[: len(texts)] = [bool(text) for text in texts]
    format_text = (
        style.think_close + style.forced_suffix + style.natural_suffix + style.answer_close
    )
    for index, added in tokenizer.added_tokens_decoder.items():
        allowed[index] = added.content in format_text
    unused = {text.encode() for text in style.unused}
    for index, text in enumerate(texts):
        if text in unused:
            allowed[index] = False
    allowed[list(eos_ids(tokenizer, style))] = True
    return allowed
