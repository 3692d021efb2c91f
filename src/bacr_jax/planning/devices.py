"""Facts about the GPUs a run can be planned for: data-sheet ceilings and what XLA must be told.

Sources, by NVIDIA: "A100 Tensor Core GPU" data sheet and the "A100 Tensor Core GPU Architecture"
white paper; "H100 Tensor Core GPU" data sheet and the "H100 Tensor Core GPU Architecture" white
paper; "H200 Tensor Core GPU" data sheet. Limits per multiprocessor are those of the CUDA C++
Programming Guide, table of technical specifications per compute capability. Matrix rates are dense
ones: the sheets of H100 and H200 print twice as much, "with sparsity".
"""

from dataclasses import dataclass, replace

from bacr_jax.errors import UserError

GIB = 2**30
# The cuDNN that described devices have: major, minor, patch.
CUDNN = (9, 10, 2)


@dataclass(frozen=True)
class Device:
    """One GPU.

    Attributes:
      name: as the driver calls it.
      memory_gib: memory on the card. The sheets print these numbers as GB, but drivers report
        nearly as many GiB.
      matmul_flops: dense bfloat16 matrix products with fp32 sums, FLOP/s.
      memory_bandwidth: bytes/s between memory and chip.
      link_bandwidth: bytes/s to other GPUs of the box, one direction.
      capability: compute capability, major and minor.
      cores: multiprocessors.
      fp32_per_core: fp32 units per multiprocessor.
      shared_per_core: bytes of shared memory per multiprocessor.
      shared_per_block: the most of it that one block may ask for, bytes.
      l2: bytes of second-level cache.
      clock_ghz: boost clock.
    """

    name: str
    memory_gib: float
    matmul_flops: float
    memory_bandwidth: float
    link_bandwidth: float
    capability: tuple[int, int]
    cores: int
    fp32_per_core: int
    shared_per_core: int
    shared_per_block: int
    l2: int
    clock_ghz: float


_A100 = Device(
    name="NVIDIA A100-SXM4-80GB",
    memory_gib=80.0,
    matmul_flops=312e12,
    memory_bandwidth=2039e9,
    # 12 third-generation links, 600 GB/s in both directions together.
    link_bandwidth=300e9,
    capability=(8, 0),
    cores=108,
    fp32_per_core=64,
    shared_per_core=164 * 1024,
    shared_per_block=163 * 1024,
    l2=40 * 2**20,
    clock_ghz=1.41,
)
_H100 = Device(
    name="NVIDIA H100 80GB HBM3",
    memory_gib=80.0,
    matmul_flops=989e12,
    memory_bandwidth=3350e9,
    # 18 fourth-generation links, 900 GB/s in both directions together.
    link_bandwidth=450e9,
    capability=(9, 0),
    cores=132,
    fp32_per_core=128,
    shared_per_core=228 * 1024,
    shared_per_block=227 * 1024,
    l2=50 * 2**20,
    clock_ghz=1.98,
)
DEVICES: dict[str, Device] = {
    "a100-40": replace(
        _A100, name="NVIDIA A100-SXM4-40GB", memory_gib=40.0, memory_bandwidth=1555e9
    ),
    "a100-80": _A100,
    "h100": _H100,
    "h200": replace(_H100, name="NVIDIA H200", memory_gib=141.0, memory_bandwidth=4800e9),
}

# Share of the card's memory that JAX may use. The launch scripts give it exactly this
# (XLA_PYTHON_CLIENT_MEM_FRACTION); the rest is for the CUDA context, NCCL's buffers and the
# workspaces of cuBLAS and cuDNN, which live outside JAX's pool.
MEMORY_FRACTION = 0.92


def find(name: str) -> Device:
    """The device called `name`.

    Raises:
      UserError: no such device.
    """
    if name not in DEVICES:
        raise UserError(f"--device: no device {name!r}; write one of {', '.join(DEVICES)}")
    return DEVICES[name]


def smallest_with(memory_gib: float) -> str:
    """The first device of the table with at least this memory; the largest if none has."""
    enough = [name for name, device in DEVICES.items() if device.memory_gib >= memory_gib]
    return enough[0] if enough else max(DEVICES, key=lambda name: DEVICES[name].memory_gib)


def target_config(device: Device) -> str:
    """The device as XLA's GpuTargetConfigProto in text form, to compile for it from anywhere.

    Threads, registers and grid limits are the same for capabilities 8.0 and 9.0.
    """
    major, minor = device.capability
    return f"""\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: {48 * 1024}
  shared_memory_per_block_optin: {device.shared_per_block}
  shared_memory_per_core: {device.shared_per_core}
  core_count: {device.cores}
  fpus_per_core: {device.fp32_per_core}
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
  memory_bandwidth: {int(device.memory_bandwidth)}
  l2_cache_size: {device.l2}
  clock_rate_ghz: {device.clock_ghz}
  device_memory_size: {int(device.memory_gib * GIB)}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} patch: {CUDNN[2]} }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{device.name}"
"""
