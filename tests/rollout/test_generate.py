"""Budgets that hold to the token, suffixes, and rows that do not notice their neighbours."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bacr_jax.data.decode_rules import decode_rules
from bacr_jax.rollout.generate import generate
from bacr_jax.rollout.sampling import sampling_params
from bacr_jax.types import CLOSED_BY_BUDGET, CLOSED_BY_EOS, CLOSED_BY_TAG, NO_BUDGET, Prompts
from rollout_world import (
    ANSWER,
    ANSWER_CLOSE,
    CLOSE,
    EOS,
    LEGAL,
    Table,
    make_prompts,
    make_rules,
    two_tokens,
)


def quarters(budgets):
    return np.ceil(np.asarray(budgets)[:, None] * np.arange(1, 5) / 4).astype(int)


def roll(world, prompts, budgets, *, rules=None, key=3, cuts=None, sampling=None, **kwargs):
    return generate(
        world.decode,
        prompts,
        np.asarray(budgets),
        quarters(budgets) if cuts is None else cuts,
        jax.random.key(key),
        spec=kwargs.pop("spec", world.spec()),
        rules=rules or make_rules(),
        sampling=sampling or sampling_params(1.0),
        phi_of=world.phi_of,
        **kwargs,
    )


ROWS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 12)), min_size=1, max_size=9)


@settings(max_examples=25, deadline=None)
@given(ROWS, st.integers(0, 10_000))
def test_every_row_keeps_its_budget(world, rows, key):
    lengths, budgets = map(np.array, zip(*rows))
    prompts = make_prompts(lengths, 5)
    result = roll(world, prompts, budgets, key=key)
    t = result.trunks
    forced = t.close == CLOSED_BY_BUDGET
    assert (t.sampled <= budgets).all()
    assert (t.thinking[forced] == budgets[forced]).all()
    assert (t.thinking[~forced] < budgets[~forced]).all()
    for i in range(len(rows)):
        start = lengths[i]
        np.testing.assert_array_equal(t.tokens[i, :start], prompts.tokens[i, :start])
        sampled = t.tokens[i, start : start + t.sampled[i]]
        assert LEGAL[sampled].all()
        ends = np.isin(sampled, [CLOSE, EOS])
        # the close is the last token sampled and the only one
        if t.close[i] == CLOSED_BY_BUDGET:
            assert not ends.any()
        else:
            expected = CLOSE if t.close[i] == CLOSED_BY_TAG else EOS
            assert ends.sum() == 1 and sampled[-1] == expected
        assert (t.tokens[i, start + t.sampled[i] :] == 0).all()
        assert (t.logprobs[i, t.sampled[i] :] == 0).all()
        assert (t.logprobs[i, : t.sampled[i]] < 0).all()


@settings(max_examples=25, deadline=None)
@given(ROWS, st.integers(0, 10_000))
def test_every_branch_has_one_bridge_and_hangs_at_its_cut(world, rows, key):
    lengths, budgets = map(np.array, zip(*rows))
    result = roll(world, make_prompts(lengths, 5), budgets, key=key)
    t, br = result.trunks, result.branches
    for i in range(len(rows)):
        for j, cut in enumerate(quarters(budgets)[i]):
            whole = cut >= t.thinking[i]
            natural = whole and t.close[i] == CLOSED_BY_TAG
            kept = t.sampled[i] if natural else min(cut, t.thinking[i])
            assert br.context[i, j] == lengths[i] + kept
            suffix = [ANSWER] if natural else [CLOSE, ANSWER]
            assert br.forced[i, j] == len(suffix)
            row = br.tokens[i, j]
            np.testing.assert_array_equal(row[: len(suffix)], suffix)
            sampled = row[len(suffix) : len(suffix) + br.sampled[i, j]]
            assert 1 <= len(sampled) <= 3
            ends = np.isin(sampled, [ANSWER_CLOSE, EOS])
            assert br.finished[i, j] == ends[-1] and not ends[:-1].any()
            assert br.finished[i, j] or len(sampled) == 3


def test_cuts_on_the_same_place_share_one_answer(world):
    # budget 2: cuts 1, 1, 2, 2
    result = roll(world, make_prompts([3] * 8, 5), [2] * 8)
    br = result.branches
    for i in range(8):
        thinking = result.trunks.thinking[i]
        places = np.minimum([1, 1, 2, 2], thinking)
        first = [list(places).index(p) for p in places]
        np.testing.assert_array_equal(br.source[i], first)
        np.testing.assert_array_equal(br.tokens[i], br.tokens[i, first])
    distinct = br.source == np.arange(4)
    assert result.counters["tokens"] == result.trunks.sampled.sum() + br.sampled[distinct].sum()


def test_several_answers_at_a_cut_are_draws_of_their_own_from_one_text(world):
    prompts, budgets = make_prompts([3, 1, 5, 2] * 4, 5), [12, 2, 7, 0] * 4
    one = roll(world, prompts, budgets, spec=world.spec(16))
    many = roll(world, prompts, budgets, spec=world.spec(16, answers=3))
    np.testing.assert_array_equal(many.trunks.tokens, one.trunks.tokens)
    assert many.counters["prefill_tokens"] == one.counters["prefill_tokens"]
    by_cut = jax.tree.map(lambda x: x.reshape(16, 4, 3, *x.shape[2:]), many.branches)
    for name in ("context", "forced"):
        here, alone = getattr(by_cut, name), getattr(one.branches, name)
        np.testing.assert_array_equal(here, np.repeat(alone[..., None], 3, axis=2))
    # The first is the answer that is drawn where only one is asked for.
    own = one.branches.source == np.arange(4)
    np.testing.assert_array_equal(by_cut.tokens[own][:, 0], one.branches.tokens[own])
    # Cuts at the same place share nothing, and all answers are counted.
    np.testing.assert_array_equal(many.branches.source, np.tile(np.arange(12), (16, 1)))
    text = by_cut.tokens.reshape(16, 12, -1)
    assert ((text[:, :, None] != text[:, None]).any(-1).mean(0)[~np.eye(12, dtype=bool)] > 0).all()
    assert many.counters["tokens"] == many.trunks.sampled.sum() + many.branches.sampled.sum()


def test_several_answers_are_the_same_in_any_company(world):
    prompts, budgets = make_prompts([1, 5, 3, 2, 4], 5), np.array([12, 0, 1, 7, 12])
    together = roll(world, prompts, budgets, spec=world.spec(8, answers=2))
    other = roll(world, prompts, budgets, spec=world.spec(2, chunk=3, answers=2))
    for name in ("tokens", "sampled", "context", "finished"):
        np.testing.assert_array_equal(
            getattr(other.branches, name), getattr(together.branches, name)
        )


def test_a_closing_tag_of_two_tokens_is_not_counted_as_thinking(world):
    rules = make_rules(two_tokens([6, 7, 8, 9, 10], [11, 12, 13, 14, 15]))
    # Hot enough that every allowed token is about as likely as any other.
    result = roll(
        world,
        make_prompts([2] * 64, 2),
        [12] * 64,
        rules=rules,
        sampling=sampling_params(100.0),
        spec=world.spec(64),
    )
    t = result.trunks
    closed = t.close == CLOSED_BY_TAG
    assert closed.sum() > 3
    assert (t.sampled[closed] == t.thinking[closed] + 2).all()
    eos = t.close == CLOSED_BY_EOS
    assert eos.any() and (t.sampled[eos] == t.thinking[eos] + 1).all()
    for i in np.flatnonzero(closed):
        first, second = t.tokens[i, 2 + t.thinking[i] :][:2]
        assert 6 <= first <= 10 < second


def test_a_row_is_the_same_in_any_company(world):
    lengths, budgets = np.array([1, 5, 3, 2, 4, 5, 1]), np.array([12, 0, 1, 7, 12, 5, 3])
    prompts = make_prompts(lengths, 5)
    together = roll(world, prompts, budgets, spec=world.spec(8))
    for slots, chunk in ((2, 5), (4, 3), (7, 12)):
        other = roll(world, prompts, budgets, spec=world.spec(slots, chunk=chunk))
        np.testing.assert_array_equal(other.trunks.tokens, together.trunks.tokens)
        np.testing.assert_array_equal(other.branches.tokens, together.branches.tokens)
    alone = roll(
        world,
        jax.tree.map(lambda x: x[3:4], prompts),
        budgets[3:4],
        rows=np.array([3]),
    )
    np.testing.assert_array_equal(alone.trunks.tokens[0], together.trunks.tokens[3])
    np.testing.assert_array_equal(alone.branches.tokens[0], together.branches.tokens[3])


def test_another_key_gives_other_text(world):
    prompts, budgets = make_prompts([3] * 6, 5), [12] * 6
    one, two = (roll(world, prompts, budgets, key=k).trunks.tokens for k in (1, 2))
    assert (one != two).any()


def test_the_told_budget_changes_what_is_said(world):
    prompts = make_prompts([3] * 32, 3)
    short, long = (
        roll(world, prompts, [b] * 32, sampling=sampling_params(0.0), spec=world.spec(32))
        for b in (4, 12)
    )
    assert (short.trunks.tokens[:, 3:7] != long.trunks.tokens[:, 3:7]).any()


def test_greedy_takes_the_most_likely_legal_token(world):
    """Against full passes of the model, one token at a time."""
    from bacr_jax.model import qwen2

    prompts = make_prompts([4, 2], 4)
    result = roll(world, prompts, [12, 12], sampling=sampling_params(0.0))
    for i in range(2):
        n, total = int(prompts.lengths[i]), int(result.trunks.sampled[i])
        row = jnp.asarray(result.trunks.tokens[i : i + 1, : n + total])
        hidden = qwen2.forward(
            world.params,
            row,
            config=world.shape,
            budget_embedding=world.phi_of(jnp.array([12])),
            conditioning=world.conditioning,
        )
        logits = np.where(LEGAL, qwen2.logits(world.params, hidden)[0], -np.inf)
        np.testing.assert_array_equal(logits[n - 1 : -1].argmax(-1), row[0, n:])


def test_polling_can_stop_a_rollout(world):
    class Stop(Exception):
        pass

    def poll():
        raise Stop

    try:
        roll(world, make_prompts([3], 3), [12], poll=poll)
    except Stop:
        return
    raise AssertionError("poll was never called")


def test_a_prompt_of_one_token_beside_one_of_the_full_width(world):
    prompts = make_prompts([1, 5], 5)
    t = roll(world, prompts, [12, 12]).trunks
    alone = roll(world, jax.tree.map(lambda x: x[:1], prompts), [12]).trunks
    np.testing.assert_array_equal(t.tokens[0], alone.tokens[0])
    assert (t.sampled >= 1).all()


def test_rows_admitted_last_say_the_same_as_rows_admitted_first(world):
    """The same rows behind ten longer ones, through four slots."""
    prompts = make_prompts([3, 2, 4] + [5] * 10, 5)
    budgets = np.array([5, 3, 4] + [12] * 10)
    crowd = roll(world, prompts, budgets, spec=world.spec(4, refill=0.01))
    few = roll(world, jax.tree.map(lambda x: x[:3], prompts), budgets[:3], spec=world.spec(64))
    for name in ("tokens", "thinking", "close"):
        np.testing.assert_array_equal(getattr(crowd.trunks, name)[:3], getattr(few.trunks, name))
    np.testing.assert_array_equal(crowd.branches.tokens[:3], few.branches.tokens)
    np.testing.assert_allclose(crowd.trunks.logprobs[:3], few.trunks.logprobs, atol=1e-5)


def test_without_cuts_only_thinking_is_sampled(world):
    prompts, budgets = make_prompts([3, 1, 2], 3), [12, 5, 0]
    none = roll(world, prompts, budgets, cuts=np.zeros((3, 0), int))
    np.testing.assert_array_equal(none.trunks.tokens, roll(world, prompts, budgets).trunks.tokens)
    assert none.branches.tokens.shape == (3, 0, 1)
    assert none.counters["tokens"] == none.trunks.sampled.sum()


def test_a_row_without_a_budget_is_the_plain_model_up_to_the_cap(world):
    prompts = make_prompts([3, 2], 3)
    told = roll(world, prompts, [NO_BUDGET, 12], cuts=quarters([12, 12]))
    plain = generate(
        dataclasses.replace(world.decode, gates=None),
        prompts,
        np.array([12, 12]),
        quarters([12, 12]),
        jax.random.key(3),
        spec=dataclasses.replace(world.spec(), conditioning=None),
        rules=make_rules(),
        sampling=sampling_params(1.0),
    )
    np.testing.assert_array_equal(told.trunks.tokens[0], plain.trunks.tokens[0])
    np.testing.assert_array_equal(told.trunks.budgets, [12, 12])
    assert (told.trunks.tokens[1] != plain.trunks.tokens[1]).any()


def test_streamed_tokens_are_the_sampled_ones_in_order(world):
    prompts, heard = make_prompts([3, 1, 4], 5), {0: [], 1: [], 2: []}
    result = roll(
        world,
        prompts,
        [12, 7, 0],
        spec=world.spec(2, chunk=2),
        on_tokens=lambda row, tokens: heard[row].extend(tokens.tolist()),
    )
    t = result.trunks
    for row, tokens in heard.items():
        start = t.prompt_lengths[row]
        assert tokens == t.tokens[row, start : start + t.sampled[row]].tolist()


def test_counters_add_up(world):
    """Token 6 alone is allowed, so that every row runs to its budget."""
    rules = make_rules(allowed_tokens=np.arange(16) == 6)
    budgets = np.array([12, 12, 4, 4])
    found = roll(
        world,
        make_prompts([2] * 4, 2),
        budgets,
        rules=rules,
        spec=world.spec(2, chunk=4, refill=0.01),
    ).counters
    # two slots: 12 steps of the long rows, then 4 of the short ones, all of them useful
    assert found["occupancy"] == 1.0
    assert found["thinking_mean"] == 8 and found["thinking_max"] == 12
    assert found["forced_share"] == 1.0 and found["prefill_tokens"] == 8
    # four cuts of three answer tokens on each of four rows
    assert found["tokens"] == 32 + 4 * 4 * 3
    # answers take the suffix of two and three tokens, the last of which is not fed: one chunk of 4
    assert found["row_steps"] == 32 + 2 * (2 * 4) * 4
    assert found["wasted_share"] == pytest.approx(1 - 80 / 96)


def test_greedy_equals_transformers(tmp_path):
    """64 tokens of 16 prompts of many lengths, the same weights on both sides."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    from bacr_jax.model import kv_cache
    from bacr_jax.model.hf import load_policy
    from bacr_jax.rollout.engine import RolloutSpec
    from hf_world import make_folder

    folder = tmp_path / "model"
    make_folder(folder)
    config, params = load_policy(folder)
    decode = kv_cache.decode_params(params, dtype=jnp.float32, conditioned=False)
    lengths = np.arange(1, 17)
    vocab = config.vocab_size
    tokens = np.random.default_rng(0).integers(1, vocab, (16, 16))
    prompts = Prompts(tokens, lengths, lengths * 0, lengths)

    def never():
        return Table(
            np.stack([np.zeros(vocab, int), np.ones(vocab, int)]), np.zeros((2, vocab), bool)
        )

    rules = decode_rules(
        allowed_tokens=np.arange(vocab) != 0,
        eos_ids=[0],
        think_close=never(),
        answer_close=never(),
        forced_suffix=[1],
        natural_suffix=[1],
    )
    ours = generate(
        decode,
        prompts,
        np.full(16, 64),
        np.zeros((16, 0), int),
        jax.random.key(0),
        spec=RolloutSpec(config, None, max_thinking=64, answer_tokens=1, slots=6, refill=0.1),
        rules=rules,
        sampling=sampling_params(0.0),
    ).trunks
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for i, n in enumerate(lengths):
        theirs = model.generate(
            torch.tensor(tokens[i : i + 1, :n]),
            do_sample=False,
            min_new_tokens=64,
            max_new_tokens=64,
            eos_token_id=0,
            pad_token_id=0,
        )
        np.testing.assert_array_equal(ours.tokens[i, n : n + 64], theirs[0, n:].numpy())
