"""Counts the updates of a run that were undone, shortened or dropped because they broke a bound.

`loop.Trainer` counts them, stores the counts in checkpoints and in summary.json, and prints them
when the run ends. `undo` and `learner.trust_region` limit the updates.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple


class LimitedUpdates(NamedTuple):
    """Numbers of limited updates so far.

    Attributes:
      undone: number of steps whose updates were undone (train.undo_*).
      shortened: number of steps with an update that was shortened (optimizer.max_update_kl),
        including steps that were undone afterwards.
      dropped: number of steps whose updates were all dropped, because shortening did not suffice or
        because their KL was not finite. These steps do not count as shortened.
    """

    undone: int = 0
    shortened: int = 0
    dropped: int = 0

    def after(self, metrics: Mapping[str, float]) -> "LimitedUpdates":
        """Returns the numbers after one more step, which has these metrics."""
        # Both metrics are means over the updates of the step, and 0 if its loss contains no tokens.
        was_measured = metrics.get("policy/update_kl", 0.0) != 0.0
        scale = metrics["policy/update_scale"] if was_measured else 1.0
        is_undone = metrics.get("train/undone", 0.0) > 0.0
        return LimitedUpdates(
            undone=self.undone + is_undone,
            shortened=self.shortened + (0.0 < scale < 1.0),
            dropped=self.dropped + (scale == 0.0),
        )

    def lines(self) -> Iterator[str]:
        """Yields one line for each kind of limit that was reached, to print when the run ends."""
        if self.undone:
            yield (
                f"undid the updates of {self.undone:,} steps, because the policy exceeded a bound "
                "afterwards (train.undo_closed_answers, train.undo_filled_budgets)"
            )
        if self.shortened:
            yield f"shortened the updates of {self.shortened:,} steps (optimizer.max_update_kl)"
        if self.dropped:
            yield (
                f"dropped the updates of {self.dropped:,} steps, because even a shortened update "
                "exceeded optimizer.max_update_kl, or because its KL was not finite; if this "
                "happens often, set a lower optimizer.learning_rate"
            )
