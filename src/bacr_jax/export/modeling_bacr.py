"""Decoder models conditioned on a thinking budget, for transformers (PyTorch).

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    model(input_ids, attention_mask=mask, budget=512)
    model.generate(**inputs, budget=[512, None, "low"])

A gated embedding of the budget b is added to the residual stream h after every layer:

    phi(b) = SiLU(s(b) W1) W2,   s(b) = [sin(b f), cos(b f)],   f_i = 10000^(-2i/D)
    h <- h + g(w . h) phi(b)

D is the width of h, g a sigmoid or tanh, and w the gate weights of the layer. Without `budget`, the
model is identical to the plain model of its family. A string such as `budget="low"` is a name in
the section `budget_levels` of config.json. `generate` enforces the budget as specified by the
section `thinking` of config.json (see `budget_generation`). This file requires only torch and
transformers.
"""

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from .budget_generation import NONE, check_files, generate, read_budgets


class BudgetConfig:
    """Adds the sections `budget_module`, `budget_levels` and `thinking` to a model config.

    The model_type is not changed, so the tokenizer can be loaded without this file.
    """

    budget_module = None
    budget_levels = None
    thinking = None


class BudgetModule(nn.Module):
    """The budget embedding phi(b) and the gates of all layers, in float32."""

    def __init__(self, config):
        super().__init__()
        self.settings = config.budget_module
        width = config.hidden_size
        layers = config.num_hidden_layers
        stack = (layers,) if self.settings["sharing"] == "per_layer" else ()
        self.width = width
        self.w1 = nn.Parameter(torch.zeros(*stack, width, width))
        self.w2 = nn.Parameter(torch.zeros(*stack, width, width))
        self.gate = nn.Parameter(torch.zeros(layers, width))

    def forward(self, budgets):
        """Returns phi(b) of each row: [B, D], or [L, B, D] with one embedding per layer."""
        b = budgets.float()
        b_max = torch.tensor(float(self.settings["b_max"]))
        if self.settings["input"] == "log":
            b = 1000.0 * torch.log1p(b) / torch.log1p(b_max).to(b.device)
        elif self.settings["input"] == "normalised":
            b = 1000.0 * b / b_max.to(b.device)
        exponents = torch.arange(0, self.width, 2, dtype=torch.float64, device=b.device)
        frequencies = (10000.0 ** (-exponents / self.width)).float()
        angles = b[:, None] * frequencies
        s = torch.cat([torch.sin(angles), torch.cos(angles)], dim=-1)
        return nn.functional.silu(s @ self.w1.float()) @ self.w2.float()

    def add(self, x, layer, phi, mask):
        """Adds the gated budget embedding to the residual stream after a layer.

        Args:
          x: residual stream [B, T, D].
          layer: index of the layer.
          phi: budget embeddings [B, D].
          mask: True [B, T] for positions that receive the embedding, or None for all positions.
        """
        h = x.float()
        if self.settings["gate"] == "sigmoid_normed":
            h = h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6)
        activation = h @ self.gate[layer].float() + self.settings["gate_bias"]
        if self.settings["gate"] == "tanh":
            gate = torch.tanh(activation)
        else:
            gate = torch.sigmoid(activation)
        if mask is not None:
            gate = gate * mask.to(gate)
        return x + (gate[..., None] * phi[:, None]).to(x.dtype)


class BudgetLayer:
    """Mixin for decoder layers of transformers that applies a function to the layer's output."""

    def forward(self, hidden_states, *args, condition=None, **kwargs):
        """Calls the decoder layer and applies `condition` to its output.

        Args:
          condition: function that maps the residual stream and the layer index to the new residual
            stream, or None to leave the stream unchanged.
        """
        stream = super().forward(hidden_states, *args, **kwargs)
        return stream if condition is None else condition(stream, self.self_attn.layer_idx)


class BudgetModel:
    """Mixin for causal language models of transformers that adds the argument `budget`."""

    _keep_in_fp32_modules_strict = ["budget"]

    def __init__(self, config):
        check_files(config.name_or_path)
        self.__dict__["files_checked"] = True
        super().__init__(config)
        layers = [self.layer_class(config, index) for index in range(config.num_hidden_layers)]
        self.model.layers = nn.ModuleList(layers)
        self.budget = BudgetModule(config)
        self.post_init()

    def _init_weights(self, module):
        """Initializes the budget module with zeros, so that the model equals the plain model.

        transformers calls this method if a folder lacks the weights of a module, for example a
        folder that was saved by the plain model classes.
        """
        if isinstance(module, BudgetModule):
            for parameter in module.parameters():
                nn.init.zeros_(parameter)
        else:
            super()._init_weights(module)

    def embed_budgets(self, budgets):
        """Returns phi(b) of each row, [B, D] or [L, B, D]. It is 0 for rows without a budget.

        Args:
          budgets: tensor [B] of budgets in tokens, with NONE for no budget.
        """
        embedding = self.budget(budgets.clamp(min=0))
        return embedding * (budgets != NONE)[:, None].to(embedding)

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        *,
        budget=None,
        budget_mask=None,
        budget_embedding=None,
        **kwargs,
    ):
        """Calls the model with a budget for all rows, or with one budget per row.

        Args:
          input_ids: as in transformers.
          attention_mask: as in transformers.
          budget: thinking budget, see `read_budgets`. None calls the plain model.
          budget_mask: boolean mask [B, T] of the positions in `input_ids` that receive the
            embedding. It is required for a model that is conditioned only at response positions.
            `generate` sets it.
          budget_embedding: result of `embed_budgets`, which can be passed instead of `budget`.
        """
        inputs = input_ids if input_ids is not None else kwargs["inputs_embeds"]
        if budget is not None:
            budgets = read_budgets(budget, inputs.shape[0], self.config.budget_levels)
            budget_embedding = self.embed_budgets(torch.tensor(budgets, device=inputs.device))
        if budget_embedding is None:
            return super().forward(input_ids, attention_mask, **kwargs)
        if budget_mask is None and self.config.budget_module["positions"] == "response":
            raise ValueError(
                "budget_mask: this model adds the budget embedding only at positions of the "
                "response and needs a mask of these positions; pass budget_mask"
            )

        def condition(x, layer):
            per_layer = budget_embedding.ndim == 3
            phi = budget_embedding[layer] if per_layer else budget_embedding
            return self.budget.add(x, layer, phi.to(x.device), budget_mask)

        return super().forward(input_ids, attention_mask, condition=condition, **kwargs)

    def generate(self, inputs=None, *, budget=None, **kwargs):
        """Generates like transformers and enforces a budget; see `budget_generation.generate`."""
        return generate(inputs, model=self, budget=budget, **kwargs)


class BacrQwen2Config(BudgetConfig, Qwen2Config):
    """Config of Qwen2 with budget sections."""


class BacrQwen3Config(BudgetConfig, Qwen3Config):
    """Config of Qwen3 with budget sections."""


class BacrLlamaConfig(BudgetConfig, LlamaConfig):
    """Config of Llama with budget sections."""


def _conditioned(config, layer, model):
    """Creates a model class with a budget from the plain layer and model classes of a family."""
    budget_layer = type(f"Bacr{layer.__name__}", (BudgetLayer, layer), {})
    attributes = {
        "config_class": config,
        "layer_class": budget_layer,
        "_no_split_modules": [budget_layer.__name__],
    }
    conditioned = type(f"Bacr{model.__name__}", (BudgetModel, model), attributes)
    # With this registration, `save_pretrained` writes this file to every folder, even if the
    # class was imported.
    config.register_for_auto_class()
    conditioned.register_for_auto_class("AutoModelForCausalLM")
    return conditioned


BacrQwen2ForCausalLM = _conditioned(BacrQwen2Config, Qwen2DecoderLayer, Qwen2ForCausalLM)
BacrQwen3ForCausalLM = _conditioned(BacrQwen3Config, Qwen3DecoderLayer, Qwen3ForCausalLM)
BacrLlamaForCausalLM = _conditioned(BacrLlamaConfig, LlamaDecoderLayer, LlamaForCausalLM)
