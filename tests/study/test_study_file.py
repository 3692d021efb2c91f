"""A study's file: what it says, what can be overridden, and what is refused."""

import contextlib
import re
from pathlib import Path

import pytest

from bacr_jax.config import io as config_io
from bacr_jax.config import shipped
from bacr_jax.config.yaml import constructed, parse_file
from bacr_jax.errors import UserError
from bacr_jax.evaluation.summary import numbers_of_samples
from bacr_study.__main__ import main
from bacr_study.study_file import read_study
from study_world import STUDY, write_study

FOLDER = Path(__file__).parents[2] / "configs" / "studies"
STUDIES = sorted(FOLDER.glob("*.yaml"))


def test_a_size_replaces_and_adds_keys(tmp_path):
    path = write_study(tmp_path)
    cpu, wide = read_study(path), read_study(path, size="wide")
    assert (
        cpu.size == "cpu" and cpu.seeds == (0, 1) and [task.id for task in cpu.tasks] == ["plain"]
    )
    assert wide.seeds == (0,) and [task.id for task in wide.tasks] == ["plain", "wide"]
    assert cpu.arms == wide.arms and cpu.name == "two"


def test_keys_of_the_study_and_of_its_runs_can_be_overridden(tmp_path):
    path = write_study(tmp_path)
    study = read_study(path, overrides=["seeds=[7]", "arms=[bacr]", "train.steps=3"])
    assert study.seeds == (7,) and [arm.id for arm in study.arms] == ["bacr"]
    config = study.config_of("plain", "bacr", {})
    assert config.train.steps == 3 and config.train.max_generated_tokens == 1000


def test_keys_of_the_evaluation_are_overridden_one_by_one(tmp_path):
    for overrides in (["evaluation.size=7"], ["evaluation={size: 7}"]):
        evaluation = read_study(write_study(tmp_path), overrides=overrides).evaluation
        assert (evaluation.samples, evaluation.size) == (2, 7)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("seeds=0", "command line: seeds: found 0; use a list of whole numbers, here [0]"),
        ("seeds=[-1]", "command line: seeds: found -1; use a number in [0, 4294967295]"),
        ("evaluation.size=0", "command line: evaluation.size: found 0; use a number in [1, 2"),
        ("evaluation.size=2147483648", "command line: evaluation.size: found 2147483648; use a "),
        ("evaluation.slots=1000001", "command line: evaluation.slots: found 1000001; use a number"),
        ("evaluation.seed=4294967296", "command line: evaluation.seed: found 4294967296; use a "),
        (
            "evaluation.temperature=0.0009",
            "command line: evaluation.temperature: found 0.0009; use 0.001 or more",
        ),
        (
            "evaluation.cut_every=8",
            "command line: evaluation.cut_every: found 8; use null, or set the key before to the",
        ),
        (
            "evaluation.sice=9",
            "command line: evaluation.sice: there is no such key; use one of samples",
        ),
        ("evaluation={temperature: -3}", "command line: evaluation.temperature: found -3"),
        ("evaluation.samples=40", "command line: evaluation.samples: found 40; use a number"),
        ("focus=[16]", "command line: focus: found 16; use 8 or 64"),
    ],
)
def test_what_the_command_line_says_wrong_is_said_of_it(tmp_path, override, says):
    with pytest.raises(UserError) as refused:
        read_study(write_study(tmp_path), overrides=[override])
    assert str(refused.value).startswith(says)


SEEDS = "use the study's key seeds, such as seeds=[4]"
VOTE = "}}\n  vote: {label: a vote, of: grpo, votes: 2}"


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("title: Two arms", "titel: Two arms", "titel: there is no such key"),
        ("title: Two arms\n", "", "the required key title is missing; use title: ..."),
        (
            "title: Two arms",
            "title: a\ntitle: b",
            "yaml, line 3: found 'title' twice; keep only one of them",
        ),
        (
            "title: Two arms",
            "title: 2021-13-45",
            "yaml: the value is not valid YAML; put it in quotes",
        ),
        ("title: Two arms", "title: Two arms\nown: {gpro: {seed: 1}}", "own: found 'gpro'; use"),
        (
            "title: Two arms",
            "title: Two arms\nown: {grpo: 1}",
            "own.grpo: found 1; use a mapping",
        ),
        ("seeds: [0, 1]", "seeds: [0, 0]", "seeds: found [0, 0]; use different seeds"),
        ("seeds: [0, 1]", "seeds: [a]", "seeds: found ['a']"),
        ("votes: 2", "votes: 3", "arms.vote.votes: found 3; use a power of 2, up to 2, or 2"),
        ("votes: 2", "votes: 1", "arms.vote.votes: found 1; use a power of 2"),
        (
            VOTE,
            "}, samples: 4}\n  vote: {label: v, of: grpo, votes: 2, accounting: matched_total}\n"
            "  more: {label: m, of: grpo, votes: 4, accounting: matched_total}",
            "arms.more.votes: found 4; use 2, as another vote over grpo",
        ),
        (
            VOTE,
            "}, samples: 9}\n  vote: {label: v, of: grpo, votes: 9, accounting: matched_total}",
            "tasks.plain.budgets: found [8, 64]; use 9 or more, a token for each vote of vote",
        ),
        (
            "budgets: [8, 64]",
            "budgets: [8, 64], hard_levels: [5, 6]",
            "tasks.plain.hard_levels: found 6; use a number in [1, 5]",
        ),
        (
            "set: {loss.entropy_coef: 0.0}",
            "sweep: {key: a, values: [1, 2], default: 3}",
            "arms.bacr.sweep.default: found 3; use 1 or 2",
        ),
        (
            "set: {loss.entropy_coef: 0.0}",
            "sweep: {key: a, values: {b: {}}, default: [b]}",
            "arms.bacr.sweep.default: found ['b']; use b",
        ),
        (
            "set: {loss.entropy_coef: 0.0}",
            "sweep: {key: a, values: [[1, 2], [3]]}",
            "arms.bacr.sweep.values: found [1, 2]; use a value of letters, digits, _, +, . and -",
        ),
        (
            "set: {loss.entropy_coef: 0.0}",
            "sweep: {key: a, values: [x/y]}",
            "arms.bacr.sweep.values: found 'x/y'; use a value of letters",
        ),
        *(
            (
                "set: {loss.entropy_coef: 0.0}",
                f"sweep: {{key: data.prompt_date, values: {values}}}",
                "_, +, . and - (a date in quotes)",
            )
            for values in ("[2026-01-31]", "[2026-01-31 10:00:00]", "{2026-01-31: {}}")
        ),
        (
            "budgets: [8, 64]",
            "budgets: [8, 64], data: [ledger, ledger]",
            "tasks.plain.data: found ['ledger', 'ledger']; use each set only once",
        ),
        ("title:", "overrides: [seed=4]\ntitle:", "overrides: there is no such key; use one of"),
        *(
            (
                "set: {loss.entropy_coef: 0.0}",
                f"sweep: {{key: budget.min, values: {{a: {{}}, b: {value}}}}}",
                f"arms.bacr.sweep.values.b: found {value}; use a mapping of config keys",
            )
            for value in ("5", "['x']", "0", "[]")
        ),
        (
            "title: Two arms",
            "title: Two arms\ncontrasts: {a: [[grpo], bacr]}",
            "contrasts.a: found [['grpo'], 'bacr']; use two arms of the study without a sweep",
        ),
        (
            "title: Two arms",
            "title: Two arms\ncontrasts: {a: [grpo, bacr]}\nsweep: {key: a, values: [1]}",
            "contrasts.a: found ['grpo', 'bacr']; use two arms of the study without a sweep",
        ),
        (
            "label: GRPO",
            "label: GRPO, samples: 36",
            "grpo.samples: found 36; use a number in [0, 35",
        ),
        ("size: 10}", "size: -2}", "two.yaml: evaluation.size: found -2; use a number in"),
        ("label: BACR", "label: GRPO", "arms.bacr.label: found 'GRPO'; use a label that no oth"),
        (
            "label: BACR",
            "label: ' '",
            "arms.bacr.label: found ' '; use a label that no other arm",
        ),
        ("of: grpo", "of: gpro", "arms.vote.of: found 'gpro'; use an arm with runs"),
        ("of: grpo", "of: grpo, accounting: none", "accounting: found 'none'"),
        (
            "budgets: [8, 64]",
            "budgets: []",
            "budgets: found []; use rising numbers, such as [512, 1024]",
        ),
        ("budgets: [8, 64]", "budgets: [-8]", "found [-8]; use rising"),
        ("  grpo: {label", "  g.po: {label", "found the name 'g.po'"),
        (
            "  wide:",
            "  5:",
            "sizes: found the name 5; use a name of letters, digits, _, + and - (a name",
        ),
        ("  cpu:", "  ../../x:", "yaml: sizes: found the name '../../x'; use a name of"),
        (
            "second: 100",
            "second: -1",
            "two.yaml: tokens_per_second: found -1.0; use more than 0",
        ),
        (
            "second: 100",
            "second: 0",
            "two.yaml: tokens_per_second: found 0.0; use more than 0",
        ),
        (
            "second: 100",
            "second: .inf",
            "tokens_per_second: found inf; use more than 0",
        ),
        ("title:", "devices_per_run: -1\ntitle:", "devices_per_run: found -1; use 0 or more"),
        ("set: {loss.entropy_coef: 0.0}", "set: 3", "set: found 3; use a mapping"),
        (
            "set: {loss.entropy_coef: 0.0}",
            "sweep: {key: a}",
            "sweep: the required key values is missing",
        ),
        ("set: {loss.entropy_coef: 0.0}", "sweep: {key: a, values: 3}", "values: found 3"),
        ("sizes:", "size_s:", "sizes: found null; use at least one"),
        ("title: Two arms", "title: Two arms\nviews: [acuracy]", "views: found ['acuracy']"),
        (
            "title: Two arms",
            "title: Two arms\ncontrasts: {a: [grpo]}",
            "contrasts.a: found ['grpo']; use",
        ),
        ("title: Two arms", "title: Two arms\nviews: [contrasts]", "contrasts: found null; use"),
        ("title: Two arms", "title: Two arms\nviews: [scale]", "sweep: found null; use the key"),
        ("title: Two arms", "title: Two arms\nfocus: [16]", "focus: found 16; use 8 or 64"),
        ("reference: [grpo]", "reference: [gpro]", "reference: found 'gpro'; use grpo"),
        ("budgets: [8, 64]", "budgets: [64, 8]", "budgets: found [64, 8]; use rising numbers"),
        ("of: grpo", "of: grpo, parts: [BUP]", "arms.vote.parts: found ['BUP']; use none, or"),
        # What a study gives its runs is not set for them.
        ("set: {train", "set: {seed: 4, train", f"two.yaml: set.seed: found 4; {SEEDS}"),
        (
            "title:",
            "own: {grpo: {output.dir: r}}\ntitle:",
            "own.grpo.output.dir: found 'r'; use -",
        ),
        (
            "{loss.",
            "{output: {dir: r}, loss.",
            "arms.bacr.set.output.dir: found 'r'; use --out D",
        ),
        (
            "budgets: [8, 64]",
            "budgets: [8], set: {seed: 4}",
            f"tasks.plain.set.seed: found 4; {SEEDS}",
        ),
        ("title:", "sweep: {key: seed, values: [4, 5]}\ntitle:", f"sweep.seed: found 4; {SEEDS}"),
        (
            "set: {loss.entropy_coef: 0.0}",
            "sweep: {key: a, values: {b: {seed: 4}}}",
            f"arms.bacr.sweep.seed: found 4; {SEEDS}",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_line(tmp_path, before, after, words):
    assert before in STUDY
    with pytest.raises(UserError) as refused:
        read_study(write_study(tmp_path, STUDY.replace(before, after, 1)))
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("seed=4", f"command line: seed: found 4; {SEEDS}"),
        ("set={seed: 4}", f"command line: set.seed: found 4; {SEEDS}"),
        ("output.dir=r", "command line: output.dir: found 'r'; use --out DIR"),
        ("output={dir: r}", "command line: output.dir: found 'r'; use --out DIR"),
    ],
)
def test_nor_is_it_overridden(tmp_path, override, says):
    with pytest.raises(UserError) as refused:
        read_study(write_study(tmp_path), overrides=["output.report=false", override])
    assert str(refused.value) == says


@pytest.mark.parametrize("budgets", ["[64]", "[0, 64]"])
def test_a_swap_needs_two_budgets(tmp_path, budgets):
    line = "evaluation.swap: found true; use false, or two budgets above 0 in tasks.plain.budgets"
    few = STUDY.replace("budgets: [8, 64]", f"budgets: {budgets}")
    swapped = few.replace("size: 10}", "size: 10, swap: true}")
    for text, overrides in ((few, ["evaluation.swap=true"]), (swapped, [])):
        with pytest.raises(UserError, match=re.escape(line)):
            read_study(write_study(tmp_path, text), overrides=overrides)
    assert read_study(write_study(tmp_path, few))
    assert read_study(write_study(tmp_path), overrides=["evaluation.swap=true"]).evaluation.swap


CURVE = STUDY.replace("title:", "before: grpo\ntitle:").replace("size: 10}", "size: 10, KEY}")


@pytest.mark.parametrize(
    ("value", "budgets", "problem"),
    [
        (1, "[8, 64]", None),
        (63, "[8, 64]", None),
        (64, "[8, 64]", "there is no multiple below the largest budget 64; use a smaller number"),
        (80, "[8, 64]", "there is no multiple below the largest budget 64; use a smaller number"),
        (
            4,
            "[0]",
            "there is no multiple below the largest budget 0; leave it out, or use a larger",
        ),
        (4, "[1024]", None),
        (3, "[1024]", "results in 342 truncation points below 1024 tokens; set it to 4 or more"),
    ],
)
def test_a_dense_curve_has_truncation_points_and_not_too_many(tmp_path, value, budgets, problem):
    text = CURVE.replace("budgets: [8, 64]", f"budgets: {budgets}")
    ways = [
        (text.replace("KEY", f"cut_every: {value}"), [], f"{tmp_path / 'two.yaml'}"),
        (text.replace(", KEY", ""), [f"evaluation.cut_every={value}"], "command line"),
    ]
    for content, overrides, source in ways:
        path = write_study(tmp_path, content)
        if problem is None:
            assert read_study(path, overrides=overrides).evaluation.cut_every == value
            continue
        with pytest.raises(UserError) as refused:
            read_study(path, overrides=overrides)
        line = str(refused.value)
        assert line.startswith(f"{source}: evaluation.cut_every={value}") and problem in line
        assert line.endswith(" (tasks.plain.budgets)")


ARM = "set: {loss.entropy_coef: 0.0}"
ENTROPY = "command line: loss.entropy_coef: found 0.5, but these arms"


@pytest.mark.parametrize(
    ("before", "after", "override", "words"),
    [
        (ARM, ARM, "loss.entropy_coef=0.5", f"{ENTROPY} set this key: bacr; use arms=[...] with"),
        (ARM, ARM, "loss={entropy_coef: 0.5}", f"{ENTROPY} set this key: bacr; use arms=[...] wi"),
        (ARM, "set: {loss: {entropy_coef: 0}}", "loss.entropy_coef=0.5", f"{ENTROPY} set this key"),
        (ARM, "set: {method: bacr}", "method=grpo", "these arms set this key: grpo, bacr; use"),
        (
            ARM,
            "set: {budget.levels: {a: 8}}",
            "budget.levels={b: 8}",
            "budget.levels: found {'b': 8}, but these arms set this key: bacr; use",
        ),
        (
            ARM,
            "sweep: {key: loss.entropy_coef, values: [0.1, 0.2]}",
            "loss.entropy_coef=0.5",
            f"{ENTROPY} vary this key in a sweep: bacr; use arms=[...] without these arms, or",
        ),
        (
            ARM,
            "sweep: {key: entropy, values: {a: {}, b: {loss: {entropy_coef: 0.1}}}}",
            "loss={entropy_coef: 0.5}",
            f"{ENTROPY} vary this key in a sweep: bacr; use",
        ),
        (
            "title:",
            "sweep: {key: train.steps, values: [1, 2]}\ntitle:",
            "train.steps=3",
            "train.steps: found 3, but these arms vary this key in a sweep: grpo, bacr; use",
        ),
    ],
)
def test_a_key_that_distinguishes_arms_is_refused_on_the_command_line(
    tmp_path, before, after, override, words
):
    assert before in STUDY
    path = write_study(tmp_path, STUDY.replace(before, after, 1))
    with pytest.raises(UserError) as refused:
        read_study(path, overrides=[override])
    assert words in str(refused.value) and "\n" not in str(refused.value)
    assert read_study(path).overrides == ()
    # Other keys are accepted, and so is this key if no selected arm has it.
    assert read_study(path, overrides=["rollout.temperature=0.9"])
    if ": bacr;" in words:
        study = read_study(path, overrides=["arms=[grpo]", override])
        assert study.overrides == (override,)


def _sweep_settings(path, arm):
    """Returns the config keys of every value of an arm's sweep."""
    sweep = read_study(path).sweep_of(arm)
    return list(sweep.settings.values()) if sweep else []


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    "override", ["optimizer.learning_rate=1e-3", "train.steps=3", "rollout.temperature=0.9"]
)
def test_a_key_of_the_command_line_reaches_all_runs_of_a_shipped_study(path, override):
    key, _, value = override.partition("=")
    try:
        study = read_study(path, overrides=[override])
    except UserError as error:
        assert str(error).startswith(f"command line: {key}: found ") and "these arms" in str(error)
        arms = read_study(path).arms
        keys = [settings for arm in arms for settings in (arm.set, *_sweep_settings(path, arm))]
        assert any(settings.get(key) for settings in keys)
        return
    for task in study.tasks:
        for arm in study.arms:
            sweep = study.sweep_of(arm)
            for varied in sweep.settings.values() if sweep else [{}]:
                config = study.config_of(task.id, arm.id, varied)
                is_untrained = key == "train.steps" and arm.set.get(key) == 0
                expected = 0.0 if is_untrained else float(value)
                assert config_io.flatten(config)[key] == expected


@pytest.mark.parametrize(
    "arguments",
    [
        "arms=[as-it-is,untrained]",
        "seeds=[10] train.max_generated_tokens=200000 eval.holdout=64 optimizer.learning_rate=1e-6",
        "train.steps=9 train.max_generated_tokens=null",
    ],
)
def test_the_commands_in_the_file_of_qwen_set_what_they_contain(arguments):
    overrides = ["model.path=FOLDER", *arguments.split()]
    study = read_study(FOLDER / "qwen.yaml", overrides=overrides)
    for arm in study.arms:
        values = config_io.flatten(study.config_of("gsm8k", arm.id, {}))
        for text in overrides:
            key, _, value = text.partition("=")
            if key == "train.steps" and arm.set.get(key) == 0:
                assert values[key] == 0
            elif key in values:
                assert values[key] == config_io.flatten(config_io.load([], [text]))[key]
    if "seeds=[10]" in overrides:
        assert study.seeds == (10,)


@pytest.mark.parametrize("samples", [3, 6, 8])
def test_votes_are_those_that_an_evaluation_has(tmp_path, samples):
    has = set(numbers_of_samples(samples)) - {1}
    for votes in range(1, samples + 2):
        text = STUDY.replace("votes: 2", f"votes: {votes}")
        path = write_study(tmp_path, text)
        with contextlib.nullcontext() if votes in has else pytest.raises(UserError, match="votes"):
            read_study(path, overrides=[f"evaluation.samples={samples}"])


@pytest.mark.parametrize("name", ["budgets: [0, 64]", "budgets: [2, 64]"])
def test_every_vote_at_equal_total_tokens_has_a_token(tmp_path, name):
    text = STUDY.replace("votes: 2", "votes: 2, accounting: matched_total")
    assert read_study(write_study(tmp_path, text.replace("budgets: [8, 64]", name)))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_shipped_study_is_read_at_each_size(path):
    sizes = constructed(parse_file(path))["sizes"]
    assert [read_study(path, size=size).size for size in sizes] == list(sizes)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_name_of_a_shipped_study_needs_no_other_row(path):
    study = read_study(path)
    names = [*(arm.label for arm in study.arms), *study.contrasts]
    assert not [name for name in names if re.match(r"(\d+ )?(of|it|that|over|without)\b", name)]


@pytest.mark.parametrize("name", ["quickstart", "methods/grpo", "examples/own-data"])
def test_a_config_of_a_run_is_not_a_study(name):
    path = shipped.root() / f"{name}.yaml"
    says = re.escape(f"{path}: the file has neither arms nor sizes, so it is not a study; use a ")
    with pytest.raises(UserError, match=says):
        read_study(path)


def test_the_study_of_the_page_is_planned_from_any_folder(tmp_path, capsys, monkeypatch):
    """The page has a study, and a size for a GPU that is added to it."""
    page = (Path(__file__).parents[2] / "docs" / "study.md").read_text()
    study, gpu_size = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    path = tmp_path / "mine.yaml"
    path.write_text(study + gpu_size)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for size, runs, task in (("cpu", 15, "ledger"), ("gpu", 15, "mine")):
        arguments = ["--config", str(path), "--size", size, "--out", str(tmp_path / "out")]
        assert main([*arguments, "--dry-run"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert f"{task}.start.0" in lines[-1 - runs]
        assert lines[-1].startswith(f"{runs} cells, ")


def test_a_size_or_an_arm_that_is_not_there_is_refused(tmp_path):
    path = write_study(tmp_path)
    with pytest.raises(UserError, match="--size: found 'gpu'; use cpu or wide"):
        read_study(path, size="gpu")
    with pytest.raises(UserError, match="arms: found 'hapo'; use grpo, vote or bacr"):
        read_study(path, overrides=["arms=[hapo]"])


def test_a_contrast_of_an_arm_that_was_not_chosen_is_left_out():
    path = FOLDER / "qwen.yaml"
    some = read_study(path, overrides=["arms=[untrained,bacr,grpo]"])
    assert list(some.contrasts) == ["GRPO"] and "contrasts" in some.views
    none = read_study(path, overrides=["arms=[as-it-is,untrained]"])
    assert none.contrasts == {} and "contrasts" not in none.views
    assert len(read_study(path).contrasts) == 4
