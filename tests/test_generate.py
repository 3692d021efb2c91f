"""`bacr generate`, on a model small enough for a test."""

import io
import os
import re
import signal
import sys

import pytest
from rich.console import Console

import hf_world
import thinking_world
from bacr_jax import generate
from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.settings import resolve
from bacr_jax.evaluation import ask as asking
from bacr_jax.evaluation.ask import Answer
from bacr_jax.export import policy_folder
from bacr_jax.export.from_run import export
from bacr_jax.generate import LiveColumns
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.questions.ledger import ledger_tokenizer, make_problems

SHAPE = Qwen2Config(27, 16, 24, 2, 2, 1, 8, rope_theta=1e4, tie_embeddings=True, max_positions=64)
KEYS = ["rollout.answer_tokens=3", "rollout.chunk=2", "data.train=ledger"]


@pytest.fixture(scope="module")
def question():
    return make_problems(0, 1, max_operand=3, split="test")[0].question


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    params = hf_world.random_params(SHAPE)
    budget = policy_folder.BudgetInput(levels={"low": 4})
    policy_folder.save_policy(
        path, params, config=SHAPE, budget=budget, tokenizer=ledger_tokenizer()
    )
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
    # The name of the option in `bacr evaluate` works too.
    code, both, _ = ask(capsys, model, "--budgets", "4,8", question)
    assert code == 0
    parts = re.split(r"--- budget \d ---\n", both)
    assert len(parts) == 3 and parts[1] == short


def test_a_bare_model_is_asked_with_the_system_message_that_is_written():
    overrides = ["data.system_prompt=Be brief."]
    config = config_io.override(Config(), overrides)
    style = generate.prompt_format(resolve(config).method, is_run=False, overrides=overrides)
    assert (style.name, style.system) == ("think_answer", "Be brief.")


@pytest.mark.parametrize(
    "override", ["data.train=ledger", "data.train = ledger", "data={train: ledger}"]
)
def test_a_training_set_that_is_written_selects_the_format_of_a_bare_model(override):
    config = config_io.override(Config(), [override])
    settings = resolve(config).method
    style = generate.prompt_format(settings, is_run=False, overrides=[override])
    assert style.name == generate.prompt_format(settings, is_run=True, overrides=[]).name
    assert style.name != "think_answer"


@pytest.mark.parametrize(
    "key", ["budget.max=4", "train.steps=2", "grading.workers=3", "data.eval=[gsm8k]"]
)
def test_a_key_of_training_is_refused_before_the_policy_is_opened(capsys, model, question, key):
    assert generate.main(["--model", str(model), "--budget", "4", question, key]) == 2
    name = key.partition("=")[0]
    assert capsys.readouterr().err.startswith(f"error: {name} defines the policy, or does not")


def test_a_model_of_the_hub_is_got_when_asked(capsys, model, question, tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **how: model)
    told = ask(capsys, "Qwen/Tiny", "--download", "--budget", "4", question)
    assert told == ask(capsys, model, "--budget", "4", question)
    monkeypatch.undo()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    code, _, error = ask(capsys, "Qwen/Tiny", "--budget", "4", question)
    assert code == 2 and "--model: 'Qwen/Tiny' is neither" in error and "pass --download" in error


def test_several_budgets_and_none_are_each_told_in_words(monkeypatch, capsys, model, question):
    found = []

    def spy(params, prompts, budgets, *arguments, **options):
        found.append(prompts)
        raise KeyboardInterrupt

    monkeypatch.setattr(asking, "generate", spy)
    keys = [
        "--budget",
        "4,none,0,16",
        "conditioning.budget_input=prompt",
        question,
        "budget.cap=20",
    ]
    assert ask(capsys, model, *keys) == (130, "", "")
    (prompts,) = found
    said = [ledger_tokenizer().decode(row[:n]) for row, n in zip(prompts.tokens, prompts.lengths)]
    assert [text.removeprefix(f"<bos>{question}") for text in said] == [
        "f4<think>", "<think>", "f0<think>", "f16<think>"
    ]  # fmt: skip


@pytest.mark.slow
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


# Sampling settings of the publisher and of the run, which differ from the defaults.
OF_BASE = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
OF_RUN = {"temperature": 0.5, "top_p": 0.9}
AS_NATIVE = "data.prompt_format=native"


@pytest.fixture(scope="module")
def thinkers(tmp_path_factory):
    """Options for a run of a model that thinks by itself, its export, and models as published."""
    place = tmp_path_factory.mktemp("thinkers")
    shape = hf_world.FAMILIES["qwen3"]
    base = thinking_world.thinking_folder(place / "base", "qwen3", shape, **OF_BASE)
    silent = thinking_world.thinking_folder(place / "silent", "qwen3", shape)
    run = thinking_world.thinking_run(place / "run", base, eval=OF_RUN)
    export(run, place / "out")
    return {
        "run": ["--run", str(run)],
        "export": ["--model", str(place / "out")],
        "published": ["--model", str(base), AS_NATIVE],
        "without settings": ["--model", str(silent), AS_NATIVE],
        "other format": ["--model", str(base)],
    }


def sampling_of(monkeypatch, *arguments):
    """Returns the temperature and top-p with which a question is asked."""
    asked = []

    def spy(self, questions, budgets, *, temperature, top_p, **options):
        asked.append((temperature, top_p))
        raise KeyboardInterrupt

    monkeypatch.setattr(asking.Session, "ask", spy)
    assert generate.main([*arguments, "--budget", "4", "What is 1+1?"]) == 130
    return asked[0]


@pytest.mark.parametrize(
    ("name", "options", "sampling"),
    [
        ("run", [], (0.5, 0.9)),
        ("export", [], (0.7, 0.8)),
        ("published", [], (0.7, 0.8)),
        # The defaults of eval.temperature and eval.top_p.
        ("without settings", [], (0.6, 0.95)),
        ("other format", [], (0.0, 1.0)),
        # Options take precedence.
        ("run", ["--temperature", "0"], (0.0, 1.0)),
        ("export", ["--temperature", "0.3"], (0.3, 1.0)),
        ("export", ["--temperature", "0.3", "--top-p", "0.4"], (0.3, 0.4)),
        ("export", ["--top-p", "0.4"], (0.7, 0.4)),
    ],
)
def test_a_model_that_thinks_by_itself_is_sampled(monkeypatch, thinkers, name, options, sampling):
    assert sampling_of(monkeypatch, *thinkers[name], *options) == sampling


def test_top_p_has_an_effect_only_where_the_default_samples(capsys, thinkers):
    arguments = [*thinkers["other format"], "--budget", "4", "--top-p", "0.4", "What is 1+1?"]
    assert generate.main(arguments) == 2
    assert "--top-p 0.4 has no effect, because --temperature 0" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["native", "boxed", "think_answer", "characters"])
def test_a_bare_model_is_asked_in_the_format_that_is_written(name):
    overrides = [f"data.prompt_format={name}"]
    config = config_io.override(Config(), overrides)
    style = generate.prompt_format(resolve(config).method, is_run=False, overrides=overrides)
    assert style.name == name


def typed(monkeypatch, *lines):
    """A terminal at which somebody types these lines and then Ctrl-D."""
    waiting = iter(lines)

    def read(prompt):
        line = next(waiting, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)


def test_without_a_question_it_asks_again_and_again_and_compiles_once(
    monkeypatch, capsys, model, question
):
    from bacr_jax.rollout import branches, trunks

    compiled = []

    def note(self, *arguments, _ask=asking.Session.ask, **options):
        found = _ask(self, *arguments, **options)
        compiled.append(
            (trunks.decode_trunks._cache_size(), branches.decode_branches._cache_size())
        )
        return found

    monkeypatch.setattr(asking.Session, "ask", note)
    typed(monkeypatch, question, "", KeyboardInterrupt, f"{question}a1", "/budget 8,12", question)
    code, out, error = ask(capsys, model, "--budget", "4")
    assert (code, error) == (0, "")
    assert len(set(compiled[:2])) == 1 and len(compiled) == 3
    assert len(re.findall(r"\[\d+ thinking tokens, \d+ forced, \d+ answer\]\n", out)) == 4
    assert "Ctrl-D ends\n" in out and len(re.findall(r"^\d+\.\d s$", out, re.MULTILINE)) == 3
    assert out.index("budget 8,12, temperature 0, top-p 1, seed 0") < out.index("--- budget 8 ---")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/budget 8,x", "error: /budget 8,x: found 'x'; use whole numbers such as"),
        ("/budget", "error: /budget : found ''; use whole numbers"),
        ("/temperature hot", "error: /temperature hot is not a number; enter a number"),
        ("/temperature nan", "error: /temperature nan is out of range; use 0"),
        ("/top-p 0.5", "error: /top-p 0.5 has no effect, because /temperature 0"),
        ("/seed -1", "error: /seed -1 is not a valid seed; use a number from 0"),
        ("/exit", "error: /exit is not a command; enter a question, or /budget"),
        ("!!", "error: question 0: the tokenizer can't encode"),
    ],
)
def test_what_can_not_be_used_costs_a_line_and_no_more(monkeypatch, capsys, model, line, says):
    typed(monkeypatch, line, "/help")
    code, out, error = ask(capsys, model, "--budget", "4")
    assert code == 0 and error.count("\n") == 1 and says in error
    # Nothing has changed.
    assert "budget 4, temperature 0, top-p 1, seed 0" in out


def test_settings_that_are_typed_hold_for_what_follows(monkeypatch, capsys, model):
    typed(monkeypatch, "/temperature 2", "/top-p 0.9", "/seed 3", "/budget low,none", "/help")
    _, out, error = ask(capsys, model, "--budget", "4")
    assert error == "" and "budget 4,none, temperature 2, top-p 0.9, seed 3\n" in out
    typed(monkeypatch, "/temperature 2", "/top-p 0.9", "/temperature 0")
    assert ask(capsys, model, "--budget", "4")[2] == ""


def test_ctrl_c_ends_an_answer_and_not_the_program(monkeypatch, capsys, model, question):
    def interrupted(self, questions, budgets, *, watch, poll, **options):
        os.kill(os.getpid(), signal.SIGINT)
        watch(0, "begun", "")
        poll()

    typed(monkeypatch, question, "/help")
    with monkeypatch.context() as patch:
        patch.setattr(asking.Session, "ask", interrupted)
        code, out, error = ask(capsys, model, "--budget", "4")
        assert (code, error) == (0, "")
        assert out.index("begun\n[stopped]\n") < out.index("budget 4, temperature")
        # Where nobody can ask again it does end it.
        code, out, _ = ask(capsys, model, "--budget", "4", question)
        assert (code, out) == (130, "begun")


def test_ctrl_c_is_heeded_between_two_chunks(monkeypatch, capsys, model, question):
    chunks = []

    def watching(self, *arguments, watch, _ask=asking.Session.ask, **options):
        def first(row, thinking, answer):
            chunks.append(thinking)
            os.kill(os.getpid(), signal.SIGINT)

        return _ask(self, *arguments, watch=first, **options)

    monkeypatch.setattr(asking.Session, "ask", watching)
    assert ask(capsys, model, "--budget", "12", question)[0] == 130
    assert len(chunks) == 1


def test_a_pipe_is_read_line_by_line(monkeypatch, capsys, model, question):
    _, alone, _ = ask(capsys, model, "--budget", "4", question)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{question}\n\n{question}\n"))
    code, out, error = ask(capsys, model, "--budget", "4")
    assert (code, out, error) == (0, f"=== {question} ===\n{alone}" * 2, "")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{question}\n!!\n"))
    code, _, error = ask(capsys, model, "--budget", "4")
    assert code == 2 and error.startswith("error: standard input, line 2: question 0: the")
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    code, out, error = ask(capsys, model, "--budget", "4")
    assert (code, out) == (2, "") and "no question is given; pass one after the options" in error


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_bytes_that_are_no_text_cost_a_line(monkeypatch, capsys, model, question, errors):
    """In UTF-8 locales they raise in Python, in the C locale they pass as halves of pairs."""
    content = f"{question}\n".encode() + b"caf\xe9\n"
    piped = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", piped)
    code, out, error = ask(capsys, model, "--budget", "4")
    assert code == 2 and out.startswith(f"=== {question} ===")
    assert error == (
        "error: standard input, line 2: 'caf\\udce9' contains bytes that are not valid in "
        "the encoding of this locale; use UTF-8 text and set the environment variable "
        "LC_ALL=C.UTF-8\n"
    )
    for arguments in (["caf\udce9?"], [question, "data.system_prompt=\udcff"]):
        code, out, error = ask(capsys, model, "--budget", "4", *arguments)
        assert (code, out) == (2, "") and error.count("\n") == 1
        assert error.startswith("error: command line: '") and "not valid in the encoding" in error


def test_a_word_that_looks_like_a_setting_is_no_question(monkeypatch, capsys, model):
    """Though no question comes before it; x=5 is one."""
    typed(monkeypatch)
    assert generate.parse(["--model", "m", "--budget", "4", "x=5?"]).question == "x=5?"
    code, _, error = ask(capsys, model, "--budget", "4", "rollout.answer_token=3")
    assert code == 2 and "no such key; use rollout.answer_tokens" in error


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--budget", "4,x", "q"], "--budget 4,x: found 'x'"),
        (["--budget", "high", "q"], "or a level (low)"),
        (["--budget", "none", "012"], "or a smaller budget.cap"),
        (["--budget", "-4", "q"], "--budget -4: found '-4'"),
        (["--budget", "60", "012"], "the model's 64 positions leave"),
        (["--budget", "4", " "], "the question is empty; pass"),
        (
            ["--budget", "4", "--temperature", "-1", "q"],
            "--temperature -1.0 is out of range; use 0",
        ),
        (
            ["--budget", "4", "--temperature", "1e-30", "q"],
            "--temperature 1e-30 is out of range; use 0 (always the most likely token) or a "
            "number from 0.001",
        ),
        (["--budget", "4", "--top-p", ".5", "q"], "--top-p 0.5 has no effect, because"),
        (["q"], "command line: the following arguments are required: --budget"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, model, question, arguments, says):
    arguments = [question if word == "012" else word for word in arguments]
    code, out, err = ask(capsys, model, *arguments)
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and says in err


def answer(budget, thinking):
    text = f"<{budget}>"
    return Answer("q", budget, 0, thinking, len(thinking), 2, 3, text, text, "tag", True, (1,))


def terminal(width):
    return Console(
        file=io.StringIO(), width=width, height=30, force_terminal=True, color_system=None
    )


def last_frame(console):
    """What stands there at the end, without the sequences that moved the cursor."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    return text[text.rindex("budget 8") :].splitlines()


def test_budgets_stand_side_by_side_with_the_tokens_of_each_part():
    console = terminal(100)
    with LiveColumns(console, [8, None]) as columns:
        columns.watch(1, "soon", "")
        columns.show([answer(8, "ab"), answer(None, "abcd")])
    names, thinking, answers, counts = (line.strip() for line in last_frame(console))
    assert names.split() == ["budget", "8", "no", "budget"]
    assert thinking.split() == ["ab", "abcd"] and answers.split() == ["<8>", "<None>"]
    parts = [f"{n} thinking tokens, 2 forced, 3 answer" for n in (2, 4)]
    assert " ".join(counts.split()) == " ".join(parts)
    assert "soon" in console.file.getvalue()


def test_long_thinking_stays_in_its_column():
    console = terminal(60)
    with LiveColumns(console, [8, 16]) as columns:
        columns.show([answer(8, "x" * 200), answer(16, "z" * 10)])
    lines = last_frame(console)
    assert "".join(lines).count("x") == 200 and max(map(len, lines)) <= 60


@pytest.mark.parametrize(("width", "budgets", "fits"), [(80, 3, True), (80, 4, False)])
def test_columns_too_narrow_to_read_are_none(width, budgets, fits):
    assert LiveColumns.fit(terminal(width), list(range(budgets))) == fits
    assert not LiveColumns.fit(Console(file=io.StringIO(), width=width), [8])
