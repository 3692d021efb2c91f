"""Lists the GPUs that a run can be planned for: data-sheet ceilings and XLA's descriptions.

Sources, by NVIDIA: data sheets of A10, RTX A6000, L4, L40S, A100, H100, H200 and of HGX B200; the
architecture white papers of A100, H100, GA102, Ada and RTX Blackwell (RTX 4090 and 5090). B200's
multiprocessors, clock, cache and memory rate come from XLA's description of it. Limits per
multiprocessor come from the CUDA C++ Programming Guide, table of technical specifications per
compute capability. Matrix rates are dense ones with fp32 sums: most sheets print twice as much,
"with sparsity". No card of this table but A100, H100 and H200 has been planned against a program
compiled for it.
"""

from dataclasses import dataclass

from bacr_jax.errors import UserError

GIB = 2**30
# The cuDNN that described devices have: major, minor, patch.
CUDNN = (9, 10, 2)


@dataclass(frozen=True)
class Device:
    """One GPU.

    Attributes:
      memory_gib: memory on the card. The sheets print these numbers as GB, but drivers report
        nearly as many GiB; of GDDR with ECC switched on, as data-center cards come, a sixteenth
        less.
      matmul_flops: dense bfloat16 matrix products with fp32 sums, FLOP/s.
      memory_bandwidth: bytes/s.
      link_bandwidth: bytes/s to other GPUs of the box, one direction; the PCIe slot's where cards
        have no NVLink.
      cores: multiprocessors.
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


# Bytes/s of a PCIe slot with 16 lanes, in one direction.
_PCIE_4 = 32e9
_PCIE_5 = 64e9
# Bytes/s of 12, 18 and 18 links of NVLink's generations 3 to 5 in one direction. Both directions
# together have 600 GB/s, 900 GB/s and 1.8 TB/s.
_NVLINK_3 = 300e9
_NVLINK_4 = 450e9
_NVLINK_5 = 900e9
# Multiprocessors by compute capability: fp32 units, KiB of shared memory, resident threads.
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

# Share of the card's memory that JAX may use. The launch scripts give it exactly this
# (XLA_PYTHON_CLIENT_MEM_FRACTION); the rest is for the CUDA context, NCCL's buffers and the
# workspaces of cuBLAS and cuDNN, which live outside JAX's pool.
MEMORY_FRACTION = 0.92


def find(name: str) -> Device:
    """Returns the device with a name of `DEVICES`.

    Raises:
      UserError: if no device has the name.
    """
    if name not in DEVICES:
        raise UserError(f"--device: no device {name!r}; write one of {', '.join(DEVICES)}")
    return DEVICES[name]


def smallest_with(memory_gib: float) -> str:
    """Returns the name of the smallest device with enough memory, or of the largest device."""
    names = sorted(DEVICES, key=lambda name: DEVICES[name].memory_gib)
    for name in names:
        if DEVICES[name].memory_gib >= memory_gib:
            return name
    return names[-1]


def target_config(device: Device) -> str:
    """Returns the device as XLA's GpuTargetConfigProto in text form, to compile for it.

    Registers and grid limits are the same for all capabilities of the table; a block may ask for
    all shared memory of a multiprocessor but one KiB, which the driver keeps.
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
