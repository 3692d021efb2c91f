"""The real programs of a run, compiled on abstract shapes: no weights, no data, no GPUs.

Meshes of devices that are not here have to be arranged before JAX starts, so this module is run as
a process of its own (`measure` starts it and reads its answer). Two ways to compile:

gpu  XLA's own GPU compiler for a described device; needs the plugin of the extra `plan`, but no
     GPU and no driver. What it says is what the GPU will allocate.
cpu  XLA's CPU compiler for as many made-up CPU devices. Arguments and outputs are exact;
     temporaries are not those of a GPU (measured: 2 to 5 times too large) and are not used.
"""

import dataclasses
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bacr_jax.config import Config
from bacr_jax.errors import UserError
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.planning.devices import DEVICES, target_config

GPU_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")

# Devices of one box, NVIDIA's HGX and DGX boards.
PER_HOST = 8

PROGRAMS = ("train", "decode")

# Kernels are not timed, there being no GPU, and library products are taken; both change which
# kernel is used for a product, hardly its memory.
GPU_FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"


@dataclasses.dataclass(frozen=True)
class Measured:
    """Bytes of a compiled program, per device.

    Attributes:
      arguments: what it is given.
      outputs: what it returns, without what it returns in the place of an argument.
      temporaries: everything else while it runs.
      seconds: compile time.
    """

    arguments: int
    outputs: int
    temporaries: int
    seconds: float

    @property
    def peak(self) -> int:
        """Bytes held at the worst moment."""
        return self.arguments + self.outputs + self.temporaries


def can_compile_for_gpus() -> bool:
    """Whether JAX's CUDA plugin is installed."""
    return any(importlib.util.find_spec(name) is not None for name in GPU_PLUGINS)


def described(config: Config, shape: Qwen2Config, *, fused_attention: bool) -> Config:
    """The config with the model's shape written out, so that no folder is needed."""
    model = dataclasses.replace(
        config.model,
        path=None,
        preset="custom",
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rope_theta=shape.rope_theta,
        tie_embeddings=shape.tie_embeddings,
        attention="cudnn" if fused_attention else "xla",
    )
    return dataclasses.replace(config, model=model)


def measure(
    config: Config,
    shape: Qwen2Config,
    *,
    devices: int,
    device: str,
    backend: str,
    fused_attention: bool,
    programs: tuple[str, ...] = PROGRAMS,
) -> dict[str, Measured]:
    """Compiles programs of a run in another process, one after the other to spare memory.

    Args:
      config: checked settings.
      shape: of the model.
      devices: number of devices.
      device: name in `DEVICES`; only matters on the gpu backend.
      backend: gpu or cpu.
      fused_attention: use cuDNN for the trunk's attention.
      programs: some of `PROGRAMS`.

    Raises:
      UserError: the compiler refused.
    """
    from bacr_jax.config import io as config_io

    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if backend == "gpu":
        # The plugin would look for a driver.
        environment["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {GPU_FLAGS}"
    else:
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "config.yaml"
        described_config = described(config, shape, fused_attention=fused_attention)
        written.write_text(config_io.to_yaml(described_config))
        request = {
            "config": str(written),
            "vocabulary": shape.vocab_size,
            "devices": devices,
            "device": device,
            "backend": backend,
            "programs": programs,
        }
        done = subprocess.run(
            [sys.executable, "-m", "bacr_jax.planning.compiling"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
    if done.returncode != 0:
        raise UserError(f"--compile {backend}: the compiler stopped ({_reason(done.stderr)})")
    answer = json.loads(done.stdout.splitlines()[-1])
    return {name: Measured(**found) for name, found in answer.items()}


def _reason(stderr: str) -> str:
    """The exception of a traceback, on one short line."""
    lines = [line for line in stderr.splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line)]
    found = (lines or stderr.split("\n") or ["no message"])[-1]
    return found.strip()[:300]


# In the process of its own -----------------------------------------------------------------------


def _abstract_devices(backend: str, device: str, count: int) -> list[Any]:
    import jax

    here = jax.devices()
    if backend == "cpu":
        return here[:count]
    from jax._src.cudnn import fused_attention_stablehlo as cudnn
    from jax.experimental import topologies

    facts = DEVICES[device]
    # These ask the machine for its cuDNN and its GPU; the described device answers instead.
    cudnn.check_cudnn_version = lambda: 91002
    cudnn.check_compute_capability = lambda wanted: (
        tuple(map(int, wanted.split("."))) <= facts.capability
    )
    cudnn.is_cuda_compute_capability_equal = lambda wanted: (
        tuple(map(int, wanted.split("."))) == facts.capability
    )
    hosts = max(count // PER_HOST, 1)
    described_topology = topologies.get_topology_desc(
        topology_name="planned",
        platform="cuda",
        topology=f"1x{hosts}x{count // hosts}",
        target_config=target_config(facts),
    )
    return list(described_topology.devices)


class Programs:
    """The jitted functions of a run with abstract arguments, laid out as in a run."""

    def __init__(self, config: Config, vocabulary: int, devices: list[Any]):
        """Prepares settings and shapes.

        Args:
          config: settings with the model's shape written out.
          vocabulary: rows of the embedding.
          devices: real, made-up or described ones.
        """
        import jax

        from bacr_jax import parallel
        from bacr_jax.learner import policy as policies
        from bacr_jax.methods import load_method
        from bacr_jax.model import qwen2

        self.config = config
        self.method = load_method(config)
        self.policy = policies.make_policy(config, self.method, vocabulary)
        shape = self.policy.learner.model
        self.layout = policies.mesh_shape(config, shape, len(devices))
        self.mesh = parallel.make_mesh(self.layout, devices)
        self.learner = dataclasses.replace(self.policy.learner, mesh=self.mesh)
        key = jax.eval_shape(lambda: jax.random.key(0))
        self.params = jax.eval_shape(
            lambda k: policies.with_budget_module(k, self.policy, qwen2.init(k, shape)), key
        )
        self.head = jax.eval_shape(lambda k: policies.random_head(k, self.policy), key)
        self.key = key

    def _rows(self, count: int, *shape: int, dtype: Any = "int32") -> Any:
        import jax

        from bacr_jax import parallel

        return jax.ShapeDtypeStruct(
            (count, *shape), dtype, sharding=parallel.row_sharding(self.mesh)
        )

    def _whole(self, tree: Any, mesh: Any = None) -> Any:
        from bacr_jax import parallel

        return self._laid_out(tree, parallel.replicated(mesh or self.mesh))

    def _laid_out(self, tree: Any, shardings: Any) -> Any:
        import jax

        if isinstance(shardings, jax.sharding.Sharding):
            one = shardings
            shardings = jax.tree.map(lambda _: one, tree)
        return jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            tree,
            shardings,
        )

    def _batch(self, rows: int) -> Any:
        import jax
        import jax.numpy as jnp

        from bacr_jax.learner.batch import Batch
        from bacr_jax.planning.workload import SUFFIX_TOKENS

        config = self.config
        one_budget = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        cuts = self.method.answers * jax.eval_shape(self.method.cuts, one_budget).shape[-1]
        thinking, answer = config.budget.max, config.rollout.answer_tokens
        real = functools.partial(self._rows, rows, dtype="float32")
        whole = functools.partial(self._rows, rows)
        return Batch(
            trunk=whole(config.data.max_prompt_tokens + thinking),
            prompt_lengths=whole(),
            question_start=whole(),
            question_end=whole(),
            sampled=whole(),
            budgets=whole(),
            cuts=whole(cuts),
            branches=whole(cuts, SUFFIX_TOKENS + answer),
            context=whole(cuts),
            forced=whole(cuts),
            answered=whole(cuts),
            thinking_advantages=real(thinking),
            answer_advantages=real(cuts),
            returns=real(cuts),
            thinking_logprobs=real(thinking),
            answer_logprobs=real(cuts, answer),
        )

    def _scores(self, batch: Any) -> Any:
        from bacr_jax.learner.objective import TokenScores

        rows, width = batch.trunk.shape[0], self.learner.model.hidden_size
        real = functools.partial(self._rows, dtype="float32")
        thinking = real(*batch.thinking_logprobs.shape)
        answers = real(*batch.answer_logprobs.shape)
        return TokenScores(thinking, answers, thinking, answers, real(rows, width))

    def _legal(self) -> Any:
        import jax

        vocabulary = self.learner.model.vocab_size
        return self._whole(jax.ShapeDtypeStruct((vocabulary,), bool))

    def train(self) -> Any:
        """One update: gradients over micro-batches, one Adam step."""
        import jax

        from bacr_jax import parallel
        from bacr_jax.learner import train_step as learning
        from bacr_jax.learner.optimizer import policy_optimizer, value_optimizer

        config = self.config
        policy_tx = policy_optimizer(config.optimizer, 1000)
        head_tx = value_optimizer(config.value)
        fresh = functools.partial(learning.init_state, policy_tx=policy_tx, head_tx=head_tx)
        state = jax.eval_shape(fresh, self.params, self.head)
        state = self._laid_out(state, parallel.shardings(state, self.mesh))
        if config.train.micro_batch_tokens is not None:
            return self._accumulation(state)
        rows = config.rollout.questions * config.rollout.group_size // config.train.minibatches
        batch = self._batch(rows)
        return learning.train_step.lower(
            state,
            batch,
            self._legal(),
            *self._old_and_reference(batch),
            spec=self.learner,
            policy_tx=policy_tx,
            head_tx=head_tx,
            micro_batches=max(rows // (config.train.micro_batch_rows or rows), 1),
        )

    def _old_and_reference(self, batch: Any) -> tuple[Any, Any]:
        several, kl = self.config.train.minibatches > 1, self.config.loss.kl_coef > 0
        return self._scores(batch) if several else None, self._scores(batch) if kl else None

    def _accumulation(self, state: Any) -> Any:
        """The gradient of one micro-batch of the widest bucket, added to those before it."""
        import jax

        from bacr_jax import parallel
        from bacr_jax.learner import train_step as learning
        from bacr_jax.learner.micro_batches import Shapes
        from bacr_jax.learner.objective import loss_normalizers

        one = self._batch(1)
        positions = one.trunk.shape[1] + one.branches.shape[1] * one.branches.shape[2]
        tokens = self.config.train.micro_batch_tokens
        assert tokens is not None
        shapes = Shapes(tokens, multiple=self.layout.row_shards)
        batch = self._batch(shapes.rows(positions, 0))
        totals = self._whole(
            jax.eval_shape(functools.partial(loss_normalizers, spec=self.learner), batch)
        )
        given = (state, batch, self._legal(), *self._old_and_reference(batch), totals)
        found = jax.eval_shape(functools.partial(learning.gradients, spec=self.learner), *given)
        found = self._laid_out(found, parallel.shardings(found, self.mesh))
        return learning.accumulate.lower(found, *given, spec=self.learner)

    def decode(self) -> Any:
        """One chunk of decoding with every slot in use and the whole cache in the window."""
        import jax
        import jax.numpy as jnp

        from bacr_jax import parallel
        from bacr_jax.model.kv_cache import decode_params
        from bacr_jax.rollout import decode as decoding

        spec, mesh = (
            self.policy.evaluation,
            parallel.decode_mesh(self.mesh, self.layout.decode_tensor),
        )
        conditioned = spec.conditioning is not None
        copy = jax.eval_shape(
            functools.partial(decode_params, dtype=spec.dtype, conditioned=conditioned),
            self.params,
        )
        phi, phi_of = None, self.policy.phi_of(self.params)
        if phi_of is not None:
            phi = jax.eval_shape(phi_of, jax.ShapeDtypeStruct((spec.slots,), jnp.int32))
        width = self.config.data.max_prompt_tokens
        slots = functools.partial(
            decoding.empty,
            config=spec.config,
            slots=spec.slots,
            prompt_width=width,
            max_new=spec.max_thinking,
            length=width + spec.max_thinking,
            dtype=spec.dtype,
        )
        state = jax.eval_shape(lambda phi: slots(phi=phi), phi)
        over = lambda *axes: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        by_row, tensor = parallel.AXES[:2], parallel.AXES[2]
        sharded = self._laid_out(dataclasses.replace(state, cache=(), phi=None), over(by_row))
        per_layer = phi is not None and phi.ndim == 3
        sharded = dataclasses.replace(
            sharded,
            cache=self._laid_out(state.cache, over(by_row, tensor)),
            phi=self._laid_out(state.phi, over(None, by_row) if per_layer else over(by_row)),
        )
        return decoding.decode_chunk.lower(
            self._laid_out(copy, parallel.shardings(copy, mesh, rules=parallel.DECODE)),
            sharded,
            self._whole(self.key, mesh),
            self._whole(self._rules(), mesh),
            self._whole(self._sampler(), mesh),
            config=spec.config,
            num_steps=spec.chunk,
            conditioning=spec.conditioning,
            mesh=mesh,
        )

    def _rules(self) -> Any:
        import jax
        import jax.numpy as jnp

        from bacr_jax.data.decode_rules import Automaton, DecodeRules
        from bacr_jax.planning.workload import SUFFIX_TOKENS

        vocabulary = self.learner.model.vocab_size
        array: Any = jax.ShapeDtypeStruct
        flags = array((vocabulary,), bool)
        # One state per byte of "</answer>", and the accepting one.
        states = len("</answer>") + 1
        table = Automaton(
            array((states, vocabulary), jnp.int32),
            array((states, vocabulary), bool),
        )
        suffix = array((SUFFIX_TOKENS,), jnp.int32)
        return DecodeRules(flags, flags, table, table, suffix, suffix)

    def _sampler(self) -> Any:
        import jax

        from bacr_jax.rollout.sampling import sampling_params

        return jax.eval_shape(lambda: sampling_params(1.0))


def compile_programs(config: Config, vocabulary: int, devices: list[Any], names: Any) -> Any:
    """Compiles the named programs for the given devices."""
    import time

    programs = Programs(config, vocabulary, devices)
    found = {}
    for name in names:
        started = time.time()
        memory = getattr(programs, name)().compile().memory_analysis()
        found[name] = Measured(
            arguments=memory.argument_size_in_bytes,
            outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
            temporaries=memory.temp_size_in_bytes,
            seconds=time.time() - started,
        )
    return found


def main() -> int:
    """Reads a request on stdin, compiles, answers on stdout in one line."""
    from bacr_jax.config import io as config_io

    request = json.load(sys.stdin)
    config = config_io.load([request["config"]])
    devices = _abstract_devices(request["backend"], request["device"], request["devices"])
    found = compile_programs(config, request["vocabulary"], devices, request["programs"])
    print(json.dumps({name: dataclasses.asdict(one) for name, one in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
