"""The stored results name the kind of processor, because a seed alone does not determine a run."""

import builtins
import io
import platform

import pytest

from bacr_study import work

EPYC = (
    "processor\t: 0\ncpu family\t: 25\nmodel name\t: AMD EPYC\n\nprocessor\t: 1\ncpu family\t: 25\n"
)


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        (EPYC, "{machine} AMD EPYC, family 25"),
        ("processor\t: 0\nBogoMIPS\t: 50.00\n", "{machine}"),
        (None, "{machine}"),
    ],
)
def test_the_processor_has_its_model_and_family_where_the_system_gives_them(
    monkeypatch, cpuinfo, expected
):
    def open_cpuinfo(path, *_, **__):
        assert path == "/proc/cpuinfo"
        if cpuinfo is None:
            raise FileNotFoundError(path)
        return io.StringIO(cpuinfo)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", open_cpuinfo)
        processor = work._processor()
    assert processor == expected.format(machine=platform.machine())
