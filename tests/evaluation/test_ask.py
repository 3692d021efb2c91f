"""One question is asked at several budgets at once."""

from types import SimpleNamespace

from bacr_jax.config import Config
from bacr_jax.evaluation.ask import Session
from bacr_jax.prompts.formats import FORMATS
from bacr_jax.questions.ledger import ledger_tokenizer


def test_one_question_at_several_budgets_is_told_each():
    tokenizer, style = ledger_tokenizer(), FORMATS["ledger_budget"]
    saved = SimpleNamespace(config=Config())
    session = SimpleNamespace(saved=saved, style=style, tokenizer=tokenizer)
    prompts = Session.prompts(session, ["7a2b3"], [8, None, 12])
    said = [tokenizer.decode(row[:n]) for row, n in zip(prompts.tokens, prompts.lengths)]
    assert [text.removeprefix(said[1]) for text in said] == ["8h", "", "12h"]
    assert len({len(row) for row in prompts.tokens}) == 1
