"""Names of the configs that ship with the package, and what else --config may be."""

from pathlib import Path

import pytest

from bacr_jax.config import io as config_io
from bacr_jax.config import shipped
from bacr_jax.config.checks import check
from bacr_jax.config.derived import HOLDOUT, selection_set
from bacr_jax.config.settings import resolve
from bacr_jax.config.shipped import STUDIES, locate
from bacr_jax.errors import UserError
from bacr_jax.methods.registry import built_in_departures, problems

REPOSITORY = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A folder that is no clone."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_config_has_a_name_that_leads_to_it():
    of_files = {
        p.relative_to(REPOSITORY).with_suffix("").as_posix() for p in REPOSITORY.rglob("*.yaml")
    }
    named = [*shipped.names(), *shipped.names(STUDIES)]
    assert len(named) == len(of_files) and set(named) == of_files
    assert all(locate(name).samefile(REPOSITORY / f"{name}.yaml") for name in named)


@pytest.mark.parametrize(
    ("written", "folders", "found"),
    [
        ("quickstart", shipped.CONFIGS, "quickstart.yaml"),
        ("grpo", shipped.CONFIGS, "methods/grpo.yaml"),
        ("methods/grpo", shipped.CONFIGS, "methods/grpo.yaml"),
        ("qwen2.5-7b-math", shipped.CONFIGS, "qwen2.5-7b-math.yaml"),
        ("main", STUDIES, "studies/main.yaml"),
        ("configs/quickstart.yaml", shipped.CONFIGS, "quickstart.yaml"),
        ("configs/methods/grpo.yaml", shipped.CONFIGS, "methods/grpo.yaml"),
    ],
)
def test_names_and_paths_of_a_clone_mean_the_shipped_one(written, folders, found):
    assert locate(written, folders).samefile(REPOSITORY / found)


def test_a_name_and_overlays_are_read_in_their_order():
    config = config_io.load(["quickstart", "grpo"], ["seed=3"])
    assert (config.method, config.budget.max, config.seed) == ("grpo", 64, 3)


@pytest.mark.parametrize(
    ("files", "order"),
    [
        (["methods/grpo", "quickstart"], "quickstart, methods/grpo"),
        (["configs/methods/grpo.yaml", "quickstart"], "quickstart, configs/methods/grpo.yaml"),
        (["grpo", "dapo", "quickstart", "mine.yaml"], "quickstart, grpo, dapo, mine.yaml"),
        (["quickstart", "grpo", "mine.yaml"], None),
        # This file does not set a key of the preset.
        (["grpo", "seed.yaml"], None),
    ],
)
def test_a_preset_that_its_base_would_undo_is_refused(elsewhere, files, order):
    (elsewhere / "mine.yaml").write_text("method: dapo")
    (elsewhere / "seed.yaml").write_text("seed: 3")
    if order is None:
        config_io.load(files)
        return
    with pytest.raises(UserError) as error:
        config_io.load(files)
    (line,) = error.value.lines
    start = f"{files[0]}: this preset of a method comes before quickstart, which sets "
    assert line.startswith(start) and line.endswith(f"; pass the configs in the order {order}")
    config_io.load(order.split(", "))


@pytest.mark.parametrize("name", shipped.names((shipped.OVERLAYS,)))
def test_every_preset_before_the_quickstart_is_refused(name):
    with pytest.raises(UserError, match=f"order quickstart, {name}$"):
        config_io.load([name, "quickstart"])


def test_a_small_config_after_a_preset_changes_its_keys(elsewhere):
    (elsewhere / "tweak.yaml").write_text("loss: {kl_coef: 0.25}")
    assert config_io.load(["methods/grpo", "tweak.yaml"]).loss.kl_coef == 0.25


@pytest.mark.parametrize("own", ["quickstart", "quickstart.yaml", "quickstart.yml"])
def test_a_name_that_could_mean_a_file_here_is_refused(elsewhere, own):
    (elsewhere / own).write_text("seed: 7")
    with pytest.raises(
        UserError, match=rf"^quickstart: this is .* but also of the file {own} in .*; use"
    ) as e:
        config_io.load(["quickstart"])
    # Both are what the message says.
    first, second = str(e.value).split("; use ")[1].split(", or ")
    assert config_io.load([first.removesuffix(" for the file")]).seed == 7
    assert config_io.load([second.removesuffix(" for the config")]).budget.max == 64


def test_a_path_is_the_file_there(elsewhere):
    (elsewhere / "configs").mkdir()
    for name in ("quickstart.yaml", "configs/quickstart.yaml", "mine"):
        (elsewhere / name).write_text("seed: 7")
        assert config_io.load([name]).seed == 7
    # A folder is no config that could be meant.
    (elsewhere / "grpo").mkdir()
    assert locate("grpo").samefile(REPOSITORY / "methods/grpo.yaml")


@pytest.mark.parametrize(
    ("written", "advice"),
    [
        ("quickstart.yaml", "no such file; use quickstart, which ships with the package"),
        ("quikstart", "no such file; use quickstart, which ships with the package"),
        ("methods/gpro", "no such file; use methods/grpo, which ships with the package"),
        ("qwen2.5-7b-mat", "use qwen2.5-7b-math, which ships with the package"),
        ("configs/mine.yaml", "no such file; use the path of a YAML file"),
        ("main", "no such file; use the path of a YAML file"),
        ("x" * 300, "File name too long"),
    ],
)
def test_what_is_not_there_is_refused_with_what_may_be_meant(written, advice):
    with pytest.raises(UserError, match=advice):
        config_io.load([written])


# Where one prompt serves all budgets, so that it is read once.
OWN = dict.fromkeys(
    ("smollm2-135m", "smollm2-135m-gsm8k", "qwen2.5-0.5b-gsm8k"), {"conditioning.positions"}
)


@pytest.mark.parametrize("path", sorted(REPOSITORY.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_trains_by_the_recommended_method(path):
    """Its preset over them changes nothing; the paper's method has all that it needs."""
    alone, recommended = (
        config_io.flatten(config_io.load(files)) for files in ([path], [path, "bacr-bounded"])
    )
    assert {key for key in alone if alone[key] != recommended[key]} == OWN.get(path.stem, set())
    paper = config_io.load([path, "bacr-paper"])
    undone = alone["train.undo_closed_answers"]
    lines = [] if undone is None else [f"train.undo_closed_answers={undone} (published: null)"]
    assert built_in_departures(resolve(paper).method) == lines
    check(paper, also=problems)


TRAINING = [*sorted(REPOSITORY.glob("*.yaml")), *sorted((REPOSITORY / "examples").glob("*.yaml"))]


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_every_config_chooses_its_best_checkpoint_during_training(path):
    config = config_io.load([path])
    assert config.eval.every is not None and config.eval.holdout > 0
    assert selection_set(config.eval, config.data) == HOLDOUT
    # A checkpoint before the end can be chosen. Configs that train for epochs have no number.
    assert config.train.steps is None or config.eval.every < config.train.steps


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_every_config_evaluates_its_test_sets_only_before_and_after_training(path):
    config = config_io.load([path])
    assert config.eval.during == "selection"
    # With no selecting set, evaluations during training would use all sets.
    assert selection_set(config.eval, config.data) not in {None, *config.data.eval}


@pytest.mark.parametrize("written", ["grpo", "methods/grpo", "configs/methods/grpo.yaml"])
def test_overlays_alone_are_refused(written):
    with pytest.raises(UserError) as error:
        shipped.check_overlays([written])
    assert str(error.value) == (
        f"--config {written} sets only the method, and no other config is given; pass "
        f"another config first, for example --config quickstart --config {written}"
    )
    with pytest.raises(UserError) as error:
        shipped.check_overlays([written], in_python=True)
    assert str(error.value) == (
        f"['{written}'] sets only the method, and no other config is given; pass another config "
        f"first, for example ['quickstart', '{written}']"
    )
    shipped.check_overlays(["quickstart", written])
    shipped.check_overlays(["mine.yaml"])


@pytest.mark.parametrize("name", shipped.names((shipped.OVERLAYS,)))
def test_the_loss_of_a_published_method_does_not_depend_on_the_config_before_its_preset(name):
    losses = {path.stem: config_io.load([path, name]) for path in TRAINING}
    # BACR's presets keep the settings that a config has for its hardware.
    if losses["quickstart"].method == "bacr":
        return
    for stem, config in losses.items():
        assert config.loss == losses["quickstart"].loss, stem
