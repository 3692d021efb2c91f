"""SelfBudgeter under evaluation: its budget tag holds the evaluated budget, or its own."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import hf_world
from bacr_grading import VerifierGrader, load_verifier
from bacr_jax import evaluate
from bacr_jax.config import EvalConfig
from bacr_jax.config import io as config_io
from bacr_jax.config.settings import resolve
from bacr_jax.evaluation import decoder
from bacr_jax.evaluation.decoder import (
    Decoder,
    declaration,
    draw_samples,
    evaluate_set,
    for_grader,
    with_declared_budget,
)
from bacr_jax.evaluation.samples import EvalSampling, EvalSetting
from bacr_jax.export import policy_folder
from bacr_jax.methods import load_method
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.prompts.encoding import encode_prompts, encode_text
from bacr_jax.prompts.formats import FORMATS
from bacr_jax.prompts.task_data import build_task_data
from bacr_jax.questions.ledger import ledger_tokenizer
from bacr_jax.runs import initial, setup
from bacr_jax.runs.checkpoint import Checkpoints
from bacr_jax.runs.folder import open_run
from bacr_jax.types import CLOSED_BY_TAG, Branches, Trunks

CONFIG = """
method: selfbudgeter
conditioning: {budget_input: none}
cuts: {count: 1}
model: {compute_dtype: float32, hidden_size: 16, intermediate_size: 32, num_layers: 1,
        scan_layers: false, remat: none}
data: {ledger: {train_size: 20}, num_groups: 1}
budget: {min: 4, max: 12, prior: fixed}
curriculum: {mu0: 8, sigma: 4}
rollout: {questions: 4, group_size: 2, answer_tokens: 2, chunk: 4, slots: 3}
train: {steps: 1, minibatches: 1}
eval: {budgets: [8, 12], size: 3, samples: 0}
output: {tensorboard: false}
"""


@pytest.fixture
def asked(monkeypatch):
    """Prompts that reach the decoder, which is interrupted before it compiles anything."""
    found = []

    def spy(params, prompts, *arguments, **options):
        found.append(jax.tree.map(np.asarray, prompts))
        raise KeyboardInterrupt

    monkeypatch.setattr(decoder, "generate", spy)
    return found


def texts(tokenizer, prompts):
    return [
        tokenizer.decode(row[:length])
        for row, length in zip(prompts.tokens, prompts.lengths, strict=True)
    ]


def ask_once(task_data, policy, params, config, phi_of=None):
    """Starts the evaluation inside a training run, up to the first prompts for the decoder."""
    with pytest.raises(KeyboardInterrupt):
        evaluate_set(
            Decoder(policy.decode_params(params), policy.evaluation, phi_of, 12),
            task_data,
            task_data.eval["ledger"],
            jax.random.key(0),
            config=config,
            seed=0,
        )


def test_only_a_format_with_a_place_for_it_is_given_a_budget():
    tokenizer, given = ledger_tokenizer(), EvalConfig()
    own = EvalConfig(budget_tag="declared")
    assert tokenizer.decode(declaration(tokenizer, FORMATS["ledger_budget"], given, 12)) == "12h"
    assert not len(declaration(tokenizer, FORMATS["ledger_budget"], own, 12))
    assert not len(declaration(tokenizer, FORMATS["ledger"], given, 12))


def test_all_budgets_are_told_in_one_width():
    tokenizer, style = ledger_tokenizer(), FORMATS["ledger_budget"]
    prompts, _ = encode_prompts(tokenizer, ["4a2", "1a3b1"], style, max_tokens=20)
    config = EvalConfig(budgets=(8, 128))
    told = {b: with_declared_budget(prompts, tokenizer, style, config, b) for b in config.budgets}
    assert told[8].tokens.shape == told[128].tokens.shape
    for budget, found in told.items():
        ends = ["4a2<think>g", "1a3b1<think>g"]
        assert texts(tokenizer, found) == [f"<bos>{end}{budget}h" for end in ends]


def test_a_runs_policy_is_given_each_budget_in_its_tag(tmp_path, asked, capsys):
    (tmp_path / "small.yaml").write_text(CONFIG)
    run = tmp_path / "run"
    settings = config_io.load([tmp_path / "small.yaml"], [f"output.dir={run}"])
    tokenizer = ledger_tokenizer()
    policy = setup.make_policy(
        resolve(settings).policy, load_method(resolve(settings).method), len(tokenizer)
    )
    params = initial.initial_params(jax.random.key(0), policy, None)
    with open_run(run, settings) as folder:
        checkpoints = Checkpoints(folder.checkpoints, keep=1)
        checkpoints.save(1, {"train": {"policy": params}}, {})
        checkpoints.close()
    style = FORMATS["ledger_budget"]
    task_data = build_task_data(resolve(settings).task, tokenizer, len(tokenizer), style=style)
    ask_once(task_data, policy, params, settings.eval)
    task_data.close()
    out = ["--out", str(tmp_path / "given")]
    assert evaluate.main(["--run", str(run), "--budgets", "12", *out]) == 130
    own = ["--out", str(tmp_path / "own"), "eval.budget_tag=declared"]
    assert evaluate.main(["--run", str(run), *own]) == 130
    for prompts, ends in zip(asked, [("g8h", "g12h"), ("g12h",), ("g",)], strict=True):
        told = texts(ledger_tokenizer(), prompts)
        for end in ends:
            assert any(text.endswith(f"<think>{end}") for text in told)
        assert all(text.endswith(tuple(f"<think>{end}" for end in ends)) for text in told)
    # What was sampled with a budget in the tag is not continued without it.
    capsys.readouterr()
    assert evaluate.main(["--run", str(run), *own[:2]]) == 2
    assert "decoding.budget_tag (declared in the folder, given now)" in capsys.readouterr().err


@pytest.fixture(scope="module")
def english(tmp_path_factory):
    folder = tmp_path_factory.mktemp("budget_tag")
    tokenizer = hf_world.chat_tokenizer()
    shape = Qwen2Config(
        len(tokenizer), 16, 24, 1, 2, 1, 8, rope_theta=1e4, tie_embeddings=True, max_positions=2048
    )
    params = hf_world.random_params(shape)
    policy_folder.save_policy(folder / "tiny", params, config=shape, tokenizer=tokenizer)
    (folder / "test.jsonl").write_text('{"question": "What is 1 + 1?", "answer": "2"}\n')
    return folder


def test_a_folder_says_nothing_of_its_method_so_the_command_does(english, tmp_path, asked, capsys):
    how = ["--model", english / "tiny", "--data", f"jsonl:{english / 'test.jsonl'}", "--budgets"]
    how += ["4", "--out", tmp_path / "out", "rollout.answer_tokens=3"]
    own = "method=selfbudgeter"
    assert evaluate.main([str(a) for a in [*how, own]]) == 130
    (text,) = texts(hf_world.chat_tokenizer(), asked[0])
    assert text.endswith("<budget>4</budget>\n<solution>\n") and "What is 1 + 1?" in text
    capsys.readouterr()
    for refused, says in (
        ([own, "data.prompt_format=boxed"], "need a special prompt format"),
        (["method=grpo"], "defines the policy and can't be overridden"),
    ):
        assert evaluate.main([str(a) for a in [*how, *refused]]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and says in error


def test_a_policy_that_is_told_in_words_reads_each_budget(tmp_path, asked):
    (tmp_path / "small.yaml").write_text(CONFIG)
    keys = ["method=bacr", "conditioning.budget_input=prompt", "eval.budgets=[8, 120]"]
    settings = config_io.load([tmp_path / "small.yaml"], keys)
    tokenizer = ledger_tokenizer()
    policy = setup.make_policy(
        resolve(settings).policy, load_method(resolve(settings).method), len(tokenizer)
    )
    task_data = build_task_data(resolve(settings).task, tokenizer, len(tokenizer))
    params = initial.initial_params(jax.random.key(0), policy, None)
    for budget in settings.eval.budgets:
        alone = dataclasses.replace(settings.eval, budgets=(budget,))
        ask_once(task_data, policy, params, alone, policy.phi_of(params))
    task_data.close()
    for prompts, budget in zip(asked, settings.eval.budgets, strict=True):
        assert all(text.endswith(f"f{budget}<think>") for text in texts(tokenizer, prompts))
    # One width, so that nothing is compiled twice.
    assert len({prompts.tokens.shape for prompts in asked}) == 1


def test_any_model_can_be_told_in_words_by_the_command(english, tmp_path, asked, capsys):
    how = ["--model", english / "tiny", "--data", f"jsonl:{english / 'test.jsonl'}", "--budgets"]
    how += ["4", "--out", tmp_path / "out", "rollout.answer_tokens=3"]
    words = ["conditioning.budget_input=prompt", "conditioning.prompt_text=Use {budget} tokens."]
    assert evaluate.main([str(a) for a in [*how, *words]]) == 130
    (text,) = texts(hf_world.chat_tokenizer(), asked[0])
    assert "What is 1 + 1?" in text and "\n\nUse 4 tokens.<|im_end|>" in text
    # What was sampled with one sentence is not continued with another.
    capsys.readouterr()
    assert evaluate.main([str(a) for a in [*how, words[0]]]) == 2
    assert "decoding.budget_words (Use {budget} tokens. in the folder" in capsys.readouterr().err
    assert (
        evaluate.main([str(a) for a in [*how, words[0], "conditioning.prompt_text=Be brief."]]) == 2
    )
    assert "that contains {budget} once" in capsys.readouterr().err


@pytest.mark.slow
def test_a_given_budget_is_no_part_of_what_was_sampled(english, tmp_path):
    how = ["--model", english / "tiny", "--data", f"jsonl:{english / 'test.jsonl'}", "--budgets"]
    how += ["4,16", "--out", tmp_path / "out", "rollout.answer_tokens=3", "method=selfbudgeter"]
    assert evaluate.main([str(a) for a in how]) == 0
    lines = (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    for found in map(json.loads, lines):
        assert found["thinking_tokens"] <= found["budget"] in (4, 16)
        assert "<budget>" not in found["text"] and "</solution>\n<answer>" in found["text"]


def test_a_grader_of_responses_gets_the_same_texts_as_in_training(tmp_path):
    """At the end of the thinking, and at an earlier cut."""
    (tmp_path / "small.yaml").write_text(CONFIG)
    (tmp_path / "mine.py").write_text(
        "import json\n"
        "def check(question, response, gold):\n"
        f"    texts = json.load(open({str(tmp_path / 'texts.json')!r}))\n"
        "    return texts.index(response) / 4\n"
    )
    settings = config_io.load([tmp_path / "small.yaml"], ["method=grpo"])
    tokenizer = ledger_tokenizer()
    task_data = build_task_data(resolve(settings).task, tokenizer, len(tokenizer))
    verifier = load_verifier(f"{tmp_path / 'mine.py'}:check")
    encode = lambda text: encode_text(tokenizer, text)
    thinking, early, late = map(
        encode, ("a1+2=3</think>", "</think><answer>1</answer>", "<answer>3</answer>")
    )
    trunks = Trunks.empty(1, width=1 + len(thinking), sampled=len(thinking))
    trunks.tokens[0, 1:] = thinking
    one = np.ones(1, np.int32)
    trunks = dataclasses.replace(
        trunks,
        prompt_lengths=one,
        sampled=one * len(thinking),
        thinking=one * (len(thinking) - 1),
        close=one * CLOSED_BY_TAG,
    )
    tokens = np.zeros((1, 2, len(early)), np.int32)
    tokens[0, 0] = early
    tokens[0, 1, : len(late)] = late
    zeros = np.zeros((1, 2), np.int32)
    branches = Branches(
        tokens=tokens,
        context=np.array([[3, 1 + len(thinking)]], np.int32),
        forced=np.array([[2, 1]], np.int32),
        sampled=zeros + 2,
        finished=zeros > -1,
        source=zeros,
        logprobs=np.zeros((1, 2, 1), np.float32),
    )
    (texts,) = task_data.responses(trunks, branches)
    (tmp_path / "texts.json").write_text(json.dumps(["", *texts]))
    questions = task_data.eval["ledger"]
    part = np.zeros(1, int), (EvalSetting("greedy", 8, 1, cut=2), EvalSetting("greedy", 8, 1))
    decoded = SimpleNamespace(traces=lambda *_: [(trunks, branches)])
    with VerifierGrader(dataclasses.replace(verifier, of_response=True)) as grader:
        sampling = EvalSampling(
            dataclasses.replace(task_data, graders={questions.set.graded_by: grader}),
            jax.random.key(0),
            settings.eval,
            None,
            lambda count: None,
        )
        (samples,) = draw_samples(
            decoded, questions, np.zeros(1, int), [part], sampling, name="ledger"
        )
    assert [sample.correct for sample in samples] == [0.25, 0.5]
    assert [sample.extracted for sample in samples] == ["1", "3"]


def test_a_box_in_a_solution_is_no_strict_answer():
    style = FORMATS["budget_solution"]
    from bacr_grading import Grader

    cut = "so it is \\boxed{7}, wait\n</solution>\n<answer>\n1"
    with Grader(workers=1) as grader:
        (verdict,) = grader.grade([for_grader(cut, style)], ["7"], mode="lenient")
    assert verdict.correct and not verdict.strict
