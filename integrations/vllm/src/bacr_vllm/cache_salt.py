"""Keys and values depend on the budget: what vLLM keeps of a prompt is kept for that budget alone.

vLLM finds cached blocks by a hash of their tokens and of the request's `cache_salt`. The salt of a
request with a budget gets the budget, in the engine itself, after everything that a client can
write: no client has to think of it, and none can leave it out.
"""

from typing import Any

from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from bacr_vllm.requests import BUDGET, RESPONSE_FROM


def budget_salt(request: EngineCoreRequest) -> str:
    """What joins the salt of a request; empty without a budget, where the model is plain Qwen2.

    Where the response begins counts too: a model may be told its budget from there on only.
    """
    params = request.sampling_params
    extra = (params.extra_args or {}) if params is not None else {}
    budget = extra.get(BUDGET)
    if budget is None or budget == "none":
        return ""
    return f"budget={budget!r} response_from={extra.get(RESPONSE_FROM)!r}"


def salt_requests() -> None:
    """Makes the engine salt the requests that enter it; once per process."""
    plain = Request.from_engine_core_request.__func__
    if getattr(plain, "_salts_budgets", False):
        return

    def salted(cls: type[Request], request: EngineCoreRequest, block_hasher: Any) -> Request:
        salt = budget_salt(request)
        if salt:
            request.cache_salt = f"{request.cache_salt or ''}|{salt}"
        return plain(cls, request, block_hasher)

    salted._salts_budgets = True  # type: ignore[attr-defined]
    Request.from_engine_core_request = classmethod(salted)
