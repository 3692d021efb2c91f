"""What the config loader accepts, and the one line it answers everything else with."""

import dataclasses
import importlib
import math
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from bacr_jax import train
from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.checks import BOUNDS, PRESETS, problems
from bacr_jax.errors import UserError
from bacr_jax.methods import registry


def changed(**sections):
    """The default config with some sections changed."""
    config = Config()
    for name, keys in sections.items():
        old = getattr(config, name)
        new = dataclasses.replace(old, **keys) if isinstance(keys, dict) else keys
        config = dataclasses.replace(config, **{name: new})
    return config


def write(folder, text, name="run.yaml"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


class TestLoading:
    def test_no_file_and_no_override_give_the_defaults(self):
        assert config_io.load([]) == Config()

    @pytest.mark.parametrize(
        "text", ["", "# nothing yet\n", "null\n", "---\n", "\ufeff", "model:\n"]
    )
    def test_a_file_that_sets_nothing_gives_the_defaults(self, tmp_path, text):
        assert config_io.load([write(tmp_path, text)]) == Config()

    def test_later_files_and_then_overrides_win_key_by_key(self, tmp_path):
        first = write(tmp_path, "budget: {min: 8, max: 64}\nseed: 1\n", "first.yaml")
        second = write(tmp_path, "budget: {max: 32}\nseed: 2\n", "second.yaml")
        config = config_io.load([first, second], ["seed=3", "cuts.count=2", "seed=4"])
        assert (config.budget.min, config.budget.max) == (8, 32)
        assert (config.seed, config.cuts.count) == (4, 2)

    def test_whole_numbers_and_1e_6_are_floats_and_lists_are_tuples(self, tmp_path):
        text = "optimizer: {learning_rate: 1e-6, grad_clip: 2}\neval: {budgets: [1, 2]}\n"
        config = config_io.load([write(tmp_path, text)], ["curriculum.mu0=[1, 2.5, 3e2, 4]"])
        assert config.optimizer.learning_rate == 1e-6
        assert config.optimizer.grad_clip == 2.0
        assert type(config.optimizer.grad_clip) is float
        assert config.eval.budgets == (1, 2)
        assert config.curriculum.mu0 == (1.0, 2.5, 300.0, 4.0)

    def test_a_section_can_be_given_as_a_mapping_or_by_dotted_keys(self, tmp_path):
        nested = config_io.load([write(tmp_path, "data: {ledger: {max_operand: 2}}")])
        dotted = config_io.load([write(tmp_path, "data.ledger.max_operand: 2")])
        override = config_io.load([], ["data.ledger={max_operand: 2}"])
        assert nested == dotted == override
        assert nested.data.ledger.max_operand == 2

    def test_null_stands_where_a_key_may_be_null(self):
        config = config_io.load([], ["curriculum.update_every=null", "eval.every=", "eval.size=~"])
        assert config.curriculum.update_every is config.eval.every is config.eval.size is None

    def test_a_number_on_the_command_line_can_be_text_since_shells_eat_quotes(self):
        assert config_io.load([], ["output.dir=2024"]).output.dir == "2024"

    def test_a_value_may_hold_an_equals_sign(self):
        assert config_io.load([], ["output.dir=runs/lr=1"]).output.dir == "runs/lr=1"

    def test_shipped_configs_pass(self):
        files = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))
        assert files
        for path in files:
            config_io.check(config_io.load([path]))

    def test_nothing_of_jax_is_imported_before_a_config_is_checked(self):
        code = (
            "import sys; from bacr_jax.config import io as config_io; "
            "config_io.check(config_io.load([], ['seed=1'])); config_io.help_text(); "
            "sys.exit(any(m.split('.')[0] in ('jax', 'flax', 'numpy') for m in sys.modules))"
        )
        assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# Content of a file, and pieces of the line that refuses it.
BAD_FILES = [
    ("sed: 1", "line 1: sed: no such key; write seed"),
    ("seed: 1\nbudget:\n  mix: 3", "line 3: budget.mix: no such key; write budget.min"),
    ("learning_rate: 1", "learning_rate: no such key; write warmup.learning_rate"),
    ("optimiser: {b1: 0.5}", "optimiser: no such key; write optimizer"),
    ("zzz: 1", "zzz: no such key; write one of seed, method"),
    ("seed: {x: 1}", "seed: found a mapping; write a whole number"),
    ("seed: one", "line 1: seed: found 'one'; write a whole number"),
    ("seed: true", "seed: found true; write a whole number"),
    ("seed: 1.5", "seed: found 1.5; write a whole number"),
    ("seed: 2.0", "seed: found 2.0; write 2"),
    ("seed:", "seed: found nothing; write a whole number"),
    ("seed: null", "seed: found null; write a whole number"),
    ("seed: [1]", "seed: found [1]; write a whole number"),
    ("budget: {max: 1e3}", "budget.max: found '1e3'; write 1000"),
    ("budget: 64", "budget: found 64, but it is a section; write one of budget.min, budget.max"),
    ("budget: [8, 64]", "budget: found [8, 64], but it is a section"),
    ("curriculum: {alpha: high}", "curriculum.alpha: found 'high'; write a number"),
    ("curriculum: {alpha: true}", "curriculum.alpha: found true; write a number"),
    ("curriculum: {clip_mu: 1}", "curriculum.clip_mu: found 1; write true or false"),
    ("curriculum: {clip_mu: 'no'}", "curriculum.clip_mu: found 'no'; write true or false"),
    ("curriculum: {mu0: [a]}", "curriculum.mu0: found ['a']; write a number or a list of numbers"),
    (
        "model: {compute_dtype: bf16}",
        "found 'bf16'; write bfloat16 (possible: float32 or bfloat16)",
    ),
    ("model: {compute_dtype: 16}", "model.compute_dtype: found 16; write float32 or bfloat16"),
    ("model: {path: None}", "model.path: found 'None'; write null"),
    ("model: {path: 7}", "model.path: found 7; write text or null, in quotes"),
    ("output: {dir: 2026-01-01}", "output.dir: found 2026-01-01; write text, in quotes"),
    ('output: {dir: "a\\0b"}', "output.dir: found 'a\\x00b'; write text without NUL"),
    ('output: {dir: "\\ud800"}', "output.dir: found '\\ud800'; write text without NUL"),
    ("eval: {budgets: 8}", "eval.budgets: found 8; write a list of whole numbers, here [8]"),
    ("eval: {budgets: '8, 16'}", "write a list of whole numbers, here [8, 16]"),
    ("eval: {budgets: [8, x]}", "eval.budgets: found [8, 'x']; write a list of whole numbers"),
    ("cuts: {weights: final}", "found 'final'; write final_heavy (possible: uniform, "),
    ("seed: 1\nseed: 2", "line 2: seed: already given in line 1; write it once"),
    ("budget: {min: 1}\nbudget.min: 2", "line 2: budget.min: already given in line 1"),
    ("budget: {min: 1}\nbudget: {max: 2}", "line 2: budget: already given in line 1"),
    ("- seed", "line 1: found ['seed'], not keys; write lines such as `seed: 0`"),
    ("seed = 1", "line 1: found 'seed = 1', not keys"),
    ("42", "found 42, not keys"),
    ("seed: [", "not valid YAML"),
    ("seed: 1\n\tmethod: bacr", "line 2: not valid YAML"),
    ("seed: 1\n--- \nseed: 2", "not valid YAML"),
    ("seed: *nowhere", "line 1: not valid YAML (found undefined alias 'nowhere')"),
    ("seed: !!python/object:os.system {}", "seed: not a YAML value"),
    ("seed: !!int x", "line 1: seed: not a YAML value"),
    ("seed: " + "9" * 5000, "seed: not a YAML value"),
    ("seed: 0x" + "f" * 9000, "seed: found 0xfff"),
    ("eval: {budgets: [0x" + "f" * 9000 + ", x]}", "found [a number of 36000 bits, 'x']"),
    ("output: {dir: 2026-13-45}", "output.dir: not a YAML value"),
    ("eval: {budgets: &a [*a]}", "eval.budgets: not a YAML value"),
    ("budget: &a {budget: *a}", "budget.budget: not a YAML value"),
    ("? [a]\n: 1", "found a list or mapping as a key; write a name"),
    ("'': 1", "line 1: found an empty key; write a name"),
    ("[" * 5000, "not valid YAML (nested too deeply)"),
    ('seed: "\\U99999999"', "not valid YAML"),
    (b"\xff\xfe", "line 1: byte 0xff is not UTF-8; write the file as UTF-8 text"),
    (b"seed: 1\nmethod: \xe9", "line 2: byte 0xe9 is not UTF-8"),
    ("seed: \x01", "line 1: not valid YAML (special characters are not allowed)"),
    ("#" * 1_000_001, "is larger than 1,000,000 bytes; write a YAML config"),
]

BAD_OVERRIDES = [
    ("seed", "command line: found 'seed'; write key=value, such as seed=1"),
    ("=1", "command line: found '=1'; write key=value"),
    ("", "command line: found ''; write key=value"),
    ("seed=", "command line: seed: found nothing; write a whole number"),
    ("seed=x", "command line: seed: found 'x'; write a whole number"),
    ("seed.x=1", "command line: seed.x: no such key; write seed"),
    ("bugdet.max=1", "command line: bugdet.max: no such key; write budget.max"),
    ("learning_rat=1", "learning_rat: no such key; write"),
    ("budget=", "command line: budget: found nothing, but it is a section"),
    ("budget={mx: 3}", "command line: budget.mx: no such key; write budget.max"),
    ("budget={max: 3, max: 4}", "command line: budget.max: already given"),
    (
        "eval.budgets=8,16",
        "eval.budgets: found '8,16'; write a list of whole numbers, here [8, 16]",
    ),
    ("data.eval=ledger", "data.eval: found 'ledger'; write a list of texts, here [ledger]"),
    ("seed=[", "command line: seed: not valid YAML (expected the node content"),
    ("seed=1\nmethod: 2", "command line: seed: not valid YAML"),
    ("a\nb=1", "command line: a\\nb: no such key"),
]


def refused(excinfo):
    line = str(excinfo.value)
    assert line.isprintable(), line
    return line


class TestBadInput:
    @pytest.mark.parametrize(("text", "fragment"), BAD_FILES, ids=[t[:30] for t, _ in BAD_FILES])
    def test_a_bad_file_is_refused_in_one_line_that_names_it(self, tmp_path, text, fragment):
        path = write(tmp_path, text)
        with pytest.raises(UserError) as excinfo:
            config_io.load([path])
        line = refused(excinfo)
        assert line.startswith(str(path))
        assert fragment in line
        assert len(line) < len(str(path)) + 400

    @pytest.mark.parametrize(("override", "fragment"), BAD_OVERRIDES)
    def test_a_bad_override_is_refused_in_one_line(self, override, fragment):
        with pytest.raises(UserError) as excinfo:
            config_io.load([], [override])
        line = refused(excinfo)
        assert line.startswith("command line: ")
        assert fragment in line

    def test_files_that_can_not_be_read_are_refused(self, tmp_path):
        write(tmp_path, "", "quickstart.yaml")
        cases = {
            tmp_path / "quikstart.yaml": f"no such file; write {tmp_path / 'quickstart.yaml'}",
            tmp_path / "no" / "such": "no such file; write the path of a YAML file",
            tmp_path: "can't be read (Is a directory)",
            tmp_path / "quickstart.yaml" / "x": "can't be read (Not a directory)",
            "a\0b": "can't be read (embedded null",
            "x" * 1000: "can't be read (File name too long)",
        }
        for path, fragment in cases.items():
            with pytest.raises(UserError) as excinfo:
                config_io.load([path])
            assert fragment in refused(excinfo)

    def test_the_line_names_the_file_that_is_wrong_not_the_last_one(self, tmp_path):
        bad = write(tmp_path, "seed: x", "bad.yaml")
        good = write(tmp_path, "seed: 1", "good.yaml")
        with pytest.raises(UserError, match=r"bad\.yaml, line 1: seed"):
            config_io.load([bad, good], ["seed=2"])


# Changed sections, and pieces of the line that refuses them.
MATH = {"train": "math:data/train.jsonl", "eval": ("math:data/test.jsonl",)}
BAD_CONFIGS = [
    ({"seed": -1}, "seed: found -1; write in [0, 4294967295]"),
    ({"seed": 2**32}, "seed: found 4294967296; write in [0, 4294967295]"),
    ({"method": "bcar"}, "method: found 'bcar', neither a method here nor an importable module"),
    ({"method": "bcar"}, "write bacr, or the path of a Python file"),
    ({"method": "my.own..method"}, "method: found 'my.own..method'"),
    ({"method": ".bacr"}, "method: found '.bacr'"),
    ({"output": {"dir": " "}}, "output.dir: found blank text; write a name"),
    ({"output": {"log_every": 0}}, "output.log_every: found 0; write 1 or more"),
    ({"model": {"preset": "qwen2-7b"}}, "model.preset: found 'qwen2-7b'; write qwen2.5-7b"),
    (
        {"model": {"num_heads": 4, "num_kv_heads": 3}},
        "num_kv_heads=3: must divide model.num_heads=4",
    ),
    ({"model": {"hidden_size": 65, "head_dim": 32}}, "model.hidden_size=65: must be even"),
    ({"model": {"hidden_size": 64, "num_heads": 3}}, "is not a multiple of model.num_heads=3"),
    ({"model": {"head_dim": 7}}, "model.head_dim=7: must be even"),
    ({"model": {"hidden_size": 6}}, "model.hidden_size/model.num_heads=3: must be even"),
    (
        {"model": {"attention": "cudnn", "compute_dtype": "float32"}},
        "model.attention=cudnn: needs 16-bit numbers, found model.compute_dtype=float32",
    ),
    ({"mesh": {"tensor": 2}}, "mesh.tensor=2: must divide model.num_kv_heads=1; write 1"),
    (
        {"train": {"micro_batch_rows": 8, "micro_batch_tokens": 64}},
        "train.micro_batch_tokens=64: train.micro_batch_rows=8 splits the update too; write null",
    ),
    (
        {"train": {"drop_zero_advantage": True, "micro_batch_tokens": 64}},
        "train.drop_zero_advantage: would change the loss, since loss.entropy_coef=0.01",
    ),
    (
        {"train": {"drop_zero_advantage": True}, "loss": {"entropy_coef": 0.0}},
        "write train.micro_batch_tokens, or false",
    ),
    ({"mesh": {"fsdp": 0}}, "mesh.fsdp: found 0; write a number of shards, or -1"),
    ({"mesh": {"data": -1}}, "mesh.data: found -1; write 1 or more"),
    ({"data": {"train": "gsm8k"}}, "data.train: found 'gsm8k'; write ledger, or NAME:PATH"),
    ({"data": {"train": ":x"}}, "data.train: found ':x'"),
    ({"data": {"train": "ledger:x"}}, "data.train: found 'ledger:x'; write ledger"),
    ({"data": {"eval": ()}}, "data.eval: found an empty list; write at least one set"),
    ({"data": {"eval": ("ledger", "ledger")}}, "data.eval: holds 'ledger' twice"),
    ({"data": {"eval": ("math:x",)}}, "data.eval: holds 'math:x', but data.train is 'ledger'"),
    ({"data": MATH}, "model.path: is null, but data.train=math:data/train.jsonl needs a tokenizer"),
    ({"model": {"path": "qwen"}}, "model.path: data.train=ledger has its own small model"),
    (
        {"data": {"num_groups": 6}},
        "data.num_groups=6: data.groups=level makes groups from 5 levels",
    ),
    ({"data": {"groups": "solve_rate"}}, "data.groups=solve_rate: the ledger has levels"),
    (
        {"data": {**MATH, "groups": "solve_rate"}, "model": {"path": "qwen"}},
        "data.labels: is null, but data.groups=solve_rate",
    ),
    ({"data": {"labels": "rates.jsonl"}}, "data.labels=rates.jsonl: is not read"),
    ({"data": {"prompt_format": "boxed"}}, "data.prompt_format=boxed: the ledger has its own"),
    ({"data": {"max_prompt_tokens": 0}}, "data.max_prompt_tokens: found 0; write 1 or more"),
    (
        {"data": MATH, "model": {"path": "qwen"}, "warmup": {"steps": 5}},
        "warmup.steps=5: only data.train=ledger has a supervised warm-up",
    ),
    ({"warmup": {"dir": "x"}}, "warmup.dir=x: is not read, since warmup.steps=0"),
    ({"warmup": {"batch_tokens": 79}}, "warmup.batch_tokens: found 79; write 80 or more"),
    ({"warmup": {"target_accuracy": 95.0}}, "warmup.target_accuracy: found 95; write in [0, 1]"),
    ({"budget": {"min": 0}}, "budget.min: found 0; write 1 or more"),
    ({"budget": {"min": 300, "max": 200}}, "budget.min=300: is above budget.max=200"),
    ({"budget": {"prior": "choices"}}, "found an empty list, and budget.prior=choices draws"),
    (
        {"budget": {"prior": "choices", "choices": (512, 5000)}},
        "budget.choices: 5000 is not between budget.min=256 and budget.max=4096; write [512], or",
    ),
    (
        {"budget": {"prior": "choices", "choices": (1024, 512, 512)}},
        "budget.choices: found [1024, 512, 512]; write every budget once, in rising order: "
        "[512, 1024]",
    ),
    (
        {"budget": {"min": 3}},
        "cuts.count=4: a trace of budget.min=3 tokens has fewer distinct cuts",
    ),
    ({"cuts": {"count": 0}}, "cuts.count: found 0; write in [1, 64]"),
    ({"cuts": {"weights": (0.5, 0.5)}}, "cuts.weights: found 2 weights for cuts.count=4"),
    ({"cuts": {"weights": (0.5, 0.5, 0.5, 0.5)}}, "cuts.weights: found weights that sum to 2"),
    ({"cuts": {"weights": (1.0, -0.5, 0.5, 0.0)}}, "cuts.weights: found -0.5; write in [0, 1]"),
    ({"curriculum": {"mu0": (1.0, 2.0)}}, "curriculum.mu0: found 2 values for data.num_groups=4"),
    ({"curriculum": {"mu0": 0.0}}, "curriculum.mu0: found 0; write more than 0"),
    ({"curriculum": {"alpha": 1.1}}, "curriculum.alpha: found 1.1; write in [0, 1]"),
    ({"curriculum": {"beta": -0.1}}, "curriculum.beta: found -0.1; write in [0, 1]"),
    ({"curriculum": {"sigma": math.nan}}, "curriculum.sigma: found nan; write more than 0"),
    ({"curriculum": {"sigma": math.inf}}, "curriculum.sigma: found inf; write more than 0"),
    ({"curriculum": {"update_every": 0}}, "curriculum.update_every: found 0; write 1 or more"),
    ({"curriculum": {"ema_decay": 1.0}}, "curriculum.ema_decay: found 1; write in [0, 1)"),
    ({"reward": {"coefficient": -0.3}}, "reward.coefficient: found -0.3; write 0 or more"),
    ({"loss": {"clip_low": 1.0}}, "loss.clip_low: found 1; write in (0, 1)"),
    ({"optimizer": {"learning_rate": -1e-6}}, "optimizer.learning_rate: found -1e-06; write 0 or"),
    ({"optimizer": {"b2": 1.0}}, "optimizer.b2: found 1; write in [0, 1)"),
    ({"optimizer": {"grad_clip": 0.0}}, "grad_clip: found 0; write more than 0 (.inf: no limit)"),
    ({"rollout": {"temperature": 0.0}}, "rollout.temperature: found 0; write more than 0"),
    ({"rollout": {"group_size": 0}}, "rollout.group_size: found 0; write 1 or more"),
    (
        {"rollout": {"group_size": 1}, "advantage": {"baseline": "residual_loo"}},
        "rollout.group_size=1: advantage.baseline=residual_loo compares the rollouts of a question",
    ),
    (
        {"rollout": {"group_size": 1}, "method": "grpo"},
        "rollout.group_size=1: method=grpo compares the rollouts of a question; write 2 or more",
    ),
    (
        {"rollout": {"questions": 10}, "train": {"minibatches": 4}},
        "train.minibatches=4: must divide rollout.questions=10; write 2",
    ),
    (
        {"train": {"micro_batch_rows": 24}},
        "train.micro_batch_rows=24: must divide the 256 rows of an update",
    ),
    ({"train": {"steps": 0}}, "train.steps: found 0; write 1 or more"),
    ({"train": {"epochs": 0.0}}, "train.epochs: found 0; write more than 0"),
    ({"eval": {"budgets": ()}}, "eval.budgets: found an empty list; write budgets such as [4096]"),
    ({"eval": {"budgets": (8, -1)}}, "eval.budgets: found -1; write 1 or more"),
    ({"eval": {"budgets": (64, 8, 8)}}, "every budget once, in rising order: [8, 64]"),
    ({"eval": {"top_p": 0.0}}, "eval.top_p: found 0; write in (0, 1]"),
    ({"eval": {"samples": -1}}, "eval.samples: found -1; write 0 or more"),
    ({"checkpoint": {"keep": 0}}, "checkpoint.keep: found 0; write 1 or more"),
    (
        {"model": {"preset": "qwen2.5-7b"}, "budget": {"max": 32768}},
        "a row has 33920 tokens, and qwen2.5-7b was made for 32768",
    ),
]


class TestChecks:
    @pytest.mark.parametrize(("sections", "fragment"), BAD_CONFIGS)
    def test_a_value_that_makes_no_sense_is_refused_in_one_line(self, sections, fragment):
        with pytest.raises(UserError) as excinfo:
            config_io.check(changed(**sections), also=registry.problems)
        assert fragment in refused(excinfo)

    def test_the_defaults_pass(self):
        assert list(problems(Config(), also=registry.problems)) == []

    @pytest.mark.parametrize(
        "sections",
        [
            {"curriculum": {"mu0": (1.0, 2.0, 3.0, 4.0), "alpha": 0.0, "beta": 1.0}},
            {"cuts": {"weights": (0.1, 0.2, 0.3, 0.4)}},
            {"optimizer": {"grad_clip": math.inf, "learning_rate": 0.0}},
            {"budget": {"min": 4, "max": 4}},
            {"rollout": {"group_size": 1}},
            {"rollout": {"questions": 4, "group_size": 2}, "train": {"micro_batch_rows": 32}},
            {"method": "json.tool"},
            {"model": {"path": "qwen"}, "data": MATH, "mesh": {"tensor": 4}},
            {"model": {"preset": "qwen2.5-7b", "tokenizer": "qwen"}, "data": MATH},
            {"model": {"head_dim": 8, "hidden_size": 62}},
        ],
    )
    def test_an_unusual_but_possible_config_passes(self, sections):
        assert list(problems(changed(**sections), also=registry.problems)) == []

    def test_several_problems_are_counted(self):
        with pytest.raises(UserError, match=r"seed: found -1.*\(1 more to fix\)"):
            config_io.check(changed(seed=-1, train={"steps": 0}))

    def test_every_number_of_the_config_has_a_legal_range_and_no_range_is_left_over(self):
        numbers = {
            name
            for name, key in config_io.schema().items()
            if {int, float} & set(flat_types(key.hint))
        }
        assert numbers == set(BOUNDS)

    def test_presets_and_methods_are_those_of_their_rooms(self):
        from bacr_jax.model import sizes

        assert set(PRESETS) == set(sizes.PRESETS)
        assert {"bacr", "grpo", "dapo", "anytime"} < set(registry.built_in_methods())
        for name in registry.built_in_methods():
            module = importlib.import_module(f"bacr_jax.methods.{name}")
            assert callable(module.make)

    @given(st.data())
    @settings(max_examples=200, deadline=None)
    def test_any_typed_config_is_accepted_or_refused_never_a_crash(self, data):
        names = [name for name, key in config_io.schema().items() if not key.is_section]
        chosen = data.draw(st.lists(st.sampled_from(names), max_size=6, unique=True))
        config = Config()
        for name in chosen:
            config = with_value(config, name, data.draw(of_type(config_io.schema()[name].hint)))
        for line in problems(config, also=registry.problems):
            assert line
        try:
            config_io.check(config)
        except UserError as error:
            assert str(error).isprintable()


def flat_types(hint):
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return []
    return [t for member in inner for t in flat_types(member)] if inner else [hint]


def of_type(hint):
    """Values of an annotation, extreme ones included."""
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return st.lists(of_type(typing.get_args(hint)[0]), max_size=5).map(tuple)
    if typing.get_args(hint):
        return st.one_of([of_type(member) for member in typing.get_args(hint)])
    return {
        int: st.one_of(st.integers(-2, 70), st.integers(-(2**63) + 1, 2**63 - 1)),
        float: st.one_of(st.floats(), st.floats(-1, 2)),
        bool: st.booleans(),
        str: st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=9),
        type(None): st.none(),
    }[hint]


def with_value(config, name, value):
    first, _, rest = name.partition(".")
    new = with_value(getattr(config, first), rest, value) if rest else value
    return dataclasses.replace(config, **{first: new})


class TestWriting:
    @given(st.data())
    @settings(max_examples=40, deadline=None)
    def test_a_written_config_reads_back_exactly(self, tmp_path_factory, data):
        config = Config()
        for name, key in config_io.schema().items():
            if not key.is_section and data.draw(st.booleans()):
                value = data.draw(of_type(key.hint).filter(lambda v: "nan" not in repr(v)))
                # Words for null are no values of keys that can be null.
                assume(value not in ("None", "none", "nil"))
                config = with_value(config, name, value)
        path = tmp_path_factory.mktemp("written") / "config.yaml"
        path.write_text(config_io.to_yaml(config))
        assert config_io.load([path]) == config

    def test_yaml_is_written_section_by_section_with_lists_on_one_line(self):
        text = config_io.to_yaml(Config())
        assert text.startswith(
            "seed: 0\nmethod: bacr\nreproducible: false\noutput:\n  dir: runs/default\n"
        )
        assert "  budgets: [512, 1024, 2048, 4096]\n" in text
        assert yaml.safe_load(text)["optimizer"]["learning_rate"] == 1e-6

    def test_flat_values_cover_every_key_once(self):
        flat = config_io.flatten(changed(budget={"max": 7}))
        assert flat["budget.max"] == 7
        assert set(flat) == {n for n, key in config_io.schema().items() if not key.is_section}


class TestFingerprint:
    def test_changes_with_the_named_sections_only(self):
        base, other = Config(), changed(seed=1)
        assert config_io.fingerprint(base, "model") == config_io.fingerprint(other, "model")
        assert config_io.fingerprint(base, "seed") != config_io.fingerprint(other, "seed")
        assert config_io.fingerprint(base) != config_io.fingerprint(other)

    def test_a_section_is_not_its_namesake(self):
        # "eval" must not take in "evaluation..." and "data" takes in "data.ledger".
        ledger = dataclasses.replace(Config().data.ledger, max_operand=2)
        inner = changed(data={"ledger": ledger})
        for section in ("data", "data.ledger", "data.ledger.max_operand"):
            same = config_io.fingerprint(Config(), section) == config_io.fingerprint(inner, section)
            assert not same

    def test_is_equal_in_another_process(self):
        code = "from bacr_jax.config import Config, io; print(io.fingerprint(Config()))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.strip() == config_io.fingerprint(Config())

    def test_an_unknown_section_is_a_mistake_of_the_caller(self):
        with pytest.raises(KeyError):
            config_io.fingerprint(Config(), "modle")


class TestHelp:
    def test_every_key_is_listed_with_default_meaning_and_range(self):
        text = config_io.help_text(100)
        lines = text.splitlines()
        assert max(map(len, lines)) <= 100
        words = " ".join(text.split())
        for name, key in config_io.schema().items():
            start = f"{name}: " if key.is_section else f"  {name} "
            assert sum(line.startswith(start) for line in lines) == 1, name
            assert " ".join(key.meaning.split()) in words
        assert "curriculum.alpha 0.6 how much a high pass rate" in words
        assert "(a number, in [0, 1])" in words

    def test_a_wide_terminal_gets_longer_lines(self):
        assert len(config_io.help_text(160).splitlines()) < len(
            config_io.help_text(80).splitlines()
        )


class TestCommand:
    @pytest.mark.parametrize("override", ["sed=1", "seed=-1", "cuts.count=9", "eval.budgets=8"])
    def test_bad_input_is_one_line_and_exit_code_2(self, tmp_path, capsys, override):
        path = write(tmp_path, "budget: {min: 8, max: 64}\n")
        out = f"output.dir={tmp_path / 'out'}"
        assert train.main(["--config", str(path), out, override]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1
        assert not (tmp_path / "out").exists()


def accepted_or_refused(paths, overrides=()):
    try:
        config = config_io.load(paths, overrides)
        config_io.check(config)
    except UserError as error:
        assert str(error).isprintable()
        assert str(error)


YAML_LIKE = st.text("seedbgtmaxin01.:-_{}[]&*!|>'\"\\#%@?, \n\t~<=", max_size=60)


class TestFuzz:
    @given(st.one_of(st.binary(max_size=200), YAML_LIKE.map(str.encode)))
    @example(b"!!timestamp x")
    @example(b"seed: !!bool x")
    @example(b"seed: !!float ''")
    @example(b"seed: !!binary x")
    @example(b"budget: !!set {a, b}")
    @example(b"%YAML 99999999999999999999.1\n---\nseed: 1")
    @example(b"%TAG ! tag:%ff\n---\nseed: !a 1")
    @example(b"<<: {seed: 1}")
    @example(b"=: 1")
    @example(b"eval: {budgets: !!omap [a: 1]}")
    @settings(
        max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    def test_any_bytes_are_a_config_or_one_line(self, tmp_path, content):
        accepted_or_refused([write(tmp_path, content)])

    @given(st.text(max_size=40), YAML_LIKE)
    @settings(max_examples=200, deadline=None)
    def test_any_override_is_a_config_or_one_line(self, text, value):
        accepted_or_refused([], [text])
        accepted_or_refused([], [f"eval.budgets={value}"])
        accepted_or_refused([], [f"{value}=1"])

    @given(st.data())
    @settings(
        max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    def test_known_keys_with_any_value_are_a_config_or_one_line(self, tmp_path, data):
        names = list(config_io.schema())
        scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text())
        values = st.recursive(
            scalars,
            lambda inner: st.one_of(
                st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
            ),
        )
        chosen = data.draw(st.dictionaries(st.sampled_from(names), values, max_size=4))
        accepted_or_refused([write(tmp_path, yaml.safe_dump(chosen))])
