"""What the variance study measures: arms, each with its ways to read the answers."""

import functools
from dataclasses import dataclass

from bacr_study.variance.baselines import (
    ARMS,
    BY_NAME,
    PUBLISHED,
    READINGS,
    REFERENCE,
    Arm,
    Reading,
)


@dataclass(frozen=True)
class Variants:
    """Arms and readings, in the order of every axis of variants.

    Attributes:
      pairs: each an arm and how it reads the answers.
      full: the reading of all answers, with which the published method is the one that others are
        measured against.
    """

    pairs: tuple[tuple[Arm, Reading], ...]
    full: Reading

    @property
    def names(self) -> tuple[str, ...]:
        """As "arm/reading"."""
        return tuple(f"{arm.name}/{reading}" for arm, reading in self.pairs)

    @property
    def readings(self) -> tuple[Reading, ...]:
        """Those that occur."""
        return tuple(dict.fromkeys(reading for _, reading in self.pairs))

    @property
    def against(self) -> int:
        """The published method."""
        return self.place(PUBLISHED)

    @property
    def reference(self) -> int:
        """The arm that g is measured with."""
        return self.place(REFERENCE)

    @property
    def trained(self) -> tuple[int, ...]:
        """Those with the gradient of the answers too: where all answers of a cut are trained on."""
        return tuple(i for i, (_, reading) in enumerate(self.pairs) if reading == self.full)

    def place(self, arm: str) -> int:
        """Where an arm stands that reads all answers."""
        return self.names.index(self.name(arm))

    def name(self, arm: str) -> str:
        """Its name with that reading."""
        assert arm in BY_NAME, arm
        return f"{arm}/{self.full}"


@functools.cache
def variants(answers: int) -> Variants:
    """All that is measured on a pool with so many answers at a cut; of one there is one reading."""
    readings: tuple[Reading, ...] = READINGS if answers > 1 else ("one",)
    full: Reading = "several" if answers > 1 else "one"
    return Variants(tuple((arm, reading) for arm in ARMS for reading in readings), full)
