"""A run folder that reports are made of."""

import pytest

from report_world import make_run


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path)
