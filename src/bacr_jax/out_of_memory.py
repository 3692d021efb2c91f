"""Converts out-of-memory errors to one line with the phase, its sizes and the requested memory.

XLA's own message has many lines about buffers, and XLA raises the error at the Python line that
waits for the device, not at the line that started the computation. Therefore each phase of a run,
such as decoding, is wrapped in `phase_memory`, which adds the name of the phase. Phases can be
nested:

    with phase_memory("evaluation"):
        with phase_memory("decode", slots=512, positions=6272):
            ...

This module does not import JAX, so commands can catch `OutOfMemory` before they import JAX.
`bacr_plan.oom_hints` suggests settings that need less memory.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping

# Status codes of XLA, and errors of the CUDA libraries if memory outside of JAX's pool is
# exhausted.
_SIGNS = re.compile(
    r"RESOURCE_EXHAUSTED|Resource exhausted|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
    r"|CU(?:BLAS|DNN|SOLVER|FFT)_STATUS_ALLOC_FAILED|[Oo]ut of memory|ran out of memory"
)
# An out-of-memory error must match this expression as well as `_SIGNS`, because XLA also uses
# RESOURCE_EXHAUSTED for messages that are too long and for full queues.
_MEMORY = re.compile(r"memory|allocat|ALLOC", re.IGNORECASE)
_REQUESTED = re.compile(
    r"allocat\w*(?: request for)? (?P<number>\d+(?:\.\d+)?) ?"
    r"(?P<unit>bytes|B|[KMGTPE]iB)\b"
)
# Number of bytes of each unit.
_UNITS = {"bytes": 1, "B": 1}
_UNITS |= {f"{letter}iB": 2 ** (10 * power) for power, letter in enumerate("KMGTPE", 1)}


class OutOfMemory(RuntimeError):
    """Raised if a device or the host runs out of memory. The message is a single line.

    Attributes:
      phases: names of the phases in which the error occurred, innermost first.
      sizes: sizes that determine the memory use of these phases, by name.
      asked: size of the failed allocation in bytes, or None if the error message does not contain
        it.
      on_host: True if the host ran out of memory, False if a device did.
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
        """Builds the error message."""
        phases = " of the ".join(self.phases)
        memory = "the machine's memory" if self.on_host else "a device's memory"
        line = f"{phases}: {memory} ran out"
        if self.asked is not None:
            line += f", and {size_text(self.asked)} more were needed"
        if self.sizes:
            sizes = ", ".join(f"{name.replace('_', ' ')} {n:,}" for name, n in self.sizes.items())
            line += f" ({sizes})"
        return line


def size_text(count: int) -> str:
    """Formats a number of bytes with a binary unit, such as 1.5 GiB."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count >= _UNITS[unit]:
            number = count / _UNITS[unit]
            return f"{number:,.0f} {unit}" if number >= 1000 else f"{number:.3g} {unit}"
    return f"{count} bytes"


def is_out_of_memory(error: BaseException) -> bool:
    """True if an exception reports that a device or the host ran out of memory.

    XLA raises a RuntimeError for every error, so the message is checked for the status codes and
    texts of memory errors.
    """
    if isinstance(error, MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and bool(_SIGNS.search(text) and _MEMORY.search(text))


def asked_for(text: str) -> int | None:
    """Parses an error message and returns the bytes of the failed allocation, or None."""
    request = _REQUESTED.search(text)
    if request is None:
        return None
    return round(float(request["number"]) * _UNITS[request["unit"]])


@contextlib.contextmanager
def phase_memory(phase: str, **sizes: int) -> Iterator[None]:
    """Adds a phase and its sizes to any out-of-memory error raised in the `with` block.

    Devices run asynchronously, so the block should wait for its results. Otherwise the error is
    raised in a later phase.

    Args:
      phase: name of the phase in the error message.
      **sizes: sizes that determine the memory use of the phase, for the error message.

    Raises:
      OutOfMemory: if a device or the host ran out of memory in the block.
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
