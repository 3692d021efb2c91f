"""Client that enforces a thinking budget on an inference engine without budget support.

The first call to the engine samples at most as many thinking tokens as the budget allows. The
second call samples the answer, with the thinking and the closing text appended to the prompt.

Used for rollouts and evaluations on a server, and by the vLLM plugin, which is installed without
bacr_jax. For this reason the package depends only on the standard library.
"""

from bacr_client.calls import (
    Answering as Answering,
    Call as Call,
    Response as Response,
    Sampling as Sampling,
    Thinking as Thinking,
)
from bacr_client.fingerprint import check_manifest as check_manifest, fingerprint as fingerprint
from bacr_client.rules import (
    BudgetRules as BudgetRules,
    read_budget as read_budget,
    read_folder as read_folder,
    read_rules as read_rules,
)
from bacr_client.server import EngineError as EngineError, Refused as Refused, Server as Server
