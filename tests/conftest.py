"""Settings that must stand before JAX starts, and fixtures shared by rooms."""

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_are_dropped():
    """Programs of one module are seldom those of the next, and together they fill gigabytes."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()


@pytest.fixture(scope="session")
def world():
    from rollout_world import World

    return World()


@pytest.fixture(scope="session")
def shared_data():
    """Real data, or a skip that says where it was looked for."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("BACR_SHARED_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"needs real data: {folder} is not there (set BACR_SHARED_DATA)")
    return folder


@pytest.fixture(scope="session")
def qwen(shared_data):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(shared_data / "qwen_tokenizer")
