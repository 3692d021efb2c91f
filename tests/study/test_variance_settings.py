"""Reading the settings of the variance study, and refusing what can't be used in one line."""

import dataclasses
from pathlib import Path

import pytest

from bacr_jax.errors import UserError
from bacr_jax.study.variance import run_config
from bacr_jax.study.variance_settings import SIZES, read_settings

SHIPPED = Path(__file__).parents[2] / "configs" / "studies" / "variance.yaml"


@pytest.mark.parametrize("size", SIZES)
def test_the_shipped_study_has_every_size(size):
    settings = read_settings(SHIPPED, size)
    assert settings.questions >= 64
    assert settings.traces >= 64
    assert len(settings.budgets) >= 4


def test_overrides_win():
    assert read_settings(SHIPPED, "cpu", ["questions=4", "groups=[2]"]).groups == (2,)


@pytest.mark.parametrize(
    ("content", "size", "overrides", "line"),
    [
        ("kind: main\nsizes: {cpu: {questions: 4}}", "cpu", [], "kind: found 'main'; write"),
        ("sizes: {cpu: {questions: 4}}", "cpu", [], "kind: found nothing; write kind: variance"),
        ("kind: variance\nsizes: {cpu: {questions: 4}}", "gpu", [], "no size 'gpu'; write one of"),
        ("kind: variance\nsizes:\n  cpu: {question: 4}", "cpu", [], "question: no such key"),
        ("kind: variance\nsizes:\n  cpu: {questions: 1}", "cpu", [], "found 1; write numbers"),
        ("kind: variance\nsizes:\n  cpu: {questions: x}", "cpu", [], "found 'x'; write a whole"),
        ("kind: variance\nsizes:\n  cpu: {traces: 16}", "cpu", [], "write 32 or more"),
        ("kind: variance\nsizes:\n  cpu: {seeds: []}", "cpu", [], "is empty"),
        ("kind: variance\nsizes:\n  cpu: {regimes: [odd]}", "cpu", [], "'odd'; write common or"),
        (
            "kind: variance\nsizes:\n  cpu: {questions: 4}",
            "cpu",
            ["question=3"],
            "no such key; write questions",
        ),
    ],
)
def test_what_cannot_be_used_is_one_line(tmp_path, content, size, overrides, line):
    path = tmp_path / "study.yaml"
    path.write_text(content)
    with pytest.raises(UserError) as refused:
        read_settings(path, size, overrides)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("method=dapo", "the run needs a value head, found method=dapo"),
        ("adapter.rank=4", "adapter.rank: found 4; the study takes gradients of all weights"),
        ("budget.max=8", "is over the run's budget.max=8"),
    ],
)
def test_a_run_that_cannot_be_measured_is_one_line(tmp_path, monkeypatch, key, line):
    monkeypatch.chdir(SHIPPED.parents[2])
    settings = read_settings(SHIPPED, "cpu")
    settings = dataclasses.replace(settings, overrides=(*settings.overrides, key))
    with pytest.raises(UserError) as refused:
        run_config(settings, 0, tmp_path)
    assert line in str(refused.value)
