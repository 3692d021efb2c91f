"""Where the state of a checkpoint comes from: config, questions, software, devices."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

import jax
from jax.sharding import Mesh

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.data.question_set import QuestionSet

# Software whose version can change what a run computes.
VERSIONED = ("bacr_jax", "jax", "jaxlib", "flax", "optax", "numpy")


def provenance(config: Config, questions: QuestionSet, mesh: Mesh | None) -> dict[str, Any]:
    """What made a state, for JSON.

    Args:
      config: of the run.
      questions: trained on.
      mesh: of the learner; None for one device.
    """
    asked = json.dumps([questions.ids, questions.questions, questions.answers]).encode()
    return {
        "seed": config.seed,
        "config": json.loads(json.dumps(config_io.flatten(config))),
        "config_fingerprint": config_io.fingerprint(config),
        "data_fingerprint": hashlib.sha256(asked).hexdigest()[:12],
        "versions": {name: version(name) for name in VERSIONED},
        "mesh": {} if mesh is None else {name: int(size) for name, size in mesh.shape.items()},
        "devices": [jax.device_count(), jax.devices()[0].device_kind],
    }


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """A line for each thing that keeps a resumed run from being bit for bit the same."""
    for what in ("versions", "devices", "mesh"):
        if then[what] != now[what]:
            yield (
                f"note: {what} were {then[what]} and are {now[what]}: the run goes on, but not bit "
                "for bit as it would have"
            )
