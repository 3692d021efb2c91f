"""`python -m bacr_jax.generate`, on a model small enough for a test."""

import re

import pytest

import hf_world
from bacr_jax import generate
from bacr_jax.data.ledger import ledger_tokenizer, make_problems
from bacr_jax.model import hf
from bacr_jax.model.sizes import Qwen2Config

SHAPE = Qwen2Config(27, 16, 24, 2, 2, 1, 8, rope_theta=1e4, tie_embeddings=True, max_positions=64)
KEYS = ["rollout.answer_tokens=3", "rollout.chunk=2", "data.train=ledger"]


@pytest.fixture(scope="module")
def question():
    return make_problems(0, 1, max_operand=3, split="test")[0].question


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    params = hf_world.random_params(SHAPE)
    levels = {"low": 4}
    hf.save_policy(path, params, config=SHAPE, tokenizer=ledger_tokenizer(), levels=levels)
    return path


def ask(capsys, model, *arguments):
    capsys.readouterr()
    code = generate.main(["--model", str(model), *arguments, *KEYS])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_one_budget_is_streamed_and_several_are_the_same_answers(capsys, model, question):
    code, short, error = ask(capsys, model, "--budget", "4", question)
    assert (code, error) == (0, "")
    assert int(re.search(r"\[(\d+) thinking tokens, \d+ forced, \d+ answer\]", short)[1]) <= 4
    code, both, _ = ask(capsys, model, "--budget", "4,8", question)
    assert code == 0
    parts = re.split(r"--- budget \d ---\n", both)
    assert len(parts) == 3 and parts[1] == short


def test_several_budgets_and_none_are_each_told_in_words(monkeypatch, capsys, model, question):
    from bacr_jax.evaluation import ask as asking

    found = []

    def spy(params, prompts, budgets, *arguments, **options):
        found.append(prompts)
        raise KeyboardInterrupt

    monkeypatch.setattr(asking, "generate", spy)
    keys = ["--budget", "4,none,0,16", question, "conditioning.told=words", "budget.max=20"]
    assert ask(capsys, model, *keys) == (130, "", "")
    (prompts,) = found
    said = [ledger_tokenizer().decode(row[:n]) for row, n in zip(prompts.tokens, prompts.lengths)]
    assert [text.removeprefix(f"<bos>{question}") for text in said] == [
        "f4<think>", "<think>", "f0<think>", "f16<think>"
    ]  # fmt: skip


def test_no_thinking_a_level_of_the_folder_and_no_budget(capsys, model, question):
    code, out, error = ask(capsys, model, "--budget", "0,low,4,none", question, "budget.cap=9")
    assert (code, error) == (0, "")
    at_once, low, four, none = re.split(r"--- .* ---\n", out)[1:]
    assert "[0 thinking tokens, 2 forced, " in at_once and at_once.startswith("\n")
    assert low == four
    assert int(re.search(r"\[(\d+) thinking tokens", none)[1]) <= 9
    assert "--- no budget ---" in out


def test_sampling_follows_the_seed(capsys, model, question):
    options = ["--budget", "12", "--temperature", "2.0", question]
    one, again, other = (
        ask(capsys, model, "--seed", seed, *options)[1] for seed in ("1", "1", "2")
    )
    assert one == again != other


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--budget", "4,x", "q"], "--budget 4,x: found 'x'"),
        (["--budget", "high", "q"], "or a level (low)"),
        (["--budget", "none", "012"], "or budget.cap"),
        (["--budget", "-4", "q"], "--budget -4: found '-4'"),
        (["--budget", "60", "012"], "the model's 64 positions leave"),
        (["--budget", "4", " "], "question: found an empty text"),
        (["--budget", "4", "--temperature", "-1", "q"], "--temperature -1.0: write 0"),
        (["--budget", "4", "--top-p", ".5", "q"], "--top-p 0.5: is not read"),
        (["q"], "command line: the following arguments are required: --budget"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, model, question, arguments, says):
    arguments = [question if word == "012" else word for word in arguments]
    code, out, err = ask(capsys, model, *arguments)
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and says in err
