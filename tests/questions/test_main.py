"""`bacr data --inspect`: what a person sees, and one line for bad input."""

import json
import os
import subprocess
import sys

import pytest

from bacr_jax.questions.__main__ import main


def table(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.fixture
def files(tmp_path):
    rows = [
        {"id": f"p{i}", "question": f"What is {i} plus {i}?", "answer": str(2 * i), "level": i}
        for i in range(1, 5)
    ]
    bad = {"id": "bad", "question": "What?", "answer": ""}
    train = table(tmp_path / "train.jsonl", [*rows, rows[0] | {"id": "again"}, bad])
    copy = {"question": "what is 3 plus 3", "answer": "\\sqrt{36}"}
    other = {"question": "Name the largest prime number below one hundred.", "answer": "97"}
    test = table(tmp_path / "test.jsonl", [copy, other])
    return train, test


def show(capsys, *arguments):
    assert main([*map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()


def test_rows_answers_levels_groups_and_what_is_left_out(files, capsys):
    lines = show(capsys, "--inspect", f"jsonl:{files[0]}")
    assert lines[:3] == [
        "jsonl: 5 questions",
        "  left out, no answer that could be graded: 1 (bad)",
        "    bad: no answer that could be graded",
    ]
    assert "answers: number 5 (2; 4; 6)" in lines
    assert "levels: 1: 2, 2: 1, 3: 1, 4: 1" in lines
    assert "groups (data.groups=level): 0: 3, 1: 1, 2: 1, 3: 0" in lines
    assert "repeated questions in the set: 1" in lines
    assert any("pass --tokenizer DIR" in line for line in lines)


def test_questions_without_a_label_are_counted_and_all_of_them_are_refused(files, tmp_path, capsys):
    labels = [{"id": f"p{i}", "avg": 0.3 * i, "samples": 8} for i in range(1, 4)]
    words = ["--inspect", f"jsonl:{files[0]}", "data.groups=solve_rate"]
    words.append(f"data.labels={table(tmp_path / 'labels.jsonl', labels)}")
    groups = "groups (data.groups=solve_rate): 0: 1, 1: 1, 2: 1, 3: 0, without a label: 2"
    assert groups in show(capsys, *words)
    table(tmp_path / "labels.jsonl", [labels[0] | {"id": "other"}])
    assert main(words) == 2
    assert "no label for 5 of 5 questions, the first of which is 'p1'" in capsys.readouterr().err


def test_near_duplicates_of_a_training_set_with_and_without(files, capsys):
    train, test = files
    lines = show(capsys, "--inspect", f"jsonl:{test}", "--against", f"jsonl:{train}")
    assert lines[-1] == "near-duplicates of jsonl (resemblance 0.6 or more): 1 of 2, 1 without them"
    assert "answers: expression 1 (\\sqrt{36}), number 1 (97)" in lines


def test_columns_may_be_those_of_the_training_set_alone(files, tmp_path, capsys):
    train = table(tmp_path / "frage.jsonl", [{"frage": "What is 2 plus 2?", "answer": "4"}])
    column = ["--against", f"jsonl:{train}", "data.question_column=frage"]
    known = table(tmp_path / "gsm8k.jsonl", [{"question": "What is 2 plus 2?", "answer": "#### 4"}])
    lines = show(capsys, "--inspect", f"gsm8k:{known}", *column)
    assert lines[-1].endswith(": 1 of 1, 0 without them")


def test_the_ledger_brings_its_tokenizer(capsys):
    lines = show(capsys, "--inspect", "ledger", "data.ledger.train_size=50")
    # 3 + 2n tokens for 1 to 5 operations
    assert any(line.startswith("prompt tokens (ledger): 0 %: 5, ") for line in lines)
    assert any("100 %: 13;" in line for line in lines)


def test_prompts_that_tell_a_budget_in_words_are_longer_by_it(capsys):
    more = ["conditioning.budget_input=prompt", "data.ledger.train_size=50"]
    lines = show(capsys, "--inspect", "ledger", *more)
    (line,) = [line for line in lines if line.startswith("prompt tokens (ledger, 'f4096'): ")]
    # the mark and four digits
    assert "0 %: 10, " in line and "100 %: 18;" in line


class TestShowPrompts:
    def test_of_a_config_without_a_model(self, files, tmp_path, capsys):
        config = tmp_path / "run.yaml"
        config.write_text(
            f"data: {{train: 'jsonl:{files[0]}', eval: ['jsonl:{files[1]}']}}\n"
            "model: {path: not-here}\nconditioning: {budget_input: prompt}\n"
        )
        lines = show(capsys, "--config", config, "--show-prompts", 1)
        assert lines[:2] == [
            "jsonl, prompt format think_answer, with a budget of 4096",
            "no tokenizer is available: these are the messages that its chat template will format",
        ]
        at = lines.index("--- p1")
        assert lines[at + 1].startswith("[system] Reason step by step between <think> and ")
        assert lines[at + 2 : at + 5] == [
            "[user] What is 1 plus 1?\\n",
            "\\n",
            "Think for at most 4096 tokens.\\n",
        ]
        assert lines[-5].startswith("thinking begins here, opened by the chat template or else the")
        assert lines[-1] == "and the answer follows, up to </answer>"
        own = "data.system_prompt=Be brief."
        lines = show(capsys, "--config", config, "--show-prompts", 1, own)
        assert lines[lines.index("--- p1") + 1] == "[system] Be brief.\\n"

    def test_of_the_ledger_in_its_own_tokens(self, capsys):
        arguments = ["--inspect", "ledger", "--show-prompts", "2", "data.ledger.train_size=9"]
        lines = show(capsys, *arguments)
        shown = [line for line in lines if line.startswith("<bos>")]
        assert len(shown) == 2
        assert all(line.endswith("<think>") for line in shown)
        assert "  if the thinking was truncated: </think><answer>" in lines

    def test_of_a_chat_model_with_its_special_tokens(self, files, shared_data, capsys):
        odd = table(files[0].with_name("odd.jsonl"), [{"question": "A\x07 B\u200b", "answer": "1"}])
        tokenizer = shared_data / "qwen_tokenizer"
        options = ["--show-prompts", "3", "--tokenizer", tokenizer, "data.num_groups=1"]
        lines = show(capsys, "--inspect", f"jsonl:{odd}", *options)
        assert lines[1].startswith("--- jsonl-train-0, ")
        assert "A\\x07 B\\u200b<|im_end|>\\n" in lines
        assert lines[-8:-6] == ["<think>\\n", ""]
        assert lines[-5].startswith(
            "thinking begins here, opened by the prompt format, and continues up"
        )

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ([], "no data set is given; pass --inspect NAME:PATH to show"),
            (
                ["--inspect", "ledger", "--show-prompts", "1", "--against", "x"],
                "--against has no effect",
            ),
            (
                ["--inspect", "ledger", "--show-prompts", "0"],
                "--show-prompts 0 is out of range; use 1 to 1000",
            ),
        ],
    )
    def test_bad_options_are_one_line(self, arguments, says, capsys):
        assert main(arguments) == 2
        assert says in capsys.readouterr().err


@pytest.mark.slow
def test_prompt_lengths_of_real_questions(shared_data, capsys):
    arguments = ["--inspect", "math500:math500/test.jsonl", f"data.dir={shared_data}"]
    tokenizer = ["--tokenizer", str(shared_data / "qwen_tokenizer")]
    tags = show(capsys, *arguments, *tokenizer)
    boxed = show(capsys, *arguments, *tokenizer, "data.prompt_format=boxed")
    (long,) = [line for line in tags if line.startswith("prompt tokens (think_answer): ")]
    (short,) = [line for line in boxed if line.startswith("prompt tokens (boxed): ")]
    least = lambda line: int(line.split(" 0 %: ")[1].split(",")[0])
    # the boxed format lacks the request for tags and the opening tag
    assert 10 < least(long) - least(short) < 60


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["jsonl:nowhere.jsonl"], "no file or folder"),
        (["jsonl"], "jsonl"),
        (["mth:x"], "math"),
        (["jsonl:{train}", "data.question_column=frage"], "the columns are id, question"),
        (["jsonl:{train}", "data.qestion_column=frage"], "data.question_column"),
        (["jsonl:{train}", "data.num_groups=9"], "num_groups"),
        (
            ["gsm8k:{train}", "data.answer_column=x"],
            "data.answer_column=x has no effect, because no set is a table",
        ),
        (
            ["jsonl:{train}", "--tokenizer", "nowhere"],
            "--tokenizer nowhere: there is no such folder",
        ),
        (
            ["ledger", "--tokenizer", "{folder}"],
            "have a built-in character tokenizer; leave the option out",
        ),
        (["jsonl:{train}", "--tokenizer", "{folder}"], "is missing or can't be read"),
        (["jsonl:{train}", "--against", "jsonl:nowhere"], "no file or folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(files, capsys, arguments, says):
    places = {"train": files[0], "folder": files[0].parent}
    spec, *rest = [argument.format(**places) for argument in arguments]
    assert main(["--inspect", spec, *rest]) == 2
    error = capsys.readouterr().err
    assert all(line.startswith("error: ") for line in error.splitlines()) and says in error


def test_the_command_itself():
    bad = subprocess.run(
        [sys.executable, "-m", "bacr_jax", "data", "--inspect", "jsonl:nowhere.jsonl"],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.count("\n") == 1 and "nowhere.jsonl" in bad.stderr
