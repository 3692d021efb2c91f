"""Updates the model's table of phi when requests begin (for vLLM's model runner V2)."""

from typing import Any

import torch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from bacr_vllm.requests import budget_of, response_start


class BudgetState(DefaultModelState):
    """State of the running requests. The slot of a request is its row in the model's table.

    Attributes:
      levels: named budgets, such as `low`, in tokens.
      start: for each slot, the position from which its request receives the budget embedding.
    """

    def __init__(self, *args: Any):
        """Creates the state; vLLM calls this when the model is loaded."""
        super().__init__(*args)
        self.levels = dict(getattr(self.model_config.hf_config, "budget_levels", None) or {})
        self.start = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=self.device)

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """Stores phi of a request that begins, or that resumes after it was preempted."""
        super().add_request(req_index, new_req_data)
        params = new_req_data.sampling_params
        self.model.set_budget(req_index, budget_of(params, self.levels))
        if self.model.at_response:
            prompt = len(new_req_data.prompt_token_ids or ())
            self.start[req_index] = response_start(params, prompt)

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        """Passes the row of each token's request to the model, before a step."""
        tokens, requests = input_batch.num_tokens, input_batch.num_reqs
        lengths = input_batch.query_start_loc[: requests + 1].diff().long()
        slots = input_batch.idx_mapping[:requests].long()
        rows = torch.repeat_interleave(slots, lengths, output_size=tokens)
        if self.model.at_response:
            in_response = input_batch.positions[:tokens] >= self.start[rows]
            rows = torch.where(in_response, rows, self.model.zero_row)
        self.model.set_rows(rows)
        return super().prepare_inputs(input_batch, req_states)
