"""Checkpoints of a whole run: parameters, optimizer, value head, curriculum, counters."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from bacr_jax.errors import UserError


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
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
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
        return at, found["state"], found["meta"]

    def close(self) -> None:
        """Waits for background writing and releases the folder."""
        self._manager.wait_until_finished()
        self._manager.close()
