"""Facts about the GPUs a run can be planned for: data-sheet ceilings and what XLA must be told.

Sources, by NVIDIA: data sheets of A10, RTX A6000, L4, L40S, A100, H100, H200 and of HGX B200; the
architecture white papers of A100, H100, GA102, Ada and RTX Blackwell (RTX 4090 and 5090). B200's
multiprocessors, clock, cache and memory rate are those of XLA's own description of it. Limits per
multiprocessor are those of the CUDA C++ Programming Guide, table of technical specifications per
compute capability. Matrix rates are dense ones with fp32 sums: most sheets print twice as much,
"with sparsity". No card of this table but A100, H100 and H200 has been planned against a program
compiled for it.
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
        nearly as many GiB; of GDDR with ECC switched on, as data-center cards come, a sixteenth
        less.
      matmul_flops: dense bfloat16 matrix products with fp32 sums, FLOP/s.
      memory_bandwidth: bytes/s between memory and chip.
      link_bandwidth: bytes/s to other GPUs of the box, one direction; the PCIe slot's where cards
        have no NVLink.
      capability: compute capability, major and minor.
      cores: multiprocessors.
      fp32_per_core: fp32 units per multiprocessor.
      shared_per_core: bytes of shared memory per multiprocessor.
      shared_per_block: the most of it that one block may ask for, bytes.
      l2: bytes of second-level cache.
      clock_ghz: boost clock.
      threads_per_core: resident threads of a multiprocessor.
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
    threads_per_core: int = 2048


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
# Slots of 16 lanes, generations 4 and 5.
_PCIE_4, _PCIE_5 = 32e9, 64e9
_A10 = Device(
    name="NVIDIA A10",
    memory_gib=22.5,
    matmul_flops=125e12,
    memory_bandwidth=600e9,
    link_bandwidth=_PCIE_4,
    capability=(8, 6),
    cores=72,
    fp32_per_core=128,
    shared_per_core=100 * 1024,
    shared_per_block=99 * 1024,
    l2=6 * 2**20,
    clock_ghz=1.695,
    threads_per_core=1536,
)
_L4 = replace(
    _A10,
    name="NVIDIA L4",
    matmul_flops=121e12,
    memory_bandwidth=300e9,
    capability=(8, 9),
    cores=58,
    l2=48 * 2**20,
    clock_ghz=2.04,
)
_B200 = replace(
    _H100,
    name="NVIDIA B200",
    memory_gib=178.0,
    matmul_flops=2250e12,
    memory_bandwidth=7672e9,
    # 18 fifth-generation links, 1.8 TB/s in both directions together.
    link_bandwidth=900e9,
    capability=(10, 0),
    cores=148,
    l2=132644864,
    clock_ghz=1.965,
)
DEVICES: dict[str, Device] = {
    "rtx-4090": replace(
        _L4,
        name="NVIDIA GeForce RTX 4090",
        memory_gib=24.0,
        matmul_flops=165.2e12,
        memory_bandwidth=1008e9,
        cores=128,
        l2=72 * 2**20,
        clock_ghz=2.52,
    ),
    "a10": _A10,
    "l4": _L4,
    "rtx-5090": replace(
        _L4,
        name="NVIDIA GeForce RTX 5090",
        memory_gib=31.8,
        matmul_flops=209.5e12,
        memory_bandwidth=1792e9,
        link_bandwidth=_PCIE_5,
        capability=(12, 0),
        cores=170,
        l2=96 * 2**20,
        clock_ghz=2.407,
    ),
    "a100-40": replace(
        _A100, name="NVIDIA A100-SXM4-40GB", memory_gib=40.0, memory_bandwidth=1555e9
    ),
    "l40s": replace(
        _L4,
        name="NVIDIA L40S",
        memory_gib=45.0,
        matmul_flops=362e12,
        memory_bandwidth=864e9,
        cores=142,
        l2=96 * 2**20,
        clock_ghz=2.52,
    ),
    "a6000": replace(
        _A10,
        name="NVIDIA RTX A6000",
        memory_gib=47.5,
        matmul_flops=154.8e12,
        memory_bandwidth=768e9,
        cores=84,
        clock_ghz=1.8,
    ),
    "a100-80": _A100,
    "h100": _H100,
    "h200": replace(_H100, name="NVIDIA H200", memory_gib=141.0, memory_bandwidth=4800e9),
    "b200": _B200,
}

# Share of the card's memory that JAX may use. The launch scripts give it exactly this
# (XLA_PYTHON_CLIENT_MEM_FRACTION); the rest is for the CUDA context, NCCL's buffers and the
# workspaces of cuBLAS and cuDNN, which live outside JAX's pool.
MEMORY_FRACTION = 0.92


def find(name: str) -> Device:
    """The device called `name`; UserError: there is none."""
    if name not in DEVICES:
        raise UserError(f"--device: no device {name!r}; write one of {', '.join(DEVICES)}")
    return DEVICES[name]


def smallest_with(memory_gib: float) -> str:
    """The device with the least memory that is enough; the largest if none has it."""
    size = lambda name: DEVICES[name].memory_gib
    enough = [name for name in DEVICES if size(name) >= memory_gib]
    return min(enough, key=size) if enough else max(DEVICES, key=size)


def target_config(device: Device) -> str:
    """The device as XLA's GpuTargetConfigProto in text form, to compile for it from anywhere.

    Registers and grid limits are the same for all capabilities of the table.
    """
    major, minor = device.capability
    return f"""\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: {device.threads_per_core}
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
