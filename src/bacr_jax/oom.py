"""Converts out-of-memory errors into one line with the phase, its sizes and the requested bytes.

XLA reports a page about buffers, at the line of Python that waits for the device. So the phases of
a run are wrapped in `phase_memory`, the finest inside:

    with phase_memory("evaluation"):
        with phase_memory("decode", slots=512, positions=6272):
            ...

This module does not import JAX, so that commands can catch `OutOfMemory` before they import JAX.
`bacr_plan.oom_hints` suggests settings that would fit.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping

# XLA's statuses, and errors of CUDA's libraries when the memory outside of JAX's pool is used up.
_SIGNS = re.compile(
    r"RESOURCE_EXHAUSTED|Resource exhausted|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
    r"|CU(?:BLAS|DNN|SOLVER|FFT)_STATUS_ALLOC_FAILED|[Oo]ut of memory|ran out of memory"
)
# Must also match, because RESOURCE_EXHAUSTED is also the status of too long messages and queues.
_MEMORY = re.compile(r"memory|allocat|ALLOC", re.IGNORECASE)
_REQUESTED = re.compile(
    r"allocat\w*(?: request for)? (?P<number>\d+(?:\.\d+)?) ?"
    r"(?P<unit>bytes|B|[KMGTPE]iB)\b"
)
# Bytes of each unit.
_UNITS = {"bytes": 1, "B": 1}
_UNITS |= {f"{letter}iB": 2 ** (10 * power) for power, letter in enumerate("KMGTPE", 1)}


class OutOfMemory(RuntimeError):
    """The memory of a device or of the host ran out. Its message is one line.

    Attributes:
      phases: names of the phases in which it happened, innermost first.
      sizes: sizes that determine the memory of these phases, by name.
      asked: bytes of the last request; None if the message does not contain them.
      on_host: True if the host's memory ran out, False for a device's.
    """

    def __init__(
        self,
        phases: tuple[str, ...],
        sizes: Mapping[str, int],
        asked: int | None,
        *,
        on_host: bool = False,
    ):
        self.phases = phases
        self.sizes = dict(sizes)
        self.asked = asked
        self.on_host = on_host
        super().__init__(self._line())

    def _line(self) -> str:
        """Returns the message."""
        phases = " of the ".join(self.phases)
        memory = "the machine's memory" if self.on_host else "a device's memory"
        line = f"{phases}: {memory} ran out"
        if self.asked is not None:
            line += f", asking for {size_text(self.asked)} more"
        if self.sizes:
            sizes = ", ".join(f"{name.replace('_', ' ')} {n:,}" for name, n in self.sizes.items())
            line += f" ({sizes})"
        return line


def size_text(count: int) -> str:
    """Returns a number of bytes with a unit, such as 1.5 GiB."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count >= _UNITS[unit]:
            number = count / _UNITS[unit]
            return f"{number:,.0f} {unit}" if number >= 1000 else f"{number:.3g} {unit}"
    return f"{count} bytes"


def is_out_of_memory(error: BaseException) -> bool:
    """True if an exception reports that the memory of a device or of the host ran out.

    XLA raises a RuntimeError for every error; its message starts with the status.
    """
    if isinstance(error, MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and bool(_SIGNS.search(text) and _MEMORY.search(text))


def asked_for(text: str) -> int | None:
    """Returns the bytes of an allocator's failed request; None if its message has none."""
    request = _REQUESTED.search(text)
    if request is None:
        return None
    return round(float(request["number"]) * _UNITS[request["unit"]])


@contextlib.contextmanager
def phase_memory(phase: str, **sizes: int) -> Iterator[None]:
    """Adds the phase and its sizes to an out-of-memory error inside.

    Devices run asynchronously, so the code inside should wait for its results. Otherwise the error
    is raised in a later phase.

    Raises:
      OutOfMemory: memory ran out inside.
    """
    try:
        yield
    except OutOfMemory as error:
        raise OutOfMemory(
            (*error.phases, phase),
            {**sizes, **error.sizes},
            error.asked,
            on_host=error.on_host,
        ) from error.__cause__
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        on_host = isinstance(error, MemoryError)
        asked = asked_for(str(error))
        raise OutOfMemory((phase,), sizes, asked, on_host=on_host) from error
