"""Fixtures for the exported folders and reference results that `make_world.py` creates."""

import json
import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def world():
    return Path(os.environ["BACR_VLLM_WORLD"])


@pytest.fixture(scope="session")
def reference(world):
    return json.loads((world / "reference.json").read_text())
