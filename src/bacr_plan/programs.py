"""Lowers the jitted functions of a run with abstract arguments that are sharded as in training.

No arrays are allocated. The devices may be real, virtual, or only described (see `compiling`).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.stages import Lowered

from bacr_jax import parallel
from bacr_jax.config import Config
from bacr_jax.config.settings import resolve
from bacr_jax.learner import copies
from bacr_jax.learner import train_step as learning
from bacr_jax.learner.batch import Batch, empty_batch
from bacr_jax.learner.micro_batches import Shapes
from bacr_jax.learner.objective import Minibatch, loss_normalizers
from bacr_jax.learner.optimizer import policy_optimizer, value_optimizer
from bacr_jax.learner.token_scores import TokenScores
from bacr_jax.learner.updates import num_scored
from bacr_jax.methods import load_method
from bacr_jax.model import adapters
from bacr_jax.model.kv_cache import decode_params
from bacr_jax.prompts.decode_rules import Automaton, DecodeRules
from bacr_jax.rollout import sampling_params, trunks
from bacr_jax.rollout.sampling import SamplingInputs
from bacr_jax.runs import initial, setup
from bacr_plan.workload import SUFFIX_TOKENS


def laid_out(tree: Any, shardings: Any) -> Any:
    """Converts every array of a pytree to a `ShapeDtypeStruct` with a sharding.

    Args:
      tree: a pytree of arrays or abstract arrays.
      shardings: one sharding for all arrays, or a pytree of shardings.
    """

    def with_sharding(array: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
        """Returns an abstract array with the given sharding."""
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    return jax.tree.map(with_sharding, tree, jax.tree.broadcast(shardings, tree))


def over(mesh: Mesh, *axes: Any) -> NamedSharding:
    """Returns the sharding of an array whose axes are sharded over the given mesh axes."""
    return NamedSharding(mesh, PartitionSpec(*axes))


def _whole(tree: Any, mesh: Mesh) -> Any:
    """Converts the arrays of a pytree to `ShapeDtypeStruct`s that are replicated on all devices."""
    return laid_out(tree, parallel.replicated(mesh))


def _decode_rules(vocab_size: int) -> DecodeRules:
    """Returns decode rules with abstract arrays, for the prompt format with answer tags."""
    array: Any = jax.ShapeDtypeStruct
    flags = array((vocab_size,), bool)
    # One state per byte of "</answer>", plus the accepting state.
    states = len("</answer>") + 1
    next_states = array((states, vocab_size), jnp.int32)
    accepted = array((states, vocab_size), bool)
    automaton = Automaton(next_states, accepted)
    suffix = array((SUFFIX_TOKENS,), jnp.int32)
    return DecodeRules(
        flags,
        flags,
        automaton,
        automaton,
        suffix,
        suffix,
        flags,
    )


class Programs:
    """The programs of a run, ready to be lowered: an update and a chunk of decoding steps."""

    def __init__(self, config: Config, vocab_size: int, devices: list[Any]):
        """Prepares the abstract arguments of the programs.

        Args:
          config: the config returned by `compiling.described`.
          vocab_size: number of tokens in the vocabulary.
          devices: real, virtual or described devices.
        """
        self.config = config
        settings = resolve(config)
        self.method = load_method(settings.method)
        self.policy = setup.make_policy(settings.policy, self.method, vocab_size)
        shape = self.policy.learner.model
        self.layout = setup.mesh_shape(settings.policy, shape, len(devices))
        self.mesh = parallel.make_mesh(self.layout, devices)
        self.decode_mesh = parallel.decode_mesh(self.mesh, self.layout.decode_tensor)
        self.learner = dataclasses.replace(self.policy.learner, mesh=self.mesh)
        self.rollout = dataclasses.replace(
            self.policy.rollout,
            mesh=self.decode_mesh,
            slots=setup.rollout_slots(config.rollout, self.layout.slot_shards),
        )
        self.key = jax.eval_shape(lambda: jax.random.key(0))
        self.params = initial.abstract_params(self.policy)
        frozen, self.trained = adapters.split(self.params)
        self.frozen = laid_out(frozen, parallel.shardings(frozen, self.mesh))
        self.head = jax.eval_shape(lambda key: initial.random_head(key, self.policy), self.key)

    def train(self) -> Lowered:
        """Lowers one update, which accumulates gradients over micro-batches and applies Adam once.

        With `train.micro_batch_tokens`, only the gradient of one micro-batch is lowered.
        """
        config = self.config
        policy_tx = policy_optimizer(config.optimizer, 1000)
        head_tx = value_optimizer(config.value, config.optimizer, 1000)
        init_state = functools.partial(learning.init_state, policy_tx=policy_tx, head_tx=head_tx)
        state = jax.eval_shape(init_state, self.trained, self.head)
        state = laid_out(state, parallel.shardings(state, self.mesh))
        if config.train.micro_batch_tokens is not None:
            return self._accumulation(state, config.train.micro_batch_tokens)
        rows = config.rollout.questions * config.rollout.group_size // config.train.minibatches
        return learning.train_step.lower(
            state,
            self._minibatch(self._batch(rows)),
            self._allowed_tokens(),
            self.frozen,
            spec=self.learner,
            policy_tx=policy_tx,
            head_tx=head_tx,
            micro_batches=max(rows // (config.train.micro_batch_rows or rows), 1),
        )

    def _accumulation(self, state: Any, tokens: int) -> Lowered:
        """Lowers the program that adds a micro-batch's gradient to the accumulated gradients.

        The micro-batch consists of traces with the maximum length.

        Args:
          state: the abstract train state.
          tokens: maximum number of tokens in the micro-batch.
        """
        row = self._batch(1)
        branch_positions = row.branches.shape[1] * row.branches.shape[2]
        positions = row.trunk.shape[1] + branch_positions
        shapes = Shapes(tokens, multiple=self.layout.row_shards)
        batch = self._batch(shapes.rows(positions, 0))
        normalizers = functools.partial(loss_normalizers, spec=self.learner)
        totals = jax.eval_shape(normalizers, batch)
        arguments = (
            state,
            self._minibatch(batch),
            _whole(totals, self.mesh),
            self._allowed_tokens(),
            self.frozen,
        )
        gradients = functools.partial(learning.gradients, spec=self.learner)
        earlier, _ = jax.eval_shape(gradients, *arguments)
        earlier = laid_out(earlier, copies.gradient_shardings(earlier, self.learner))
        return learning.accumulate.lower(earlier, *arguments, spec=self.learner)

    def decode(self) -> Lowered:
        """Lowers one chunk of decoding steps with a trace in every slot and a full-length cache."""
        spec = self.rollout
        return trunks.decode_trunks.lower(
            self.decode_copy(),
            self.slots(),
            self.draws(),
            spec=spec.decode,
            num_steps=spec.chunk,
        )

    def decode_copy(self) -> Any:
        """Returns the abstract weights for decoding, which are a copy of the parameters."""
        mesh = self.decode_mesh
        make_copy = functools.partial(
            decode_params,
            dtype=self.rollout.dtype,
            conditioned=self.rollout.conditioning is not None,
            shards=mesh.shape["tensor"],
        )
        copy = jax.eval_shape(make_copy, self.params)
        return laid_out(copy, parallel.shardings(copy, mesh, rules=parallel.DECODE))

    def draws(self) -> SamplingInputs:
        """Returns the abstract inputs of sampling (key, decode rules, temperature), replicated."""
        rules = _decode_rules(self.learner.model.vocab_size)
        sampling = jax.eval_shape(lambda: sampling_params(1.0))
        return _whole(SamplingInputs(self.key, rules, sampling), self.decode_mesh)

    def slots(self) -> Any:
        """Returns the abstract state of all decoding slots with full-length KV caches."""
        spec = self.rollout
        width = self.config.data.max_prompt_tokens
        phi = None
        phi_of = self.policy.phi_of(self.params)
        if phi_of is not None:
            budgets = jax.ShapeDtypeStruct((spec.slots,), jnp.int32)
            phi = jax.eval_shape(phi_of, budgets)
        free_slots = functools.partial(
            trunks.free_slots,
            spec=spec.decode,
            slots=spec.slots,
            prompt_width=width,
            max_new=spec.max_sampled,
            length=width + spec.max_sampled,
        )
        state = jax.eval_shape(lambda phi: free_slots(phi=phi), phi)
        mesh = self.decode_mesh
        row_axes = parallel.AXES[:2]
        tensor_axis = parallel.AXES[2]
        by_row = over(mesh, row_axes)
        # If phi differs per layer, its first axis is the layer.
        per_layer = phi is not None and phi.ndim == 3
        phi_sharding = over(mesh, None, row_axes) if per_layer else by_row
        logits_sharding = parallel.logits_sharding(mesh, state.logits.shape[-1])
        other_arrays = dataclasses.replace(state, cache=(), phi=None)
        return dataclasses.replace(
            laid_out(other_arrays, by_row),
            cache=laid_out(state.cache, over(mesh, row_axes, tensor_axis)),
            phi=laid_out(state.phi, phi_sharding),
            logits=laid_out(state.logits, logits_sharding),
        )

    def _batch(self, rows: int) -> Batch:
        """Returns an abstract batch of `rows` traces with the maximum lengths of the config."""
        config = self.config
        batch = empty_batch(
            rows,
            prompt=config.data.max_prompt_tokens,
            thinking=config.budget.max + config.budget.grace,
            cuts=self.method.num_cuts * self.method.answers,
            suffix=SUFFIX_TOKENS,
            answer=config.rollout.answer_tokens,
        )
        return laid_out(batch, parallel.row_sharding(self.mesh))

    def _allowed_tokens(self) -> Any:
        """Returns the abstract mask of the tokens that may be sampled."""
        mask = jax.ShapeDtypeStruct((self.learner.model.vocab_size,), bool)
        return _whole(mask, self.mesh)

    def _minibatch(self, batch: Batch) -> Minibatch:
        """Returns a batch with abstract old and reference log-probabilities if they are used."""
        thinking = batch.thinking_logprobs
        answers = batch.answer_logprobs
        scores = TokenScores(thinking, answers, thinking, answers)
        loss = self.config.loss
        scores_old = num_scored(loss.old_logprobs, self.config.train.minibatches)
        old = scores if scores_old else None
        reference = scores if loss.kl_coef > 0 else None
        return Minibatch(batch, old, reference)
