"""Workloads and meshes for the tests of planning."""

from pathlib import Path

from bacr_jax.config import io as config_io
from bacr_jax.parallel import MeshShape
from bacr_jax.planning.workload import model_shape, workload_of

ROOT = Path(__file__).parents[1]
SEVEN = ROOT / "configs" / "qwen2.5-7b-math.yaml"
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def workload(*overrides, conditioned=True, uses_value=True, cuts=4, fused_attention=True):
    """The paper's 7B run with overrides."""
    config = config_io.load([SEVEN], overrides)
    return workload_of(
        config,
        *model_shape(config),
        row_shards=8,
        conditioned=conditioned,
        uses_value=uses_value,
        branches=cuts,
        fused_attention=fused_attention,
    )


def mesh(data=1, fsdp=8, tensor=1, decode_tensor=1):
    return MeshShape(data, fsdp, tensor, decode_tensor)
