"""Fixtures of the grading tests."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ready_worker
from bacr_grading import Grader
from bacr_grading.pool import Program

_DEFAULT = Path(__file__).resolve().parents[2] / "../shared/data"


@pytest.fixture(scope="session")
def shared_rows() -> Callable[[str], list[dict[str, Any]]]:
    """Reads a JSONL file of the shared data, or skips the test."""
    root = Path(os.environ.get("BACR_SHARED_DATA", _DEFAULT))

    def read(name: str) -> list[dict[str, Any]]:
        path = root / name
        if not path.exists():
            pytest.skip(f"no shared data at {path}; set BACR_SHARED_DATA")
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    return read


@pytest.fixture(scope="package")
def grader() -> Iterator[Grader]:
    """One grader for the tests that only need verdicts."""
    with Grader(workers=2) as shared:
        yield shared


@pytest.fixture
def ready(monkeypatch):
    """Workers that are there at once: math-verify takes some seconds to start."""
    program = Program(script=ready_worker.__file__)
    monkeypatch.setattr("bacr_grading.grader.Program", lambda: program)
