"""What a run asks of the devices, read from its config: shapes, rows, widths; no weights, no data.

Where the real sizes depend on data (prompt lengths, how long a trace thinks), the largest one that
the config allows is taken, so that a plan errs on the safe side.
"""

from dataclasses import dataclass
from pathlib import Path

from bacr_jax.config import Config
from bacr_jax.errors import UserError
from bacr_jax.learner.micro_batches import Shapes
from bacr_jax.model.sizes import PRESETS, Qwen2Config, preset

# Tokens of the longer suffix, rounded up: "\n</think>\n<answer>\n" is 7 tokens of Qwen2.5.
SUFFIX_TOKENS = 8


@dataclass(frozen=True)
class Workload:
    """Sizes of one iteration.

    Attributes:
      model: shape of the policy.
      shape_source: where the shape was found, in words.
      conditioned: the policy has a budget module.
      per_layer_phi: it has one budget embedding per layer.
      value_hidden: width of the value head; 0 without one.
      reference: a frozen copy of the policy is kept for a KL term.
      rows: traces per iteration, Q G.
      minibatches: updates per iteration.
      micro_rows: traces per gradient accumulation step, of all devices.
      scored: passes over all rows that only score them (old and reference log-probabilities).
      by_tokens: micro-batches hold equal numbers of tokens (train.micro_batch_tokens).
      buckets: padded lengths that rows are sorted into for that; 1: none.
      prompt: prompt tokens, padded.
      thinking: thinking tokens, padded: the largest budget.
      mean_thinking: expected thinking tokens of a trace.
      longest_thinking: expected thinking tokens of an iteration's longest trace.
      cuts: branches per trace: M, or M times the answers that a method samples at each cut.
      answer: sampled answer tokens of a branch, padded.
      slots: rows decoded together, on all devices.
      eval_thinking: largest budget of an evaluation.
      float_bytes: bytes of the compute type.
      logprob_chunk: tokens per chunk of the output head.
      scan: the learner loops over layers.
      remat: layers are recomputed in the backward pass.
      fused_attention: the trunk's attention never stores its scores (cuDNN).
    """

    model: Qwen2Config
    shape_source: str
    conditioned: bool
    per_layer_phi: bool
    value_hidden: int
    reference: bool
    rows: int
    minibatches: int
    micro_rows: int
    scored: int
    by_tokens: bool
    buckets: int
    prompt: int
    thinking: int
    mean_thinking: float
    longest_thinking: float
    cuts: int
    answer: int
    slots: int
    eval_thinking: int
    float_bytes: int
    logprob_chunk: int
    scan: bool
    remat: bool
    fused_attention: bool

    @property
    def branch(self) -> int:
        """Tokens of a branch: suffix and answer."""
        return SUFFIX_TOKENS + self.answer

    @property
    def trunk(self) -> int:
        """Tokens of a trunk: prompt and thinking."""
        return self.prompt + self.thinking

    @property
    def row_tokens(self) -> int:
        """Tokens of a row in the learner: a trunk and all its branches."""
        return self.trunk + self.cuts * self.branch

    @property
    def padded_trunk(self) -> float:
        """Tokens of a trunk as the learner computes them, padding included, on average.

        Sorted rows are padded to the end of their bucket, half a bucket too much on average.
        """
        if self.buckets == 1:
            return float(self.trunk)
        return min(self.prompt + self.mean_thinking + self.trunk / self.buckets / 2, self.trunk)

    @property
    def padded_tokens(self) -> float:
        """The same for a row, its branches included."""
        return self.padded_trunk + self.cuts * self.branch

    @property
    def update_rows(self) -> int:
        """Rows of one update."""
        return self.rows // self.minibatches


def _named_preset(path: str) -> str | None:
    """The released model that a folder's name begins with: Qwen2.5-7B-Instruct is qwen2.5-7b."""
    name = Path(path).name.lower()
    found = [known for known in PRESETS if name == known or name.startswith(f"{known}-")]
    return found[0] if found else None


def _vocabulary(config: Config) -> int:
    """Ids of the tokenizer that a model without published shape gets its vocabulary from."""
    if config.data.train == "ledger":
        from bacr_jax.data import ledger

        return len(ledger.ledger_tokenizer())
    folder = config.model.tokenizer
    if folder is None or not Path(folder).is_dir():
        raise UserError(
            f"model.tokenizer: no folder {folder!r} here, and with model.preset=custom it decides "
            "the size of the vocabulary; write a Hugging Face folder, or a preset"
        )
    from transformers import AutoTokenizer

    return len(AutoTokenizer.from_pretrained(folder))


def model_shape(config: Config) -> tuple[Qwen2Config, str]:
    """The shape of the policy and where it was found; weights are never needed.

    A folder that is here gives its own shape. Else `model.preset` does, and last the name of the
    folder, if it is that of a released model.

    Raises:
      UserError: no way to know the shape.
    """
    model = config.model
    if model.path is not None and (Path(model.path) / "config.json").is_file():
        from bacr_jax.model.hf.hf_config import read_hf_config

        return read_hf_config(model.path), f"{model.path}/config.json"
    if model.preset != "custom":
        return preset(model.preset), f"model.preset={model.preset}"
    if model.path is not None:
        named = _named_preset(model.path)
        if named is None:
            raise UserError(
                f"model.path: no {model.path}/config.json here, and the name is not that of a "
                f"Qwen2.5 model; write its shape as model.preset (one of {', '.join(PRESETS)})"
            )
        return preset(named), f"{named}, after the name of {model.path}, which is not here"
    shape = Qwen2Config(
        vocab_size=_vocabulary(config),
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim or model.hidden_size // model.num_heads,
        rope_theta=model.rope_theta,
        tie_embeddings=model.tie_embeddings,
    )
    return shape, "model.* of the config"


def _thinking(config: Config) -> tuple[float, float]:
    """Mean and longest thinking of an iteration, if every trace uses its budget up."""
    budget, curriculum = config.budget, config.curriculum
    if budget.prior == "fixed" or config.method != "bacr":
        return float(budget.max), float(budget.max)
    if budget.prior == "uniform":
        return (budget.min + budget.max) / 2, float(budget.max)
    if budget.prior == "choices":
        return sum(budget.choices) / len(budget.choices), float(budget.choices[-1])
    mu0 = curriculum.mu0
    means = list(mu0) if isinstance(mu0, tuple) else [mu0]
    inside = [min(max(mu, budget.min), budget.max) for mu in means]
    # The largest of a few hundred normal draws stands about three deviations out.
    longest = min(max(inside) + 3 * curriculum.sigma, budget.max)
    return sum(inside) / len(inside), float(longest)


def workload_of(
    config: Config,
    shape: Qwen2Config,
    shape_source: str,
    *,
    row_shards: int,
    conditioned: bool,
    uses_value: bool,
    branches: int,
    fused_attention: bool,
) -> Workload:
    """The sizes of one iteration of a config.

    Args:
      config: checked settings.
      shape: of the model (`model_shape`).
      shape_source: where it was found.
      row_shards: parts that the learner's rows are split into.
      conditioned: the method tells the policy its budget.
      uses_value: the method has a value head.
      branches: answers per trace, of all truncation points of the method.
      fused_attention: the trunk's attention is cuDNN's.
    """
    rollout, train = config.rollout, config.train
    rows = rollout.questions * rollout.group_size
    update = rows // train.minibatches
    mean, longest = _thinking(config)
    reference = config.loss.kl_coef > 0
    branch = SUFFIX_TOKENS + rollout.answer_tokens
    row = config.data.max_prompt_tokens + config.budget.max + branches * branch
    micro = min(train.micro_batch_rows or update, update)
    buckets = 1
    if train.micro_batch_tokens is not None:
        micro = Shapes(train.micro_batch_tokens, multiple=row_shards).rows(row, 0)
        buckets = train.length_buckets
    return Workload(
        model=shape,
        shape_source=shape_source,
        conditioned=conditioned,
        per_layer_phi=conditioned and config.conditioning.sharing == "per_layer",
        value_hidden=config.value.hidden_size if uses_value else 0,
        reference=reference,
        rows=rows,
        minibatches=train.minibatches,
        micro_rows=micro,
        scored=(train.minibatches > 1) + reference,
        by_tokens=train.micro_batch_tokens is not None,
        buckets=buckets,
        prompt=config.data.max_prompt_tokens,
        thinking=config.budget.max,
        mean_thinking=mean,
        longest_thinking=longest,
        cuts=branches,
        answer=rollout.answer_tokens,
        slots=min(rollout.slots or rows, rows),
        eval_thinking=max(config.budget.max, *config.eval.budgets),
        float_bytes=2 if config.model.compute_dtype == "bfloat16" else 4,
        logprob_chunk=config.model.logprob_chunk,
        scan=config.model.scan_layers,
        remat=config.model.remat,
        fused_attention=fused_attention,
    )
