"""An exported folder in plain transformers says what this package says, token for token."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

import export_world
import hf_world
from bacr_jax.config import ConditioningConfig
from bacr_jax.config.budgets import cap
from bacr_jax.data.environment import make_rules
from bacr_jax.data.prompts import encode_prompts
from bacr_jax.data.told import told_prompts
from bacr_jax.evaluation.decoder import open_decoder
from bacr_jax.model import hf
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.report import exported_folder
from bacr_jax.rollout import generate, sampling_params
from bacr_jax.runs.open import open_policy
from bacr_jax.types import NO_BUDGET

torch = pytest.importorskip("torch", reason="needs torch: pip install -e '.[parity]'")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

BUDGETS = [0, 8, 16, 64, None]


@pytest.fixture(autouse=True)
def own_modules(tmp_path, monkeypatch):
    """transformers copies a folder's code before it runs it: not to the user's cache."""
    modules = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    monkeypatch.syspath_prepend(modules)


def saved_policy(run):
    saved = open_policy(run, None)
    style = exported_folder.trained_style(saved.config)
    return saved, style, saved.tokenizer(), exported_folder.told_in(saved.config, style)


def asked(run, questions, budgets):
    """Prompts of rows, as this package makes them."""
    saved, style, tokenizer, words = saved_policy(run)
    plain, _ = encode_prompts(tokenizer, questions, style, max_tokens=500)
    if not words:
        return plain
    waiting, _ = told_prompts(tokenizer, questions, style, words, largest=999, max_tokens=500)
    told = np.array([NO_BUDGET if b is None else b for b in budgets], np.int32)
    return waiting.at(np.arange(len(questions)), told, plain)


def ours(run, questions, budgets):
    """Ids of each row's response, prompt left out, and the rollout they are from."""
    saved, style, tokenizer, _ = saved_policy(run)
    limits = np.array([cap(saved.config) if b is None else b for b in budgets], np.int32)
    told = np.array([NO_BUDGET if b is None else b for b in budgets], np.int32)
    rows = hf.load_policy(saved.config.model.path)[0].vocab_size if saved.config.model.path else 27
    most = max(int(limits.max()), 1)
    decoder = open_decoder(saved, rows, max_thinking=most, slots=min(len(questions), 100))
    rollout = generate(
        decoder.params,
        asked(run, questions, budgets),
        told,
        limits[:, None],
        jax.random.key(0),
        spec=decoder.spec,
        rules=make_rules(tokenizer, style, rows),
        sampling=sampling_params(0.0),
        phi_of=decoder.phi_of,
        limits=limits,
    )
    trunks, branches = jax.tree.map(np.asarray, (rollout.trunks, rollout.branches))
    found = []
    for row, start in enumerate(trunks.prompt_lengths):
        thinking = trunks.tokens[row, start : branches.context[row, 0]].tolist()
        written = branches.forced[row, 0] + branches.sampled[row, 0]
        found.append(thinking + branches.tokens[row, 0, :written].tolist())
    return found, trunks


class Folder:
    """An exported folder in transformers, as anybody loads it."""

    def __init__(self, path):
        how = {"trust_remote_code": True, "dtype": torch.float32}
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, **how).eval()

    def chats(self, questions, budgets):
        """Prompts as text."""
        render = self.tokenizer.apply_chat_template
        chat = lambda question: [{"role": "user", "content": question}]
        return [
            render(chat(q), tokenize=False, add_generation_prompt=True, budget=b)
            for q, b in zip(questions, budgets)
        ]

    def says(self, questions, budgets, **how):
        """Ids of each row's response; padding behind it is left out."""
        texts = self.chats(questions, budgets)
        inputs = self.tokenizer(texts, add_special_tokens=False, return_tensors="pt", padding=True)
        found = self.model.generate(**inputs, **{"budget": budgets, **how})
        return found[:, inputs["input_ids"].shape[1] :].tolist()


def assert_same(found, expected, pad):
    for row, ids in zip(found, expected, strict=True):
        assert row[: len(ids)] == ids
        assert set(row[len(ids) :]) <= {pad}


def check(run, out, questions):
    """20 prompts at every budget, in one batch and one by one."""
    rows = [(question, budget) for budget in BUDGETS for question in questions]
    all_questions, budgets = map(list, zip(*rows))
    expected, trunks = ours(run, all_questions, budgets)
    folder = Folder(out)
    pad = folder.model.generation_config.pad_token_id
    assert_same(folder.says(all_questions, budgets), expected, pad)
    for question, budget, ids in zip(all_questions, budgets, expected):
        assert folder.says([question], [budget]) == [ids]
    return folder, expected, trunks


# The ledger ----------------------------------------------------------------------------------

LEDGER = replace(export_world.LEDGER, hidden_size=32, head_dim=8, max_positions=128)


def ledger_run(tmp_path, told, seed=1):
    conditioning = ConditioningConfig(told=told)
    given = {"conditioning": conditioning} if conditioning.embeds else {}
    params = hf_world.random_params(LEDGER, seed, **given)
    # Far from uniform and far from ties, so that rounding decides nothing.
    params["embed"] = params["embed"] * 3
    model = {**export_world.MODEL, "hidden_size": 32, "head_dim": 8, "compute_dtype": "float32"}
    settings = {
        "model": model,
        "conditioning": {"told": told},
        "budget": {"min": 8, "max": 64, "levels": {"low": 16}},
        "rollout": {"answer_tokens": 5},
    }
    run = export_world.make_run(tmp_path / "run", params, settings)
    exported_folder.export(run, tmp_path / "out")
    return run, tmp_path / "out"


def ledger_questions():
    from bacr_jax.data.ledger import make_problems

    return [p.question for p in make_problems(0, 20, max_operand=3, split="test")]


@pytest.mark.parametrize("told", ["embedding", "words", "both", "nothing"])
def test_the_ledger_in_transformers_says_what_we_say(tmp_path, told):
    run, out = ledger_run(tmp_path, told)
    folder, expected, trunks = check(run, out, ledger_questions())
    # Thinking that was cut and that closed itself, and texts that differ by budget and question.
    assert {0, 1} <= set(trunks.close.tolist())
    assert len({tuple(ids) for ids in expected}) > 40


def test_the_pipeline_takes_a_budget(tmp_path):
    run, out = ledger_run(tmp_path, "both")
    questions = ledger_questions()[:3]
    expected, _ = ours(run, questions, [8] * 3)
    ask = transformers.pipeline(
        "text-generation", model=str(out), trust_remote_code=True, dtype=torch.float32
    )
    chats = [[{"role": "user", "content": question}] for question in questions]
    told = {"tokenizer_encode_kwargs": {"budget": 8}, "skip_special_tokens": False}
    for size in (1, 3):
        said = ask(chats, budget=8, batch_size=size, return_full_text=False, **told)
        texts = [answers[0]["generated_text"].replace("<pad>", "") for answers in said]
        assert texts == [ask.tokenizer.decode(ids) for ids in expected]


def test_the_command_says_the_same_of_a_run_and_of_its_folder(tmp_path, capsys):
    from bacr_jax import generate as command

    run, out = ledger_run(tmp_path, "both")
    question = ledger_questions()[0]
    said = []
    for source in (["--run", str(run)], ["--model", str(out)]):
        capsys.readouterr()
        assert command.main([*source, "--budget", "0,low,24,none", question]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_bad_budgets_and_batches_are_value_errors_that_name_the_field(tmp_path):
    _, out = ledger_run(tmp_path, "embedding")
    folder = Folder(out)
    ask = lambda budget, **how: folder.says(ledger_questions()[:2], [8, 8], budget=budget, **how)
    for bad in (-1, 8.5, "8", "high", [8], [8, -1], torch.tensor([8.0, 8.0]), True):
        with pytest.raises(ValueError, match="^budget: found"):
            ask(bad)
    with pytest.raises(ValueError, match="^budget: found 120, .* 128 positions leave"):
        ask(120)
    with pytest.raises(ValueError, match="^budget: is held by greedy and sampled decoding"):
        ask(8, num_beams=2)
    folder.tokenizer.padding_side = "right"
    with pytest.raises(ValueError, match="^attention_mask: found padding on the right"):
        folder.says(["4a2b3c1", "4a2b3c1d2a1"], [8, 8])


class Streamer:
    """Keeps what it is given."""

    def __init__(self):
        self.ids, self.over = [], False

    def put(self, value):
        self.ids += value.flatten().tolist()

    def end(self):
        self.over = True


def test_a_length_of_the_caller_stands_and_samples_are_held_too(tmp_path):
    _, out = ledger_run(tmp_path, "embedding")
    folder, questions = Folder(out), ledger_questions()[:2]
    whole = folder.says(questions, [8, 8])
    assert [row[:4] for row in whole] == folder.says(questions, [8, 8], max_new_tokens=4)
    given = Streamer()
    (alone,) = folder.says(questions[:1], [8], streamer=given)
    assert given.ids[-len(alone) :] == alone and given.over
    torch.manual_seed(0)
    drawn = folder.says(questions, [0, 8], do_sample=True, num_return_sequences=4)
    assert len(drawn) == 8 and all(row[:2] == [3, 4] for row in drawn[:4])
    # Thinking of at most 8 tokens, its tag and the answer's, an answer of at most 5.
    assert all(4 in row[:11] for row in drawn[4:])
    assert max(len([i for i in row if i]) for row in drawn) <= 8 + 2 + 5


# A real tokenizer ----------------------------------------------------------------------------

QWEN = Qwen2Config(
    151_936, 32, 48, 4, 4, 2, 8, rope_theta=1e4, tie_embeddings=False, max_positions=2048
)


def writes_tags(tokenizer, params, seed=0):
    """Parameters whose greedy text is of few tokens, among them those of both closing tags.

    After `</` comes `think` or `answer`, and after these what ends the tag.
    """
    rng = np.random.default_rng(seed)
    one = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    opened, think, end = one("</think>\n")
    (answer,) = one("answer")
    words = rng.choice(20_000, 30, replace=False) + 1000
    embed = np.array(params["embed"])
    active = np.unique([*words, opened, think, answer, end, tokenizer.eos_token_id, *one("\n")])
    embed[active] = 2.0 * rng.standard_normal((len(active), 32))
    head = np.zeros_like(embed)
    head[active] = 2.0 * rng.standard_normal((len(active), 32))
    follow = [(opened, think), (opened, answer), (think, end), (answer, end)]
    for before, after in [*follow, *((word, opened) for word in words[:6])]:
        head[after] += 6.0 * embed[before] / np.linalg.norm(embed[before])
    return {**params, "embed": jax.numpy.asarray(embed), "lm_head": jax.numpy.asarray(head)}


def qwen_run(tmp_path, tokens, conditioning, **settings):
    how = ConditioningConfig(**conditioning)
    given = {"conditioning": how} if how.embeds else {}
    params = writes_tags(tokens, hf_world.random_params(QWEN, 3, **given))
    plain = {name: leaf for name, leaf in params.items() if name != "budget"}
    hf.save_policy(tmp_path / "base", plain, config=QWEN, tokenizer=tokens)
    settings = {
        "model": {"path": str(tmp_path / "base"), "compute_dtype": "float32"},
        "data": {"train": "math:somewhere"},
        "conditioning": conditioning,
        "budget": {"min": 8, "max": 64},
        "rollout": {"answer_tokens": 12},
        **settings,
    }
    run = export_world.make_run(tmp_path / "run", params, settings)
    exported_folder.export(run, tmp_path / "out")
    return run, tmp_path / "out"


def math_questions(shared_data):
    with (shared_data / "math500/test.jsonl").open() as file:
        return [json.loads(next(file))["problem"] for _ in range(20)]


RESPONSE = {"positions": "response", "sharing": "per_layer", "input": "log", "gate": "tanh"}


@pytest.mark.parametrize("conditioning", [{}, RESPONSE, {"told": "words"}], ids=str)
def test_a_real_tokenizer_says_what_we_say(tmp_path, shared_data, qwen, conditioning):
    run, out = qwen_run(tmp_path, qwen, conditioning)
    questions = math_questions(shared_data)
    folder, _, trunks = check(run, out, questions)
    assert {0, 1} <= set(trunks.close.tolist())
    # Budgets that cut inside the tokens of the tag: after `</`, and after `</think`.
    rows = [(question, budget) for budget in range(1, 9) for question in questions]
    asked_again, budgets = map(list, zip(*rows))
    expected, cut = ours(run, asked_again, budgets)
    thought = [
        qwen.decode(tokens[start : start + count].tolist())
        for tokens, start, count in zip(cut.tokens, cut.prompt_lengths, cut.thinking)
    ]
    inside = [i for i, text in enumerate(thought) if text.endswith(("</", "</think"))]
    assert {thought[i].rpartition("</")[2] for i in inside if cut.close[i] == 0} == {"", "think"}
    pick = lambda values: [values[i] for i in inside]
    found = folder.says(pick(asked_again), pick(budgets))
    assert_same(found, pick(expected), folder.model.generation_config.pad_token_id)
