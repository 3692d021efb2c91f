"""One question is asked at several budgets at once."""

from bacr_jax.config import EvalConfig
from bacr_jax.evaluation.ask import prompt_per_budget
from bacr_jax.prompts.encoding import encode_prompts
from bacr_jax.prompts.formats import FORMATS
from bacr_jax.questions.ledger import ledger_tokenizer


def test_one_question_at_several_budgets_is_told_each():
    tokenizer, style = ledger_tokenizer(), FORMATS["ledger_budget"]
    question, _ = encode_prompts(tokenizer, ["7a2b3"], style, max_tokens=32)
    prompts = prompt_per_budget(question, tokenizer, style, [8, None, 12], EvalConfig())
    said = [tokenizer.decode(row[:n]) for row, n in zip(prompts.tokens, prompts.lengths)]
    assert [text.removeprefix(said[1]) for text in said] == ["8h", "", "12h"]
    assert len({len(row) for row in prompts.tokens}) == 1
