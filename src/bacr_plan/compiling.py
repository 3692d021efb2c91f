"""Compiles the programs of a run to measure the memory that XLA allocates for them.

Needs no weights, no data and no GPUs. The compiler runs in another process, because devices that do
not exist must be configured before JAX starts: `measure` runs this module and reads its output.
There are two ways to compile:

gpu  XLA's GPU compiler for a described device. Needs the plugin of the extra `plan`, but no GPU and
     no driver. The GPU will allocate what this compiler reports.
cpu  XLA's CPU compiler for the same number of virtual CPU devices. Arguments and outputs are exact.
     Temporaries are 2 to 5 times larger than a GPU's (measured), so they are not used.
"""

import dataclasses
import importlib.util
import json
import os
import pickle
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any, Literal

from bacr_jax.config import Config
from bacr_jax.errors import UserError
from bacr_jax.model.sizes import Qwen2Config
from bacr_plan.devices import CUDNN, Device, target_config
from bacr_plan.workload import Workload

GPU_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")

# Devices of one box, NVIDIA's HGX and DGX boards.
PER_HOST = 8

# Without a GPU, kernels cannot be timed, so library products are used. Both flags change the kernel
# of a product, but hardly its memory.
GPU_FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"


@dataclass(frozen=True)
class ProgramMemory:
    """Memory of a compiled program on one device.

    Attributes:
      arguments: bytes.
      outputs: bytes, without outputs that reuse the memory of an argument.
      temporaries: bytes.
      seconds: time to compile.
    """

    arguments: int
    outputs: int
    temporaries: int
    seconds: float


@dataclass(frozen=True)
class Compilation:
    """The compiled programs of a run.

    Attributes:
      source: how the memory was measured, for the plan's text.
      programs: an update ("train") and a chunk of decoding ("decode"); empty without a compiler.
      exact: True if the temporaries are a GPU's.
    """

    source: str
    programs: dict[str, ProgramMemory]
    exact: bool


def can_compile_for_gpus() -> bool:
    """True if JAX's CUDA plugin is installed."""
    specs = [importlib.util.find_spec(name) for name in GPU_PLUGINS]
    return any(spec is not None for spec in specs)


def compile_run(work: Workload, *, num_devices: int, device: Device, compiler: str) -> Compilation:
    """Compiles the programs of a run.

    Args:
      compiler: gpu, cpu or none. The CPU compiler replaces the GPU compiler if its plugin is not
        installed.

    Raises:
      UserError: if the compiler fails, or cannot compile for this number of devices.
    """
    if compiler == "none":
        return Compilation("arithmetic only (--compile none)", {}, exact=False)
    exact = compiler == "gpu" and can_compile_for_gpus()
    by_cpus = "arguments compiled by XLA for CPUs, temporaries by arithmetic"
    if exact:
        source = "compiled for this GPU by XLA; scoring and branches by arithmetic"
    elif compiler == "gpu":
        source = f'{by_cpus}; the GPU compiler is not here (pip install -e ".[plan]" in a clone)'
    else:
        source = f"{by_cpus} (--compile cpu)"
    if exact and num_devices > PER_HOST and num_devices % PER_HOST:
        raise UserError(
            f"--devices: found {num_devices}; write up to {PER_HOST}, or whole boxes of {PER_HOST}"
        )
    fused_attention = work.fused_attention and exact
    config = described(work.config, work.model, fused_attention=fused_attention)
    gpu = device if exact else None
    programs = measure(config, work.model.vocab_size, num_devices, gpu)
    return Compilation(source, programs, exact)


def described(config: Config, shape: Qwen2Config, *, fused_attention: bool) -> Config:
    """Returns the config with the model's shape in its keys, so that no folder is needed.

    Biases and norms of heads are Qwen2's for every family, because their memory is negligible.

    Args:
      fused_attention: True to compile cuDNN's attention.
    """
    config_keys = {field.name for field in dataclasses.fields(config.model)}
    shape_keys = {key: value for key, value in vars(shape).items() if key in config_keys}
    attention: Literal["cudnn", "xla"] = "cudnn" if fused_attention else "xla"
    decoding_attention = attention
    if config.rollout.attention == "xla":
        decoding_attention = "xla"
    model = dataclasses.replace(
        config.model,
        path=None,
        preset="custom",
        attention=attention,
        **shape_keys,
    )
    rollout = dataclasses.replace(config.rollout, attention=decoding_attention)
    return dataclasses.replace(config, model=model, rollout=rollout)


def measure(
    config: Config, vocab_size: int, num_devices: int, gpu: Device | None
) -> dict[str, ProgramMemory]:
    """Compiles the programs of a run in another process, one after the other to save memory.

    Args:
      config: what `described` returns.
      gpu: the GPU to compile for; None: virtual CPU devices.

    Raises:
      UserError: if the compiler fails.
    """
    environment = dict(os.environ)
    environment["JAX_PLATFORMS"] = "cpu"
    environment["TF_CPP_MIN_LOG_LEVEL"] = "3"
    if gpu is not None:
        # Without this setting the plugin looks for a driver.
        environment["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {GPU_FLAGS}"
    else:
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={num_devices}"
    done = subprocess.run(
        [sys.executable, "-m", "bacr_plan.compiling"],
        input=pickle.dumps((config, vocab_size, num_devices, gpu)),
        capture_output=True,
        env=environment,
        check=False,
    )
    if done.returncode != 0:
        reason = last_exception(done.stderr.decode(errors="replace"))
        compiler = "gpu" if gpu else "cpu"
        raise UserError(f"--compile {compiler}: the compiler stopped ({reason})")
    by_program = json.loads(done.stdout.splitlines()[-1])
    return {name: ProgramMemory(**fields) for name, fields in by_program.items()}


def last_exception(stderr: str) -> str:
    """Returns the exception of a traceback, or the last line, cut after 300 characters."""
    exceptions = [
        line for line in stderr.splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line)
    ]
    lines = exceptions or stderr.split("\n")
    return lines[-1].strip()[:300]


# In the compiler's process ------------------------------------------------------------------------


def described_devices(device: Device, count: int) -> list[Any]:
    """Returns descriptions of devices that do not exist, in boxes of `PER_HOST`.

    This process can then compile for these devices only: JAX's fused attention checks the machine's
    cuDNN and GPU, and has no public way to set the GPU that is compiled for, so the checks are
    replaced.
    """
    from jax._src.cudnn import fused_attention_stablehlo as checks
    from jax.experimental import topologies

    major, minor, patch = CUDNN
    vars(checks).update(
        check_cudnn_version=lambda: 10_000 * major + 100 * minor + patch,
        check_compute_capability=lambda text: _capability(text) <= device.capability,
        is_cuda_compute_capability_equal=lambda text: _capability(text) == device.capability,
    )
    hosts = max(count // PER_HOST, 1)
    topology = topologies.get_topology_desc(
        topology_name="planned",
        platform="cuda",
        topology=f"1x{hosts}x{count // hosts}",
        target_config=target_config(device),
    )
    return list(topology.devices)


def _capability(text: str) -> tuple[int, ...]:
    """Returns a compute capability such as `9.0` as numbers."""
    return tuple(map(int, text.split(".")))


def measured(compiled: Any, seconds: float) -> ProgramMemory:
    """Returns the memory that a compiled program reports.

    Args:
      seconds: time to compile it.
    """
    memory = compiled.memory_analysis()
    return ProgramMemory(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        seconds=seconds,
    )


def main() -> int:
    """Compiles the programs that `measure` requests on stdin, and prints their memory as JSON."""
    import jax

    from bacr_plan.programs import Programs

    config, vocab_size, count, device = pickle.load(sys.stdin.buffer)
    devices = jax.devices()[:count]
    if device is not None:
        devices = described_devices(device, count)
    programs = Programs(config, vocab_size, devices)
    memory_of_program = {}
    for name, lower in (("train", programs.train), ("decode", programs.decode)):
        started = time.time()
        compiled = lower().compile()
        memory = measured(compiled, time.time() - started)
        memory_of_program[name] = dataclasses.asdict(memory)
    print(json.dumps(memory_of_program))
    return 0


if __name__ == "__main__":
    sys.exit(main())
