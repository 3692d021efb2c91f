"""A folder that loads."""

import pytest

from hf_world import make_folder


@pytest.fixture
def folder(tmp_path):
    make_folder(tmp_path / "hf")
    return tmp_path / "hf"
