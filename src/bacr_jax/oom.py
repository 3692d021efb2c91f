"""Memory that ran out, in one line: in which phase, at what sizes, how much was asked for.

XLA answers with a page about buffers, at whatever line of Python happened to wait for the device.
`phase_memory` is put around the phases of a run, finest inside:

    with phase_memory("evaluation"):
        with phase_memory("decode", slots=512, positions=6272):
            ...

Needs no JAX, so that entry points can catch `OutOfMemory` before they import it. What would fit is
the business of `bacr_plan.oom_hints`.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping

# XLA's statuses, and what CUDA's libraries say when the memory beside JAX's pool is used up.
_SIGNS = re.compile(
    r"RESOURCE_EXHAUSTED|Resource exhausted|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
    r"|CU(?:BLAS|DNN|SOLVER|FFT)_STATUS_ALLOC_FAILED|[Oo]ut of memory|ran out of memory"
)
# RESOURCE_EXHAUSTED is also the status of a message or a queue that is too long.
_MEMORY = re.compile(r"memory|allocat|ALLOC", re.IGNORECASE)
_ASKED = re.compile(
    r"allocat\w*(?: request for)? (?P<number>\d+(?:\.\d+)?) ?"
    r"(?P<unit>bytes|B|[KMGTPE]iB)\b"
)
_UNITS = {"bytes": 1, "B": 1} | {f"{c}iB": 2 ** (10 * i) for i, c in enumerate("KMGTPE", 1)}


class OutOfMemory(RuntimeError):
    """Memory of a device, or of the host, ran out. Its message is one line.

    Attributes:
      phases: names of the phases it happened in, innermost first.
      sizes: what decides how much memory they take, by name.
      asked: bytes that were asked for at last; None if the message doesn't say.
      on_host: it was the machine's memory and not a device's.
    """

    def __init__(
        self,
        phases: tuple[str, ...],
        sizes: Mapping[str, int],
        asked: int | None,
        *,
        on_host: bool = False,
    ):
        self.phases, self.sizes, self.asked = phases, dict(sizes), asked
        self.on_host = on_host
        super().__init__(self._line())

    def _line(self) -> str:
        where = " of the ".join(self.phases)
        sizes = ", ".join(f"{name.replace('_', ' ')} {n:,}" for name, n in self.sizes.items())
        amount = "" if self.asked is None else f", asking for {size_text(self.asked)} more"
        whose = "the machine's memory" if self.on_host else "a device's memory"
        return f"{where}: {whose} ran out{amount}" + (f" ({sizes})" if sizes else "")


def size_text(count: int) -> str:
    """A number of bytes as people say it: 1.5 GiB."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count >= _UNITS[unit]:
            number = count / _UNITS[unit]
            return f"{number:,.0f} {unit}" if number >= 1000 else f"{number:.3g} {unit}"
    return f"{count} bytes"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, on a device or on the host.

    XLA has one exception for everything, a RuntimeError whose message opens with the status.
    """
    if isinstance(error, MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and bool(_SIGNS.search(text) and _MEMORY.search(text))


def asked_for(text: str) -> int | None:
    """Bytes that an allocator was asked for, if its message says so."""
    amount = _ASKED.search(text)
    return None if amount is None else round(float(amount["number"]) * _UNITS[amount["unit"]])


@contextlib.contextmanager
def phase_memory(phase: str, **sizes: int) -> Iterator[None]:
    """Names the phase and its sizes if memory runs out inside.

    The device works ahead of Python: what is inside should end by waiting for its results, or the
    error comes up in a later phase.
    """
    try:
        yield
    except OutOfMemory as error:
        phases, sizes = (*error.phases, phase), {**sizes, **error.sizes}
        raise OutOfMemory(phases, sizes, error.asked, on_host=error.on_host) from error.__cause__
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        on_host = isinstance(error, MemoryError)
        asked = asked_for(str(error))
        raise OutOfMemory((phase,), sizes, asked, on_host=on_host) from error
