"""Budget-adaptive curriculum reasoning for language models, in JAX.

In notebooks and scripts, `bacr_jax.train(config)` trains a policy and `bacr_jax.load(folder)` loads
one. Research code imports the subpackages and modules whose functions it composes:

    from bacr_jax import advantages, curriculum, learner, losses, qwen2, rewards, rollout

Importing the package imports neither JAX nor any of its submodules. They are imported on first use.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bacr_jax import advantages, curriculum, learner, losses, rewards, rollout
    from bacr_jax.facade import Policy, load
    from bacr_jax.model import qwen2

    __version__: str

__all__ = [
    "Policy",
    "__version__",
    "advantages",
    "curriculum",
    "learner",
    "load",
    "losses",
    "qwen2",
    "rewards",
    "rollout",
    "train",
]
# Modules that are imported when their name is first accessed. `train` is also callable; see
# `train._CallableModule`.
_MODULES = {
    "advantages": "bacr_jax.advantages",
    "curriculum": "bacr_jax.curriculum",
    "learner": "bacr_jax.learner",
    "losses": "bacr_jax.losses",
    "qwen2": "bacr_jax.model.qwen2",
    "rewards": "bacr_jax.rewards",
    "rollout": "bacr_jax.rollout",
    "train": "bacr_jax.train",
}

# transformers is used only for tokenizers and model folders, so its advice to install PyTorch does
# not apply.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def __getattr__(name: str) -> Any:
    """Imports public names when they are first accessed."""
    if name in ("load", "Policy"):
        return getattr(importlib.import_module("bacr_jax.facade"), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name == "__version__":
        from importlib.metadata import version

        return version("bacr_jax")
    raise AttributeError(f"module 'bacr_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
