"""The frozen base of a run's adapters, which its checkpoints do not hold."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bacr_jax.config import Config
from bacr_jax.config.derived import param_dtype
from bacr_jax.errors import UserError
from bacr_jax.model.hf.reading import load_policy
from bacr_jax.runs.checkpoint import read_meta, read_part
from bacr_jax.runs.digest import fingerprint
from bacr_jax.runs.folder import RunPaths, WarmupPaths, steps_in
from bacr_jax.types import Params


def read_base(folder: Path, config: Config, state: Path, moved: Path | None = None) -> Params:
    """The base that a checkpoint's adapters were trained on, layers stacked, and `adapter_scale`.

    Args:
      state: folder `state` of the checkpoint.
      moved: where `model.path` lies now; None: where the config says.
    """
    dtype = jnp.dtype(param_dtype(config))
    if config.warmup.steps:
        place = Path(config.warmup.dir) if config.warmup.dir else RunPaths(folder).warmup
        params = _of_warmup(place, dtype)
    else:
        assert config.model.path is not None
        place = moved or Path(config.model.path)
        params = load_policy(place, dtype=dtype)[1]
    params.pop("budget", None)
    assert config.adapter.rank is not None
    params["adapter_scale"] = np.float32(config.adapter.alpha / config.adapter.rank)
    expected = read_meta(state).get("base_fingerprint")
    if expected not in (None, fingerprint(params)):
        raise UserError(
            f"{place}: holds other weights than those that the adapters in {folder} were trained "
            "on; put them back"
        )
    return params


def _of_warmup(place: Path, dtype: Any) -> Params:
    """Finished weights of a warm-up, on the host."""
    weights = WarmupPaths(place.absolute()).weights
    steps = steps_in(weights)
    if not steps:
        raise UserError(f"{place}: holds no finished warm-up, on which the adapters were trained")
    params = read_part(weights / str(steps[-1]) / "state")
    return dict(jax.tree.map(lambda leaf: leaf.astype(dtype), params))
