"""Tests the provenance of stored results."""

import os
from types import SimpleNamespace

from bacr_study import work


def test_results_name_the_processor_and_the_devices(monkeypatch):
    monkeypatch.setattr(work, "processor", lambda: "x86_64 AMD EPYC, family 25")
    stored = work._provenance([SimpleNamespace(device_kind="H100")] * 2)
    assert stored["machine"] == f"x86_64 AMD EPYC, family 25, {os.cpu_count()} cores, 2 x H100"
