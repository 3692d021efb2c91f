"""A decoder conditioned on a thinking budget, for transformers (PyTorch).

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    model(input_ids, attention_mask=mask, budget=512)
    model.generate(**inputs, budget=[512, None, "low"])

A gated embedding of the budget b joins the residual stream of every layer:

    phi(b) = SiLU(s(b) W1) W2,   s(b) = [sin(b f), cos(b f)],   f_i = 10000^(-2i/D)
    h <- h + g(w . h) phi(b)

Without `budget` the model is the plain one of its family. `budget="low"` stands for the tokens that
config.json gives this name in `budget_levels`, if it names any. `generate` holds the budget, as the
section `thinking` of config.json says (`budget_generation`). This file needs torch and transformers
only.
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
    """A config of a family with the sections `budget_module` and `thinking`.

    Its type is the family's, which transformers knows without this file: a tokenizer loads without
    it.
    """

    budget_module = budget_levels = thinking = None


class BudgetModule(nn.Module):
    """phi(b), and the gates of all layers; fp32."""

    def __init__(self, config):
        super().__init__()
        self.settings = settings = config.budget_module
        width, layers = config.hidden_size, config.num_hidden_layers
        stack = (layers,) if settings["sharing"] == "per_layer" else ()
        self.width = width
        self.w1 = nn.Parameter(torch.zeros(*stack, width, width))
        self.w2 = nn.Parameter(torch.zeros(*stack, width, width))
        self.gate = nn.Parameter(torch.zeros(layers, width))

    def forward(self, budgets):
        """Embeddings of each row: [B, D], or [L, B, D] with one embedding per layer."""
        b, b_max = budgets.float(), torch.tensor(float(self.settings["b_max"]))
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
        """Residual stream of a layer with the gated embedding added where `mask` is True."""
        h = x.float()
        if self.settings["gate"] == "sigmoid_normed":
            h = h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6)
        activation = h @ self.gate[layer].float() + self.settings["gate_bias"]
        tanh = self.settings["gate"] == "tanh"
        opened = torch.tanh(activation) if tanh else torch.sigmoid(activation)
        if mask is not None:
            opened = opened * mask.to(opened)
        return x + (opened[..., None] * phi[:, None]).to(x.dtype)


class BudgetLayer:
    """A family's layer; `condition`, when given, maps (residual stream, layer) to the stream."""

    def forward(self, hidden_states, *args, condition=None, **kwargs):
        """As of the family's layer."""
        stream = super().forward(hidden_states, *args, **kwargs)
        return stream if condition is None else condition(stream, self.self_attn.layer_idx)


class BudgetModel:
    """A family's model that takes `budget`: thinking tokens, one number or one per row."""

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
        """Zeros for a budget module that is not in the weights: phi is 0, the model the plain one.

        transformers calls it for what a folder lacks, as one that its plain classes saved.
        """
        if isinstance(module, BudgetModule):
            for parameter in module.parameters():
                nn.init.zeros_(parameter)
        else:
            super()._init_weights(module)

    def embed_budgets(self, told):
        """Phi of each row's budget, [B, D] or [L, B, D]; zero for a row that is told none."""
        embedded = self.budget(told.clamp(min=0))
        return embedded * (told != NONE)[:, None].to(embedded)

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
        """As the family's model.

        Args:
          budget: thinking tokens, see `read_budgets`; None: the plain model.
          budget_mask: [B, T], True at the positions of `input_ids` that receive the embedding. A
            model conditioned at the response only needs it (`generate` sets it by itself).
          budget_embedding: what `embed_budgets` gave, instead of `budget`.
        """
        inputs = input_ids if input_ids is not None else kwargs["inputs_embeds"]
        if budget is not None:
            told = read_budgets(budget, inputs.shape[0], self.config.budget_levels)
            budget_embedding = self.embed_budgets(torch.tensor(told, device=inputs.device))
        if budget_embedding is None:
            return super().forward(input_ids, attention_mask, **kwargs)
        if budget_mask is None and self.config.budget_module["positions"] == "response":
            raise ValueError("this model is conditioned at response positions: give budget_mask")
        phi = budget_embedding

        def condition(x, layer):
            of_layer = (phi[layer] if phi.ndim == 3 else phi).to(x.device)
            return self.budget.add(x, layer, of_layer, budget_mask)

        return super().forward(input_ids, attention_mask, condition=condition, **kwargs)

    def generate(self, inputs=None, *, budget=None, **kwargs):
        """As in transformers, with a thinking budget that holds; see `budget_generation`."""
        return generate(inputs, model=self, budget=budget, **kwargs)


class BacrQwen2Config(BudgetConfig, Qwen2Config):
    """Qwen2's."""


class BacrQwen3Config(BudgetConfig, Qwen3Config):
    """Qwen3's."""


class BacrLlamaConfig(BudgetConfig, LlamaConfig):
    """Llama's."""


def _conditioned(config, layer, model):
    """Returns a family's model with its layers, told a budget; `config` is one of those above."""
    own = type(f"Bacr{layer.__name__}", (BudgetLayer, layer), {})
    inside = {"config_class": config, "layer_class": own, "_no_split_modules": [own.__name__]}
    conditioned = type(f"Bacr{model.__name__}", (BudgetModel, model), inside)
    # save_pretrained then writes this file into every folder, however the class was loaded.
    config.register_for_auto_class()
    conditioned.register_for_auto_class("AutoModelForCausalLM")
    return conditioned


BacrQwen2ForCausalLM = _conditioned(BacrQwen2Config, Qwen2DecoderLayer, Qwen2ForCausalLM)
BacrQwen3ForCausalLM = _conditioned(BacrQwen3Config, Qwen3DecoderLayer, Qwen3ForCausalLM)
BacrLlamaForCausalLM = _conditioned(BacrLlamaConfig, LlamaDecoderLayer, LlamaForCausalLM)
