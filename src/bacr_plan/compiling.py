"""Compiles the programs of a run to measure the memory that XLA allocates for them.

No weights, data or GPUs are needed. `measure` runs this module as a script in a separate process,
because the number and type of simulated devices must be configured before JAX starts. There are two
compilers:

gpu  XLA's GPU compiler, for a GPU that is described but does not have to exist. It needs the
     plugin of the extra `plan`, but neither a GPU nor a driver. It reports the memory that a real
     GPU allocates.
cpu  XLA's CPU compiler, for the same number of virtual CPU devices. The sizes of arguments and
     outputs are exact. The sizes of temporaries are not used, because they are 2 to 5 times larger
     than on a GPU (measured).
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
from bacr_plan.devices import CUDNN, PER_HOST, Device, target_config
from bacr_plan.workload import Workload

GPU_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")

# Kernels cannot be autotuned without a GPU, so these flags select library kernels for matrix
# products. The choice of the kernel has little effect on memory use.
GPU_FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"


@dataclass(frozen=True)
class ProgramMemory:
    """The memory of a compiled program on one device.

    Attributes:
      arguments: size of the arguments in bytes.
      outputs: size of the outputs in bytes, without outputs that reuse the memory of an argument.
      temporaries: size of the temporary buffers in bytes.
      seconds: compilation time in seconds.
    """

    arguments: int
    outputs: int
    temporaries: int
    seconds: float


@dataclass(frozen=True)
class Compilation:
    """The compiled programs of a run.

    Attributes:
      source: description of how the memory was determined, for the plan's text.
      programs: memory of one update ("train") and one chunk of decoding steps ("decode"); empty if
        nothing was compiled.
      exact: True if the temporaries come from the GPU compiler.
    """

    source: str
    programs: dict[str, ProgramMemory]
    exact: bool


def can_compile_for_gpus() -> bool:
    """True if JAX's CUDA plugin is installed."""
    specs = [importlib.util.find_spec(name) for name in GPU_PLUGINS]
    return any(spec is not None for spec in specs)


def compile_run(work: Workload, *, num_devices: int, device: Device, compiler: str) -> Compilation:
    """Compiles the programs of a run and returns the memory that they need.

    Args:
      work: the sizes of the run.
      num_devices: number of GPUs.
      device: the GPU model.
      compiler: "gpu", "cpu" or "none". If the CUDA plugin is not installed, "gpu" falls back to the
        CPU compiler.

    Raises:
      UserError: if compilation fails, or if programs for this number of devices cannot be compiled.
    """
    if compiler == "none":
        return Compilation("arithmetic only (--compile none)", {}, exact=False)
    exact = compiler == "gpu" and can_compile_for_gpus()
    by_cpus = "arguments compiled by XLA for CPUs, temporaries by arithmetic"
    if exact:
        source = "compiled for this GPU by XLA; scoring and branches by arithmetic"
    elif compiler == "gpu":
        source = (
            f"{by_cpus}; the GPU compiler is not installed (on Linux, run "
            'pip install -e ".[plan]" in a clone)'
        )
    else:
        source = f"{by_cpus} (--compile cpu)"
    if exact and num_devices > PER_HOST and num_devices % PER_HOST:
        raise UserError(
            f"--devices {num_devices}: the plan assumes machines with {PER_HOST} devices each, "
            f"all of which are used; set at most {PER_HOST}, or a multiple of {PER_HOST}"
        )
    fused_attention = work.fused_attention and exact
    config = described(work.config, work.model, fused_attention=fused_attention)
    gpu = device if exact else None
    programs = measure(config, work.model.vocab_size, num_devices, gpu)
    return Compilation(source, programs, exact)


def described(config: Config, shape: Qwen2Config, *, fused_attention: bool) -> Config:
    """Copies the model's shape into the config, so that compilation needs no model folder.

    Every model family gets the biases and head norms of Qwen2, because their memory is negligible.

    Args:
      config: the config of the run.
      shape: the model's shape.
      fused_attention: True to compile cuDNN's attention instead of XLA's.
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
    """Compiles the programs of a run in a separate process, one at a time to save memory.

    Args:
      config: the config returned by `described`.
      vocab_size: number of tokens in the vocabulary.
      num_devices: number of devices.
      gpu: the GPU to compile for, or None to compile for virtual CPU devices.

    Returns:
      A dict from the name of each program ("train" and "decode") to its memory.

    Raises:
      UserError: if compilation fails.
    """
    environment = dict(os.environ)
    environment["JAX_PLATFORMS"] = "cpu"
    environment["TF_CPP_MIN_LOG_LEVEL"] = "3"
    if gpu is not None:
        # Without this setting the plugin requires a GPU driver.
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
        raise UserError(
            f"--compile {compiler}: the compilation failed ({reason}); pass --compile none, which "
            "estimates the memory by arithmetic"
        )
    by_program = json.loads(done.stdout.splitlines()[-1])
    return {name: ProgramMemory(**fields) for name, fields in by_program.items()}


def last_exception(stderr: str) -> str:
    """Extracts the last exception from a traceback, truncated to 300 characters.

    Returns the last line of the text if it does not contain an exception.
    """
    exceptions = [
        line for line in stderr.splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line)
    ]
    lines = exceptions or stderr.split("\n")
    return lines[-1].strip()[:300]


# In the compiler's process ------------------------------------------------------------------------


def described_devices(device: Device, count: int) -> list[Any]:
    """Creates JAX devices for GPUs that do not exist, with `PER_HOST` GPUs per host.

    After this call, the process can only compile for these GPUs, because this function replaces the
    checks of JAX's fused attention. These check the cuDNN version and the GPU of the current
    machine, and no public option specifies another GPU.
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
    """Parses a CUDA compute capability such as "9.0" into a tuple of integers."""
    return tuple(map(int, text.split(".")))


def measured(compiled: Any, seconds: float) -> ProgramMemory:
    """Reads the memory statistics of a compiled program.

    Args:
      compiled: the compiled program.
      seconds: its compilation time in seconds.
    """
    memory = compiled.memory_analysis()
    return ProgramMemory(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        seconds=seconds,
    )


def main() -> int:
    """Compiles the programs that `measure` sends to stdin, and prints their memory as JSON."""
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
