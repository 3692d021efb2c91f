"""What is static about a rollout, which programs rollouts share, and rows that are refused."""

import dataclasses
import inspect
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.errors import UserError
from bacr_jax.rollout import RolloutRequest, SamplingSetup, sampling_params
from bacr_jax.rollout.rows import _check_shapes
from bacr_jax.types import NO_BUDGET
from rollout_world import VOCAB, make_prompts, make_rules, no_cuts

# Without the runtime type checks that tests run with, whose annotations would refuse first.
unchecked = inspect.unwrap


def test_rollouts_of_other_sizes_share_the_programs_of_a_step(world):
    one, other = world.spec(), world.spec(64, answers=3, chunk=7, max_thinking=99)
    assert one.decode == other.decode and hash(one.decode) == hash(other.decode)
    assert one.decode != world.spec(conditioning=None).decode
    assert type(one.decode) is not type(one)


def test_the_longest_caches_hold_every_row_and_the_others_are_its_parts(world):
    assert world.spec(windows=4, max_thinking=11).cache_lengths(5) == [4, 8, 12, 16]
    assert world.spec(windows=3, max_thinking=11).cache_lengths(5) == [6, 11, 16]
    assert world.spec(windows=1).cache_lengths(5) == [17]


def test_slots_that_do_not_divide_over_devices_are_refused(world):
    mesh = jax.sharding.AbstractMesh((2, 4, 1), ("data", "fsdp", "tensor"))
    assert world.spec(16, mesh=mesh).batch_sizes() == [8, 16]
    with pytest.raises(UserError, match="rollout.slots=12: .* 8 devices; set rollout.slots=16"):
        world.spec(12, mesh=mesh).batch_sizes()


IDS = np.array([70, 71, 72])


def roll(world, *, prompts=None, budgets=(4, 5, 6), cuts=None, **changes):
    return world.roll(
        make_prompts([2, 3, 1], 5) if prompts is None else prompts,
        budgets,
        cuts=no_cuts(3) if cuts is None else np.array(cuts),
        ids=IDS,
        **changes,
    )


def with_lengths(*lengths):
    return dataclasses.replace(make_prompts([2, 3, 1], 5), lengths=np.array(lengths))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"budgets": [4, -2, 6]}, "trace 71: the budget -2 is out of range; use 0 to 12"),
        ({"budgets": [4, 5, 13]}, "trace 72: the budget 13 is out of range; use 0 to 12"),
        ({"prompts": make_prompts([2, 3], 5)}, "2 prompts, 2 lengths, 3 budgets"),
        ({"prompts": with_lengths(0, 3, 1)}, "trace 70: the prompt is empty"),
        (
            {"prompts": with_lengths(2, 3, 9)},
            "trace 72: the prompt has 9 tokens, but the array of prompts has only 5 columns",
        ),
        (
            {"cuts": [[1], [1], [-1]]},
            r"trace 72: a cut \(truncation point\) is at -1 tokens; use 0 or more",
        ),
        (
            {"limits": np.array([4, 13, 6])},
            "trace 71: the limit of thinking tokens, 13, is out of range; use 0 to 12",
        ),
        (
            {"limits": np.array([4, -3, 6])},
            "trace 71: the limit of thinking tokens, -3, is out of range; use 0 to 12",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_naming_the_row(world, changes, line):
    with pytest.raises(UserError, match=line) as refusal:
        roll(world, **changes)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"cuts": [1, 2, 3]}, r"cuts has the shape \(3,\); pass an array with .* \[trace, cut\]"),
        ({"cuts": 4}, r"cuts has the shape \(\); "),
        ({"limits": [[4], [5], [6]]}, r"limits has the shape \(3, 1\); .* the axes \[trace\]"),
        ({"streams": 0}, r"streams has the shape \(\); "),
    ],
)
def test_an_array_with_another_number_of_axes_is_refused(world, changes, line):
    ones = np.ones(3, int)
    request = RolloutRequest(ones, no_cuts(3)).complete(world.spec())
    rows = SimpleNamespace(**{**vars(request), **changes})
    setup = SamplingSetup(world.spec(), make_rules(), sampling_params(1.0))
    with pytest.raises(UserError, match=f"^rollout: {line}"):
        unchecked(_check_shapes)(make_prompts([2, 3, 1], 5), rows, setup)


def test_a_rollout_without_rows_is_refused(world):
    with pytest.raises(UserError, match="no prompts; pass at least one"):
        world.roll(make_prompts([], 5), np.zeros(0, int), cuts=no_cuts(0))


def test_several_answers_at_a_cut_are_not_taken_in_parts(world):
    spec = world.spec(answers=2, max_parallel_cuts=1)
    with pytest.raises(
        UserError, match="max_parallel_cuts=1 can't be used with 2 answers at each cut; set"
    ):
        roll(world, spec=spec, cuts=[[1, 2]] * 3)


def test_an_embedding_that_nothing_takes_in_is_refused(world):
    for changes in (
        {"params": dataclasses.replace(world.decode, gates=None)},
        {"spec": world.spec(conditioning=None)},
    ):
        with pytest.raises(UserError, match="is set, but the decode parameters contain no gates"):
            roll(world, **changes)


def test_a_cut_beyond_all_numbers_is_the_end_of_the_trace(world):
    far = [[2**31 - 1], [2**31], [2**40]]
    found = roll(world, cuts=np.array(far), spec=world.spec(grace=2)).branches.context
    np.testing.assert_array_equal(
        found, roll(world, cuts=[[9]] * 3, spec=world.spec(grace=2)).branches.context
    )
    assert (found > 0).all()


def test_a_token_beyond_the_vocabulary_is_refused(world):
    prompts = make_prompts([2, 3, 1], 5)
    prompts.tokens[1, 2] = VOCAB
    with pytest.raises(
        UserError,
        match=f"trace 71: the prompt contains the token id {VOCAB}, but the vocabulary .* has "
        f"{VOCAB}",
    ):
        roll(world, prompts=prompts)


def test_rules_of_another_vocabulary_are_refused(world):
    rules = dataclasses.replace(make_rules(), allowed_tokens=jnp.ones(VOCAB + 1, bool))
    with pytest.raises(
        UserError,
        match=f"rules have {VOCAB + 1} token ids, but the embedding of the model has {VOCAB}",
    ):
        roll(world, rules=rules)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_stop_the_rollout_naming_a_row(world, bad):
    broken = dataclasses.replace(world.decode, final_norm=world.decode.final_norm * bad)
    with pytest.raises(
        UserError, match=r"logits of trace 7\d were not finite .* thinking .* \(3 such"
    ):
        roll(world, params=broken)


def test_only_the_row_with_broken_logits_is_blamed(world):
    # NaN in the embedding of one token poisons the prompts that hold it, and tied logits of that id
    head = world.decode.embed
    poisoned = dataclasses.replace(world.decode, embed=head.at[7].set(jnp.nan), head=head)
    prompts = make_prompts([2, 3, 1], 5)
    prompts.tokens[:] = 6
    prompts.tokens[1, 0] = 7
    rules = make_rules(allowed_tokens=np.arange(VOCAB) == 6)
    with pytest.raises(UserError, match=r"logits of trace 71 were not finite .* \(1 such traces\)"):
        roll(world, params=poisoned, prompts=prompts, rules=rules, budgets=(4, NO_BUDGET, 4))
