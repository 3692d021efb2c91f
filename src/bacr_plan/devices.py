"""Lists the supported GPUs with the rates of their data sheets and their descriptions for XLA.

The numbers come from NVIDIA's data sheets of A10, RTX A6000, L4, L40S, A100, H100, H200 and HGX
B200, and from the architecture white papers of A100, H100, GA102, Ada and RTX Blackwell (RTX 4090
and 5090). The number of multiprocessors, clock rate, cache size and memory bandwidth of B200 come
from XLA's description of this GPU. The limits per multiprocessor come from the CUDA C++ Programming
Guide (table of technical specifications per compute capability). Rates of matrix products are for
dense matrices and fp32 accumulation. Most data sheets list twice this rate, "with sparsity". Only
the plans for A100, H100 and H200 have been compared with programs compiled for these GPUs.
"""

from dataclasses import dataclass

from bacr_jax.config.gpus import MEMORY_FRACTION as MEMORY_FRACTION
from bacr_jax.errors import UserError

GIB = 2**30
# Number of GPUs per machine, as in NVIDIA's HGX and DGX systems.
PER_HOST = 8
# Assumed bandwidth between machines in one direction, in bytes/s per GPU: one network card of
# 200 Gb/s per GPU, as in the data sheet of NVIDIA's DGX A100. DGX H100, H200 and B200 have cards of
# 400 Gb/s, but rented machines often have less.
NETWORK_BANDWIDTH = 25e9
# cuDNN version for which programs are compiled: major, minor, patch.
CUDNN = (9, 10, 2)


@dataclass(frozen=True)
class Device:
    """A GPU model.

    Attributes:
      name: the full name.
      memory_gib: memory in GiB. Data sheets list these numbers as GB, but drivers report nearly the
        same number of GiB. For GDDR memory, one sixteenth is subtracted if ECC is enabled, which is
        the default of data-center cards.
      matmul_flops: rate of dense bfloat16 matrix products with fp32 accumulation, in FLOP/s.
      memory_bandwidth: bandwidth of the GPU memory in bytes/s.
      link_bandwidth: bandwidth in bytes/s to other GPUs of the same host in one direction. The PCIe
        bandwidth for cards without NVLink.
      capability: major and minor version of the CUDA compute capability.
      cores: number of streaming multiprocessors.
      l2_mib: size of the L2 cache in MiB.
      clock_ghz: clock rate in GHz.
      network_bandwidth: bandwidth in bytes/s per GPU to other machines in one direction. It depends
        on the machine, not on the GPU model.
    """

    name: str
    memory_gib: float
    matmul_flops: float
    memory_bandwidth: float
    link_bandwidth: float
    capability: tuple[int, int]
    cores: int
    l2_mib: float
    clock_ghz: float
    network_bandwidth: float = NETWORK_BANDWIDTH


# Bandwidth of a PCIe slot with 16 lanes in one direction, in bytes/s.
_PCIE_4 = 32e9
_PCIE_5 = 64e9
# Bandwidth of NVLink generations 3 to 5 (12, 18 and 18 links) in one direction, in bytes/s. Both
# directions together have 600 GB/s, 900 GB/s and 1.8 TB/s.
_NVLINK_3 = 300e9
_NVLINK_4 = 450e9
_NVLINK_5 = 900e9
# Multiprocessor specifications by compute capability: number of fp32 units, KiB of shared memory,
# and maximum number of resident threads.
_CORE = {
    (8, 0): (64, 164, 2048),
    (9, 0): (128, 228, 2048),
    (10, 0): (128, 228, 2048),
    (8, 6): (128, 100, 1536),
    (8, 9): (128, 100, 1536),
    (12, 0): (128, 100, 1536),
}
DEVICES = {
    "rtx-4090": Device(
        "NVIDIA GeForce RTX 4090", 24.0, 165.2e12, 1008e9, _PCIE_4, (8, 9), 128, 72, 2.52
    ),
    "a10": Device("NVIDIA A10", 22.5, 125e12, 600e9, _PCIE_4, (8, 6), 72, 6, 1.695),
    "l4": Device("NVIDIA L4", 22.5, 121e12, 300e9, _PCIE_4, (8, 9), 58, 48, 2.04),
    "rtx-5090": Device(
        "NVIDIA GeForce RTX 5090", 31.8, 209.5e12, 1792e9, _PCIE_5, (12, 0), 170, 96, 2.407
    ),
    "a100-40": Device(
        "NVIDIA A100-SXM4-40GB", 40.0, 312e12, 1555e9, _NVLINK_3, (8, 0), 108, 40, 1.41
    ),
    "l40s": Device("NVIDIA L40S", 45.0, 362e12, 864e9, _PCIE_4, (8, 9), 142, 96, 2.52),
    "a6000": Device("NVIDIA RTX A6000", 47.5, 154.8e12, 768e9, _PCIE_4, (8, 6), 84, 6, 1.8),
    "a100-80": Device(
        "NVIDIA A100-SXM4-80GB", 80.0, 312e12, 2039e9, _NVLINK_3, (8, 0), 108, 40, 1.41
    ),
    "h100": Device("NVIDIA H100 80GB HBM3", 80.0, 989e12, 3350e9, _NVLINK_4, (9, 0), 132, 50, 1.98),
    "h200": Device("NVIDIA H200", 141.0, 989e12, 4800e9, _NVLINK_4, (9, 0), 132, 50, 1.98),
    "b200": Device("NVIDIA B200", 178.0, 2250e12, 7672e9, _NVLINK_5, (10, 0), 148, 126.5, 1.965),
}


def find(name: str) -> Device:
    """Returns the GPU model with a given name in `DEVICES`.

    Raises:
      UserError: if no GPU model has this name.
    """
    if name not in DEVICES:
        raise UserError(
            f"--device: bacr plan has no data of a device {name!r}; use one of {', '.join(DEVICES)}"
        )
    return DEVICES[name]


def smallest_with(memory_gib: float) -> str:
    """Returns the name of the GPU model with the least memory that is at least `memory_gib`.

    Returns the name of the largest GPU model if none has enough memory.
    """
    names = sorted(DEVICES, key=lambda name: DEVICES[name].memory_gib)
    for name in names:
        if DEVICES[name].memory_gib >= memory_gib:
            return name
    return names[-1]


def target_config(device: Device) -> str:
    """Returns XLA's description of a GPU (GpuTargetConfigProto as text), to compile for the GPU.

    The limits of registers and grids are the same for all compute capabilities in `_CORE`. A block
    may request all shared memory of a multiprocessor except one KiB, which the driver reserves.
    """
    major, minor = device.capability
    fp32_units, shared_kib, threads = _CORE[device.capability]
    return f"""\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: {threads}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: {48 * 1024}
  shared_memory_per_block_optin: {(shared_kib - 1) * 1024}
  shared_memory_per_core: {shared_kib * 1024}
  core_count: {device.cores}
  fpus_per_core: {fp32_units}
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
  memory_bandwidth: {int(device.memory_bandwidth)}
  l2_cache_size: {int(device.l2_mib * 2**20)}
  clock_rate_ghz: {device.clock_ghz}
  device_memory_size: {int(device.memory_gib * GIB)}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} patch: {CUDNN[2]} }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{device.name}"
"""
