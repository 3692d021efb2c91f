import os
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def shared_data():
    folder = Path(os.environ.get("BACR_SHARED_DATA", PROJECT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"needs real data: {folder} is not there (set BACR_SHARED_DATA)")
    return folder


@pytest.fixture(scope="session")
def qwen(shared_data):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(shared_data / "qwen_tokenizer")


@pytest.fixture(scope="session")
def ledger_tokens():
    from bacr_jax.data.ledger import ledger_tokenizer

    return ledger_tokenizer()
