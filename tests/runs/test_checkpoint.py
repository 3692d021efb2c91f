"""Checkpoints are whole or not there; the newest and the best stay."""

import gc
import hashlib
import json
import shutil
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.errors import UserError
from bacr_jax.runs import checkpoint
from bacr_jax.runs.checkpoint import (
    Checkpoints,
    check_policy,
    policy_digest,
    read_part,
    restore_target,
)
from bacr_jax.runs.digest import DigestMismatch, digests

# Where one array fails, Orbax drops its reads of the others half-way, and Python says so of each
# once it is collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True, scope="module")
def dropped_reads_are_collected():
    """Here, and in no later module."""
    yield
    gc.collect()


def state(step):
    return {
        "params": {"w": jnp.arange(6.0).reshape(2, 3) + step, "b": jnp.float32(step)},
        "key": jax.random.key(step),
        "tokens": 2**40 + step,
    }


def filled(folder, steps, *, keep=10, best=None):
    checkpoints = Checkpoints(folder, keep=keep)
    if best is not None:
        checkpoints.prefer(best)
    for step in steps:
        checkpoints.save(step, state(step), {"step": step})
    checkpoints.close()
    return Checkpoints(folder, keep=keep)


def assert_is(found, step):
    assert found["tokens"] == state(step)["tokens"]
    np.testing.assert_array_equal(found["params"]["w"], state(step)["params"]["w"])
    assert jax.random.key_data(found["key"]).tolist() == [0, step]


def test_what_was_saved_comes_back(tmp_path):
    checkpoints = filled(tmp_path, [1, 2])
    assert (checkpoints.latest, checkpoints.steps) == (2, [1, 2])
    for step in (1, 2):
        at, found, meta = checkpoints.restore(state(0), step)
        assert (at, meta, checkpoints.meta(step)) == (step, {"step": step}, {"step": step})
        assert_is(found, step)


ON_A_DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def addresses(tree):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]


def test_an_update_reuses_the_memory_of_a_state_that_was_just_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_LARGE_STATE", 1 << 20)
    double = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree), donate_argnums=0)
    numbers = np.random.default_rng(0).normal(size=(4, 1 << 20)).astype(np.float32)
    large = jax.device_put({str(i): row for i, row in enumerate(numbers)}, ON_A_DEVICE)
    # Arrays that JAX has computed; arrays of NumPy may be borrowed.
    large = double(large)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, large, {})
    checkpoints.release_large_state()
    before = addresses(large)
    assert addresses(double(large)) == before
    checkpoints.close()
    assert checkpoint.read_part(tmp_path / "1" / "state")["3"].tolist() == (2 * numbers[3]).tolist()


def test_nothing_waits_for_a_small_state(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state(1), {})
    monkeypatch.setattr(checkpoint.time, "sleep", lambda seconds: pytest.fail("waited"))
    checkpoints.release_large_state()
    monkeypatch.undo()
    checkpoints.close()


def test_a_state_is_restored_into_shapes_without_memory_of_their_own(tmp_path):
    placed = {"w": jax.device_put(np.arange(6.0, dtype=np.float32), ON_A_DEVICE), "n": 2**40}
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, placed, {})
    target = restore_target(placed)
    assert isinstance(target["w"], jax.ShapeDtypeStruct)
    _, found, _ = checkpoints.restore(target)
    checkpoints.close()
    assert found["w"].sharding == ON_A_DEVICE and found["w"].tolist() == [0, 1, 2, 3, 4, 5]
    assert found["n"] == 2**40


def test_a_checkpoint_that_its_run_has_dropped_meanwhile_is_not_called_damaged(tmp_path):
    filled(tmp_path, [2, 3]).close()
    with pytest.raises(UserError, match="this checkpoint was deleted.*or pass --step 3"):
        read_part(tmp_path / "1" / "state", "params")


def test_the_best_before_stays_until_the_new_one_has_been_read(tmp_path):
    checkpoints = filled(tmp_path, [1, 4], keep=1, best=1)
    checkpoints.prefer(1)
    assert checkpoints.steps == [1, 4]
    checkpoints.prefer(5)
    checkpoints.save(5, state(5), {"step": 5})
    checkpoints._manager.wait_until_finished()
    assert {1, 5} <= set(checkpoints.steps)
    checkpoints.wait()
    assert checkpoints.steps == [5]
    # What is there and known to be good takes over at once.
    checkpoints.save(6, state(6), {"step": 6})
    checkpoints.wait()
    checkpoints.prefer(6)
    checkpoints.save(7, state(7), {"step": 7})
    checkpoints.wait()
    assert checkpoints.steps == [6, 7]
    checkpoints.close()


@pytest.mark.parametrize("hours", [-1, 1])
def test_the_clock_may_be_set_while_a_checkpoint_is_saved(tmp_path, monkeypatch, hours):
    now = time.time

    def set_while_arrays_are_written():
        waiting = sys._getframe(1).f_code.co_name == "get_remaining_time"
        return now() + 3600 * hours * waiting

    monkeypatch.setattr(time, "time", set_while_arrays_are_written)
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, state(1), {"step": 1})
    checkpoints.close()
    monkeypatch.undo()
    assert_is(Checkpoints(tmp_path, keep=2).restore(state(0))[1], 1)


@pytest.mark.parametrize("name", ["lr=[1e-5]", "a*b", "a?b", "[!a] {é}\\%"])
def test_a_folder_may_have_any_name(tmp_path, name):
    # What a pattern of that name, or the name with a slash, would find.
    for other in ("run1", "aXb", "a/b"):
        filled(tmp_path / other, [9]).close()
    folder = tmp_path / name
    checkpoints = filled(folder, [1])
    at, found, _ = checkpoints.restore(state(0))
    assert (at, sorted(path.name for path in folder.iterdir())) == (1, ["1"])
    assert_is(found, 1)
    np.testing.assert_array_equal(read_part(folder / "1" / "state", "params")["w"][0, 0], 1)
    checkpoints.save(2, {"train": {"policy": state(2)}}, {"step": 2})
    checkpoints.close()
    check_policy(folder / "2" / "state")


def spoiled_once_written(monkeypatch, folder, step):
    """A disk that gives back something else than it was given, of one step."""
    read = checkpoint.read_whole

    def spoil_and_read(state, sizes):
        if state.parent.name == str(step):
            path = max((folder / str(step)).rglob("d/*"), key=lambda path: path.stat().st_size)
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        read(state, sizes)

    monkeypatch.setattr(checkpoint, "read_whole", spoil_and_read)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_save_that_can_not_be_read_is_told_at_once_and_the_one_before_stays(
    tmp_path, monkeypatch, keep
):
    spoiled_once_written(monkeypatch, tmp_path, 3)
    checkpoints = Checkpoints(tmp_path, keep=keep)
    for step in (1, 2, 3):
        checkpoints.save(step, state(step), {"step": step})
    said = rf"{tmp_path}/3 was saved, but can't be read \(.*to continue from step 2"
    with pytest.raises(UserError, match=said):
        while True:
            checkpoints.confirm()
            time.sleep(0.01)
    checkpoints.close()
    shutil.rmtree(tmp_path / "3")
    at, found, _ = Checkpoints(tmp_path, keep=keep).restore(state(0))
    assert at == 2
    assert_is(found, 2)


@pytest.mark.parametrize(("at_once", "reads"), [(1 << 27, 1), (0, 4)])
def test_arrays_are_read_back_together_up_to_a_size(tmp_path, monkeypatch, at_once, reads):
    filled(tmp_path, [3]).close()
    read, parts = checkpoint._read, []
    monkeypatch.setattr(checkpoint, "_READ_AT_ONCE", at_once)
    monkeypatch.setattr(checkpoint, "_read", lambda *given: parts.append(read(*given)))
    checkpoint.read_whole(tmp_path / "3" / "state", jax.tree.map(np.size, state(3)))
    assert len(parts) == reads


def test_every_array_is_read_back(tmp_path):
    filled(tmp_path, [3]).close()
    checkpoint.read_whole(tmp_path / "3" / "state", jax.tree.map(np.size, state(3)))
    path = tmp_path / "3" / "meta" / "metadata"
    record = json.loads(path.read_text())
    for name in record["digests"]:
        wrong = record | {"digests": record["digests"] | {name: "0" * 16}}
        seal = {part: wrong[part] for part in ("meta", "digests", "types")}
        wrong["digest"] = hashlib.sha256(json.dumps(seal, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps(wrong))
        with pytest.raises(DigestMismatch, match=f"^{name} differs from what was saved"):
            checkpoint.read_whole(tmp_path / "3" / "state", jax.tree.map(np.size, state(3)))


@pytest.mark.slow
def test_reading_back_loses_next_to_no_memory(tmp_path):
    many = {f"leaf{i}": jnp.ones(8) for i in range(20)}
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, many, {})
    checkpoints.close()
    read = lambda: checkpoint.read_whole(tmp_path / "1" / "state", jax.tree.map(np.size, many))

    def blocks(reads):
        for _ in range(reads):
            read()
        gc.collect()
        return sys.getallocatedblocks()

    before = blocks(3)
    # The array store never frees the few strings of an array's address that it gives out as JSON;
    # those of all that it knows of an array would be 80.
    assert (blocks(10) - before) / (10 * len(many)) < 15


@pytest.mark.parametrize(
    ("best", "kept"), [(None, [5, 6]), (2, [2, 5, 6]), (6, [5, 6]), (99, [5, 6])]
)
def test_the_newest_and_the_best_stay(tmp_path, best, kept):
    assert filled(tmp_path, range(1, 7), keep=2, best=best).steps == kept


def test_an_unfinished_checkpoint_is_never_listed_and_is_cleared_away(tmp_path):
    # Orbax looks for unfinished ones in the background; a second opening would be at it still.
    first = Checkpoints(tmp_path, keep=2)
    first.save(1, state(1), {})
    first.close()
    unfinished = tmp_path / "2.orbax-checkpoint-tmp"
    (unfinished / "state").mkdir(parents=True)
    again = Checkpoints(tmp_path, keep=2)
    assert again.latest == 1
    again.save(2, state(2), {})
    again.close()
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2"}


def test_any_damage_is_told_in_one_line_or_does_no_harm(tmp_path):
    filled(tmp_path / "whole", [3, 7]).close()
    files = [p for p in (tmp_path / "whole" / "7").rglob("*") if p.is_file()]
    assert len(files) > 5
    told = 0
    for path in files:
        content = path.read_bytes()
        for spoilt in (None, content[: len(content) // 2]):
            path.unlink()
            if spoilt is not None:
                path.write_bytes(spoilt)
            checkpoints = Checkpoints(tmp_path / "whole", keep=2)
            try:
                at, found, meta = checkpoints.restore(state(0))
            except UserError as error:
                told += 1
                assert str(error).isprintable()
                assert f"{tmp_path}/whole/7 is damaged" in str(error)
                assert (
                    "delete this checkpoint, and run the same command again to continue from step 3"
                    in str(error)
                )
            else:
                # A file that nothing is read from; or, where it makes a checkpoint one, the older.
                assert meta == {"step": at}
                assert_is(found, at)
            path.write_bytes(content)
    assert told > len(files) / 2
    assert Checkpoints(tmp_path / "whole", keep=2).latest == 7


def flips(files, count, seed):
    """Files with one bit of one of them flipped; each is whole again before the next."""
    random = np.random.default_rng(seed)
    sizes = np.array([path.stat().st_size for path in files])
    for _ in range(count):
        path = files[random.choice(len(files), p=sizes / sizes.sum())]
        content = path.read_bytes()
        spoilt = bytearray(content)
        spoilt[random.integers(len(content))] ^= 1 << int(random.integers(8))
        path.write_bytes(spoilt)
        yield path
        path.write_bytes(content)


@pytest.mark.parametrize("count", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_told_or_does_no_harm(tmp_path, count):
    filled(tmp_path / "whole", [3, 7]).close()
    folder = tmp_path / "whole" / "7"
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size)
    told = 0
    for _ in flips(files, count, seed=count):
        checkpoints = Checkpoints(tmp_path / "whole", keep=2)
        try:
            at, found, meta = checkpoints.restore(state(0))
        except UserError as error:
            told += 1
            assert f"{folder} is damaged" in str(error)
        else:
            assert meta == {"step": at}
            assert_is(found, at)
        try:
            params = read_part(folder / "state", "params")
        except UserError as error:
            assert f"{folder}/state: the policy can't be read" in str(error)
            assert str(error).endswith("or pass --step 3 to use the previous checkpoint")
        else:
            np.testing.assert_array_equal(params["w"], state(7)["params"]["w"])
    assert told > count / 4


def test_a_changed_number_of_a_leaf_or_beside_it_is_named(tmp_path):
    filled(tmp_path, [3]).close()
    path = tmp_path / "3" / "meta" / "metadata"
    text = path.read_text()
    record = json.loads(text)
    # What was saved had another b.
    record["digests"]["params/b"] = digests(jnp.float32(4))[""]
    content = {name: record[name] for name in ("meta", "digests", "types")}
    seal = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(content | {"digest": seal}))
    with pytest.raises(UserError, match=r"damaged \(params/b differs from what was saved\)"):
        Checkpoints(tmp_path, keep=2).restore(state(0))
    path.write_text(text.replace('"step": 3', '"step": 4'))
    with pytest.raises(UserError, match=r"damaged \(the metadata was changed after it was saved"):
        Checkpoints(tmp_path, keep=2).meta(3)


def test_the_digest_of_a_policy_is_of_its_weights_alone_and_reads_no_array(tmp_path):
    def saved(name, *, policy=(1.0, 2.0), moment=0.0, **meta):
        checkpoints = Checkpoints(tmp_path / name, keep=1)
        weights = {"embed": jnp.float32(policy[0]), "layers": {"q": jnp.float32(policy[1])}}
        train = {"policy": weights, "policy_opt": {"embed": jnp.float32(moment)}}
        checkpoints.save(5, {"train": train}, {"step": 5, **meta})
        checkpoints.close()
        return tmp_path / name / "5" / "state"

    first = saved("first")
    shutil.rmtree(first)
    assert policy_digest(first) == policy_digest(saved("moment", moment=1.0))
    assert policy_digest(first) == policy_digest(saved("meta", config_fingerprint="other"))
    others = [
        saved("other", policy=(1.0, 2.5)),
        saved("swapped", policy=(2.0, 1.0)),
        saved("base", base_fingerprint="a"),
        saved("other base", base_fingerprint="b"),
    ]
    assert len({policy_digest(state) for state in (first, *others)}) == 5
    (first.parent / "meta" / "metadata").write_text("{}")
    with pytest.raises(UserError, match="the policy can't be read, because the checkpoint is dam"):
        policy_digest(first)


@pytest.mark.parametrize(
    "numbers",
    [
        0.5,
        3,
        True,
        np.float32(0.1),
        np.float64(0.1),
        np.int64(7),
        np.arange(3.0),
        jnp.asarray(0.5),
        jnp.zeros(2, jnp.bfloat16),
        jax.random.key(1),
        {"mean": 0.1, "counts": (2, np.bool_(False)), "none": None, "empty": {}},
    ],
    ids=repr,
)
def test_numbers_become_arrays_that_are_restored_as_they_were_saved(tmp_path, numbers):
    start = {"method_state": checkpoint.arrays_of(numbers, "method=own.py")}
    later = jax.jit(lambda tree: tree)(start)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, later, {})
    _, found, _ = checkpoints.restore(restore_target(start))
    checkpoints.close()
    assert jax.tree.structure(found) == jax.tree.structure(start)
    for leaf, restored in zip(jax.tree.leaves(start), jax.tree.leaves(found)):
        # With other types, the resumed run would compile other programs.
        assert jax.typeof(leaf) == jax.typeof(restored)
        assert not jax.typeof(leaf).weak_type
        assert (leaf == restored).all()


@pytest.mark.parametrize(
    ("leaf", "says"),
    [
        ("mean", r"\['a'\]\[1\] is 'mean', which can't be converted to an array; use only"),
        (object(), r"\['a'\]\[1\] is <object object at .*, which can't be converted"),
        (2**40, r"\['a'\]\[1\] is 1099511627776, which can't be converted"),
        (
            np.zeros((0, 2)),
            r"\['a'\]\[1\] is an array of the shape \(0, 2\), which has no elements",
        ),
    ],
)
def test_what_no_checkpoint_can_restore_is_refused(leaf, says):
    with pytest.raises(UserError, match=f"^method=own.py: state{says}"):
        checkpoint.arrays_of({"a": [0.5, leaf]}, "method=own.py")


FULL = """
import resource, sys
from pathlib import Path
import numpy as np
from bacr_jax.config.cli import silence_orbax
from bacr_jax.errors import UserError
from bacr_jax.runs.checkpoint import Checkpoints

silence_orbax()
# Where one array's write fails, those of the others are under way.
normal = np.random.default_rng(0).normal
state = {f"a{i}": normal(size=(20, 1000)).astype(np.float32) for i in range(40)}
checkpoints = Checkpoints(Path(sys.argv[1]), keep=1)
checkpoints.save(1, state, {})
checkpoints.close()
checkpoints = Checkpoints(Path(sys.argv[1]), keep=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # as a full disk: write fails
try:
    checkpoints.save(2, state, {})
    checkpoints.close()
except UserError as error:
    print(error)
"""


def test_a_disk_without_room_is_one_line_and_the_last_checkpoint_stays(tmp_path):
    found = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "c")], capture_output=True, text=True
    )
    assert found.stdout == (
        f"{tmp_path}/c: checkpoints can't be written (File too large); free disk space or change "
        "the permissions, and run the same command again to continue from the last checkpoint\n"
    ), found.stderr
    assert found.stderr == ""
    again = Checkpoints(tmp_path / "c", keep=1)
    assert again.latest == 1
    assert json.dumps(again.meta(1)) == "{}"
