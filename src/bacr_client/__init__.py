"""Limits the thinking of a policy by calls to an engine that knows no budgets.

The first call samples at most as many thinking tokens as the budget. The second call samples the
answer, with a prompt that ends with the thinking and the closing text. Used by rollouts and
evaluations on a server, and by the vLLM plugin, which is installed without bacr_jax. Standard
library only.
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
