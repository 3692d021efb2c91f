import pytest


@pytest.fixture(scope="session")
def ledger_tokens():
    from bacr_jax.data.ledger import ledger_tokenizer

    return ledger_tokenizer()
