"""Converts token ids to text piece by piece, without tags and incomplete characters."""

import codecs
from collections.abc import Sequence


class TextStream:
    """Decodes the tokens of one part of a response, such as the thinking.

    The concatenated pieces are the text up to the closing tag, without trailing whitespace. Text
    that may be the beginning of the closing tag and trailing whitespace are stored until further
    tokens are added.

    Attributes:
      closed: True if the closing tag was decoded. All later tokens are ignored.
    """

    def __init__(self, vocabulary: Sequence[bytes], closing: str = "", *, strips: bool = True):
        """Creates a stream without text.

        Args:
          vocabulary: bytes of each token, indexed by token id.
          closing: tag that ends the part, or "" for none.
          strips: True to leave out trailing whitespace.
        """
        self._vocabulary = vocabulary
        self._closing = closing
        self._strips = strips
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pending = ""
        self.closed = False

    def feed(self, tokens: Sequence[int]) -> str:
        """Adds tokens and returns the new text that later tokens cannot change."""
        content = b"".join([self._vocabulary[token] for token in tokens])
        return self._advance(self._decoder.decode(content))

    def finish(self) -> str:
        """Returns the remaining text. Called after the last token."""
        text = self._advance(self._decoder.decode(b"", final=True))
        if self.closed:
            return text
        rest = self._pending.rstrip() if self._strips else self._pending
        self._pending = ""
        return text + rest

    def _advance(self, new_text: str) -> str:
        """Adds text and returns what is certainly neither closing tag nor trailing whitespace."""
        if self.closed:
            return ""
        text = self._pending + new_text
        if self._closing and self._closing in text:
            self.closed = True
            text = text.partition(self._closing)[0]
            return text.rstrip() if self._strips else text
        certain = text[: len(text) - _overlap(text, self._closing)]
        if self._strips:
            certain = certain.rstrip()
        self._pending = text[len(certain) :]
        return certain


def _overlap(text: str, closing: str) -> int:
    """Returns the length of the longest suffix of `text` with which the closing tag begins."""
    for length in range(min(len(closing) - 1, len(text)), 0, -1):
        if text.endswith(closing[:length]):
            return length
    return 0
