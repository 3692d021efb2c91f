"""Budgets that hold to the token, suffixes, and rows that do not notice their neighbours."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bacr_jax.errors import UserError
from bacr_jax.model import budget, qwen2
from bacr_jax.prompts.decode_rules import decode_rules
from bacr_jax.rollout import (
    RolloutRequest,
    RolloutSpec,
    SamplingSetup,
    generate,
    precompile,
    sampling_params,
)
from bacr_jax.rollout.rollouts import sampled_counters
from bacr_jax.types import (
    CLOSED_BY_BUDGET,
    CLOSED_BY_EOS,
    CLOSED_BY_TAG,
    NO_BUDGET,
    Branches,
    Prompts,
    Trunks,
)
from rollout_world import (
    ANSWER,
    ANSWER_CLOSE,
    CLOSE,
    EOS,
    LEGAL,
    Table,
    make_prompts,
    make_rules,
    no_cuts,
    quarters,
    two_tokens,
)

ROWS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 12)), min_size=1, max_size=9)


@settings(max_examples=25)
@given(ROWS, st.integers(0, 10_000))
def test_every_row_keeps_its_budget(world, rows, key):
    lengths, budgets = map(np.array, zip(*rows))
    prompts = make_prompts(lengths, 5)
    result = world.roll(prompts, budgets, key=key)
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


@settings(max_examples=25)
@given(ROWS, st.integers(0, 10_000))
def test_every_branch_has_one_suffix_and_hangs_at_its_cut(world, rows, key):
    lengths, budgets = map(np.array, zip(*rows))
    result = world.roll(make_prompts(lengths, 5), budgets, key=key)
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
    result = world.roll(make_prompts([3] * 8, 5), [2] * 8)
    br = result.branches
    for i in range(8):
        thinking = result.trunks.thinking[i]
        places = np.minimum([1, 1, 2, 2], thinking)
        first = [list(places).index(p) for p in places]
        np.testing.assert_array_equal(br.source[i], first)
        np.testing.assert_array_equal(br.tokens[i], br.tokens[i, first])
    distinct = br.source == np.arange(4)
    assert result.counters["tokens"] == result.trunks.sampled.sum() + br.sampled[distinct].sum()


@pytest.mark.slow
def test_several_answers_at_a_cut_are_draws_of_their_own_from_one_text(world):
    prompts, budgets = make_prompts([3, 1, 5, 2] * 4, 5), [12, 2, 7, 0] * 4
    one = world.roll(prompts, budgets)
    many = world.roll(prompts, budgets, spec=world.spec(answers=3))
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


@pytest.fixture(scope="module")
def flat(world):
    """A policy for which all tokens are equally probable, so that equal keys draw equal tokens."""
    return dataclasses.replace(world.decode, head=0 * world.decode.head)


def first_answer_tokens(branches, cut):
    rows = np.arange(len(branches.tokens))
    return branches.tokens[rows, cut, branches.forced[:, cut]]


def test_an_answer_does_not_repeat_the_draws_of_the_thinking(world, flat):
    prompts, cuts = make_prompts([3] * 64, 5), np.full((64, 1), 4)
    result = world.roll(prompts, [4] * 64, params=flat, cuts=cuts)
    first = result.trunks.tokens[:, 3]
    # One of 14 tokens by chance: 64 / 14 = 4.6 of the traces.
    assert (first == first_answer_tokens(result.branches, 0)).sum() < 16


def test_an_answer_does_not_repeat_the_draws_of_cuts_that_were_answered_earlier(world, flat):
    prompts, cuts = make_prompts([3] * 64, 5), np.tile([1, 2], (64, 1))
    spec = world.spec(max_parallel_cuts=1)
    branches = world.roll(prompts, [4] * 64, params=flat, cuts=cuts, spec=spec).branches
    # Traces that end before both cuts share an answer. About 64 x (12 / 14)^2 = 47 do not.
    is_distinct = branches.source[:, 1] == 1
    same = first_answer_tokens(branches, 0) == first_answer_tokens(branches, 1)
    assert is_distinct.sum() > 30 and same[is_distinct].sum() < 12


def test_answers_have_the_temperature_of_their_own_stream(world):
    prompts, budgets = make_prompts([3, 1, 5, 2], 5), [8] * 4
    options = {"key": jax.vmap(jax.random.key)(np.arange(2)), "streams": np.array([0, 1, 0, 1])}
    greedy, mixed = (
        world.roll(prompts, budgets, sampling=sampling_params(temperatures), **options).branches
        for temperatures in ([0.0, 0.0], [0.0, 50.0])
    )
    same = (mixed.tokens == greedy.tokens).all((1, 2))
    np.testing.assert_array_equal(same, [True, False, True, False])


def test_a_slot_forgets_the_closing_tag_of_the_row_before(world):
    """Only token 6 and the tag are allowed, so that about half of the rows end with the tag."""
    rules = make_rules(allowed_tokens=np.isin(np.arange(16), [6, CLOSE]))
    prompts, budgets = make_prompts([3, 1, 5, 2] * 4, 5), [6] * 16
    options = {"rules": rules, "cuts": no_cuts(16), "temperature": 100.0}
    apart = world.roll(prompts, budgets, **options).trunks
    refilled = world.roll(prompts, budgets, spec=world.tight(), **options).trunks
    assert (apart.close == CLOSED_BY_TAG).sum() > 4 and apart.thinking.max() > 1
    for name in ("tokens", "thinking", "close"):
        np.testing.assert_array_equal(getattr(refilled, name), getattr(apart, name))


@pytest.mark.parametrize("answers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_row_is_the_same_in_any_company(world, answers):
    """Through four slots, and through two whose caches grow, shrink and are refilled."""
    lengths, budgets = np.array([1, 5, 3, 2, 4, 5, 1]), np.array([12, 0, 1, 7, 12, 5, 3])
    prompts = make_prompts(lengths, 5)
    together = world.roll(prompts, budgets, spec=world.spec(answers=answers))
    tight = world.roll(prompts, budgets, spec=world.tight(answers=answers))
    for name in ("tokens", "thinking", "close"):
        np.testing.assert_array_equal(getattr(tight.trunks, name), getattr(together.trunks, name))
    for name in ("tokens", "sampled", "context", "finished"):
        np.testing.assert_array_equal(
            getattr(tight.branches, name), getattr(together.branches, name)
        )
    np.testing.assert_allclose(tight.trunks.logprobs, together.trunks.logprobs, atol=1e-5)
    alone = world.roll(
        jax.tree.map(lambda x: x[3:4], prompts),
        budgets[3:4],
        ids=np.array([3]),
        spec=world.spec(answers=answers),
    )
    np.testing.assert_array_equal(alone.trunks.tokens[0], together.trunks.tokens[3])
    np.testing.assert_array_equal(alone.branches.tokens[0], together.branches.tokens[3])


@pytest.mark.slow
def test_rows_that_waited_say_the_same_as_rows_that_entered_first(world):
    """The same rows behind ten longer ones, through two slots."""
    prompts = make_prompts([3, 2, 4] + [5] * 10, 5)
    budgets = np.array([5, 3, 4] + [12] * 10)
    crowd = world.roll(prompts, budgets, spec=world.tight())
    few = world.roll(jax.tree.map(lambda x: x[:3], prompts), budgets[:3])
    for name in ("tokens", "thinking", "close"):
        np.testing.assert_array_equal(getattr(crowd.trunks, name)[:3], getattr(few.trunks, name))
    np.testing.assert_array_equal(crowd.branches.tokens[:3], few.branches.tokens)


def test_a_closing_tag_of_two_tokens_is_not_counted_as_thinking(world):
    rules = make_rules(two_tokens([6, 7, 8, 9, 10], [11, 12, 13, 14, 15]))
    # Hot enough that every allowed token is about as likely as any other.
    t = world.roll(
        make_prompts([2] * 64, 5), [12] * 64, rules=rules, temperature=100.0, cuts=no_cuts(64)
    ).trunks
    closed = t.close == CLOSED_BY_TAG
    assert closed.sum() > 3
    assert (t.sampled[closed] == t.thinking[closed] + 2).all()
    eos = t.close == CLOSED_BY_EOS
    assert eos.any() and (t.sampled[eos] == t.thinking[eos] + 1).all()
    for i in np.flatnonzero(closed):
        first, second = t.tokens[i, 2 + t.thinking[i] :][:2]
        assert 6 <= first <= 10 < second


def test_another_key_gives_other_text(world):
    prompts, budgets = make_prompts([3] * 6, 5), [12] * 6
    one, two = (world.roll(prompts, budgets, key=k).trunks.tokens for k in (1, 2))
    assert (one != two).any()


def test_the_told_budget_changes_what_is_said(world):
    prompts = make_prompts([3] * 32, 5)
    short, long = (
        world.roll(prompts, [b] * 32, temperature=0.0, cuts=no_cuts(32)).trunks for b in (4, 12)
    )
    assert (short.tokens[:, 3:7] != long.tokens[:, 3:7]).any()


def test_greedy_takes_the_most_likely_allowed_token_in_trunks_and_branches(world):
    """Against full passes of the model over prompt, thinking up to the cut, and answer."""
    prompts = make_prompts([4, 2], 5)
    result = world.roll(prompts, [12, 12], temperature=0.0)
    t, br = result.trunks, result.branches
    conditioned = budget.Conditioned(
        world.phi_of(jnp.array([12])), world.params["budget"]["gate"], settings=world.conditioning
    )
    width = t.tokens.shape[1] + br.tokens.shape[2]

    @jax.jit
    def most_likely(row):
        hidden = qwen2.forward(
            world.params,
            row[None],
            config=world.shape,
            conditioned=conditioned,
        )
        return jnp.where(LEGAL, qwen2.logits(world.params, hidden)[0], -jnp.inf).argmax(-1)

    def check(text, sampled):
        row = np.zeros(width, np.int32)
        row[: len(text)] = text
        np.testing.assert_array_equal(
            np.asarray(most_likely(row))[len(text) - sampled - 1 : len(text) - 1],
            text[len(text) - sampled :],
        )

    for i, n in enumerate(prompts.lengths):
        check(t.tokens[i, : n + t.sampled[i]], t.sampled[i])
        for j in range(4):
            answer = br.tokens[i, j, : br.forced[i, j] + br.sampled[i, j]]
            check(np.append(t.tokens[i, : br.context[i, j]], answer), br.sampled[i, j])


def test_polling_can_stop_a_rollout(world):
    class Stop(Exception):
        pass

    def poll():
        raise Stop

    with pytest.raises(Stop):
        world.roll(make_prompts([3], 5), [12], poll=poll)


def test_without_cuts_only_thinking_is_sampled(world):
    prompts, budgets = make_prompts([3, 1, 2], 5), [12, 5, 0]
    none = world.roll(prompts, budgets, cuts=no_cuts(3))
    np.testing.assert_array_equal(none.trunks.tokens, world.roll(prompts, budgets).trunks.tokens)
    assert none.branches.tokens.shape == (3, 0, 1)
    assert none.counters["tokens"] == none.trunks.sampled.sum()


def test_a_row_without_a_budget_is_the_plain_model_up_to_the_cap(world):
    prompts = make_prompts([3, 2], 5)
    told = world.roll(prompts, [NO_BUDGET, 12], cuts=no_cuts(2)).trunks
    plain = world.roll(
        prompts,
        [12, 12],
        cuts=no_cuts(2),
        params=dataclasses.replace(world.decode, gates=None),
        spec=world.spec(conditioning=None),
        phi_of=None,
    ).trunks
    np.testing.assert_array_equal(told.tokens[0], plain.tokens[0])
    np.testing.assert_array_equal(told.budgets, [12, 12])
    assert (told.tokens[1] != plain.tokens[1]).any()


def test_streamed_tokens_are_the_sampled_ones_in_order(world):
    prompts, heard = make_prompts([3, 1, 4], 5), {0: [], 1: [], 2: []}
    result = world.roll(
        prompts,
        [12, 7, 0],
        spec=world.tight(),
        cuts=no_cuts(3),
        on_tokens=lambda row, tokens: heard[row].extend(tokens.tolist()),
    )
    t = result.trunks
    for row, tokens in heard.items():
        start = t.prompt_lengths[row]
        assert tokens == t.tokens[row, start : start + t.sampled[row]].tolist()


def test_counters_add_up(world):
    """Token 6 alone is allowed, so that every row runs to its budget."""
    rules = make_rules(allowed_tokens=np.arange(16) == 6)
    counters = world.roll(
        make_prompts([2] * 4, 5), [12, 12, 6, 6], rules=rules, spec=world.tight()
    ).counters
    # two slots: 12 steps of the long rows, then 6 of the short ones, all of them useful
    assert counters["occupancy"] == 1.0
    assert counters["thinking_mean"] == 9 and counters["thinking_max"] == 12
    assert counters["forced_share"] == 1.0 and counters["prefill_tokens"] == 8
    # four cuts of three answer tokens on each of four rows
    assert counters["tokens"] == 36 + 4 * 4 * 3
    # answers take the suffix of two and three tokens, the last of which is not fed: two chunks of 3
    assert counters["row_steps"] == 36 + 2 * (2 * 4) * 6
    assert counters["wasted_share"] == pytest.approx(1 - 84 / 132)


def test_an_answer_that_serves_several_cuts_is_counted_once():
    trunks = dataclasses.replace(Trunks.empty(4, width=5, sampled=3), sampled=np.arange(4))
    source = np.array([[0, 1, 1]]).repeat(4, 0)
    branches = Branches.empty(4, 3, width=4, sampled=2)
    branches = dataclasses.replace(branches, sampled=np.full((4, 3), 2), source=source)
    assert sampled_counters(trunks, branches)["tokens"] == 6 + 4 * 4


def test_the_excess_of_a_trace_is_its_thinking_beyond_its_budget():
    of_rows = lambda *values: np.array(values, np.int32)
    trunks = dataclasses.replace(
        Trunks.empty(4, width=12, sampled=9),
        thinking=of_rows(3, 9, 5, 4),
        budgets=of_rows(4, 6, 5, 9),
    )
    counters = sampled_counters(trunks, Branches.empty(4, 1, width=2, sampled=1))
    # 0, 3, 0 and 0 tokens.
    assert (counters["excess_mean"], counters["thinking_mean"]) == (0.75, 5.25)


@pytest.mark.slow  # test_train.py listens to a whole run
@pytest.mark.parametrize(
    "sizes", [{}, {"slots": 16}, {"slots": 16, "windows": 4}, {"max_parallel_cuts": 2}], ids=str
)
def test_after_precompiling_nothing_is_left_to_compile(world, caplog, sizes):
    # What other tests have compiled would not be compiled here.
    jax.clear_caches()
    prompts = make_prompts([3, 1, 5, 2, 4], 5)
    given = {"rules": make_rules(), "spec": dataclasses.replace(world.tight(chunk=4), **sizes)}
    names = (
        "prefill_prompts insert_rows decode_trunks take_slots open_branches decode_branches"
        " branches_of resize"
    )

    def compiled():
        lines = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return {
            name for name in names.split() for line in lines if f"Compiling jit({name})" in line
        }

    with jax.log_compiles(), caplog.at_level("WARNING"):
        sampler = SamplingSetup(sampling=sampling_params(0.5), phi_of=world.phi_of, **given)
        precompile(world.decode, prompts, 4, sampler, rows=5)
        assert compiled() == set(names.split())
        world.roll(prompts, [12, 3, 7, 0, 5], **given)
        assert compiled() == set()


def test_greedy_equals_transformers(tmp_path):
    """64 tokens of 16 prompts of many lengths, the same weights on both sides."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    from bacr_jax.model import kv_cache
    from bacr_jax.model.hf.reading import load_policy
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
        RolloutRequest(np.full(16, 64), np.zeros((16, 0), int)),
        jax.random.key(0),
        SamplingSetup(
            RolloutSpec(config, None, max_thinking=64, answer_tokens=1, slots=6, refill=0.1),
            rules,
            sampling_params(0.0),
        ),
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


@pytest.mark.slow
def test_rows_of_several_streams_say_what_they_say_apart(world):
    """Three rollouts with keys, temperatures and budgets of their own, in slots that they share."""
    lengths = np.array([3, 1, 5, 2, 4])
    prompts = make_prompts(lengths, 5)
    budgets, temperatures = [4, 12, 7], [0.0, 1.0, 0.7]
    keys = jax.vmap(jax.random.key)(np.arange(3))
    row = np.arange(5, dtype=np.int32)
    apart = [
        world.roll(prompts, np.full(5, budget), key=stream, temperature=temperature, ids=row)
        for stream, (budget, temperature) in enumerate(zip(budgets, temperatures))
    ]
    mixed = np.random.default_rng(0).permutation(15)  # whose row stands where
    streams, own = np.repeat(np.arange(3), 5)[mixed], np.tile(row, 3)[mixed]
    done = []
    several = np.array(budgets)[streams]
    together = world.roll(
        jax.tree.map(lambda x: np.asarray(x)[own], prompts),
        several,
        key=keys,
        spec=world.tight(),
        sampling=sampling_params(temperatures),
        ids=own,
        streams=streams,
        on_rows=lambda *part: done.append(part),
    )
    # Rows are told of once, with what was sampled of them.
    told = np.concatenate([rows for rows, *_ in done])
    assert sorted(told) == list(range(15))
    ended = jax.tree.map(lambda *x: np.concatenate(x), *[part[1:] for part in done])
    whole = jax.tree.map(lambda x: np.asarray(x)[told], (together.trunks, together.branches))
    same = lambda part, name: getattr(part, name)
    for name in ("tokens", "sampled"):
        np.testing.assert_array_equal(same(ended[0], name), same(whole[0], name))
        np.testing.assert_array_equal(same(ended[1], name), same(whole[1], name))
    for stream in range(3):
        mine = np.flatnonzero(streams == stream)
        mine = mine[np.argsort(own[mine])]
        for part in ("trunks", "branches"):
            found = jax.tree.map(lambda x, mine=mine: np.asarray(x)[mine], getattr(together, part))
            # Every token; log-probabilities but for what the caches' lengths round.
            alike = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5)
            jax.tree.map(alike, found, getattr(apart[stream], part))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"streams": None}, "2 random keys were passed, but `streams`, .* is missing"),
        ({"streams": np.array([0, 2])}, "contains indices from 0 to 2; use 0 to 1"),
        ({"sampling": sampling_params([0.0, 1.0, 0.5])}, "3 temperatures for 2 random keys"),
    ],
)
def test_streams_that_do_not_fit_their_keys_are_refused(world, changes, says):
    given = {"streams": np.array([0, 1]), **changes}
    keys = jax.vmap(jax.random.key)(np.arange(2))
    with pytest.raises(UserError, match=says):
        prompts = make_prompts(np.array([2, 3]), 5)
        world.roll(prompts, [3, 3], cuts=no_cuts(2), key=keys, **given)


def test_an_old_style_key_is_refused(world):
    with pytest.raises(UserError, match=r"old-style array of integers; use jax.random.key\(seed\)"):
        prompts = make_prompts(np.array([2, 3]), 5)
        world.roll(prompts, [3, 3], cuts=no_cuts(2), key=jax.random.PRNGKey(0))


@pytest.mark.parametrize("generator", ["rbg", "unsafe_rbg"])
def test_a_key_with_which_a_row_would_depend_on_its_slot_is_refused(world, generator):
    prompts = make_prompts(np.array([2, 3]), 5)
    key = jax.random.key(0, impl=generator)
    for keys in (key, jax.random.split(key, 2)):
        with pytest.raises(UserError, match=f"key of the generator {generator}, .*threefry2x32"):
            world.roll(prompts, [3, 3], cuts=no_cuts(2), key=keys, streams=np.array([0, 0]))
