"""Separates vLLM's prefix cache by budget, because keys and values depend on the budget.

vLLM finds cached blocks by a hash of their tokens and of the request's `cache_salt`. The engine
appends the budget to this salt, so clients don't have to, and can't leave it out.
"""

from typing import Any

from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from bacr_vllm.requests import BUDGET, RESPONSE_FROM


def budget_salt(request: EngineCoreRequest) -> str:
    """Returns the text that is appended to a request's salt.

    It is empty for a request without a budget, for which the model is the plain model. The text
    includes the position at which the response begins, because some policies receive the budget
    only from there on.
    """
    params = request.sampling_params
    extra = (params.extra_args or {}) if params is not None else {}
    budget = extra.get(BUDGET)
    if budget is None or budget == "none":
        return ""
    return f"budget={budget!r} response_from={extra.get(RESPONSE_FROM)!r}"


def salt_requests() -> None:
    """Makes the engine add the budget to the salt of every request.

    A second call in the same process has no effect.
    """
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
