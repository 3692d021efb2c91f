"""Builds the JSON bodies of responses in OpenAI's format from the pieces of a response.

A `Reply` receives the pieces in order and returns either the events of a stream or the complete
body.
"""

import time
import uuid
from typing import Any

from bacr_serve.fields import Asked
from bacr_serve.generation import ANSWER, FORCED, THINKING, Generation, Piece
from bacr_serve.policy import ServedPolicy

# Name of the field of a choice that contains our additions to OpenAI's format.
DETAILS = "bacr"


class Reply:
    """The response to one request in OpenAI's format.

    Attributes:
      finish_reason: "stop" if the answer ended by itself, "length" if it was truncated.
    """

    def __init__(self, policy: ServedPolicy, asked: Asked, request: Generation):
        self._policy = policy
        self._asked = asked
        self._request = request
        self._created = int(time.time())
        prefix = "chatcmpl" if asked.is_chat else "cmpl"
        self._id = f"{prefix}-{uuid.uuid4().hex}"
        self._counts = {THINKING: 0, FORCED: 0, ANSWER: 0}
        self._thinking = policy.thinking_text()
        self._answer = policy.answer_text()
        self._raw = policy.raw_text()
        self._forced_text = ""
        self._closed_by: str | None = None
        self._contents = {"reasoning_content": "", "content": "", "text": ""}
        self.finish_reason = "length"

    def take(self, piece: Piece) -> dict[str, str]:
        """Adds a piece and returns a dict from each field of the response to its new text."""
        self._counts[piece.kind] += len(piece.tokens)
        if piece.finished:
            self.finish_reason = "stop"
        change: dict[str, str] = {}
        if not self._asked.is_chat:
            change["text"] = self._raw.feed(self._without_end(piece))
        elif piece.kind == THINKING:
            change["reasoning_content"] = self._thinking.feed(piece.tokens)
        elif piece.kind == FORCED:
            change["reasoning_content"] = self._thinking.finish()
            if piece.closed_by is not None:
                change["content"] = self._policy.answer_prefix
        else:
            change["content"] = self._answer.feed(self._without_end(piece))
        if piece.kind == FORCED:
            self._close_thinking(piece)
        return self._added(change)

    def _close_thinking(self, piece: Piece) -> None:
        """Stores the reason why the thinking ended and the text of the forced tokens."""
        decoder = self._policy.raw_text()
        self._closed_by = piece.closed_by
        self._forced_text = decoder.feed(piece.tokens) + decoder.finish()

    def _without_end(self, piece: Piece) -> tuple[int, ...]:
        """Returns the tokens of a piece, without an end-of-turn token that ended the answer."""
        tokens = piece.tokens
        if piece.kind == ANSWER and tokens and tokens[-1] in self._policy.end_ids:
            return tokens[:-1]
        return tokens

    def finish(self) -> dict[str, str]:
        """Returns the remaining text of each field. Called after the last piece."""
        if not self._asked.is_chat:
            return self._added({"text": self._raw.finish()})
        rest = {"content": self._answer.finish()}
        if self._closed_by is None:
            rest["reasoning_content"] = self._thinking.finish()
        return self._added(rest)

    def _added(self, change: dict[str, str]) -> dict[str, str]:
        """Appends new text to each field and returns the fields whose new text is not empty."""
        for name, text in change.items():
            self._contents[name] += text
        return {name: text for name, text in change.items() if text}

    def usage(self) -> dict[str, Any]:
        """Returns the token counts. Forced tokens count as completion tokens, not as reasoning."""
        prompt = len(self._request.prompt)
        completion = sum(self._counts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "completion_tokens_details": {"reasoning_tokens": self._counts[THINKING]},
        }

    def details(self) -> dict[str, Any]:
        """Returns the budget, the token counts and the reason why the thinking ended."""
        return {
            "budget": self._request.budget,
            "thinking_tokens": self._counts[THINKING],
            "forced_tokens": self._counts[FORCED],
            "answer_tokens": self._counts[ANSWER],
            "closed_by": self._closed_by,
            "forced_text": self._forced_text,
        }

    def whole(self) -> dict[str, Any]:
        """Returns the complete body of a response that is not streamed."""
        choice: dict[str, Any] = {"index": 0}
        if self._asked.is_chat:
            choice["message"] = {
                "role": "assistant",
                "content": self._contents["content"],
                "reasoning_content": self._contents["reasoning_content"],
            }
        else:
            choice["text"] = self._contents["text"]
        choice |= {
            "logprobs": None,
            "finish_reason": self.finish_reason,
            DETAILS: self.details(),
        }
        return {**self._head(""), "choices": [choice], "usage": self.usage()}

    def first_chunk(self) -> dict[str, Any]:
        """Returns the first event of a streamed chat, which contains the role."""
        return self._chunk({"role": "assistant", "content": ""})

    def chunk(self, change: dict[str, str]) -> dict[str, Any]:
        """Returns a stream event that contains new text."""
        return self._chunk(change)

    def last_chunk(self) -> dict[str, Any]:
        """Returns the event with the finish reason, which follows the last text of a stream."""
        return self._chunk({} if self._asked.is_chat else {"text": ""}, self.finish_reason)

    def usage_chunk(self) -> dict[str, Any]:
        """Returns a stream event that contains the token counts and no text."""
        return {**self._head(".chunk"), "choices": [], "usage": self.usage()}

    def _chunk(self, change: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0}
        if self._asked.is_chat:
            choice["delta"] = change
        else:
            choice |= change
        choice |= {
            "logprobs": None,
            "finish_reason": finish_reason,
            DETAILS: self.details(),
        }
        return {**self._head(".chunk"), "choices": [choice]}

    def _head(self, suffix: str) -> dict[str, Any]:
        """Returns the fields that all bodies and events of a response contain."""
        kind = f"chat.completion{suffix}" if self._asked.is_chat else "text_completion"
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._policy.name,
        }
