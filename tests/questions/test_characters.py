"""One token a character."""

from bacr_jax.config import DataConfig
from bacr_jax.questions.characters import VOCABULARY
from bacr_jax.questions.loaders import own_tokenizer


def test_every_character_and_tag_is_a_token_and_comes_back():
    tokenizer = own_tokenizer(DataConfig(train="gym:gcd", prompt_format="characters"))
    text = "<bos>12, 'a'<think>:12=7</think><answer>7</answer>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text) - sum(len(tag) - 1 for tag in VOCABULARY[1:6] if tag in text)
    assert tokenizer.decode(ids) == text and len(tokenizer) == len(VOCABULARY) == 165
    assert (tokenizer.eos_token, tokenizer.pad_token_id) == ("</answer>", 0)


def test_a_models_tokenizer_follows_from_its_data():
    assert own_tokenizer(DataConfig(train="jsonl:x.jsonl")) is None
    assert len(own_tokenizer(DataConfig(train="ledger"))) == 27
