"""Converts requests to token ids and responses to text for the served policy.

Both backends use this module, so that they receive the same token ids for a prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from bacr_serve.errors import RequestError
from bacr_serve.fields import Asked
from bacr_serve.generation import Generation
from bacr_serve.text import TextStream


class Encoder(Protocol):
    """Interface that converts prompts to token ids. `setup.SessionEncoder` implements it."""

    def question(self, question: str, budget: int | None) -> Sequence[int]:
        """Returns the token ids of a question in the policy's prompt format at a budget."""

    def text(self, text: str) -> Sequence[int]:
        """Returns the token ids of a text, without any prompt format."""


@dataclass(frozen=True)
class ServedPolicy:
    """The prompt format, vocabulary and maximum lengths of the served policy.

    Attributes:
      name: name of the policy in requests and responses.
      levels: dict from the name of each budget level to its tokens.
      largest_budget: maximum budget of a request in tokens.
      cap: maximum number of thinking tokens of a request without a budget.
      prompt_tokens: maximum number of tokens of a prompt.
      answer_tokens: maximum number of sampled tokens of an answer.
      vocabulary: bytes of each token, indexed by token id.
      end_ids: ids of the tokens that end the turn.
      think_close: tag that closes the thinking, or "".
      answer_open: text that opens the answer. The forced tokens end with it.
      answer_close: tag that closes the answer.
      encoder: converts prompts to token ids.
      temperature: sampling temperature of a request that contains none.
      top_p: top-p of a request that contains neither a temperature nor a top-p.
    """

    name: str
    levels: Mapping[str, int]
    largest_budget: int
    cap: int
    prompt_tokens: int
    answer_tokens: int
    vocabulary: Sequence[bytes]
    end_ids: frozenset[int]
    think_close: str
    answer_open: str
    answer_close: str
    encoder: Encoder
    temperature: float = 0.0
    top_p: float = 1.0

    def generation(self, asked: Asked) -> Generation:
        """Converts a parsed request to a request for the backend.

        Raises:
          RequestError: if the prompt has too many tokens or contains an invalid token id.
        """
        limit = self.cap if asked.budget is None else asked.budget
        if asked.max_tokens is not None:
            limit = min(limit, asked.max_tokens)
        return Generation(
            prompt=tuple(self._prompt(asked)),
            budget=asked.budget,
            limit=limit,
            temperature=asked.temperature,
            top_p=asked.top_p,
            seed=asked.seed,
            max_tokens=asked.max_tokens,
        )

    def _prompt(self, asked: Asked) -> list[int]:
        """Returns the token ids of a request's prompt."""
        name = "messages" if asked.is_chat else "prompt"
        if isinstance(asked.prompt, tuple):
            ids = list(asked.prompt)
            self._check_ids(ids)
        else:
            self._check_characters(asked.prompt, name)
            try:
                if asked.is_chat:
                    ids = list(self.encoder.question(asked.prompt, asked.budget))
                else:
                    ids = list(self.encoder.text(asked.prompt))
            except ValueError as error:
                raise RequestError(400, f"{name}: {error}", param=name) from None
        if not ids:
            raise RequestError(
                400, f"{name}: the text is empty; send at least one character", param=name
            )
        if len(ids) > self.prompt_tokens:
            raise self._too_long(name, f"{len(ids)} tokens")
        return ids

    def _check_ids(self, ids: Sequence[int]) -> None:
        """Raises RequestError if a token id is not in the vocabulary."""
        for token in ids:
            if not 0 <= token < len(self.vocabulary):
                raise RequestError(
                    400,
                    f"prompt: the token id {token} is not in the vocabulary of this policy; use "
                    f"ids from 0 to {len(self.vocabulary) - 1}",
                    param="prompt",
                )

    def _check_characters(self, text: str, name: str) -> None:
        """Raises RequestError if a text is so long that it must have too many tokens.

        Only compares the number of bytes, so that very long texts are not tokenized.
        """
        longest_token = max(map(len, self.vocabulary))
        if len(text.encode()) > longest_token * self.prompt_tokens:
            raise self._too_long(name, f"{len(text)} characters")

    def _too_long(self, name: str, size: str) -> RequestError:
        return RequestError(
            400,
            f"{name}: the prompt has {size}, but this policy accepts at most {self.prompt_tokens} "
            "tokens; send a shorter prompt",
            param=name,
            code="context_length_exceeded",
        )

    def thinking_text(self) -> TextStream:
        """Returns a decoder for thinking tokens, which leaves out the closing tag."""
        return TextStream(self.vocabulary, self.think_close)

    def answer_text(self) -> TextStream:
        """Returns a decoder for answer tokens, which leaves out the closing tag."""
        return TextStream(self.vocabulary, self.answer_close)

    def raw_text(self) -> TextStream:
        """Returns a decoder that keeps closing tags and whitespace at the end."""
        return TextStream(self.vocabulary, strips=False)

    @property
    def answer_prefix(self) -> str:
        r"""Returns the part of the forced text with which the answer begins, or "".

        Text such as `\boxed{` belongs to the answer, because the answer would otherwise contain
        only the closing brace. A tag such as `<answer>` does not belong to it.
        """
        is_tag = self.answer_open.startswith("<") and self.answer_open.endswith(">")
        return "" if is_tag else self.answer_open
