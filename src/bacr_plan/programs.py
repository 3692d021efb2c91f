"""The jitted functions of a run on abstract arguments, laid out on its devices as in training.

Nothing is allocated, and the devices may be real, made-up or only described ones (`compiling`).
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
from bacr_jax.learner import copies
from bacr_jax.learner import train_step as learning
from bacr_jax.learner.batch import Batch, empty_batch
from bacr_jax.learner.micro_batches import Shapes
from bacr_jax.learner.objective import Minibatch, TokenScores, loss_normalizers
from bacr_jax.learner.optimizer import policy_optimizer, value_optimizer
from bacr_jax.learner.updates import num_scored
from bacr_jax.methods import load_method
from bacr_jax.model import adapters
from bacr_jax.model.kv_cache import decode_params
from bacr_jax.prompts.decode_rules import Automaton, DecodeRules
from bacr_jax.rollout import sampling_params, trunks
from bacr_jax.rollout.sampling import Draws
from bacr_jax.runs import initial, setup
from bacr_plan.workload import SUFFIX_TOKENS


def laid_out(tree: Any, shardings: Any) -> Any:
    """The tree's shapes and types with one sharding for all, or with a tree of them."""

    def struct(x: Any, where: Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    return jax.tree.map(struct, tree, jax.tree.broadcast(shardings, tree))


def over(mesh: Mesh, *axes: Any) -> NamedSharding:
    """Arrays whose axes are split over those of a mesh."""
    return NamedSharding(mesh, PartitionSpec(*axes))


def _whole(tree: Any, mesh: Mesh) -> Any:
    """The same on every device."""
    return laid_out(tree, parallel.replicated(mesh))


def _decode_rules(vocab_size: int) -> DecodeRules:
    array: Any = jax.ShapeDtypeStruct
    flags = array((vocab_size,), bool)
    # One state per byte of "</answer>", and the accepting one.
    states = len("</answer>") + 1
    table = Automaton(array((states, vocab_size), jnp.int32), array((states, vocab_size), bool))
    suffix = array((SUFFIX_TOKENS,), jnp.int32)
    return DecodeRules(flags, flags, table, table, suffix, suffix, flags)


class Programs:
    """What a run compiles, ready to be lowered: an update and a chunk of decoding."""

    def __init__(self, config: Config, vocab_size: int, devices: list[Any]):
        """Takes a config with its model's shape in it, and real, made-up or described devices."""
        self.config = config
        self.method = load_method(config)
        self.policy = setup.make_policy(config, self.method, vocab_size)
        shape = self.policy.learner.model
        self.layout = setup.mesh_shape(config, shape, len(devices))
        self.mesh = parallel.make_mesh(self.layout, devices)
        self.decode_mesh = parallel.decode_mesh(self.mesh, self.layout.decode_tensor)
        self.learner = dataclasses.replace(self.policy.learner, mesh=self.mesh)
        self.rollout = dataclasses.replace(self.policy.rollout, mesh=self.decode_mesh)
        self.key = jax.eval_shape(lambda: jax.random.key(0))
        self.params = initial.abstract_params(self.policy)
        frozen, self.trained = adapters.split(self.params)
        self.frozen = laid_out(frozen, parallel.shardings(frozen, self.mesh))
        self.head = jax.eval_shape(lambda k: initial.random_head(k, self.policy), self.key)

    def train(self) -> Lowered:
        """One update: gradients over micro-batches, one Adam step."""
        config = self.config
        policy_tx = policy_optimizer(config.optimizer, 1000)
        head_tx = value_optimizer(config.value, config.optimizer, 1000)
        fresh = functools.partial(learning.init_state, policy_tx=policy_tx, head_tx=head_tx)
        state = jax.eval_shape(fresh, self.trained, self.head)
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
        """The gradient of one micro-batch of the widest bucket, added to those before it."""
        one = self._batch(1)
        positions = one.trunk.shape[1] + one.branches.shape[1] * one.branches.shape[2]
        batch = self._batch(Shapes(tokens, multiple=self.layout.row_shards).rows(positions, 0))
        totals = jax.eval_shape(functools.partial(loss_normalizers, spec=self.learner), batch)
        whole = (_whole(totals, self.mesh), self._allowed_tokens(), self.frozen)
        given = (state, self._minibatch(batch), *whole)
        earlier = jax.eval_shape(functools.partial(learning.gradients, spec=self.learner), *given)
        earlier = laid_out(earlier, copies.gradient_shardings(earlier, self.learner))
        return learning.accumulate.lower(earlier, *given, spec=self.learner)

    def decode(self) -> Lowered:
        """One chunk of decoding with every slot in use and the whole cache in the window."""
        spec = self.rollout
        return trunks.decode_trunks.lower(
            self.decode_copy(), self.slots(), self.draws(), spec=spec.decode, num_steps=spec.chunk
        )

    def decode_copy(self) -> Any:
        """The parameters as decoding reads them."""
        mesh, spec = self.decode_mesh, self.rollout
        conditioned = spec.conditioning is not None
        how = {"dtype": spec.dtype, "conditioned": conditioned, "shards": mesh.shape["tensor"]}
        copy = jax.eval_shape(functools.partial(decode_params, **how), self.params)
        return laid_out(copy, parallel.shardings(copy, mesh, rules=parallel.DECODE))

    def draws(self) -> Draws:
        """Key, rules and temperature, whole on every device."""
        rules = _decode_rules(self.learner.model.vocab_size)
        sampling = jax.eval_shape(lambda: sampling_params(1.0))
        return _whole(Draws(self.key, rules, sampling), self.decode_mesh)

    def slots(self) -> Any:
        """The state of decoding with a cache as long as it gets."""
        spec, width = self.rollout, self.config.data.max_prompt_tokens
        phi, phi_of = None, self.policy.phi_of(self.params)
        if phi_of is not None:
            phi = jax.eval_shape(phi_of, jax.ShapeDtypeStruct((spec.slots,), jnp.int32))
        empty = functools.partial(
            trunks.free_slots,
            spec=spec.decode,
            slots=spec.slots,
            prompt_width=width,
            max_new=spec.max_sampled,
            length=width + spec.max_sampled,
        )
        state = jax.eval_shape(lambda phi: empty(phi=phi), phi)
        mesh, by_row, tensor = self.decode_mesh, parallel.AXES[:2], parallel.AXES[2]
        per_layer = phi is not None and phi.ndim == 3
        return dataclasses.replace(
            laid_out(dataclasses.replace(state, cache=(), phi=None), over(mesh, by_row)),
            cache=laid_out(state.cache, over(mesh, by_row, tensor)),
            phi=laid_out(state.phi, over(mesh, None, by_row) if per_layer else over(mesh, by_row)),
            logits=laid_out(state.logits, parallel.logits_sharding(mesh, state.logits.shape[-1])),
        )

    def _batch(self, rows: int) -> Batch:
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
        return _whole(jax.ShapeDtypeStruct((self.learner.model.vocab_size,), bool), self.mesh)

    def _minibatch(self, batch: Batch) -> Minibatch:
        """The batch, with old and reference scores where the run has them."""
        thinking, answers = batch.thinking_logprobs, batch.answer_logprobs
        shape, where = (batch.trunk.shape[0], self.learner.model.hidden_size), batch.trunk.sharding
        hidden: Any = jax.ShapeDtypeStruct(shape, "float32", sharding=where)
        scores = TokenScores(thinking, answers, thinking, answers, hidden)
        loss, minibatches = self.config.loss, self.config.train.minibatches
        old = scores if num_scored(loss.old_logprobs, minibatches) else None
        reference = scores if self.config.loss.kl_coef > 0 else None
        return Minibatch(batch, old, reference)
