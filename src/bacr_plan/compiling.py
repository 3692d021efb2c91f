"""What XLA will allocate for a run: its programs compiled, with no weights, no data and no GPUs.

Meshes of devices that are not here have to be arranged before JAX starts, so the compiler is a
process of its own: `measure` runs this module and reads its answer. Two ways to compile:

gpu  XLA's own GPU compiler for a described device; needs the plugin of the extra `plan`, but no
     GPU and no driver. What it says is what the GPU will allocate.
cpu  XLA's CPU compiler for as many made-up CPU devices. Arguments and outputs are exact;
     temporaries are not those of a GPU (measured: 2 to 5 times too large) and are not used.
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

# Kernels are not timed, there being no GPU, and library products are taken; both change which
# kernel is used for a product, hardly its memory.
GPU_FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"


@dataclass(frozen=True)
class Measured:
    """Bytes of a compiled program, per device; outputs in the place of an argument are none."""

    arguments: int
    outputs: int
    temporaries: int
    seconds: float


@dataclass(frozen=True)
class Compilation:
    """What compilers said about a run.

    Attributes:
      programs: an update ("train") and a chunk of decoding ("decode"); empty without a compiler.
      exact: temporaries are those of the GPU too.
    """

    source: str
    programs: dict[str, Measured]
    exact: bool


def can_compile_for_gpus() -> bool:
    """Whether JAX's CUDA plugin is installed."""
    return any(importlib.util.find_spec(name) is not None for name in GPU_PLUGINS)


def compile_run(work: Workload, *, num_devices: int, device: Device, compiler: str) -> Compilation:
    """Compiles the programs of a run as far as that is possible here.

    `compiler` is gpu (that of CPUs where its plugin is not installed), cpu or none. UserError: it
    refused, or can't compile for so many devices.
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
    config = described(work.config, work.model, fused_attention=work.fused_attention and exact)
    of = num_devices, device if exact else None
    return Compilation(source, measure(config, work.model.vocab_size, *of), exact)


def described(config: Config, shape: Qwen2Config, *, fused_attention: bool) -> Config:
    """The config with the model's shape written out, so that no folder is needed.

    Biases and norms of heads are Qwen2's in every family; they weigh next to nothing.
    """
    keys = {one.name for one in dataclasses.fields(config.model)}
    attention: Literal["cudnn", "xla"] = "cudnn" if fused_attention else "xla"
    model = dataclasses.replace(
        config.model,
        path=None,
        preset="custom",
        attention=attention,
        **{key: value for key, value in vars(shape).items() if key in keys},
    )
    asked = config.rollout
    rollout = dataclasses.replace(asked, attention="xla" if asked.attention == "xla" else attention)
    return dataclasses.replace(config, model=model, rollout=rollout)


def measure(
    config: Config, vocab_size: int, num_devices: int, gpu: Device | None
) -> dict[str, Measured]:
    """Compiles the programs of a `described` run in another process, for GPUs or else for CPUs.

    One after the other, to spare memory. UserError: the compiler refused.
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if gpu is not None:
        # The plugin would look for a driver.
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
        said = last_exception(done.stderr.decode(errors="replace"))
        raise UserError(f"--compile {'gpu' if gpu else 'cpu'}: the compiler stopped ({said})")
    answer = json.loads(done.stdout.splitlines()[-1])
    return {name: Measured(**measured) for name, measured in answer.items()}


def last_exception(stderr: str) -> str:
    """The exception of a traceback, on one short line."""
    lines = [line for line in stderr.splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return (lines or stderr.split("\n"))[-1].strip()[:300]


# In the process of its own -----------------------------------------------------------------------


def described_devices(device: Device, count: int) -> list[Any]:
    """Devices that are not here, in boxes of `PER_HOST`; this process compiles for them alone.

    JAX's fused attention asks the machine for its cuDNN and GPU; `device` answers instead. JAX has
    no public way to say which GPU is compiled for, so its own checks are replaced.
    """
    from jax._src.cudnn import fused_attention_stablehlo as checks
    from jax.experimental import topologies

    major, minor, patch = CUDNN
    capability = lambda text: tuple(map(int, text.split(".")))
    vars(checks).update(
        check_cudnn_version=lambda: 10_000 * major + 100 * minor + patch,
        check_compute_capability=lambda wanted: capability(wanted) <= device.capability,
        is_cuda_compute_capability_equal=lambda wanted: capability(wanted) == device.capability,
    )
    hosts = max(count // PER_HOST, 1)
    topology = topologies.get_topology_desc(
        topology_name="planned",
        platform="cuda",
        topology=f"1x{hosts}x{count // hosts}",
        target_config=target_config(device),
    )
    return list(topology.devices)


def measured(compiled: Any, seconds: float) -> Measured:
    """What a compiled program says of its memory."""
    memory = compiled.memory_analysis()
    return Measured(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        seconds=seconds,
    )


def main() -> int:
    """Reads what `measure` asks on stdin; compiles an update and a chunk of decoding; answers."""
    import jax

    from bacr_plan.programs import Programs

    config, vocab_size, count, device = pickle.load(sys.stdin.buffer)
    made_up = jax.devices()[:count]
    devices = made_up if device is None else described_devices(device, count)
    programs, found = Programs(config, vocab_size, devices), {}
    for name, lower in (("train", programs.train), ("decode", programs.decode)):
        started = time.time()
        compiled = lower().compile()
        found[name] = dataclasses.asdict(measured(compiled, time.time() - started))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
