"""A thinking budget held by calls to an engine that knows nothing of it.

Thinking is one call that may write as many tokens as the budget; the answer is a second one, whose
prompt ends with the thinking and the closing text. The plugin of vLLM stands on it too, where
nothing else of ours can be installed: it needs Python only.
"""

from bacr_held.calls import (
    Answer as Answer,
    Answering as Answering,
    Call as Call,
    Sampling as Sampling,
    Thinking as Thinking,
)
from bacr_held.fingerprint import check_manifest as check_manifest, fingerprint as fingerprint
from bacr_held.rules import (
    Rules as Rules,
    read_budget as read_budget,
    read_folder as read_folder,
    read_rules as read_rules,
)
from bacr_held.server import EngineError as EngineError, Refused as Refused, Server as Server
