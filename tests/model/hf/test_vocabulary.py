"""Tokenizer files: their ids fit the embedding."""

from bacr_jax.model.hf import reading
from hf_world import refusal, tokenizer_json


def test_a_vocabulary_larger_than_the_embedding(folder):
    (folder / "tokenizer.json").write_text(tokenizer_json(37))
    reading.load_policy(folder)
    (folder / "tokenizer.json").write_text(tokenizer_json(38))
    assert "its tokenizer has 38 ids but the embedding only 37 rows" in refusal(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text('{"a": 0, "b": 36}')
    reading.load_policy(folder)
    (folder / "added_tokens.json").write_text('{"c": 40}')
    assert "has 41 ids" in refusal(folder)
