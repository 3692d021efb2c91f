"""A thinking budget held by calls to an engine that knows nothing of it.

Thinking is one call that may write as many tokens as the budget; the answer is a second one, whose
prompt ends with the thinking and the closing text. The plugin of vLLM stands on it too, where
nothing else of ours can be installed: it needs Python only.
"""

from bacr_held.calls import Answer, Answering, Call, Sampling, Thinking
from bacr_held.fingerprint import check_manifest, fingerprint
from bacr_held.rules import Rules, read_budget, read_folder, read_rules
from bacr_held.server import EngineError, Refused, Server

__all__ = [
    "Answer",
    "Answering",
    "Call",
    "EngineError",
    "Refused",
    "Rules",
    "Sampling",
    "Server",
    "Thinking",
    "check_manifest",
    "fingerprint",
    "read_budget",
    "read_folder",
    "read_rules",
]
