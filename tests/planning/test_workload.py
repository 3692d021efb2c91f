"""What is read from a config without weights."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from bacr_jax.config import io as config_io
from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.methods import load_method
from bacr_jax.model.sizes import PRESETS
from bacr_jax.questions.published_sets import PUBLISHED_SETS
from bacr_jax.runs import setup
from bacr_plan import lengths, schedule
from bacr_plan.workload import SUFFIX_TOKENS, planned_shape, sizes_of
from plan_world import QUICKSTART, ROOT, SEVEN, tiny_config, workload


def shape_of(*overrides, config=SEVEN):
    loaded = config_io.load([config], overrides)
    return planned_shape(loaded.data, loaded.model)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("models/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("somewhere/qwen2.5-14b", "qwen2.5-14b"),
        ("Qwen2.5-1.5B", "qwen2.5-1.5b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "deepseek-r1-distill-qwen-1.5b"),
        ("Qwen3-0.6B", "qwen3-0.6b"),
        ("Llama-3.2-1B-Instruct", "llama-3.2-1b"),
    ],
)
def test_a_released_model_is_known_by_the_name_of_its_folder(path, name):
    shape, source = shape_of(f"model.path={path}")
    assert shape == PRESETS[name]
    assert "because this folder does not exist" in source


def test_a_folder_that_is_here_gives_its_own_shape(tmp_path):
    raw = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    shape, source = shape_of(f"model.path={tmp_path}", "model.preset=qwen2.5-7b")
    assert (shape.hidden_size, shape.vocab_size) == (32, 100)
    assert source.endswith("config.json")


def test_a_preset_wins_over_the_name_of_a_folder_that_is_not_here():
    assert shape_of("model.preset=qwen2.5-14b")[0] == PRESETS["qwen2.5-14b"]


def test_a_name_that_says_nothing_is_refused():
    with pytest.raises(
        UserError, match=r"model.path: the shape of the model .models/mine. is unknown"
    ):
        shape_of("model.path=models/mine")


def test_a_vocabulary_nobody_knows_is_refused():
    with pytest.raises(UserError, match=r"model.tokenizer=x: there is no such folder; use"):
        shape_of("model.path=null", "model.tokenizer=x")


def test_the_procedural_task_brings_its_own_vocabulary():
    from bacr_jax.questions import ledger

    assert shape_of(config=QUICKSTART)[0].vocab_size == len(ledger.ledger_tokenizer())


def test_portions_of_the_papers_run():
    work = workload()
    assert (work.rows, work.update_rows, work.micro_rows, work.slots) == (512, 256, 16, 512)
    # 1024 of prompt, 4096 of thinking, four times 128 of answer behind a suffix.
    assert work.row_tokens == 5120 + 4 * (128 + SUFFIX_TOKENS)


def test_portions_are_never_larger_than_the_whole():
    work = workload("rollout.questions=2", "rollout.slots=1000", "train.micro_batch_rows=100")
    assert (work.rows, work.slots, work.micro_rows) == (16, 16, 8)


@pytest.mark.parametrize("eval_slots", ["null", "4", "64"])
@pytest.mark.parametrize("slots", ["null", "4", "8", "64"])
def test_training_decodes_the_slots_of_the_plan(slots, eval_slots):
    """A rollout has 8 traces. Evaluations may have more, so they use all slots that are written."""
    config = tiny_config(f"rollout.slots={slots}", f"eval.slots={eval_slots}")
    settings = resolve(config)
    policy = setup.make_policy(settings.policy, load_method(settings.method), 27)
    work, _ = sizes_of(config, 1)
    written = 8 if slots == "null" else int(slots)
    evaluated = written if eval_slots == "null" else int(eval_slots)
    assert policy.rollout.slots == work.slots == min(written, 8)
    assert policy.evaluation.slots == work.evaluation.slots == evaluated


def test_slots_that_stay_empty_are_left_out_in_a_multiple_of_the_devices():
    keys = [
        *("rollout.questions=6", "rollout.group_size=2", "rollout.slots=64"),
        *("train.micro_batch_rows=2", "train.minibatches=1"),
        *("mesh.data=1", "mesh.fsdp=2", "mesh.tensor=4", "mesh.decode_tensor=1"),
    ]
    config = config_io.load([SEVEN], keys)
    work, layout = sizes_of(config, 8)
    assert (work.rows, layout.slot_shards, work.slots) == (12, 8, 16)
    assert setup.rollout_slots(config.rollout, layout.slot_shards) == 16
    assert schedule.rollout(work, layout).steps > 0


def test_micro_batches_by_tokens_hold_as_many_rows_as_fit():
    # 90624 = 16 rows of 5664 tokens.
    work = workload("train.micro_batch_rows=null", "train.micro_batch_tokens=90624")
    assert work.by_tokens and work.micro_rows == 16


def test_slots_for_every_device_are_asked_for():
    config = config_io.load([SEVEN], ["rollout.slots=12"])
    with pytest.raises(UserError, match="over 8 devices; set rollout.slots=8"):
        sizes_of(config, 8)


@pytest.mark.parametrize(
    ("overrides", "mean"),
    [
        # The normal one is cut at 256 and 4,096: hardly anything.
        ((), 1500),
        (("budget.prior=fixed",), 4096),
        (("budget.prior=uniform",), (256 + 4096) / 2),
        (("budget.prior=choices", "budget.choices=[512,1024]"), 768),
        (("method=grpo",), 4096),
        (("method=elastic",), 1024),
        (("curriculum.mu0=[500,1000,2000,4000]",), 1875),
    ],
)
def test_thinking_is_expected_to_use_the_budget_up(overrides, mean):
    work = workload(*overrides)
    assert work.lengths.thinking.mean() == pytest.approx(mean, rel=0.05)
    assert work.lengths.thinking.min() >= 256 and work.lengths.thinking.max() <= 4096


@pytest.mark.parametrize(
    ("overrides", "mean"),
    [
        (("budget.min=1000", "budget.max=1000"), 1000),
        (("curriculum.sigma=1e9",), (256 + 4096) / 2),
        (("curriculum.sigma=0", "curriculum.mu0=9000"), 4096),
        (("curriculum.sigma=9", "curriculum.mu0=9000"), 4096),
    ],
)
def test_budgets_of_any_curriculum_are_drawn_at_once(overrides, mean):
    thinking = workload("budget.prior=curriculum", *overrides).lengths.thinking
    assert thinking.mean() == pytest.approx(mean, rel=0.05)


def test_equal_settings_have_equal_lengths_and_a_group_shares_its_prompt():
    one = planned_lengths()
    other = planned_lengths()
    np.testing.assert_array_equal(one.thinking, other.thinking)
    by_question = one.prompts.reshape(64, 8)
    assert (by_question == by_question[:, :1]).all() and len(set(by_question[:, 0])) > 10


def planned_lengths(*overrides):
    config = config_io.load([SEVEN], overrides)
    settings = resolve(config)
    prompts = lengths.prompt_lengths(settings.task, config.model)
    return lengths.rows_of(settings.method, prompts, cuts=4)


def test_without_the_data_prompts_are_as_long_as_those_of_math():
    rows = planned_lengths()
    assert "MATH's training problems (mean 119)" in rows.source
    # Counted over all 7,498 problems; 64 of them here, in groups of 8.
    assert np.trapezoid(lengths.MATH.tokens, lengths.MATH.shares) == pytest.approx(118.2, rel=0.03)
    assert rows.prompts.mean() == pytest.approx(118.2, rel=0.2)
    assert planned_lengths("data.max_prompt_tokens=100").prompts.max() <= 100


def test_data_that_is_here_says_its_own_lengths():
    config = config_io.load([QUICKSTART])
    rows = lengths.prompt_lengths(resolve(config).task, config.model)
    assert rows.source.startswith("ledger")
    assert 0 < rows.tokens[-1] <= config.data.max_prompt_tokens


# Tokens of the longer suffix of each format, as the comment at `SUFFIX_TOKENS` has them.
SUFFIXES = {"think_answer": 7, "budget_solution": 7, "boxed": 8, "native": 12}


@pytest.mark.parametrize("name", SUFFIXES)
def test_the_suffix_has_room_for_the_real_one_except_natives(name):
    from tokenizers import Tokenizer

    from bacr_jax.prompts.formats import FORMATS

    assert SUFFIXES.keys() == {style.name for style in FORMATS.values() if style.chat}
    root = Path(os.environ.get("BACR_SHARED_DATA", ROOT.parent / "shared" / "data"))
    file = root / "qwen_tokenizer" / "tokenizer.json"
    if not file.is_file():
        pytest.skip(f"needs a Qwen2.5 tokenizer: {file} is not there (set BACR_SHARED_DATA)")
    tokenizer, style = Tokenizer.from_file(str(file)), FORMATS[name]
    suffixes = (style.forced_suffix, style.natural_suffix)
    tokens = [len(tokenizer.encode(text, add_special_tokens=False).ids) for text in suffixes]
    assert max(tokens) == SUFFIXES[name]
    assert (max(tokens) <= SUFFIX_TOKENS) == (name != "native")


@pytest.mark.parametrize(
    ("key", "value"),
    [("refill", 1.0), ("windows", 9), ("chunk", 8), ("slots", 64)],
)
def test_a_rollout_is_scheduled_by_the_runs_own_settings(key, value):
    def planned(*overrides):
        work, layout = sizes_of(config_io.load([SEVEN], overrides), 8)
        return getattr(schedule.rollout_spec(work, layout), key)

    assert planned() != value
    assert planned(f"rollout.{key}={str(value).lower()}") == value


def test_traces_that_the_decoding_mesh_cannot_divide_are_refused_early():
    """Without rollout.slots, each of the 12 traces has a slot, on 8 devices of one shard each."""
    keys = [
        *("rollout.questions=6", "rollout.group_size=2", "rollout.slots=null"),
        *("train.micro_batch_rows=2", "train.minibatches=1"),
        *("mesh.data=1", "mesh.fsdp=2", "mesh.tensor=4", "mesh.decode_tensor=1"),
    ]
    config = config_io.load([SEVEN], keys)
    with pytest.raises(UserError, match="rollout.slots=12: .* over 8 devices; set rollout.slots=8"):
        sizes_of(config, 8)
    work, layout = sizes_of(config_io.override(config, ["rollout.slots=8"]), 8)
    assert work.slots % layout.slot_shards == 0


@pytest.mark.parametrize(
    ("name", "problems"),
    [
        *(("gsm8k", 1319), ("math", 5000), ("math500", 500), ("aime24", 30), ("minerva_math", 272)),
        # A set that is not public.
        ("jsonl", 500),
    ],
)
def test_an_evaluation_has_the_problems_of_its_public_set(name, problems):
    keys = ("eval.size=null", "eval.samples=0", "eval.budgets=[512]", "eval.every=null")
    work = workload(f"data.eval=[{name}:mine.jsonl]", *keys)
    assert work.evaluated == (((problems, 512),),)
    assert {*PUBLISHED_SETS} == {"gsm8k", "math", "math500", "aime24", "minerva_math"}
