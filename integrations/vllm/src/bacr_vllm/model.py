"""vLLM models of Qwen2, Qwen3 and Llama with a budget embedding (the paper's Eq. 2 and 3).

    phi(b) = SiLU(s(b) W1) W2,   s(b) = [sin(b f), cos(b f)],   f_i = 10000^(-2i/D)
    h <- h + g(w . h) phi(b)

A batch contains tokens of several requests. phi is computed once per request and stored in a row of
a table. Each token of a step has the index of its row. The last row is always zero, for tokens that
receive no budget. The table and the indices keep their addresses in memory, so that a recorded CUDA
graph reads the current values. With tensor parallelism, each device has all of phi, like the
residual stream.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel
from vllm.model_executor.models.qwen2 import Qwen2DecoderLayer, Qwen2ForCausalLM, Qwen2Model
from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors

# Added to the mean square when the gate normalises the residual stream.
_EPS = 1e-6
# Scaled budgets are between 0 and this number.
_SCALE = 1000.0


class BudgetModule(nn.Module):
    """Computes phi, and the gates of all layers, in float32.

    Its tensors have the names of budget.safetensors.
    """

    def __init__(self, config: Any):
        """Allocates the tensors, which `load_weights` fills."""
        super().__init__()
        self.settings = settings = config.budget_module
        self.width, layers = config.hidden_size, config.num_hidden_layers
        self.per_layer = settings["sharing"] == "per_layer"
        stack = (layers,) if self.per_layer else ()
        self.w1 = _frozen(*stack, self.width, self.width)
        self.w2 = _frozen(*stack, self.width, self.width)
        self.gate = _frozen(layers, self.width)

    @torch.no_grad()
    def embed(self, budget: int) -> Tensor:
        """Returns phi of a budget.

        Args:
          budget: thinking tokens.

        Returns:
          [1, D], or [L, D] if each layer has an embedding.
        """
        device = self.w1.device
        b = torch.tensor(float(budget), dtype=torch.float32, device=device)
        b_max = torch.tensor(float(self.settings["b_max"]), dtype=torch.float32, device=device)
        if self.settings["input"] == "log":
            b = _SCALE * torch.log1p(b) / torch.log1p(b_max)
        elif self.settings["input"] == "normalised":
            b = _SCALE * b / b_max
        exponents = torch.arange(0, self.width, 2, dtype=torch.float64, device=device)
        angles = b * (10000.0 ** (-exponents / self.width)).float()
        sinusoids = torch.cat([torch.sin(angles), torch.cos(angles)])[None]
        phi = nn.functional.silu(sinusoids @ self.w1) @ self.w2
        return phi[:, 0] if self.per_layer else phi

    def gated(self, x: Tensor, layer: int, phi: Tensor) -> Tensor:
        """Returns g(w . x) phi, which is added to the residual stream.

        Args:
          x: residual stream, [T, D].
          layer: index of the layer whose gate is used.
          phi: budget embedding of each token, [T, D].

        Returns:
          [T, D], in the dtype of x.
        """
        h = x.float()
        if self.settings["gate"] == "sigmoid_normed":
            h = h * torch.rsqrt((h * h).mean(-1, keepdim=True) + _EPS)
        activation = h @ self.gate[layer] + self.settings["gate_bias"]
        if self.settings["gate"] == "tanh":
            gate = torch.tanh(activation)
        else:
            gate = torch.sigmoid(activation)
        return (gate[:, None] * phi).to(x.dtype)


def _frozen(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, dtype=torch.float32), requires_grad=False)


class BudgetLayer:
    """Adds the gated budget embedding after a layer of a model family.

    It is the first base class, before the family's layer. vLLM represents the residual stream by
    two terms, whose sum is the stream.
    """

    def forward(
        self,
        positions: Tensor,
        hidden_states: Tensor,
        residual: Tensor | None,
        budget: BudgetModule,
        layer: int,
        phi: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Runs the layer, and adds the budget embedding to the residual stream.

        Args:
          positions: positions of the tokens, [T].
          hidden_states: first term of the stream, [T, D].
          residual: second term of the stream, [T, D], or None if it is zero.
          budget: module with the gates.
          layer: index of this layer.
          phi: budget embedding of each token, [T, D].

        Returns:
          The two terms of the stream after the layer, [T, D] each.
        """
        h, r = super().forward(positions, hidden_states, residual)  # type: ignore[misc]
        stream = h + r
        return budget.gated(stream, layer, phi), stream


class TiedHead(UnquantizedEmbeddingMethod):
    """Output head that shares its weights with the token embedding.

    On a CPU, vLLM's own class makes a packed copy of the weights when it first loads them. Weights
    that are loaded later would not change this copy.
    """

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Uses the weights directly, without a copy, on a CPU."""
        if current_platform.is_cpu():
            layer.cpu_linear = nn.functional.linear


class BudgetStream:
    """Passes the budget embedding of each token through the layers of a model family.

    It is the first base class, before the family's model.

    Attributes:
      layer: keyword argument with which the family's model receives its layer class.
    """

    layer: dict[str, type[nn.Module]]

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        """Creates the family's model and the budget module."""
        super().__init__(vllm_config=vllm_config, prefix=prefix, **self.layer)  # type: ignore[call-arg]
        self.budget = BudgetModule(vllm_config.model_config.hf_config)

    # vLLM reads these annotations, so arguments that may be None must be annotated with None.
    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        table: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the last hidden states, [T, D].

        Args:
          input_ids: token ids, [T], or None if `inputs_embeds` is given.
          positions: positions of the tokens, [T].
          intermediate_tensors: unused, because pipeline parallelism is not supported.
          inputs_embeds: embeddings of the tokens, [T, D], or None.
          rows: row of `table` of each token, [T].
          table: phi of each request, [1, requests + 1, D], or [L, requests + 1, D] if each layer
            has an embedding.
        """
        assert rows is not None and table is not None
        h = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        r = None
        phi = table[0][rows]
        for index, layer in enumerate(self.layers):
            if self.budget.per_layer and index:
                phi = table[index][rows]
            h, r = layer(positions, h, r, self.budget, index, phi)
        h, _ = self.norm(h, r)
        return h


_compiled = support_torch_compile(
    dynamic_arg_dims={
        "input_ids": {0: "b"},
        "positions": {-1: "b"},
        "intermediate_tensors": {0: "b"},
        "inputs_embeds": {0: "b"},
        "rows": {0: "b"},
    }
)


class BudgetQwen2Layer(BudgetLayer, Qwen2DecoderLayer):
    """Layer of Qwen2 and Qwen2.5."""


class BudgetQwen3Layer(BudgetLayer, Qwen3DecoderLayer):
    """Layer of dense Qwen3 models."""


class BudgetLlamaLayer(BudgetLayer, LlamaDecoderLayer):
    """Layer of Llama."""


@_compiled
class BudgetQwen2Model(BudgetStream, Qwen2Model):
    """Layers of Qwen2 and Qwen2.5."""

    layer = {"decoder_layer_type": BudgetQwen2Layer}


@_compiled
class BudgetQwen3Model(BudgetStream, Qwen2Model):
    """Layers of dense Qwen3 models, which vLLM builds from its Qwen2 model."""

    layer = {"decoder_layer_type": BudgetQwen3Layer}


@_compiled
class BudgetLlamaModel(BudgetStream, LlamaModel):
    """Layers of Llama."""

    layer = {"layer_type": BudgetLlamaLayer}


class BudgetForCausalLM:
    """Model with output head, as vLLM uses it.

    It is the first base class, before the family's class.

    Attributes:
      stream: class of the family's layers, one of those above.
      zero_row: index of the row of the table that is always zero.
      at_response: True if the tokens of the prompt do not receive the budget.
    """

    stream: type[nn.Module]
    hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"budget.": "model.budget."})

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        """Creates the model; vLLM calls this."""
        nn.Module.__init__(self)  # type: ignore[arg-type]
        self.config = config = vllm_config.model_config.hf_config
        self.quant_config = vllm_config.quant_config
        self.model = self.stream(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            quant_config=self.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
            if isinstance(self.lm_head.quant_method, UnquantizedEmbeddingMethod):
                self.lm_head.quant_method = TiedHead()
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors
        self.at_response = config.budget_module["positions"] == "response"
        self._make_table(vllm_config.scheduler_config)

    def _make_table(self, scheduler: Any) -> None:
        """Allocates the table of phi and the rows of a step's tokens; all of phi is zero."""
        self.zero_row = scheduler.max_num_seqs
        stack = self.config.num_hidden_layers if self.model.budget.per_layer else 1
        table = torch.zeros(stack, self.zero_row + 1, self.config.hidden_size, dtype=torch.float32)
        self.register_buffer("table", table, persistent=False)
        # vLLM pads steps for recorded graphs, by at most one token per request.
        most_tokens = scheduler.max_num_batched_tokens + scheduler.max_num_seqs
        rows = torch.full((most_tokens,), self.zero_row)
        self.register_buffer("rows", rows, persistent=False)

    def set_budget(self, row: int, budget: int | None) -> None:
        """Stores phi of a request's budget in the request's row.

        Args:
          row: row of the request.
          budget: thinking tokens, or None for a row of zeros.
        """
        self.table[:, row] = 0.0 if budget is None else self.model.budget.embed(budget)

    def set_rows(self, rows: Tensor) -> None:
        """Sets the row of each token of the next step.

        Args:
          rows: indices of rows, [T]. Padding after these tokens gets the row of zeros.
        """
        self.rows[: len(rows)].copy_(rows)
        self.rows[len(rows) :].fill_(self.zero_row)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the last hidden states, [T, D], like the family's class."""
        rows = self.rows[: positions.shape[-1]]
        return self.model(
            input_ids, positions, intermediate_tensors, inputs_embeds, rows, self.table
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads the weights, including those of budget.safetensors; returns their names."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)

    @staticmethod
    def get_model_state_cls() -> type:
        """Returns the class that updates the table when requests begin (model runner V2)."""
        from bacr_vllm.state import BudgetState

        return BudgetState


class BacrQwen2ForCausalLM(BudgetForCausalLM, Qwen2ForCausalLM):
    """Qwen2 and Qwen2.5 with a budget embedding."""

    stream = BudgetQwen2Model


class BacrQwen3ForCausalLM(BudgetForCausalLM, Qwen3ForCausalLM):
    """Dense Qwen3 with a budget embedding."""

    stream = BudgetQwen3Model


class BacrLlamaForCausalLM(BudgetForCausalLM, LlamaForCausalLM):
    """Llama with a budget embedding."""

    stream = BudgetLlamaModel
