"""Derives the policy of a run from its config: model shape, device mesh and static settings.

Static settings are hashable values that are compiled into JAX programs.

Training, evaluation, `bacr generate` and `bacr plan` use this module. It does not read any weights.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bacr_jax import parallel
from bacr_jax.config import (
    AdapterConfig,
    DataConfig,
    MeshConfig,
    ModelConfig,
    RolloutConfig,
    TrainConfig,
)
from bacr_jax.config.settings import PolicySettings, ResponseLimits
from bacr_jax.errors import UserError
from bacr_jax.files import check_model_folder
from bacr_jax.learner.spec import LearnerSpec, phi_of
from bacr_jax.methods import Method
from bacr_jax.model import kv_cache
from bacr_jax.model.hf import peft
from bacr_jax.model.hf.hf_config import read_hf_config
from bacr_jax.model.hf.reading import check_folder
from bacr_jax.model.kv_cache import DecodeParams
from bacr_jax.model.sizes import Qwen2Config, preset
from bacr_jax.parallel import MeshShape
from bacr_jax.rollout import RolloutSpec
from bacr_jax.types import Params


def model_shape(model: ModelConfig, vocab_size: int) -> Qwen2Config:
    """Returns the shape of the model that the config section `model` specifies.

    Args:
      model: section `model` of the config.
      vocab_size: number of embedding rows of a custom model. Presets and model folders define their
        own number.

    Raises:
      UserError: if the model folder can't be read.
    """
    if model.path is not None:
        check_model_folder(model.path, "model.path")
        return read_hf_config(model.path)
    if model.preset != "custom":
        return preset(model.preset)
    return Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim or model.hidden_size // model.num_heads,
        rope_theta=model.rope_theta,
        tie_embeddings=model.tie_embeddings,
    )


def run_tokenizer(data: DataConfig, model: ModelConfig) -> Any:
    """Loads the built-in tokenizer of a run's data, or the tokenizer of its model folder.

    Raises:
      UserError: if the tokenizer can't be loaded.
    """
    from bacr_jax.prompts.tokenizers import load_tokenizer
    from bacr_jax.questions.loaders import own_tokenizer

    tokenizer_of_data = own_tokenizer(data)
    if tokenizer_of_data is not None:
        return tokenizer_of_data
    where = "model.tokenizer" if model.tokenizer else "model.path"
    return load_tokenizer(model.tokenizer or model.path, where=where, model=model.path)


def vocabulary_rows(model: ModelConfig, tokenizer_size: int) -> int:
    """Returns the number of embedding rows, which may exceed the size of the tokenizer.

    Raises:
      UserError: if the model has fewer embedding rows than the tokenizer has ids.
    """
    rows = model_shape(model, tokenizer_size).vocab_size
    if tokenizer_size > rows:
        model_key = f"model.path={model.path}" if model.path else f"model.preset={model.preset}"
        where = model_key
        subject = "the model"
        if model.tokenizer:
            where = f"model.tokenizer={model.tokenizer}"
            subject = model_key
        raise UserError(
            f"{where}: the tokenizer has {tokenizer_size} token ids, but {subject} has only "
            f"{rows} embedding rows; use the tokenizer of the model"
        )
    return rows


def check_model(
    settings: PolicySettings, shape: Qwen2Config, longest_prompt: int, suffix_length: int
) -> None:
    """Checks the initial policy of a run without reading its weights.

    Args:
      settings: settings of the policy.
      shape: shape of the model.
      longest_prompt: number of tokens of the longest prompt.
      suffix_length: number of tokens that are forced between thinking and answer.

    Raises:
      UserError: if the model folder, the attention implementation, the adapters or the number of
        positions can't be used.
    """
    model = settings.model
    adapter = settings.adapter
    if model.path is not None:
        check_folder(model.path)
    if settings.distill.teacher is not None:
        _check_teacher(settings.distill.teacher, shape)
    for name, section in (("model", model), ("rollout", settings.rollout)):
        if section.attention == "cudnn" and (shape.head_dim % 8 or shape.head_dim > 256):
            raise UserError(
                f"{name}.attention=cudnn supports head dimensions up to 256 that are multiples of "
                f"8, but the head dimension of the model is {shape.head_dim}; set "
                f"{name}.attention=xla"
            )
    if adapter.rank is not None and model.path is None and not settings.has_warmup:
        raise UserError(
            f"adapter.rank={adapter.rank}: the adapters would be trained on random weights, which "
            "stay frozen; set model.path=FOLDER to use a pretrained model, or warmup.steps to "
            "train the weights first (ledger)"
        )
    if adapter.path is not None:
        peft.check_adapter(adapter.path, shape, adapter)
    check_positions(settings.limits, shape, longest_prompt, suffix_length)


def _check_teacher(folder: str, shape: Qwen2Config) -> None:
    """Checks a teacher of on-policy distillation without reading its weights.

    Args:
      folder: value of `distill.teacher`.
      shape: shape of the policy's model.

    Raises:
      UserError: if the folder can't be read, or its vocabulary has a different size.
    """
    check_model_folder(folder, "distill.teacher")
    check_folder(folder)
    teacher = read_hf_config(folder)
    if teacher.vocab_size != shape.vocab_size:
        raise UserError(
            f"distill.teacher={folder}: the vocabulary of the teacher has {teacher.vocab_size} "
            f"tokens, but that of the policy has {shape.vocab_size}; use a teacher with the same "
            "vocabulary"
        )


def positions_needed(
    *, prompt: int, forced: int, answers: int, grace: int, thinking: int = 0
) -> int:
    """Returns the number of positions of a trace with all of its parts, in tokens.

    Without `thinking`, the result is the number of positions that thinking can't use.

    Args:
      prompt: tokens of the prompt, including a budget tag that is appended to it.
      forced: tokens that are forced between thinking and answer.
      answers: maximum number of answer tokens.
      grace: tokens by which thinking may exceed its budget (`budget.grace`).
      thinking: maximum number of thinking tokens, without the grace window.
    """
    return prompt + thinking + grace + forced + answers


def check_positions(
    limits: ResponseLimits, shape: Qwen2Config, longest_prompt: int, suffix_length: int
) -> None:
    """Raises UserError if prompt, thinking and answer may exceed the model's positions.

    Args:
      limits: maximum numbers of thinking and answer tokens.
      shape: shape of the model.
      longest_prompt: number of tokens of the longest prompt.
      suffix_length: number of tokens that are forced between thinking and answer.
    """
    trained = limits.max
    evaluated = limits.largest_evaluated
    largest = max(trained, evaluated) + limits.grace
    key = "budget.max" if trained >= evaluated else "eval.budgets"
    answers = limits.answer_tokens
    # `largest` already contains the grace window.
    free = shape.max_positions - positions_needed(
        prompt=longest_prompt, forced=suffix_length, answers=answers, grace=0
    )
    if largest > free:
        advice = f"set at most {free} tokens" if free > 0 else "set a smaller rollout.answer_tokens"
        raise UserError(
            f"{key}={largest}: the model has {shape.max_positions} positions, of which prompts of "
            f"{longest_prompt} tokens, {suffix_length} tokens of forced text and "
            f"rollout.answer_tokens={answers} leave {max(free, 0)} for thinking; {advice}"
        )


def check_allowance(
    allowance: int | None, limits: ResponseLimits, longest_prompt: int, answers: int
) -> None:
    """Checks that the longest row of a batch fits into `train.micro_batch_tokens`.

    A row consists of a prompt, its thinking and all answers sampled from it.

    Args:
      allowance: `train.micro_batch_tokens`, or None without a limit.
      limits: limits of prompts, thinking and answers.
      longest_prompt: number of tokens of the longest training prompt.
      answers: number of tokens of all answers of a row, including forced tokens.

    Raises:
      UserError: if a row may have more tokens than `train.micro_batch_tokens`.
    """
    thinking = limits.max + limits.grace
    longest = longest_prompt + thinking + answers
    if allowance is not None and allowance < longest:
        raise UserError(
            f"train.micro_batch_tokens={allowance}: a trace may have {longest} tokens "
            f"({longest_prompt} of the prompt, {thinking} of thinking, {answers} of answers), "
            f"which must fit into one micro-batch; set it to at least {longest}, or set a smaller "
            "budget.max"
        )


def attention_for(compute_dtype: str, head_dim: int, backend: str, wanted: str) -> Any:
    """Returns the attention implementation for the config value `wanted`.

    "auto" selects cuDNN attention on GPUs if JAX supports it for this head size and dtype on all
    GPU generations. Otherwise, it selects XLA attention.
    """
    if wanted != "auto":
        return wanted
    heads_fit = head_dim % 8 == 0 and head_dim <= 128
    supported = compute_dtype == "bfloat16" and heads_fit
    return "cudnn" if supported and backend == "gpu" else "xla"


def mesh_shape(settings: PolicySettings, shape: Qwen2Config, num_devices: int) -> MeshShape:
    """Returns the mesh shape that the config section `mesh` specifies.

    Raises:
      UserError: if the devices, the model, or the rows (traces) of a rollout, update or micro-batch
        can't be divided evenly over this mesh.
    """
    layout = parallel.resolve(
        settings.mesh,
        num_devices,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_kv_heads=shape.num_kv_heads,
    )
    _check_rows_divide(settings.rollout, settings.train, layout)
    # Without rollout.slots, each trace of an iteration has a slot.
    traces = settings.rollout.questions * settings.rollout.group_size
    decoded_rows = {
        "rollout.slots": settings.rollout.slots or traces,
        "eval.slots": settings.eval_slots,
    }
    for name, slots in decoded_rows.items():
        if slots is not None and slots % layout.slot_shards:
            nearest = max(slots // layout.slot_shards, 1) * layout.slot_shards
            raise UserError(
                f"{name}={slots}: the sequences that are decoded at the same time can't be split "
                f"evenly over {layout.slot_shards} devices; set {name}={nearest}"
            )
    return layout


def _check_rows_divide(rollout: RolloutConfig, train: TrainConfig, layout: MeshShape) -> None:
    """Raises UserError if a mesh shape can't divide the rows of a batch evenly."""
    shards = layout.row_shards
    rows = rollout.questions * rollout.group_size
    devices = f"mesh.data x mesh.fsdp = {shards} devices"
    if rows % shards:
        step = shards // math.gcd(rollout.group_size, shards)
        nearest = max(round(rollout.questions / step), 1) * step
        raise UserError(
            f"rollout.questions={rollout.questions} x rollout.group_size={rollout.group_size} = "
            f"{rows} traces can't be split evenly over {devices}; set rollout.questions={nearest}"
        )
    update_rows = rows // train.minibatches
    if train.micro_batch_tokens is None and update_rows % shards:
        divisors = [n for n in range(1, rollout.questions + 1) if rollout.questions % n == 0]
        even = [n for n in divisors if rows // n % shards == 0]
        nearest = min(even, key=lambda n: abs(n - train.minibatches))
        raise UserError(
            f"train.minibatches={train.minibatches}: the {update_rows} traces of an update can't "
            f"be split evenly over {devices}; set train.minibatches={nearest}"
        )
    if train.padding_free and shards * layout.tensor > 1:
        raise UserError(
            "train.padding_free=true works on a single device only, but this run uses "
            f"{shards * layout.tensor}; set train.padding_free=false"
        )
    micro_rows = train.micro_batch_rows
    if micro_rows is not None and micro_rows < update_rows and micro_rows % shards:
        even = [n for n in range(shards, update_rows + 1, shards) if update_rows % n == 0]
        nearest = min(even, key=lambda n: abs(n - micro_rows))
        raise UserError(
            f"train.micro_batch_rows={micro_rows}: the traces of a micro-batch can't be split "
            f"evenly over {devices}; set train.micro_batch_rows={nearest}"
        )


def decoding_mesh(mesh: MeshConfig, shape: Qwen2Config, num_devices: int) -> MeshShape:
    """Returns the mesh shape for decoding without training, with replicas of the policy.

    Each replica decodes a different part of the batch. A replica uses as many devices as during
    training (`mesh.decode_tensor`). If this number does not divide both the number of devices and
    the model, the next smaller number that does is used.
    """
    wanted = mesh.decode_tensor or mesh.tensor
    common_divisor = math.gcd(
        num_devices, shape.num_kv_heads, shape.hidden_size, shape.intermediate_size
    )
    shared = max(n for n in range(1, wanted + 1) if common_divisor % n == 0)
    return MeshShape(num_devices // shared, shared, 1, shared)


@dataclasses.dataclass(frozen=True)
class Policy:
    """Static settings of a policy that is trained with a method.

    Attributes:
      learner: static settings for scoring and updates.
      rollout: static settings for training rollouts. Its mesh contains the learner's devices,
        arranged for decoding.
      evaluation: static settings for evaluation rollouts, whose budgets may be larger.
      adapter: settings of the LoRA adapters, or None if all weights are trained.
      param_dtype: dtype in which the weights of the model are stored.
    """

    learner: LearnerSpec
    rollout: RolloutSpec
    evaluation: RolloutSpec
    adapter: AdapterConfig | None = None
    param_dtype: Any = jnp.float32

    def place(self, state: Any) -> Any:
        """Moves parameters, optimizer states or train states to their devices."""
        mesh = self.learner.mesh
        if mesh is None:
            return state
        return parallel.place(state, parallel.shardings(state, mesh))

    def make(self, build: Callable[..., Any], *arrays: Any) -> Any:
        """Calls `build(*arrays)` such that each shard of the result is created on its device.

        No device stores the full result.
        """
        mesh = self.learner.mesh
        if mesh is None or mesh.size == 1:
            return self.place(build(*arrays))
        shardings = parallel.shardings(jax.eval_shape(build, *arrays), mesh)
        return jax.jit(build, out_shardings=shardings)(*arrays)

    def abstract(self, build: Callable[..., Any], *arrays: Any) -> Any:
        """Returns the shapes, dtypes and shardings of `build(*arrays)`, without allocating memory.

        The result is used as the target for restoring saved values.
        """
        shapes = jax.eval_shape(build, *arrays)
        mesh = self.learner.mesh
        if mesh is None:
            return shapes

        def with_sharding(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(with_sharding, shapes, parallel.shardings(shapes, mesh))

    def decode_params(self, params: Params, *, plain: bool = False) -> DecodeParams:
        """Converts parameters to the layout for decoding.

        Parameters are cast, sliced, and gathered over the mesh axis `fsdp`.

        Args:
          params: parameters of the policy.
          plain: True to omit the budget module.
        """
        conditioned = self.learner.conditioning is not None and not plain
        types = {"dtype": self.learner.dtype, "product_dtype": self.learner.product_dtype}
        return _decode_params(params, conditioned, self.rollout.mesh, **types)

    def phi_of(self, params: Params) -> Callable[[jax.Array], jax.Array] | None:
        """Returns a function that computes the embeddings phi(b) of budgets b.

        The result is None if the policy has no budget embedding.
        """
        if self.learner.conditioning is None:
            return None
        module = {"budget": params["budget"]}
        return lambda budgets: _phi_of(module, budgets, self.learner, self.rollout.mesh)


@functools.partial(jax.jit, static_argnums=(1, 2), static_argnames=("dtype", "product_dtype"))
def _decode_params(
    params: Params, conditioned: bool, mesh: Mesh | None, *, dtype: Any, product_dtype: Any
) -> DecodeParams:
    """Converts parameters to the layout for decoding in a single compiled program."""
    shards = 1 if mesh is None else mesh.shape["tensor"]
    types = {"dtype": dtype, "product_dtype": product_dtype}
    copy = kv_cache.decode_params(params, conditioned=conditioned, shards=shards, **types)
    return parallel.constrain(copy, mesh, rules=parallel.DECODE)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _phi_of(params: Params, budgets: jax.Array, spec: LearnerSpec, mesh: Mesh | None) -> jax.Array:
    """Computes the embedding phi(b) of each budget in a single compiled program."""
    return parallel.constrain([phi_of(params, budgets, spec)], mesh)[0]


def rollout_slots(rollout: RolloutConfig, shards: int) -> int:
    """Returns the number of traces that a training rollout decodes at the same time.

    It is at most the number of traces of an iteration, rounded up to a multiple of `shards`. More
    slots would stay empty, but would need memory and time for decoding.

    Args:
      rollout: section `rollout` of the config.
      shards: number of parts into which the decoding mesh divides the slots.
    """
    traces = rollout.questions * rollout.group_size
    most = -(-traces // shards) * shards
    return min(rollout.slots or traces, most)


def _meshes(mesh: MeshShape | None) -> tuple[Mesh | None, Mesh | None]:
    """Returns the learner's mesh, and a mesh of the same devices for decoding.

    Both are None if `mesh` is None. The second mesh is also None for a single device.
    """
    if mesh is None:
        return None, None
    learner = parallel.make_mesh(mesh)
    if mesh.num_devices == 1:
        return learner, None
    return learner, parallel.decode_mesh(learner, mesh.decode_tensor)


def make_policy(
    settings: PolicySettings, method: Method, vocab_size: int, mesh: MeshShape | None = None
) -> Policy:
    """Builds the static settings of a run's policy for training with a method.

    Args:
      settings: settings of the policy.
      method: method to train.
      vocab_size: number of embedding rows of a custom model.
      mesh: mesh shape, or None for a single device.
    """
    learner_mesh, decode_mesh = _meshes(mesh)
    model = settings.model
    limits = settings.limits
    product_dtype = model.product_dtype
    shape = model_shape(model, vocab_size)
    attention = functools.partial(
        attention_for, model.compute_dtype, shape.head_dim, jax.default_backend()
    )
    learner = LearnerSpec(
        model=shape,
        conditioning=settings.conditioning if method.conditioned else None,
        loss=settings.loss,
        value=settings.value if method.uses_value else None,
        b_max=limits.max,
        temperature=settings.rollout.temperature,
        dtype=jnp.dtype(model.compute_dtype),
        product_dtype=None if product_dtype is None else jnp.dtype(product_dtype),
        implementation=attention(model.attention),
        scan=model.scan_layers,
        remat=model.remat,
        chunk=model.logprob_chunk,
        mesh=learner_mesh,
        distill=settings.distill.coef,
    )
    rollout = RolloutSpec(
        config=learner.model,
        conditioning=learner.conditioning,
        max_thinking=limits.max,
        answer_tokens=limits.answer_tokens,
        slots=rollout_slots(settings.rollout, parallel.row_shards(decode_mesh)),
        chunk=settings.rollout.chunk,
        windows=settings.rollout.windows,
        refill=settings.rollout.refill,
        dtype=learner.dtype,
        product_dtype=learner.product_dtype,
        implementation=learner.implementation,
        attention=attention(settings.rollout.attention),
        answers=method.answers,
        group_size=settings.rollout.group_size,
        grace=limits.grace,
        mesh=decode_mesh,
        cuts_relative_to_length=method.cuts_relative_to_length,
    )
    evaluation = dataclasses.replace(
        rollout,
        max_thinking=max(limits.max, limits.largest_evaluated),
        # An evaluation may have more traces than a training rollout.
        slots=settings.eval_slots or settings.rollout.slots or rollout.slots,
        answers=1,
        group_size=1,
        cuts_relative_to_length=False,
    )
    return Policy(
        learner,
        rollout,
        evaluation,
        adapter=settings.adapter if settings.adapter.rank else None,
        param_dtype=jnp.dtype(settings.param_dtype),
    )
