"""Qwen2, Qwen3 and Llama whose residual stream receives the embedding of each token's budget.

    phi(b) = SiLU(s(b) W1) W2,   s(b) = [sin(b f), cos(b f)],   f_i = 10000^(-2i/D)
    h <- h + g(w . h) phi(b)

A batch mixes requests. phi is computed once per request, into a row of a table, and every token of
a step points at a row; the last row stays zero and is that of tokens that are told no budget. Table
and pointers never move, so that a recorded graph reads what is there when it is replayed. Under
tensor parallelism every device holds all of phi, as it holds all of the residual stream.
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

# Added to the mean square where the gate reads a normalised stream.
_EPS = 1e-6
# Codes of scaled budgets reach from 0 to this.
_SCALE = 1000.0


class BudgetModule(nn.Module):
    """phi and the gates of all layers, in fp32; tensors are called as in budget.safetensors."""

    def __init__(self, config: Any):
        """Makes room for what `load_weights` reads."""
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
        """Phi of a budget in thinking tokens: [1, D], or [L, D] with an embedding per layer."""
        device = self.w1.device
        b = torch.tensor(float(budget), dtype=torch.float32, device=device)
        b_max = torch.tensor(float(self.settings["b_max"]), dtype=torch.float32, device=device)
        if self.settings["input"] == "log":
            b = _SCALE * torch.log1p(b) / torch.log1p(b_max)
        elif self.settings["input"] == "normalised":
            b = _SCALE * b / b_max
        exponents = torch.arange(0, self.width, 2, dtype=torch.float64, device=device)
        angles = b * (10000.0 ** (-exponents / self.width)).float()
        codes = torch.cat([torch.sin(angles), torch.cos(angles)])[None]
        phi = nn.functional.silu(codes @ self.w1) @ self.w2
        return phi[:, 0] if self.per_layer else phi

    def conditioned(self, x: Tensor, layer: int, phi: Tensor) -> Tensor:
        """What joins the stream: g(w . x) phi, of the stream's type.

        Args:
          x: residual stream, [T, D].
          layer: index of the layer, whose gate is used.
          phi: of each token, [T, D].
        """
        h = x.float()
        if self.settings["gate"] == "sigmoid_normed":
            h = h * torch.rsqrt((h * h).mean(-1, keepdim=True) + _EPS)
        activation = h @ self.gate[layer] + self.settings["gate_bias"]
        tanh = self.settings["gate"] == "tanh"
        opened = torch.tanh(activation) if tanh else torch.sigmoid(activation)
        return (opened[:, None] * phi).to(x.dtype)


def _frozen(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, dtype=torch.float32), requires_grad=False)


class BudgetLayer:
    """Stands before a family's own layer.

    vLLM hands on the stream as two terms, of which the first may be new.
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
        """Terms of the stream after the layer, [T, D] each.

        Args:
          positions: of the tokens.
          hidden_states: one term of the stream.
          residual: the other one; None: zero.
          budget: phi's module.
          layer: index of this layer.
          phi: of each token, [T, D].
        """
        h, r = super().forward(positions, hidden_states, residual)  # type: ignore[misc]
        stream = h + r
        return budget.conditioned(stream, layer, phi), stream


class TiedHead(UnquantizedEmbeddingMethod):
    """A head that is the embedding itself.

    On a CPU vLLM would pack a copy of it when it first loads, which weights that are loaded later
    do not reach.
    """

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Keeps no copy."""
        if current_platform.is_cpu():
            layer.cpu_linear = nn.functional.linear


class BudgetStream:
    """Stands before a family's own model, which is also given a table of phi and each token's row.

    Attributes:
      layer: the family's layer, as its model takes it.
    """

    layer: dict[str, type[nn.Module]]

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        """Called by the models below."""
        super().__init__(vllm_config=vllm_config, prefix=prefix, **self.layer)  # type: ignore[call-arg]
        self.budget = BudgetModule(vllm_config.model_config.hf_config)

    # vLLM reads the annotations: None has to stand in them where it can come.
    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        table: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Last hidden states [T, D]; `rows` is [T], `table` [1 or L, requests + 1, D]."""
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
    """Of Qwen2 and Qwen2.5."""


class BudgetQwen3Layer(BudgetLayer, Qwen3DecoderLayer):
    """Of dense Qwen3."""


class BudgetLlamaLayer(BudgetLayer, LlamaDecoderLayer):
    """Of dense Llama."""


@_compiled
class BudgetQwen2Model(BudgetStream, Qwen2Model):
    """Of Qwen2 and Qwen2.5."""

    layer = {"decoder_layer_type": BudgetQwen2Layer}


@_compiled
class BudgetQwen3Model(BudgetStream, Qwen2Model):
    """Of dense Qwen3, which is Qwen2 of other layers."""

    layer = {"decoder_layer_type": BudgetQwen3Layer}


@_compiled
class BudgetLlamaModel(BudgetStream, LlamaModel):
    """Of dense Llama."""

    layer = {"layer_type": BudgetLlamaLayer}


class BudgetForCausalLM:
    """Stands before a family's model with its head, as vLLM knows it.

    Attributes:
      stream: the family's model above.
      none: the row of the table that stays zero.
      at_response: tokens of the prompt are told nothing.
    """

    stream: type[nn.Module]
    hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"budget.": "model.budget."})

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        """Called by vLLM; as of the family, with the model above inside."""
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
        """The table of phi, and the row of every token of a step; all rows are zero at first."""
        self.none = scheduler.max_num_seqs
        stack = self.config.num_hidden_layers if self.model.budget.per_layer else 1
        table = torch.zeros(stack, self.none + 1, self.config.hidden_size, dtype=torch.float32)
        self.register_buffer("table", table, persistent=False)
        # Steps are padded for recorded graphs, to one token per request at most beyond the longest.
        rows = torch.full((scheduler.max_num_batched_tokens + self.none,), self.none)
        self.register_buffer("rows", rows, persistent=False)

    def tell(self, row: int, budget: int | None) -> None:
        """Puts phi of a request's budget into its row; zero for None."""
        self.table[:, row] = 0.0 if budget is None else self.model.budget.embed(budget)

    def point(self, rows: Tensor) -> None:
        """Says which row each token of the next step reads; what comes behind them reads zero."""
        self.rows[: len(rows)].copy_(rows)
        self.rows[len(rows) :].fill_(self.none)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As of the family."""
        rows = self.rows[: positions.shape[-1]]
        return self.model(
            input_ids, positions, intermediate_tensors, inputs_embeds, rows, self.table
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """As of the family; budget.safetensors lies beside the other files."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)

    @staticmethod
    def get_model_state_cls() -> type:
        """What keeps the table in step with the requests (model runner V2)."""
        from bacr_vllm.state import BudgetState

        return BudgetState


class BacrQwen2ForCausalLM(BudgetForCausalLM, Qwen2ForCausalLM):
    """Qwen2 and Qwen2.5."""

    stream = BudgetQwen2Model


class BacrQwen3ForCausalLM(BudgetForCausalLM, Qwen3ForCausalLM):
    """Dense Qwen3."""

    stream = BudgetQwen3Model


class BacrLlamaForCausalLM(BudgetForCausalLM, LlamaForCausalLM):
    """Dense Llama."""

    stream = BudgetLlamaModel
