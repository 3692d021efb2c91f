"""Settings that must stand before JAX starts, and fixtures shared by rooms."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def world():
    from rollout_world import World

    return World()
