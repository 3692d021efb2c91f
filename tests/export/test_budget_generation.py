"""The rules that hold a budget in transformers: read, cut, forced, answered."""

import json
import re
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install -e '.[parity]'")
transformers = pytest.importorskip("transformers")

from bacr_client.fingerprint import write_manifest  # noqa: E402
from bacr_jax.export import budget_generation  # noqa: E402
from bacr_jax.export.budget_generation import CACHE  # noqa: E402

# Tokens: 1 a word, 2 `</`, 3 `think>`, 4 `answer>`, 5 ends the turn, 6 holds a line break, 7 `<a>`.
THINKING = {
    "closing_ids": [2, 3, 7],
    "answer_ids": [7],
    "end_ids": [5],
    "never_sampled": "0 8-9",
    "think_close": {"string": "", "states": 3, "jumps": [[None, 1, "2"], [1, 2, "3"]]},
    "answer_close": {"string": "", "states": 3, "jumps": [[None, 1, "2"], [1, 2, "4"]]},
    "answer_tokens": 3,
    "grace": 0,
}


def written(drawn, limit, **changes):
    """What a row writes where these tokens are drawn for it, one a step, until it ends."""
    rules = budget_generation.Rules({**THINKING, **changes}, 10, "cpu")
    rows, found = budget_generation.Rows(rules, torch.tensor([limit])), []
    for token in drawn:
        found.append(int(rows.take(torch.tensor([token]), 0)))
        if rows.done:
            return found
    raise AssertionError("never ended")


WORDS = [1] * 20


def test_the_largest_budget_leaves_room_for_the_closing_text_and_the_answer():
    # 10 tokens of the prompt, 8 of thinking, 3 of closing text, and 3 of the answer.
    exact = types.SimpleNamespace(max_position_embeddings=24)
    assert budget_generation._limits([8], THINKING, exact, 10) == [8]
    with pytest.raises(ValueError, match="23 positions leave room for only 7"):
        short = types.SimpleNamespace(max_position_embeddings=23)
        budget_generation._limits([8], THINKING, short, 10)


class TestRows:
    def test_thinking_is_cut_at_the_budget_and_answered(self):
        assert written(WORDS, 2) == [1, 1, 2, 3, 7, 1, 1, 1]

    def test_a_budget_of_zero_begins_with_the_closing_text(self):
        assert written(WORDS, 0) == [2, 3, 7, 1, 1, 1]

    def test_thinking_that_closes_itself_keeps_its_tag(self):
        assert written([1, 2, 3, *WORDS], 9) == [1, 2, 3, 7, 1, 1, 1]
        # The tag may end with the last token of the budget.
        assert written([1, 2, 3, *WORDS], 3) == [1, 2, 3, 7, 1, 1, 1]

    def test_a_cut_inside_the_tag_closes_the_thinking_again(self):
        assert written([1, 2, 3, *WORDS], 2) == [1, 2, 2, 3, 7, 1, 1, 1]

    def test_the_end_of_the_turn_is_not_kept_in_thinking(self):
        assert written([1, 5, *WORDS], 9) == [1, 2, 3, 7, 1, 1, 1]

    def test_an_answer_ends_by_its_tag_by_the_turn_or_at_its_limit(self):
        assert written([9, 9, 9, 2, 4], 0) == [2, 3, 7, 2, 4]
        assert written([9, 9, 9, 1, 5], 0) == [2, 3, 7, 1, 5]
        # A tag begun in the thinking is none of the answer's.
        assert written([2, 9, 9, 9, 4, 1, 1], 1) == [2, 2, 3, 7, 4, 1, 1]

    def test_a_grace_window_ends_at_a_line_break_or_with_the_window(self):
        grace = {"grace": 2, "line_breaks": "6"}
        assert written([1, 6, *WORDS], 1, **grace)[:3] == [1, 6, 2]
        assert written([6, *WORDS], 1, **grace)[:2] == [6, 2]
        assert written([6, 1, *WORDS], 2, **grace)[:5] == [6, 1, 1, 1, 2]
        assert written(WORDS, 0, **grace)[:1] == [2]

    def test_rows_of_a_batch_go_their_own_ways(self):
        rules = budget_generation.Rules(THINKING, 10, "cpu")
        rows, steps = budget_generation.Rows(rules, torch.tensor([0, 2])), []
        while not rows.done:
            steps.append(rows.take(torch.tensor([1, 1]), 0))
        found = torch.stack(steps, 1).tolist()
        assert found == [[2, 3, 7, 1, 1, 1, 0, 0], [1, 1, 2, 3, 7, 1, 1, 1]]


@pytest.mark.parametrize(
    ("budget", "found"),
    [
        (8, [8, 8]),
        (0, [0, 0]),
        (None, [-1, -1]),
        ("none", [-1, -1]),
        ("low", [16, 16]),
        ([8, None], [8, -1]),
        (("low", np.int64(3)), [16, 3]),
        (torch.tensor(8), [8, 8]),
        (torch.tensor([8, 9]), [8, 9]),
        (np.array([8, 9]), [8, 9]),
    ],
)
def test_budgets_of_a_batch(budget, found):
    assert budget_generation.read_budgets(budget, 2, {"low": 16}) == found


@pytest.mark.parametrize(
    "budget",
    [-1, 8.5, 8.0, True, "8", "high", 2**31, [8, -2], [8, 8, 8], [8], torch.tensor([1.0, 2.0])]
    + [float("nan"), {"b": 1}, np.array([8])],
)
def test_what_is_no_budget_is_a_value_error_that_names_it(budget):
    with pytest.raises(ValueError, match="^budget: .*found "):
        budget_generation.read_budgets(budget, 2, {"low": 16})


def test_numbers_in_text():
    assert budget_generation.numbers_in("3 7-9") == [3, 7, 8, 9]
    assert budget_generation.numbers_in("") == []
    assert json.loads(json.dumps(THINKING)) == THINKING


def test_a_plain_folder_that_was_edited_does_not_generate(tmp_path):
    (tmp_path / "generation_config.json").write_text("{}")
    write_manifest(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"stop_strings": "5"}')
    model = types.SimpleNamespace(name_or_path=str(tmp_path))
    with pytest.raises(
        ValueError, match="generation_config.json is not the file that was exported"
    ):
        budget_generation.generate(model=model)
    # A model of the hub has no folder to look at.
    budget_generation.check_files("org/model")


# With a model --------------------------------------------------------------------------------

VOCABULARY = 100


@pytest.fixture
def model():
    """A plain model with random weights, as transformers loads an exported folder."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.5,
        eos_token_id=5,
        pad_token_id=0,
    )
    config.thinking = {**THINKING, "cap": 8}
    return transformers.Qwen2ForCausalLM(config).eval()


# Two prompts of 12 and 9 tokens.
PROMPTS = torch.tensor(
    [
        [11, 27, 93, 34, 52, 16, 77, 81, 45, 60, 38, 29],
        [0, 0, 0, 64, 13, 88, 71, 42, 19, 55, 26, 97],
    ]
)
MASK = (PROMPTS != 0).long()


def response(model, ids=PROMPTS, mask=MASK, **arguments):
    """Generates with budgets of 6 and 2 tokens, and returns ids, logits and the cache."""
    return budget_generation.generate(
        ids,
        model=model,
        attention_mask=mask,
        budget=[6, 2],
        return_dict_in_generate=True,
        output_logits=True,
        **arguments,
    )


def assert_same(found, expected):
    torch.testing.assert_close(found.sequences, expected.sequences)
    found_logits = torch.stack(found.logits)
    torch.testing.assert_close(found_logits, torch.stack(expected.logits), rtol=1e-3, atol=1e-4)


def cache_of(model, count, ids=PROMPTS, mask=MASK):
    """Returns a KV cache of the first tokens of prompts."""
    cache = transformers.DynamicCache(config=model.config)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    if count:
        with torch.no_grad():
            model(
                input_ids=ids[:, :count],
                attention_mask=mask[:, :count],
                position_ids=positions[:, :count],
                use_cache=True,
                **{CACHE: cache},
            )
    return cache


@pytest.mark.parametrize("count", [0, 1, 4, 11])
def test_a_cache_of_the_first_tokens_of_the_prompts_changes_nothing(model, count):
    expected = response(model)
    assert len(set(expected.sequences[:, 12:].flatten().tolist())) > 6
    assert_same(response(model, **{CACHE: cache_of(model, count)}), expected)


def test_a_cache_without_padding_and_without_a_mask_changes_nothing(model):
    ids = PROMPTS[:, 3:]
    cache = cache_of(model, 8, ids, torch.ones_like(ids))
    assert_same(response(model, ids, None, **{CACHE: cache}), response(model, ids, None))


def test_a_response_is_continued_with_its_cache(model):
    first = response(model)
    more = torch.tensor([[31, 48], [22, 87]])
    ids = torch.cat([first.sequences, more], dim=-1)
    mask = torch.cat([MASK, torch.ones_like(ids[:, 12:])], dim=-1)
    assert_same(response(model, ids, mask, **{CACHE: first[CACHE]}), response(model, ids, mask))


@pytest.mark.parametrize("count", [9, 12])
def test_a_cache_as_long_as_the_prompts_is_refused(model, count):
    ids = PROMPTS[:, :9]
    mask = torch.ones_like(ids)
    cache = cache_of(model, count, PROMPTS, torch.ones_like(PROMPTS))
    message = f"^{CACHE}: the KV cache contains {count} tokens, but the prompt has only 9; pass the"
    with pytest.raises(ValueError, match=message):
        response(model, ids, mask, **{CACHE: cache})


@pytest.mark.parametrize("count", [2, 9])
def test_prompts_without_the_tokens_of_the_cache_are_refused(model, count):
    cache = cache_of(model, count)
    message = (
        f"attention_mask: the shape is (2, 12), but the prompts have the shape (2, {12 - count}"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        response(model, PROMPTS[:, count:], MASK, **{CACHE: cache})


def num_candidates(model, **arguments):
    """The number of tokens from which the first token is sampled."""
    found = response(model, output_scores=True, **arguments)
    return int(found.scores[0][0].isfinite().sum())


# All tokens but the three that are never sampled.
ALL = VOCABULARY - 3


@pytest.mark.parametrize(
    ("arguments", "folder", "expected"),
    [
        ({"do_sample": True}, {}, ALL),
        ({"do_sample": True, "temperature": 0.7, "top_p": 1.0}, {}, ALL),
        ({"do_sample": True, "top_k": None}, {}, ALL),
        ({"do_sample": True, "top_k": 0}, {"top_k": 7}, ALL),
        ({}, {"do_sample": True}, ALL),
        ({"generation_config": {"do_sample": True}}, {}, ALL),
        ({"do_sample": True, "top_k": 50}, {}, 50),
        ({"do_sample": True, "top_k": 5}, {"top_k": 7}, 5),
        ({"generation_config": {"do_sample": True, "top_k": 50}}, {}, 50),
        ({"do_sample": True}, {"top_k": 7}, 7),
        ({"generation_config": {"do_sample": True}}, {"top_k": 7}, 7),
        ({}, {"do_sample": True, "top_k": 7}, 7),
    ],
)
def test_all_tokens_are_sampled_unless_the_caller_or_the_folder_sets_top_k(
    model, arguments, folder, expected
):
    for name, value in folder.items():
        setattr(model.generation_config, name, value)
    if "generation_config" in arguments:
        config = transformers.GenerationConfig(**arguments["generation_config"])
        arguments = {**arguments, "generation_config": config}
        before = config.to_dict()
    assert num_candidates(model, **arguments) == expected
    if "generation_config" in arguments:
        assert config.to_dict() == before


@pytest.mark.parametrize("arguments", [{}, {"do_sample": False}])
def test_greedy_decoding_gets_no_setting_that_transformers_warns_of(model, monkeypatch, arguments):
    warnings = []
    logger = transformers.generation.configuration_utils.logger
    for name in ("warning", "warning_once"):
        monkeypatch.setattr(logger, name, lambda *words: warnings.append(words))
    response(model, **arguments)
    assert warnings == []
