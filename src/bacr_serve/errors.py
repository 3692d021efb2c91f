"""Errors that end a request, in OpenAI's format. Used by all modules of this package."""

from typing import Any

from bacr_jax.errors import printable

# OpenAI's error types by HTTP status. Other statuses below 500 have the type `_INVALID`, and
# statuses from 500 on have the type `_SERVER_ERROR`.
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
# Maximum number of characters of a message.
_LONGEST = 500
_SERVER_ERROR = "server_error"
_INVALID = "invalid_request_error"


class RequestError(Exception):
    """Raised if a request cannot be answered.

    Attributes:
      status: HTTP status code.
      message: one line with the field, the invalid value and the suggested fix.
      param: name of the invalid field, or None.
      code: OpenAI's error code, such as "invalid_api_key", or None.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ):
        # Messages and names quote the request, which may contain control characters.
        self.message = printable(message[:_LONGEST])
        self.param = None if param is None else printable(param[:_LONGEST])
        super().__init__(self.message)
        self.status = status
        self.code = code

    def body(self) -> dict[str, Any]:
        """Returns the JSON body of the error, in OpenAI's format."""
        kind = _SERVER_ERROR if self.status >= 500 else _TYPES.get(self.status, _INVALID)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def invalid(field: str, message: str) -> RequestError:
    """Builds the error for an invalid field of a request.

    Args:
      field: name of the field. The error message begins with it.
      message: the invalid value and the suggested fix.
    """
    return RequestError(400, f"{field}: {message}", param=field, code="invalid_value")


def short(value: Any) -> str:
    """Formats a value for an error message, truncated to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
