"""Values and combinations that make no sense: one line each."""

import math
import re
import typing
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings

from bacr_jax.config import Config
from bacr_jax.config.budget_checks import PRESETS
from bacr_jax.config.checks import check, check_ranges, problems
from bacr_jax.config.fields import inside, range_text
from bacr_jax.config.values import FrozenMap, written
from bacr_jax.errors import UserError
from config_world import KEYS, changed, values_by_key, with_value

# Changed sections, and pieces of the line that refuses them.
MATH = {"train": "math:data/train.jsonl", "eval": ("math:data/test.jsonl",)}
BAD_CONFIGS = [
    ({"seed": -1}, "seed: found -1; it must be in [0, 4294967295]"),
    *(
        ({"data": {"prompt_date": date}}, f"data.prompt_date: found '{date}'; use a date such as")
        for date in ("today", "28 Nov 2026", "20261128", "2026-02-30")
    ),
    (
        {"conditioning": {"prompt_text": "Be brief."}},
        "conditioning.prompt_text: found 'Be brief.'; use a sentence that contains {budget} once",
    ),
    (
        {"conditioning": {"prompt_text": "{budget} of {budget}"}},
        "use a sentence that contains {budget} once",
    ),
    (
        {"conditioning": {"prompt_text": "At most {budget}!"}},
        "conditioning.prompt_text has no effect, because this data set has special tokens",
    ),
    ({"output": {"dir": " "}}, "output.dir: the text is blank; use a name"),
    ({"model": {"preset": "qwen2-7b"}}, "model.preset: found 'qwen2-7b'; use qwen2.5-7b"),
    (
        {"model": {"num_heads": 4, "num_kv_heads": 3}},
        "num_kv_heads=3 does not divide model.num_heads=4",
    ),
    ({"model": {"hidden_size": 65, "head_dim": 32}}, "model.hidden_size=65 is odd"),
    ({"model": {"hidden_size": 64, "num_heads": 3}}, "is not a multiple of model.num_heads=3"),
    ({"model": {"head_dim": 7}}, "model.head_dim=7 is odd"),
    ({"model": {"hidden_size": 6}}, "model.hidden_size/model.num_heads=3 is odd"),
    (
        {"model": {"attention": "cudnn", "compute_dtype": "float32"}},
        "model.attention=cudnn supports only 16-bit floating-point numbers, but "
        "model.compute_dtype is float32",
    ),
    (
        {"model": {"product_dtype": "bfloat16", "compute_dtype": "bfloat16"}},
        "model.product_dtype=bfloat16 needs a model that computes in float32, but model.compute",
    ),
    ({"mesh": {"tensor": 2}}, "mesh.tensor=2 does not divide model.num_kv_heads=1; set it to 1"),
    (
        {"train": {"padding_free": True}},
        "train.padding_free=true needs micro-batches that are limited by their number",
    ),
    (
        {"train": {"micro_batch_rows": 8, "micro_batch_tokens": 9000}},
        "train.micro_batch_tokens=9000 and train.micro_batch_rows=8 both set the size",
    ),
    (
        # A prompt of one token at least, 64 of thinking, and an answer of 7.
        {
            "budget": {"max": 64, "min": 8},
            "curriculum": {"mu0": 32.0},
            "eval": {"budgets": (64,)},
            "rollout": {"answer_tokens": 7},
            "train": {"micro_batch_tokens": 71},
        },
        "train.micro_batch_tokens=71: with budget.max=64 and rollout.answer_tokens=7, a single "
        "trace may "
        "have 72 tokens or more",
    ),
    (
        {"loss": {"ratio": "sequence"}, "advantage": {"credit": "trajectory"}},
        "loss.aggregate=constant: with loss.ratio=sequence",
    ),
    (
        {
            "loss": {
                "ratio": "sequence",
                "aggregate": "seq_mean_token_mean",
                "importance_cap": 2.0,
            }
        },
        "loss.importance_cap=2 limits a weight per token, but loss.ratio=sequence",
    ),
    (
        {"budget": {"min": 300, "max": 1000, "stages": (1.0, 0.25)}},
        "budget.stages=[1, 0.25]: 0.25 of budget.max=1000 is 250 tokens, which is below "
        "budget.min=300; use fractions of at least 0.3",
    ),
    (
        {"distill": {"teacher": "folder"}},
        "distill.teacher=folder has no effect with distill.coef=0",
    ),
    (
        {"loss": {"sequence_cap": 3.0, "importance_cap": 2.0}},
        "loss.sequence_cap=3 and loss.importance_cap=2 would both weight a token",
    ),
    (
        {"loss": {"sequence_cap": 3.0, "dual_clip": 10.0, "old_logprobs": "sampler"}},
        "loss.sequence_cap=3: with loss.old_logprobs=sampler",
    ),
    (
        {"loss": {"old_logprobs": "sampler"}},
        "loss.old_logprobs=sampler: the log-probabilities of sampler and learner differ",
    ),
    (
        {"optimizer": {"single_rate": True}},
        "value.inner_steps=4: these steps train only the value head",
    ),
    ({"mesh": {"fsdp": 0}}, "mesh.fsdp: found 0; set it to a number of shards, or to -1"),
    ({"data": {"train": "gsm8k"}}, "data.train: found 'gsm8k'; use ledger, or NAME:PATH"),
    ({"data": {"train": ":x"}}, "data.train: found ':x'"),
    (
        {"data": {"train": "ledger:x"}},
        "data.train: found 'ledger:x', but the problems of the ledger",
    ),
    (
        {"data": {**MATH, "question_column": "q"}, "model": {"path": "qwen"}},
        "data.question_column=q has no effect, because no set is a table (jsonl, json, csv",
    ),
    (
        {"data": {"trace_column": ("a", "b")}},
        "data.trace_column=[a, b] has no effect, because no set is a table",
    ),
    (
        {"data": {"train": ("1" + "0" * 400 + "*gym:gcd",)}},
        "use one or more sets with weights above 0",
    ),
    (
        {"rollout": {"engine": "vllm", "urls": ("http://a:1", "foo")}},
        "rollout.urls: 'foo' is not the address of a server; use addresses such as http://HOST:PORT",
    ),
    (
        {"rollout": {"temperature": 1e-320}},
        "rollout.temperature: found 9.99989e-321; it must be 0.001",
    ),
    ({"data": {"eval": ()}}, "data.eval: the list is empty; use at least one set"),
    ({"data": {"eval": ("ledger", "ledger")}}, "data.eval contains 'ledger' twice"),
    ({"data": {"eval": ("math:x",)}}, "data.eval contains 'math:x', but data.train is ledger"),
    ({"data": MATH}, "model.path is null, but data.train=math:data/train.jsonl needs a tokenizer"),
    ({"model": {"path": "qwen"}}, "model.path: data.train=ledger has its own small model"),
    (
        {"data": {"num_groups": 6}},
        "data.num_groups=6: data.groups=level makes groups from 5 levels",
    ),
    ({"data": {"groups": "solve_rate"}}, "data.groups=solve_rate: the ledger has levels"),
    (
        {"data": {**MATH, "groups": "solve_rate"}, "model": {"path": "qwen"}},
        "data.labels is null, but data.groups=solve_rate",
    ),
    ({"data": {"labels": "rates.jsonl"}}, "data.labels=rates.jsonl has no effect"),
    ({"grader": "mine.py"}, "grader: expected FILE.py:function, such as"),
    (
        {"reward": {"weights": {"mine.py:brief": 1.0}}},
        "reward.weights={mine.py:brief: 1} lacks the reward `correct`, from which accuracy and "
        "pass rates are computed; use {correct: 1, FILE.py:function: 0.2}",
    ),
    (
        {"reward": {"weights": {"correct": 1.0, "mine.py": 0.2}}},
        "reward.weights: expected FILE.py:function, such as examples/verify_unit_tests.py:grade, "
        "or correct, but found 'mine.py'",
    ),
    (
        {"reward": {"weights": {"correct": 1.0, "a.py:f": 0.0}}},
        "reward.weights: found 0; it must be more",
    ),
    (
        {"reward": {"weights": {"correct": 1.0, "a.py:f": 0.2, "b.py:f": 0.2}}},
        "reward.weights: two rewards have the name 'f', so their metrics would have the same "
        "name; use",
    ),
    (
        {"reward": {"normalize_each": True}},
        "reward.normalize_each=true needs several rewards, but",
    ),
    (
        {"data": {"answers": "verbatim"}},
        "data.answers=verbatim keeps reference answers as text, but the built-in",
    ),
    ({"data": {"prompt_format": "boxed"}}, "data.prompt_format=boxed: the ledger task has its own"),
    (
        {"data": MATH, "model": {"path": "qwen"}, "warmup": {"steps": 5}},
        "warmup.learning_rate=0.003, warmup.hold_accuracy=0.85, warmup.target_accuracy=0.95 are "
        "defaults for a small model made from scratch, not for model.path=qwen; set "
        "warmup.learning_rate=1e-5 warmup.hold_accuracy=0 warmup.target_accuracy=0, or other "
        "values that suit",
    ),
    (
        {"eval": {"select": "leger"}},
        "eval.select: 'leger' is the name of none of the sets in data.eval, but must be the name "
        "of one; use train_holdout or ledger",
    ),
    (
        {
            "eval": {"select": "math"},
            "data": {**MATH, "eval": ("math:a", "math:b")},
            "model": {"path": "qwen"},
        },
        "eval.select: 'math' is the name of several of the sets in data.eval, but must be the "
        "name of one; use train_holdout or math:a "
        "or math:b",
    ),
    (
        {"eval": {"holdout": 0, "every": 5}},
        "eval.holdout=0 holds out no questions, but eval.select=train_holdout selects",
    ),
    ({"warmup": {"dir": "x"}}, "warmup.dir=x has no effect with warmup.steps=0"),
    ({"budget": {"min": 300, "max": 200}}, "budget.min=300 is above budget.max=200"),
    (
        {"budget": {"prior": "choices", "max": 32, "min": 16}, "eval": {"budgets": [8, 64]}},
        "budget.choices: the list is empty, which means the eval.budgets between",
    ),
    (
        {"budget": {"prior": "choices", "choices": (512, 5000)}},
        "budget.choices: 5000 is not between budget.min=256 and budget.max=4096; use [512], or",
    ),
    (
        {"budget": {"prior": "choices", "choices": (1024, 512, 512)}},
        "budget.choices: found [1024, 512, 512]; list every budget once, in increasing order: "
        "[512, 1024]",
    ),
    (
        {"budget": {"min": 3}},
        "cuts.count=4: a trace of budget.min=3 tokens can't have that many distinct",
    ),
    ({"cuts": {"weights": (0.5, 0.5)}}, "cuts.weights has 2 weights, but cuts.count=4"),
    ({"cuts": {"weights": (0.5, 0.5, 0.5, 0.5)}}, "cuts.weights: the weights sum to 2"),
    ({"curriculum": {"mu0": (1.0, 2.0)}}, "curriculum.mu0 has 2 values, but data.num_groups=4"),
    ({"warmup": {"style": "steps"}}, "warmup.style=steps: the accuracy of a single style"),
    (
        {"warmup": {"style_accuracy": (0.9, 0.5)}},
        "warmup.style_accuracy=[0.9, 0.5] is not an interval; use [low, high]",
    ),
    (
        {"rollout": {"questions": 10}, "train": {"minibatches": 4}},
        "train.minibatches=4 does not divide rollout.questions=10; set it to 2",
    ),
    (
        {"train": {"micro_batch_rows": 24}},
        "train.micro_batch_rows=24 does not divide the 256 traces of an update",
    ),
    ({"eval": {"budgets": ()}}, "eval.budgets: the list is empty; use budgets such as [4096]"),
    ({"eval": {"budgets": (8, -1)}}, "eval.budgets: found -1; it must be 0 or more"),
    ({"eval": {"budgets": (0,), "cut_every": 4}}, "eval.cut_every=4: there is no multiple below"),
    (
        {"eval": {"budgets": (8, 64), "cut_every": 64}},
        "the largest budget 64; use a smaller number",
    ),
    (
        {"eval": {"budgets": (300,), "cut_every": 1}},
        "results in 300 truncation points below 300 tokens; set it to 2 or more",
    ),
    ({"eval": {"budgets": (64, 8, 8)}}, "every budget once, in increasing order: [8, 64]"),
    (
        {"model": {"preset": "qwen2.5-7b"}, "budget": {"max": 32768}},
        "a prompt with its response may have 33920 tokens, but qwen2.5-7b supports at most 32768",
    ),
]


@pytest.mark.parametrize(("sections", "fragment"), BAD_CONFIGS)
def test_a_value_that_makes_no_sense_is_refused_in_one_line(sections, fragment):
    with pytest.raises(UserError) as excinfo:
        check(changed(**sections))
    line = str(excinfo.value)
    assert fragment in line and line.isprintable()


@pytest.mark.parametrize("name", [name for name, key in KEYS.items() if key.bounds])
def test_a_number_outside_its_interval_is_refused_and_one_inside_is_not(name):
    key = KEYS[name]
    low, high = map(float, key.bounds[1:-1].split(","))
    wrap = {tuple: lambda x: (x,), Mapping: lambda x: FrozenMap(level=x)}.get(
        typing.get_origin(key.hint), lambda x: x
    )
    outside = 0
    for number in (low - 1, low, low + 1, high, high + 1, math.nan, math.inf):
        if "float" not in str(key.hint):
            if not math.isfinite(number):
                continue
            number = int(number)
        refusal = f"{name}: found {written(number)}; it must be {range_text(key.bounds)}"
        refused = refusal in problems(with_value(Config(), name, wrap(number)))
        assert refused != inside(number, key.bounds), number
        outside += refused
    assert outside


def test_the_defaults_pass():
    assert list(problems(Config())) == []


@pytest.mark.parametrize(
    "sections",
    [
        {"curriculum": {"mu0": (1.0, 2.0, 3.0, 4.0), "alpha": 0.0, "beta": 1.0}},
        {"cuts": {"weights": (0.1, 0.2, 0.3, 0.4)}},
        {"optimizer": {"grad_clip": math.inf, "learning_rate": 0.0}},
        {"budget": {"min": 4, "max": 4}},
        {"rollout": {"questions": 4, "group_size": 2}, "train": {"micro_batch_rows": 32}},
        {"model": {"path": "qwen"}, "data": MATH, "mesh": {"tensor": 4}},
        {"model": {"preset": "qwen2.5-7b", "tokenizer": "qwen"}, "data": MATH},
        {"model": {"head_dim": 8, "hidden_size": 62}},
        {"loss": {"old_logprobs": "sampler", "dual_clip": 10.0}},
    ],
)
def test_an_unusual_but_possible_config_passes(sections):
    assert list(problems(changed(**sections))) == []


def test_several_problems_are_counted():
    with pytest.raises(UserError, match=r"seed: found -1.*\(1 more to fix\)"):
        check(changed(seed=-1, train={"steps": -1}))


def test_problems_of_a_method_count_too():
    blank = changed(output={"dir": " "})
    with pytest.raises(UserError, match=r"output.dir: the text is blank.*\(2 more to fix\)"):
        check(blank, also=lambda config: iter([config.method, "another"]))
    with pytest.raises(UserError, match="^bacr$"):
        check(Config(), also=lambda config: iter([config.method]))


def test_nobody_is_asked_about_combinations_of_numbers_out_of_range():
    def never(config):
        raise AssertionError

    found = list(problems(changed(seed=-1, budget={"min": 300, "max": 200}), never))
    assert found == ["seed: found -1; it must be in [0, 4294967295]"]


def test_ranges_can_be_checked_alone():
    check_ranges(changed(budget={"min": 300, "max": 200}))
    with pytest.raises(UserError, match="seed: found -1"):
        check_ranges(changed(seed=-1))
    with pytest.raises(UserError, match="budget.levels: 'none' is not a valid name of a budget"):
        check_ranges(changed(budget={"levels": FrozenMap(none=4)}))


def test_corrections_that_a_message_recommends_have_the_values_of_the_docs():
    docs = Path(__file__).parents[2] / "docs"
    values = {}
    for page in ("vllm-training.md", "reproducibility.md"):
        for name, value in re.findall(r"\b(loss\.\w+)=([\d.]+\b)", (docs / page).read_text()):
            values.setdefault(name, set()).add(value)
    servers = {"engine": "vllm", "urls": ("http://one:1",), "async_steps": 1}
    (message,) = problems(changed(rollout=servers))
    recommended = dict(re.findall(r"(loss\.\w+)=([\d.]+\b)", message))
    assert set(recommended) == {"loss.importance_cap", "loss.sequence_mask"}
    for name, value in recommended.items():
        assert values[name] == {value}


def test_presets_are_those_of_the_models_room():
    from bacr_jax.model import sizes

    assert {name: shape.max_positions for name, shape in sizes.PRESETS.items()} == PRESETS


@given(values_by_key())
@settings(max_examples=50)
def test_any_typed_config_is_accepted_or_refused_never_a_crash(values):
    config = Config()
    for name, value in values.items():
        config = with_value(config, name, value)
    try:
        check(config)
    except UserError as error:
        assert str(error).isprintable()
