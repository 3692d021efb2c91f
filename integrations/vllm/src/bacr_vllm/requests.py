"""Reads the budget of a request, and rejects invalid requests before they run."""

import json
from functools import lru_cache
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from bacr_client.rules import numbers_in, read_budget

# Names of the fields in `SamplingParams.extra_args`, or over HTTP in `vllm_xargs`.
BUDGET = "budget"
RESPONSE_FROM = "response_from"
FOLDER = "folder"


def _extra(params: SamplingParams | None) -> dict[str, Any]:
    return (params.extra_args or {}) if params is not None else {}


def budget_of(params: SamplingParams | None, levels: dict[str, int]) -> int | None:
    """Returns the budget of a valid request in tokens, or None if it has no budget."""
    return read_budget(_extra(params).get(BUDGET), levels)


def response_start(params: SamplingParams | None, prompt_tokens: int) -> int:
    """Returns the position at which the response begins.

    It is the end of the prompt, unless the request specifies another position.
    """
    start = _extra(params).get(RESPONSE_FROM)
    return prompt_tokens if start is None else int(start)


class BudgetRequests(LogitsProcessor):
    """Rejects invalid requests, and masks the tokens that the prompt format never samples.

    Attributes:
      levels: named budgets, such as `low`, in tokens.
      most: largest budget in tokens. The model has no positions for a larger one.
      folder: fingerprint of the folder, or an empty string if it is unknown.
    """

    levels: dict[str, int] = {}
    most = 0
    folder = ""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Checks a request; vLLM calls this when the request arrives.

        Raises:
          ValueError: a field is invalid. vLLM replies with HTTP status 400.
        """
        extra = _extra(sampling_params)
        read_budget(extra.get(BUDGET), cls.levels, cls.most)
        start = extra.get(RESPONSE_FROM, 0)
        if type(start) is not int or start < 0:
            raise ValueError(
                f"response_from is {start!r:.80}, but must be the number of tokens before the "
                "response"
            )
        if FOLDER in extra and extra[FOLDER] != cls.folder:
            raise ValueError(
                f"folder: the request is for the folder {extra[FOLDER]!r:.80}, but this engine "
                f"serves {cls.folder!r}; start the engine with the request's folder"
            )

    def __init__(self, vllm_config: Any, req_states: Any):
        """Reads the tokens that are never sampled; vLLM calls this in its worker process."""
        super().__init__(vllm_config, req_states)
        thinking = vllm_config.model_config.hf_config.thinking
        masked = torch.zeros(req_states.vocab_size, dtype=torch.bool)
        ids = [token for token in numbers_in(thinking["never_sampled"]) if token < len(masked)]
        masked[ids] = True
        self.masked = masked.to(req_states.device)

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Returns the logits [rows, V] with -inf for the tokens that are never sampled."""
        return logits.masked_fill_(self.masked, float("-inf"))


@lru_cache
def _class_for(attributes: str) -> type[BudgetRequests]:
    """Returns a subclass of `BudgetRequests` with class attributes given as JSON."""
    return type("BudgetRequests", (BudgetRequests,), json.loads(attributes))


class _ClassesByName:
    """Makes subclasses of `BudgetRequests` from the names of attributes.

    vLLM validates requests by a classmethod, and passes a class between processes as the name of a
    module and an attribute. Therefore the attribute's name contains the settings of the class, as
    JSON in hexadecimal digits.
    """

    def __getattr__(self, name: str) -> type[BudgetRequests]:
        try:
            return _class_for(bytes.fromhex(name.removeprefix("of_")).decode())
        except ValueError:
            raise AttributeError(name) from None


FOLDERS = _ClassesByName()


def processor_name(levels: dict[str, int], most: int, folder: str) -> str:
    """Returns the name of a folder's class for `model_config.logits_processors`.

    Args:
      levels: named budgets in tokens.
      most: largest budget in tokens.
      folder: fingerprint of the folder.
    """
    settings = {"levels": levels, "most": most, "folder": folder}
    encoded = json.dumps(settings, sort_keys=True).encode().hex()
    return f"{__name__}:FOLDERS.of_{encoded}"
