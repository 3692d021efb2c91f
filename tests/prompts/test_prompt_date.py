"""A template's date is one for a run, and for an evaluation, whenever it goes on."""

import json

import pytest

from bacr_jax.config import DataConfig
from bacr_jax.prompts import prompt_date
from bacr_jax.prompts.prompt_date import reads_date, with_prompt_date

DATED = "Today: {{ strftime_now('%d %b %Y') }}"


@pytest.fixture
def on(monkeypatch):
    def set_today(date):
        monkeypatch.setattr(prompt_date, "today", lambda: date)

    return set_today


def of_run(date=None, train="math:x"):
    return DataConfig(train=train, prompt_date=date)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chat_template.jinja", DATED),
        ("tokenizer_config.json", json.dumps({"chat_template": DATED})),
        ("tokenizer_config.json", json.dumps({"chat_template": [{"template": DATED}]})),
    ],
)
def test_a_template_that_asks_for_the_date_is_seen(tmp_path, name, text):
    assert not reads_date(tmp_path)
    (tmp_path / name).write_text(text)
    assert reads_date(tmp_path)


def test_a_new_run_has_the_date_of_its_day_and_keeps_it(tmp_path, on):
    (tmp_path / "chat_template.jinja").write_text(DATED)
    on("2026-11-28")
    begun = with_prompt_date(of_run(), str(tmp_path))
    assert begun.prompt_date == "2026-11-28"
    on("2026-11-29")
    assert with_prompt_date(of_run(), str(tmp_path), begun).prompt_date == "2026-11-28"
    evaluated = with_prompt_date(of_run(), str(tmp_path), recorded="2026-11-27")
    assert evaluated.prompt_date == "2026-11-27"
    # One that is written stays; a run from before dates were kept has none.
    written = with_prompt_date(of_run("2024-02-29"), str(tmp_path), begun)
    assert written.prompt_date == "2024-02-29"
    assert with_prompt_date(of_run(), str(tmp_path), of_run()).prompt_date is None


def test_a_template_without_a_date_and_a_model_of_characters_have_none(tmp_path, on):
    on("2026-11-28")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert with_prompt_date(of_run(), str(tmp_path)) == of_run()
    (tmp_path / "chat_template.jinja").write_text(DATED)
    assert with_prompt_date(of_run(train="ledger"), str(tmp_path)).prompt_date is None
    assert with_prompt_date(of_run(), None) == of_run()
