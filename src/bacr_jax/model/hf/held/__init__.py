"""A thinking budget held by calls to an engine that knows nothing of it.

Thinking is one call that may write as many tokens as the budget; the answer is a second one, whose
prompt ends with the thinking and the closing text. `bacr_vllm` holds the same files, so that they
need Python only and import each other by their own names.
"""

from .calls import Answer, Answering, Call, Sampling, Thinking
from .fingerprint import fingerprint
from .rules import LARGEST, Rules, read_budget, read_folder, read_rules
from .server import EngineError, Refused, Server

__all__ = [
    "LARGEST",
    "Answer",
    "Answering",
    "Call",
    "EngineError",
    "Refused",
    "Rules",
    "Sampling",
    "Server",
    "Thinking",
    "fingerprint",
    "read_budget",
    "read_folder",
    "read_rules",
]
