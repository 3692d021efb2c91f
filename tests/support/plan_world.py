"""Creates configs, workloads and meshes for tests of `bacr_plan`."""

import dataclasses
import functools
import tempfile
from pathlib import Path

from bacr_jax.config import io as config_io
from bacr_jax.parallel import MeshShape
from bacr_plan.workload import sizes_of

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def _by_rows():
    """Writes a config of the paper's method at 7B, and returns the path of the file.

    With its settings for memory, such as micro-batches of 16 rows, predictions are easy to
    calculate by hand.
    """
    keys = (
        *("train.micro_batch_tokens=null", "train.micro_batch_rows=16"),
        *(
            "model.remat=full",
            "model.logprob_chunk=512",
            "train.length_buckets=4",
            "eval.slots=null",
        ),
    )
    configs = ROOT / "configs"
    method = configs / "methods" / "bacr-paper.yaml"
    config = config_io.load([configs / "qwen2.5-7b-math.yaml", method], keys)
    file = Path(tempfile.mkdtemp()) / "qwen2.5-7b-math.yaml"
    file.write_text(config_io.to_yaml(config))
    return file


SEVEN = _by_rows()
TINY = """
model: {hidden_size: 16, intermediate_size: 32, num_layers: 2, num_heads: 2, num_kv_heads: 2,
        compute_dtype: float32, logprob_chunk: 16}
data: {max_prompt_tokens: 8}
budget: {min: 4, max: 16}
cuts: {count: 2}
rollout: {questions: 4, group_size: 2, answer_tokens: 4, chunk: 4}
eval: {budgets: [16]}
"""


@functools.cache
def sizes(overrides):
    """Returns the workload of the 7B run on eight devices, with a tuple of overrides."""
    return sizes_of(config_io.load([SEVEN], overrides), 8)[0]


def workload(*overrides, **changed):
    """Returns the workload of the paper's 7B run on eight devices.

    Args:
      overrides: overrides of the config, such as `rollout.slots=64`.
      changed: fields of `Workload` with other values than the config determines.
    """
    return dataclasses.replace(sizes(overrides), **changed)


def mesh(data=1, fsdp=8, tensor=1, decode_tensor=1):
    return MeshShape(data, fsdp, tensor, decode_tensor)


def tiny_config(*overrides):
    """Returns a config of a tiny model, whose programs are lowered quickly."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tiny.yaml"
        file.write_text(TINY)
        config = config_io.load([file], overrides)
    config_io.check(config)
    return config
