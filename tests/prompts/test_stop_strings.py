import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from bacr_jax.errors import UserError
from bacr_jax.prompts import stop_strings
from bacr_jax.prompts.stop_strings import byte_automaton, compile_stop_string, match, token_bytes

QWEN_VOCAB = 152_064
many = settings(
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
# Text made of what could confuse the automaton: pieces of tags, brackets, unicode, anything.
pieces = st.lists(
    st.one_of(
        st.sampled_from(
            ["<", "</", "</think", "</think>", ">", ">\n\n", "think", "</answer>", "<answer>", "/"]
        ),
        st.text(max_size=6),
        st.sampled_from(["é", "数学", "🙂", "‹/think›", "</thinκ>"]),
    ),
    max_size=12,
).map("".join)


def literal_tokenizer(tokens):
    """Each id stands for its own text; the text may overlap in any way."""
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def small_byte_level_tokenizer():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    lines = ["<<</think>\n\n<answer>4</answer>", "a < b </ > think thin >\n\n", "数学 é <think>"]
    backend.train_from_iterator(lines * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


SMALL = small_byte_level_tokenizer()


@pytest.fixture(scope="session")
def by_prefix(qwen):
    """Ids of Qwen's tokens by their first two bytes."""
    index = {}
    for token, text in enumerate(stop_strings.vocabulary(qwen)):
        index.setdefault(text[:2], []).append(token)
    return index


def random_split(text, texts, by_prefix, rng):
    """A random way to write the bytes with tokens, canonical or not."""
    ids = []
    while text:
        near = [i for start in {text[:1], text[:2]} for i in by_prefix.get(start, [])]
        ids.append(rng.choice([i for i in near if text.startswith(texts[i])]))
        text = text[len(texts[ids[-1]]) :]
    return ids


def found_by_search(ids, texts, string):
    """What `match` must say, from the whole text: token of the last and of the first byte."""
    whole = b"".join(texts[i] for i in ids)
    token_of_byte = [place for place, i in enumerate(ids) for _ in texts[i]]
    start = whole.find(string.encode())
    if start < 0:
        return -1, -1
    return token_of_byte[start + len(string.encode()) - 1], token_of_byte[start]


class TestQwen:
    STRINGS = ("</think>", "</answer>", "<|im_end|>", "\n\n")

    @many
    @given(text=pieces, seed=st.integers(0, 10**6), which=st.sampled_from(STRINGS))
    def test_any_split_of_any_text_agrees_with_string_search(
        self, qwen, by_prefix, text, seed, which
    ):
        table = compile_stop_string(qwen, which, vocab_size=QWEN_VOCAB)
        texts = stop_strings.vocabulary(qwen)
        ids = random_split(text.encode(), texts, by_prefix, random.Random(seed))
        assert match(table, ids) == found_by_search(ids, texts, which)

    @many
    @given(text=pieces)
    def test_canonical_tokens_agree_with_string_search(self, qwen, text):
        table = compile_stop_string(qwen, "</think>", vocab_size=QWEN_VOCAB)
        ids = qwen(text, add_special_tokens=False)["input_ids"]
        texts = stop_strings.vocabulary(qwen)
        assert match(table, ids) == found_by_search(ids, texts, "</think>")

    def test_the_tag_can_end_inside_a_longer_token(self, qwen):
        table = compile_stop_string(qwen, "</think>", vocab_size=QWEN_VOCAB)
        ids = qwen("so x = 4\n</think>\n\n<answer>", add_special_tokens=False)["input_ids"]
        spelled = [qwen.decode([i]) for i in ids]
        end, start = match(table, ids)
        assert spelled[end] == ">\n\n"
        assert spelled[start] == "</"
        assert (end, start) == (8, 6)

    def test_repeated_brackets_begin_the_match_at_the_last_one(self, qwen):
        table = compile_stop_string(qwen, "</think>", vocab_size=QWEN_VOCAB)
        one = lambda c: qwen.convert_tokens_to_ids(c)
        ids = [one(c) for c in "<<</think>"]
        assert match(table, ids) == (9, 2)
        ids = [one("<<"), one("</"), one("think"), one(">")]
        assert match(table, ids) == (3, 1)

    def test_a_special_token_stands_for_its_text(self, qwen):
        table = compile_stop_string(qwen, "<|im_end|>", vocab_size=QWEN_VOCAB)
        assert match(table, [40, 151645]) == (1, 1)

    def test_every_byte_string_of_a_text_comes_back(self, qwen):
        texts = token_bytes(qwen)
        assert len(texts) == len(qwen) == 151_665
        sample = "数学 🙂 naïve \x00\x7f\n\t</think>"
        ids = qwen(sample, add_special_tokens=False)["input_ids"]
        assert b"".join(texts[i] for i in ids) == sample.encode()

    def test_ids_beyond_the_tokenizer_lead_to_the_start(self, qwen):
        table = compile_stop_string(qwen, "</think>", vocab_size=QWEN_VOCAB)
        assert table.next_state.shape == (9, QWEN_VOCAB)
        assert not table.next_state[:-1, len(qwen) :].any()
        assert not table.opens[:, len(qwen) :].any()
        assert (table.next_state[-1] == table.accept).all()

    def test_is_built_once(self, qwen):
        table = compile_stop_string(qwen, "</answer>", vocab_size=QWEN_VOCAB)
        assert table.next_state.nbytes + table.opens.nbytes == 10 * QWEN_VOCAB * 5
        assert compile_stop_string(qwen, "</answer>", vocab_size=QWEN_VOCAB) is table
        assert compile_stop_string(qwen, "</answer>", vocab_size=151_936) is not table


class TestSmallByteLevel:
    """The same claims without real data: a byte-level tokenizer trained on a few lines."""

    @many
    @given(text=pieces, seed=st.integers(0, 10**6))
    def test_any_split_of_any_text_agrees_with_string_search(self, text, seed):
        texts = stop_strings.vocabulary(SMALL)
        near = {}
        for index, token in enumerate(texts):
            near.setdefault(token[:2], []).append(index)
        table = compile_stop_string(SMALL, "</think>", vocab_size=512)
        ids = random_split(text.encode(), texts, near, random.Random(seed))
        assert match(table, ids) == found_by_search(ids, texts, "</think>")

    def test_the_alphabet_is_that_of_the_library(self):
        texts = token_bytes(SMALL)
        spelled = [SMALL.backend_tokenizer.decode([i]) for i in range(len(texts))]
        whole = [i for i, text in enumerate(texts) if "\ufffd" not in spelled[i]]
        assert [texts[i] for i in whole] == [spelled[i].encode() for i in whole]
        assert {bytes([byte]) for byte in range(256)} <= set(texts)


class TestLedger:
    @many
    @given(ids=st.lists(st.integers(0, 26) | st.sampled_from([3, 5]), min_size=0, max_size=12))
    def test_tags_are_single_tokens(self, ledger_tokens, ids):
        table = compile_stop_string(ledger_tokens, "</think>", vocab_size=32)
        where = ids.index(3) if 3 in ids else -1
        assert match(table, ids) == (where, where)


class TestAutomaton:
    # Short alphabets make overlaps likely; strings with one distinct first letter always locate.
    alphabet = ("a", "b", "c", "ab", "ba", "bc", "abc", "cab", "aab", "bcab", "é", "")

    @many
    @given(
        string=st.text("abcé", min_size=1, max_size=6),
        ids=st.lists(st.integers(0, 11), max_size=16),
    )
    def test_overlapping_strings_agree_with_string_search(self, string, ids):
        tokenizer = literal_tokenizer(self.alphabet)
        texts = [token.encode() for token in self.alphabet]
        try:
            table = compile_stop_string(tokenizer, string, vocab_size=12)
        except UserError:
            return
        assert match(table, ids) == found_by_search(ids, texts, string)

    @many
    @given(string=st.text("ab", min_size=1, max_size=6), text=st.text("ab", max_size=16))
    def test_bytes_lead_to_the_longest_prefix_that_ends_there(self, string, text):
        table, state = byte_automaton(string.encode()), 0
        for end, byte in enumerate(text.encode(), 1):
            state = table[state, byte]
            if string in text[:end]:
                assert state == len(string)
            else:
                ends = [n for n in range(len(string)) if text[:end].endswith(string[:n])]
                assert state == max(ends)

    def test_a_self_overlapping_string_is_refused_where_its_start_would_be_lost(self):
        tokenizer = literal_tokenizer(("a", "b"))
        with pytest.raises(UserError, match="beginning that also occurs later"):
            compile_stop_string(tokenizer, "aaab", vocab_size=2)

    def test_nothing_after_the_first_end_matters(self):
        tokenizer = literal_tokenizer(("x", "<>", "<><", ">"))
        table = compile_stop_string(tokenizer, "<>", vocab_size=4)
        assert match(table, [0, 2, 3, 1]) == (1, 1)

    def test_states_of_one_string_are_its_prefixes(self):
        assert byte_automaton(b"</think>").shape == (9, 256)

    def test_tokens_of_no_bytes_change_nothing(self):
        tokenizer = literal_tokenizer(("a", "b", ""))
        table = compile_stop_string(tokenizer, "ab", vocab_size=3)
        np.testing.assert_array_equal(table.next_state[:, 2], np.arange(3))
        assert match(table, [0, 2, 1]) == (2, 0)

    def test_added_tokens_get_a_new_table(self):
        tokenizer = literal_tokenizer(("a", "b"))
        before = compile_stop_string(tokenizer, "ab", vocab_size=4)
        tokenizer.add_tokens([AddedToken("ab", normalized=False)])
        after = compile_stop_string(tokenizer, "ab", vocab_size=4)
        assert match(before, [2]) == (-1, -1)
        assert match(after, [2]) == (0, 0)


class TestRefusals:
    def test_a_tokenizer_larger_than_the_vocabulary(self, ledger_tokens):
        with pytest.raises(
            UserError, match="27 token ids, but the vocabulary of the model has only 26"
        ):
            compile_stop_string(ledger_tokens, "</think>", vocab_size=26)

    def test_a_tokenizer_whose_tokens_are_not_the_text(self):
        backend = Tokenizer(models.WordPiece({"a": 0, "##b": 1}, unk_token="a"))
        backend.decoder = decoders.WordPiece()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
        with pytest.raises(UserError, match="WordPiece"):
            compile_stop_string(tokenizer, "</think>", vocab_size=27)

    def test_a_slow_tokenizer(self):
        with pytest.raises(UserError, match="tokenizer.json"):
            token_bytes(object())
