"""Digests of what a policy is asked with: equal for equal content, other for any change of it."""

import dataclasses

import numpy as np
import tokenizers

import hf_world
from bacr_jax.prompts.budget_prompt import make_budget_prompts
from bacr_jax.prompts.encoding import encode_prompts
from bacr_jax.prompts.fingerprints import (
    prompts_fingerprint,
    template_fingerprint,
    tokenizer_fingerprint,
)
from bacr_jax.prompts.formats import FORMATS
from bacr_jax.questions.ledger import ledger_tokenizer

STYLE = FORMATS["think_answer"]


def swapped(tokenizer):
    """The same tokenizer with two ids that change places."""
    backend = tokenizer.backend_tokenizer
    words = backend.get_vocab(with_added_tokens=False)
    words["Y"], words["Z"] = words["Z"], words["Y"]
    model = tokenizers.models.BPE(words, [])
    backend.model = model
    return tokenizer


def test_a_tokenizer_is_known_by_the_texts_of_its_ids():
    letters = hf_world.chat_tokenizer
    own = tokenizer_fingerprint(letters())
    assert tokenizer_fingerprint(letters()) == own
    assert tokenizer_fingerprint(swapped(letters())) != own
    longer = letters()
    longer.add_tokens(["<note>"])
    assert tokenizer_fingerprint(longer) != own
    # Tokens stay the same, and what becomes of a text does not.
    lower = letters()
    lower.backend_tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    assert tokenizer_fingerprint(lower) != own
    assert tokenizer_fingerprint(ledger_tokenizer()) == tokenizer_fingerprint(ledger_tokenizer())


def test_a_template_is_known_by_what_stands_around_a_question():
    letters = hf_world.chat_tokenizer()
    own = template_fingerprint(letters, STYLE)
    assert template_fingerprint(hf_world.chat_tokenizer(), STYLE) == own
    for change in ({"system": "Be brief."}, {"forced_suffix": "</think><answer>"}):
        assert template_fingerprint(letters, dataclasses.replace(STYLE, **change)) != own
    letters.chat_template = letters.chat_template.replace("<|im_end|>", "<|im_end|>\n")
    assert template_fingerprint(letters, STYLE) != own
    dated = hf_world.chat_tokenizer()
    dated.chat_template = "{{ strftime_now('%d') }}" + dated.chat_template
    days = [dataclasses.replace(STYLE, date=f"2026-11-{day}") for day in (27, 28)]
    one, other = (template_fingerprint(dated, style) for style in days)
    assert one != other


def test_prompts_are_known_by_their_ids_and_by_where_the_budget_stands():
    letters = hf_world.chat_tokenizer()
    encode = lambda *texts: encode_prompts(letters, texts, STYLE, max_tokens=999)[0]
    own = prompts_fingerprint(encode("1+1", "2+2"), None)
    assert prompts_fingerprint(encode("1+1", "2+2"), None) == own
    assert prompts_fingerprint(encode("2+2", "1+1"), None) != own
    assert prompts_fingerprint(encode("1+1", "2+2").take(np.array([0])), None) != own
    tell = lambda words: make_budget_prompts(
        letters, ["1+1", "2+2"], STYLE, words, largest=99, max_tokens=999
    )[0]
    told = prompts_fingerprint(encode("1+1", "2+2"), tell("Use {budget} tokens."))
    assert told not in (own, prompts_fingerprint(encode("1+1", "2+2"), tell("Use {budget} words.")))
