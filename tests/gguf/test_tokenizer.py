"""Texts become the tokens that a file's merges, types and pre-tokenizer say."""

import pytest

import gguf_world
from bacr_gguf import container, tokenizer
from bacr_gguf.container import GgufError
from gguf_world import TOKENS, TYPES

ROWS = len(TOKENS)


def read(tmp_path, kind="smollm", rows=ROWS, **settings):
    said = {f"tokenizer.ggml.{key}": value for key, value in settings.items()}
    path = gguf_world.write(tmp_path / "m.gguf", stored={}, settings=said, pre=kind)
    return tokenizer.read(container.read(path), rows=rows)


def pieces(backend, text):
    return backend.encode(text).tokens


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "hello  12", "hello Ġ Ġ1 2"),
        ("smollm", "hello  12", "hello ĠĠ 1 2"),
        ("qwen2", "hello  12", "hello Ġ Ġ 1 2"),
        ("llama-bpe", "hello  12", "hello Ġ Ġ 12"),
        ("gpt-2", "\n\n1", "Ċ Ċ 1"),
        ("smollm", "\n\n1", "ĊĊ 1"),
        ("qwen2", "\n\n1", "ĊĊ 1"),
        ("llama-bpe", "21212", "2 12 12"),
        ("llama-bpe", "2112", "2 1 1 2"),
        ("gpt-2", "2112", "2 1 12"),
        # A letter and its accent: three bytes, two when they are composed.
        ("gpt-2", "e\u0300", "e Ì Ģ"),
        ("qwen2", "e\u0300", "Ã ¨"),
        ("smollm", "hell<think>\n<|im_end|>", "hell <think> Ċ <|im_end|>"),
    ],
)
def test_pieces_are_those_of_the_pre_tokenizer_that_the_file_names(tmp_path, pre, text, expected):
    backend, _ = read(tmp_path, pre, add_bos_token=("bool", False))
    found = pieces(backend, text)
    assert found == expected.split()
    assert [backend.token_to_id(one) for one in found] == [TOKENS.index(one) for one in found]


def test_text_comes_back_and_only_control_tokens_are_hidden(tmp_path):
    backend, ids = read(tmp_path)
    text = "héllo 12\t<think> 日本 🙂\n"
    encoded = backend.encode(f"{text}<|im_end|>").ids
    assert backend.decode(encoded) == text
    assert ids == {"bos": 1, "eos": 0, "pad": 0}
    # An unused token only fills the embedding up.
    assert backend.get_vocab_size() == len(TOKENS) - 1 and backend.token_to_id("[PAD]") is None


def test_texts_begin_with_bos_where_the_file_says_so_or_its_kind_does(tmp_path):
    for pre, said, expected in (
        ("smollm", ("bool", True), True),
        ("smollm", None, False),
        ("llama-bpe", None, True),
        ("llama-bpe", ("bool", False), False),
    ):
        backend, _ = read(tmp_path, pre, add_bos_token=said)
        assert (pieces(backend, "h") == ["<|im_start|>", "h"]) is expected
        assert backend.encode("h", add_special_tokens=False).tokens == ["h"]


def test_a_piece_that_is_a_token_is_not_merged_in_llamas(tmp_path):
    tokens = [*TOKENS[:-1], "ohe"]
    types = [*TYPES[:-1], 1]
    said = {"tokens": ("array", tokens), "token_type": ("array", types)}
    said["add_bos_token"] = ("bool", False)
    assert pieces(read(tmp_path, "llama-bpe", **said)[0], "ohe") == ["ohe"]
    assert pieces(read(tmp_path, "qwen2", **said)[0], "ohe") == ["o", "he"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": ("string", "llama")}, "tokenizer 'llama' with the pre-tokenizer 'smollm'"),
        ({"pre": ("string", "tekken")}, "'tekken' is not supported; .* with one of gpt-2, smollm"),
        ({"pre": None}, "pre-tokenizer '' is not"),
        ({"tokens": ("array", [1, 2])}, "at least one of the tokenizer's 2 tokens"),
        ({"tokens": ("array", TOKENS[:-1])}, "at least one of the tokenizer"),
        ({"tokens": ("array", [*TOKENS[:-2], "h", "x"])}, "two tokens of the tokenizer have"),
        ({"tokens": None}, "tokens' is null, but must be of type tuple"),
        ({"token_type": ("array", [6] * len(TOKENS))}, "has no text, no known type or no row"),
        ({"merges": ("array", ["h e", "x yz"])}, "does not join two tokens"),
        ({"merges": ("array", ["hello"])}, "does not join two tokens"),
        ({"eos_token_id": ("uint32", len(TOKENS))}, "not the id of a token"),
        ({"eos_token_id": ("int32", -1)}, "is -1, which is not the id of a token"),
        ({"eos_token_id": ("uint64", 2**64 - 1)}, "not the id of a token"),
        ({"eos_token_id": ("uint32", len(TOKENS) - 1)}, "not the id of a token"),
        ({"add_eos_token": ("bool", True)}, "appends an end token"),
        ({"add_bos_token": ("bool", True), "bos_token_id": None}, "whose id is missing"),
    ],
)
def test_another_tokenizer_or_a_damaged_one_is_refused(tmp_path, settings, words):
    with pytest.raises(GgufError, match=words):
        read(tmp_path, **settings)


def test_more_tokens_than_embeddings_are_refused(tmp_path):
    with pytest.raises(GgufError, match="no row in the embedding"):
        read(tmp_path, rows=len(TOKENS) - 1)
