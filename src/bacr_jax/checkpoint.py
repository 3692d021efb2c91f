"""Checkpoints of a whole run: parameters, optimizer, value head, curriculum, counters."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from bacr_jax.errors import UserError


def _is_local(leaf: Any) -> bool:
    """An array that was never put on particular devices."""
    is_array = isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return is_array and leaf.is_fully_addressable and not leaf.committed


class Checkpoints:
    """The newest checkpoints of a run, saved in the background and swapped in atomically."""

    def __init__(self, folder: Path, *, keep: int):
        """Opens (or makes) the folder; a half-written checkpoint is never listed."""
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    @property
    def latest(self) -> int | None:
        """Newest finished step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Saves `state` under `step`; returns while writing goes on in the background."""
        if jax.process_count() > 1:
            # Process 0 writes arrays of the host; sharded ones are written by all.
            state = jax.tree.map(lambda x: np.asarray(x) if _is_local(x) else x, state)
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta)
            ),
        )

    def restore(self, like: Any, step: int | None = None) -> tuple[int, Any, dict[str, Any]]:
        """The state saved under `step` (the newest by default), shaped and placed like `like`.

        Raises:
          UserError: nothing to restore, or its shapes are not those of `like`.
        """
        at = self.latest if step is None else step
        if at is None:
            raise UserError(f"{self._manager.directory}: holds no finished checkpoint")
        # An array on no device in particular stays so: on one of several it could not be mixed with
        # arrays that are spread over all.
        on_host = jax.tree.map(lambda x: np.asarray(x) if _is_local(x) else x, like)
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, on_host)
        try:
            found = self._manager.restore(
                at,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(abstract), meta=ocp.args.JsonRestore()
                ),
            )
        except (ValueError, KeyError, FileNotFoundError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                f"{self._manager.directory}/{at}: does not fit this config ({first})"
            ) from None
        free = lambda x, y: jnp.asarray(np.asarray(y)) if _is_local(x) else y
        return at, jax.tree.map(free, like, found["state"]), found["meta"]

    def close(self) -> None:
        """Waits for background writing and releases the folder."""
        self._manager.wait_until_finished()
        self._manager.close()
