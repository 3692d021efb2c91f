"""What a request may ask of a folder: its budget, read and refused before it runs."""

import json
from functools import lru_cache
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from bacr_client.rules import numbers_in, read_budget

# Names in `SamplingParams.extra_args`, and over HTTP in `vllm_xargs`.
BUDGET, RESPONSE_FROM, FOLDER = "budget", "response_from", "folder"


def _extra(params: SamplingParams | None) -> dict[str, Any]:
    return (params.extra_args or {}) if params is not None else {}


def budget_of(params: SamplingParams | None, levels: dict[str, int]) -> int | None:
    """The budget that a request that was let in is told; None: plain Qwen2."""
    return read_budget(_extra(params).get(BUDGET), levels)


def response_start(params: SamplingParams | None, prompt_tokens: int) -> int:
    """The position at which a request's response begins: behind its prompt, unless it says so."""
    start = _extra(params).get(RESPONSE_FROM)
    return prompt_tokens if start is None else int(start)


class BudgetRequests(LogitsProcessor):
    """Refuses what can't be asked, and never lets tokens be sampled that the format never writes.

    Attributes:
      levels: tokens by name.
      most: the largest budget: more would leave the model's positions.
      folder: fingerprint of the folder; "": unknown.
    """

    levels: dict[str, int] = {}
    most = 0
    folder = ""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Called by vLLM for every request on its arrival; a refusal is HTTP status 400.

        Raises:
          ValueError: names the field.
        """
        extra = _extra(sampling_params)
        read_budget(extra.get(BUDGET), cls.levels, cls.most)
        start = extra.get(RESPONSE_FROM, 0)
        if type(start) is not int or start < 0:
            raise ValueError(f"response_from: found {start!r:.80}; use the number of prompt tokens")
        if FOLDER in extra and extra[FOLDER] != cls.folder:
            raise ValueError(
                f"folder: found {extra[FOLDER]!r:.80}, this engine serves {cls.folder!r}; start it "
                "with the other folder"
            )

    def __init__(self, vllm_config: Any, req_states: Any):
        """Called by vLLM in the worker."""
        super().__init__(vllm_config, req_states)
        thinking = vllm_config.model_config.hf_config.thinking
        never = torch.zeros(req_states.vocab_size, dtype=torch.bool)
        ids = [token for token in numbers_in(thinking["never_sampled"]) if token < len(never)]
        never[ids] = True
        self.never = never.to(req_states.device)

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Scores [rows, V] with those of such tokens at the bottom."""
        return logits.masked_fill_(self.never, float("-inf"))


@lru_cache
def _of(facts: str) -> type[BudgetRequests]:
    return type("BudgetRequests", (BudgetRequests,), json.loads(facts))


class _ByName:
    """Classes of `BudgetRequests` by names that say everything about them.

    vLLM asks the class, not an object, whether a request is good, and names it across processes by
    module and attribute. So the attribute holds what the class has to know: JSON, in hexadecimal.
    """

    def __getattr__(self, name: str) -> type[BudgetRequests]:
        try:
            return _of(bytes.fromhex(name.removeprefix("of_")).decode())
        except ValueError:
            raise AttributeError(name) from None


FOLDERS = _ByName()


def processor_name(levels: dict[str, int], most: int, folder: str) -> str:
    """What `model_config.logits_processors` calls the class for a folder."""
    facts = json.dumps({"levels": levels, "most": most, "folder": folder}, sort_keys=True)
    return f"{__name__}:FOLDERS.of_{facts.encode().hex()}"
