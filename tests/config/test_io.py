"""What the config loader accepts, and the one line it answers everything else with."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.values import FrozenMap
from bacr_jax.errors import UserError
from bacr_jax.methods.registry import problems as method_problems
from config_world import KEYS, changed, values_by_key, with_value, write


class TestLoading:
    def test_no_file_and_no_override_give_the_defaults(self):
        assert config_io.load([]) == Config()

    def test_later_files_and_then_overrides_win_key_by_key(self, tmp_path):
        first = write(tmp_path, "budget: {min: 8, max: 64}\nseed: 1\n", "first.yaml")
        second = write(tmp_path, "budget: {max: 32}\nseed: 2\n", "second.yaml")
        config = config_io.load([first, second], ["seed=3", "cuts.count=2", "seed=4"])
        assert (config.budget.min, config.budget.max) == (8, 32)
        assert (config.seed, config.cuts.count) == (4, 2)

    @pytest.mark.parametrize(
        "key",
        [
            *("model.path", "model.tokenizer", "adapter.path", "data.dir", "warmup.dir"),
            *("output.dir", "rollout.weights_dir", "distill.teacher"),
        ],
    )
    def test_folders_and_files_may_begin_with_the_home_folder(self, tmp_path, monkeypatch, key):
        monkeypatch.setenv("HOME", str(tmp_path))
        write(tmp_path, f"{key}: ~/from-file\n", "home.yaml")
        config = config_io.load(["~/home.yaml"])
        assert config_io.flatten(config)[key] == str(tmp_path / "from-file")
        config = config_io.load([], [f"{key}=~/x"])
        assert config_io.flatten(config)[key] == str(tmp_path / "x")
        with pytest.raises(
            UserError, match=f"{key}=~nobody-here/x: the home folder of this user does not exist"
        ):
            config_io.load([], [f"{key}=~nobody-here/x"])

    def test_a_config_in_the_home_folder_of_nobody_is_refused(self):
        with pytest.raises(
            UserError, match="^~nobody-here/c.yaml: the home folder of this user does not exist"
        ):
            config_io.load(["~nobody-here/c.yaml"])

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

    @pytest.mark.parametrize(
        ("override", "advice"),
        [
            ("dapo.overlong_filter=true", "there is no such key; use loss.overlong_filter"),
            (
                "conditioning.enabled=true",
                "there is no such key; use one of conditioning.budget_input, ",
            ),
            ("adapter.decode=merged", "there is no such key; use one of adapter.rank, "),
            ("rollout.transfer=folder", "there is no such key; use one of rollout.questions, "),
            ("rollout.windos=true", "there is no such key; use rollout.windows"),
            ("model.remat=true", "found true; use full, selective or none"),
        ],
    )
    def test_an_unknown_key_is_refused_with_those_to_write(self, override, advice):
        with pytest.raises(UserError, match=f"^command line: {override.split('=')[0]}: {advice}"):
            config_io.load([], [override])

    def test_shipped_configs_pass(self):
        folder = Path(__file__).parents[2] / "configs"
        # A study is no config of a run; tests/study reads those.
        files = [path for path in folder.rglob("*.yaml") if path.parent.name != "studies"]
        assert len(files) > 10
        for path in files:
            config_io.check(config_io.load([path]), also=method_problems)


# Content of a file, and pieces of the line that refuses it; test_values.py has more values.
BAD_FILES = [
    ("sed: 1", "line 1: sed: there is no such key; use seed"),
    ("seed: 1\nbudget:\n  mix: 3", "line 3: budget.mix: there is no such key; use budget.min"),
    ("learning_rate: 1", "learning_rate: there is no such key; use warmup.learning_rate"),
    ("optimiser: {b1: 0.5}", "optimiser: there is no such key; use optimizer"),
    ("zzz: 1", "zzz: there is no such key; use one of seed, method"),
    ("seed: {x: 1}", "seed: found a mapping; use a whole number"),
    ("seed: one", "use a whole number"),
    ("seed: 2.0", "seed: found 2.0; use 2"),
    ("seed:", "seed: found nothing; use a whole number"),
    ("budget: {max: 1e3}", "budget.max: found '1e3'; use 1000"),
    (
        "budget: 64",
        "budget: found 64, but this is a section and not a key; use eval.budgets for the budgets",
    ),
    (
        "curriculum: 64",
        "curriculum: found 64, but this is a section and not a key; use one of curriculum.",
    ),
    # A section is only suggested for a mapping, because a value of it is refused next.
    ("curiculum: 64", "use a key of the section curriculum (bacr keys curriculum lists them)"),
    ("curiculum: {clip_mu: true}", "curiculum: there is no such key; use curriculum"),
    ("curriculum: {alpha: high}", "curriculum.alpha: found 'high'; use a number"),
    ("curriculum: {clip_mu: 1}", "curriculum.clip_mu: found 1; use true or false"),
    ("curriculum: {mu0: [a]}", "curriculum.mu0: found ['a']; use a number or a list of numbers"),
    (
        "model: {compute_dtype: bf16}",
        "found 'bf16'; use bfloat16 (possible: float32 or bfloat16)",
    ),
    ("model: {path: None}", "model.path: found 'None'; use null"),
    ("output: {dir: 2026-01-01}", "output.dir: found 2026-01-01; use text, in quotes"),
    ('output: {dir: "\\ud800"}', "output.dir: found '\\ud800'; use text without NUL"),
    ("eval: {budgets: 8}", "eval.budgets: found 8; use a list of whole numbers, here [8]"),
    ("eval: {budgets: [8, x]}", "eval.budgets: found [8, 'x']; use a list of whole numbers"),
    ("adapter: {targets: [zz]}", "adapter.targets: found ['zz']; use a list of q, k, v, o, "),
    ("cuts: {weights: final}", "found 'final'; use final_heavy (possible: uniform, "),
    ("seed: 0x" + "f" * 9000, "seed: found 0xfff"),
    ("eval: {budgets: [0x" + "f" * 9000 + ", x]}", "found [a number of 36000 bits, 'x']"),
]

BAD_OVERRIDES = [
    ("seed=", "command line: seed: found nothing; use a whole number"),
    ("seed.x=1", "command line: seed.x: there is no such key; use seed"),
    ("bugdet.mxa=1", "command line: bugdet.mxa: there is no such key; use budget.max"),
    ("bugdet.max=1", "command line: bugdet.max: there is no such key; use budget.max"),
    ("learning_rat=1", "learning_rat: there is no such key; use"),
    ("budget=", "command line: budget: found nothing, but this is a section"),
    ("budget={mx: 3}", "command line: budget.mx: there is no such key; use budget.max"),
    (
        "eval.budgets=8,16",
        "eval.budgets: found '8,16'; use a list of whole numbers, here [8, 16]",
    ),
    ("data.eval=ledger", "data.eval: found 'ledger'; use a list of texts, here [ledger]"),
    ("a\nb=1", "command line: a\\nb: there is no such key"),
    (
        "reward.weights={correct: 1, correct: 2}",
        "reward.weights: found 'correct' twice; keep only one of them",
    ),
    ("budget.levels={low: 2, high: 2.5}", "use a whole number"),
    ("budget.levels={1: 2}", "budget.levels: found the name 1; use text, in quotes"),
    ("eval.samples={ledger: x}", "use a whole number"),
    ("data.template_variables={day: 2024-07-26}", "variables.day: found 2024-07-26; use"),
    (
        "data.system_prompt=",
        "the value is empty; use null, or \"data.system_prompt=''\" for an empty",
    ),
]


def refused(paths, overrides=()):
    with pytest.raises(UserError) as excinfo:
        config_io.load(paths, overrides)
    line = str(excinfo.value)
    assert line.isprintable(), line
    return line


class TestBadInput:
    @pytest.mark.parametrize(("text", "fragment"), BAD_FILES, ids=[t[:30] for t, _ in BAD_FILES])
    def test_a_bad_file_is_refused_in_one_line_that_names_it(self, tmp_path, text, fragment):
        path = write(tmp_path, text)
        line = refused([path])
        assert line.startswith(str(path)) and fragment in line
        assert len(line) < len(str(path)) + 400

    @pytest.mark.parametrize(("override", "fragment"), BAD_OVERRIDES)
    def test_a_bad_override_is_refused_in_one_line(self, override, fragment):
        line = refused([], [override])
        assert line.startswith("command line: ") and fragment in line

    def test_the_line_names_the_file_that_is_wrong_not_the_last_one(self, tmp_path):
        bad = write(tmp_path, "seed: x", "bad.yaml")
        good = write(tmp_path, "seed: 1", "good.yaml")
        assert refused([bad, good], ["seed=2"]).startswith(f"{bad}, line 1: seed")

    @given(st.data())
    @settings(max_examples=25)
    def test_known_keys_with_any_value_are_a_config_or_one_line(self, tmp_path_factory, data):
        scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text())
        values = st.recursive(
            scalars,
            lambda inner: st.one_of(
                st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
            ),
        )
        names = st.sampled_from(list(config_io.schema()))
        chosen = data.draw(st.dictionaries(names, values, max_size=4))
        path = write(tmp_path_factory.getbasetemp(), yaml.safe_dump(chosen))
        try:
            config_io.check(config_io.load([path]))
        except UserError as error:
            assert str(error) and str(error).isprintable()


# Texts that YAML 1.1, YAML 1.2 or both read as another type.
LIKE_OTHER_TYPES = (
    *("0o17", "0x1F", "017", "1_000", "1:30", "+1", "-0", "0b11"),
    *("1.5e3", "1.e5", ".5", "-.5E-3", "1.0e+3", ".inf", "-.INF", ".nan"),
    *("null", "~", "Null", "true", "False", "yes", "off", "2026-01-01", "=", "<<", "", " "),
)


class TestWriting:
    # Words for null are no values of keys that can be null.
    @given(values_by_key(lambda v: "nan" not in repr(v) and v not in ("None", "none", "nil")))
    @settings(max_examples=15)
    def test_a_written_config_reads_back_exactly(self, tmp_path_factory, values):
        config = Config()
        for name, value in values.items():
            config = with_value(config, name, value)
        path = write(tmp_path_factory.getbasetemp(), config_io.to_yaml(config))
        assert config_io.load([path]) == config

    @given(st.text("0123456789.eExoabfinty+-_:~=<", max_size=7) | st.sampled_from(LIKE_OTHER_TYPES))
    @example("0o17")
    @example("1.5e3")
    def test_texts_that_look_like_other_types_are_written_as_texts(self, tmp_path_factory, text):
        config = changed(
            data={
                "system_prompt": None if text in ("None", "none", "nil") else text,
                "trace_column": (text, "x"),
                "template_variables": FrozenMap({text or "x": text}),
            }
        )
        written = config_io.to_yaml(config)
        path = write(tmp_path_factory.getbasetemp(), written)
        assert config_io.load([path]) == config
        # Other programs, which read numbers as YAML 1.1 defines them, read the same texts.
        assert yaml.safe_load(written)["data"]["trace_column"] == [text, "x"]
        values = {"data.trace_column": [text, "x"], "data.template_variables": {"x": text}}
        overridden = config_io.override(Config(), values)
        assert overridden.data.trace_column == (text, "x")
        assert overridden.data.template_variables == {"x": text}

    def test_yaml_is_written_section_by_section_with_lists_on_one_line(self):
        text = config_io.to_yaml(Config())
        assert text.startswith(
            "seed: 0\nmethod: bacr\ngrader: null\nreproducible: false\n"
            "output:\n  dir: runs/default\n"
        )
        assert "  budgets: [512, 1024, 2048, 4096]\n" in text
        assert yaml.safe_load(text)["optimizer"]["learning_rate"] == 1e-6

    def test_flat_values_cover_every_key_once(self):
        flat = config_io.flatten(changed(budget={"max": 7}))
        assert flat["budget.max"] == 7
        assert set(flat) == set(KEYS)


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
        assert "curriculum.alpha 0.6 how strongly a high pass rate" in words
        assert "(a number, in [0, 1])" in words
        assert "(true or false)" in words

    def test_a_wide_terminal_gets_longer_lines(self):
        assert len(config_io.help_text(160).splitlines()) < len(
            config_io.help_text(80).splitlines()
        )


def test_another_process_finds_the_same_fingerprint_and_imports_no_jax():
    code = (
        "import sys; from bacr_jax.config import io; config = io.load([], ['seed=1']); "
        "io.check(config); io.help_text(); print(io.fingerprint(config)); "
        "sys.exit(any(m.split('.')[0] in ('jax', 'flax', 'numpy') for m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.strip() == config_io.fingerprint(changed(seed=1))


OVERRIDDEN = [
    "data.train=gsm8k",
    "data.train =gsm8k",
    " data.train = gsm8k",
    "data={train: gsm8k}",
    "data={dir: data, train: gsm8k}",
]


@pytest.mark.parametrize("text", OVERRIDDEN)
def test_a_key_is_overridden_in_every_spelling_that_changes_it(text):
    assert config_io.override(Config(), [text]).data.train == "gsm8k"
    assert config_io.is_overridden("data.train", ["seed=3", text])
    for key in ("data.eval", "data", "train", "data.train_size"):
        assert not config_io.is_overridden(key, ["seed=3", text])


def test_overrides_are_texts_or_a_dict():
    values = {
        "method": "grpo",
        "output.dir": Path("runs/1e-3"),
        "train.steps": np.int64(3),
        "optimizer.learning_rate": 1e-5,
        "budget.levels": {"low": 4, "high": 8},
        "eval": {"budgets": [8, np.int64(16)], "slots": None},
        "data.eval": (Path("a: b"), np.str_("no")),
        "reward.weights": {"correct": np.float32(0.5), Path("r.py:brief"): np.array(1)},
        "reproducible": np.True_,
    }
    texts = [
        "method=grpo",
        'output.dir="runs/1e-3"',
        "train.steps=3",
        "optimizer.learning_rate=0.00001",
        "budget.levels={low: 4, high: 8}",
        "eval.budgets=[8, 16]",
        "eval.slots=null",
        'data.eval=["a: b", "no"]',
        "reward.weights={correct: 0.5, r.py:brief: 1}",
        "reproducible=true",
    ]
    config = config_io.override(Config(), values)
    assert config == config_io.override(Config(), texts) != Config()
    assert config_io.override(Config(), "seed=3").seed == 3
    # A text that looks like a number stays a text.
    assert config_io.override(Config(), {"method": "1e3"}).method == "1e3"


def test_a_mapping_of_a_config_keeps_its_order_as_an_override():
    levels = config_io.override(Config(), ["budget.levels={low: 4, high: 8}"]).budget.levels
    (text,) = config_io.override_texts({"budget.levels": levels})
    assert text == "budget.levels={low: 4, high: 8}"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"train.step": 3}, "train.step"),
        ({"train.steps": "three"}, "train.steps"),
        (
            {"train.steps": object()},
            "overrides: the value of train.steps has the type object; use a number",
        ),
        (
            {"eval": {"budgets": [8, object()]}},
            "overrides: the value of eval contains an item of the type object; use a number",
        ),
    ],
)
def test_overrides_as_a_dict_are_refused_like_texts(overrides, says):
    with pytest.raises(UserError, match=says):
        config_io.override(Config(), overrides)
