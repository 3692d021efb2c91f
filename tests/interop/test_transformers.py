"""An exported folder in plain transformers says what this package says, token for token."""

import shutil
import sys
from dataclasses import replace

import pytest

from bacr_jax.model.sizes import RopeScaling
from interop_world import (
    QWEN,
    ledger_questions,
    ledger_run,
    math_questions,
    ours,
    qwen_run,
)

torch = pytest.importorskip("torch", reason="needs torch: pip install -e '.[parity]'")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

from bacr_jax.export.budget_generation import CACHE  # noqa: E402

BUDGETS = [0, 8, 16, 64, None]


@pytest.fixture(autouse=True)
def own_modules(tmp_path, monkeypatch):
    """transformers copies a folder's code before it runs it: not to the user's cache."""
    modules = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    monkeypatch.syspath_prepend(modules)
    # The package of the copies, which still has the path of the test before.
    monkeypatch.delitem(sys.modules, "transformers_modules", raising=False)


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
        if how.get("return_dict_in_generate"):
            # A score for each step, and a cache of all tokens but the last.
            assert found[CACHE].get_seq_length() == found.sequences.shape[1] - 1
            assert len(found.scores) == found.sequences.shape[1] - inputs["input_ids"].shape[1]
            found = found.sequences
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


@pytest.mark.parametrize("told", ["embedding", "prompt", "both", "none"])
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


@pytest.mark.parametrize("told", ["embedding", "prompt", "none"])
def test_a_folder_that_was_saved_again_says_the_same(tmp_path, told):
    """transformers copies the code of an embedding, but not the folder `custom_generate`."""
    _, out = ledger_run(tmp_path, told)
    questions = ledger_questions()[:3]
    folder = Folder(out)
    expected = folder.says(questions, [8] * 3)
    saved = tmp_path / "saved"
    folder.model.save_pretrained(saved)
    folder.tokenizer.save_pretrained(saved)
    assert not (saved / "custom_generate").exists()
    if told != "embedding":
        with pytest.raises(ValueError, match="not used by the model: .'budget'"):
            Folder(saved).says(questions, [8] * 3)
        # As docs/serving.md says.
        shutil.copytree(out / "custom_generate", saved / "custom_generate")
    assert Folder(saved).says(questions, [8] * 3) == expected


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
        with pytest.raises(ValueError, match="^budget: .*found"):
            ask(bad)
    folder.model.config.max_position_embeddings = 128
    with pytest.raises(ValueError, match="^budget: 120 allows .* 128 positions leave"):
        ask(120)
    with pytest.raises(
        ValueError, match="^budget: a budget can only be used with greedy decoding or sampling,"
    ):
        ask(8, num_beams=2)
    folder.tokenizer.padding_side = "right"
    with pytest.raises(ValueError, match="^attention_mask: the prompts are padded on the right"):
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
    in_parts = {"return_dict_in_generate": True, "output_scores": True}
    assert folder.says(questions, [8, 8], **in_parts) == whole
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

RESPONSE = {"positions": "response", "sharing": "per_layer", "input": "log", "gate": "tanh"}


QWEN3 = replace(QWEN, head_dim=12, qkv_bias=False, qk_norm=True)
LLAMA = replace(QWEN, qkv_bias=False, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 256))


@pytest.mark.parametrize(
    ("conditioning", "shape"),
    [
        ({}, QWEN),
        (RESPONSE, QWEN),
        ({"budget_input": "prompt"}, QWEN),
        (RESPONSE, QWEN3),
        ({"budget_input": "both"}, LLAMA),
    ],
    ids=["qwen2", "qwen2, response", "qwen2, words", "qwen3, response", "llama, both"],
)
def test_a_real_tokenizer_says_what_we_say(tmp_path, shared_data, qwen, conditioning, shape):
    run, out = qwen_run(tmp_path, qwen, conditioning, shape=shape)
    questions = math_questions(shared_data)
    folder, _, trunks = check(run, out, questions)
    # Budgets that cut inside the tokens of the tag: after `</`, and after `</think`.
    rows = [(question, budget) for budget in range(1, 9) for question in questions]
    asked_again, budgets = map(list, zip(*rows))
    expected, cut = ours(run, asked_again, budgets)
    thought = [
        qwen.decode(tokens[start : start + count].tolist())
        for tokens, start, count in zip(cut.tokens, cut.prompt_lengths, cut.thinking)
    ]
    inside = [i for i, text in enumerate(thought) if text.endswith(("</", "</think"))]
    where = {thought[i].rpartition("</")[2] for i in inside if cut.close[i] == 0}
    assert "" in where
    if not conditioning:
        # What this random policy says was looked for; the others end some thinking otherwise.
        assert where == {"", "think"}
        assert {0, 1} <= set(trunks.close.tolist())
    pick = lambda values: [values[i] for i in inside]
    found = folder.says(pick(asked_again), pick(budgets))
    assert_same(found, pick(expected), folder.model.generation_config.pad_token_id)


@pytest.mark.parametrize("conditioning", [{}, {"budget_input": "prompt"}])
def test_a_grace_window_says_what_we_say(tmp_path, shared_data, qwen, conditioning):
    settings = {"min": 8, "max": 64, "grace": 6}
    run, out = qwen_run(tmp_path, qwen, conditioning, budget=settings)
    questions = math_questions(shared_data)[:8]
    _, _, trunks = check(run, out, questions)
    # Rows with a budget of 8, which end in the window.
    counts = trunks.thinking[len(questions) : 2 * len(questions)]
    assert counts.max() > 8
