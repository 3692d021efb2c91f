"""The card of an exported policy says what its run measured, and nothing that is not known."""

import json
from pathlib import Path

import pytest
import yaml

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.errors import UserError
from bacr_jax.export import model_card as cards
from bacr_jax.prompts.formats import FORMATS

TOKENS = {"mean_thinking_tokens": 4.0, "mean_total_tokens": 9.0}
ENTRY = {"accuracy": 0.5, "ci95": [0.4, 0.625], "problems": 500, "samples": 1, **TOKENS}


@pytest.fixture
def about(tmp_path):
    config = config_io.override(Config(), ["budget.max=64", "budget.levels={low: 16}", "seed=3"])
    return cards.Exported(
        tmp_path / "mine", 3, config, FORMATS["think_answer"], base=None, merged=False
    )


def evaluated(about, step, **sets):
    about.run.mkdir(exist_ok=True)
    with (about.run / "eval.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "when": "after", "sets": sets}) + "\n")


def test_accuracy_is_that_of_the_checkpoint_with_intervals(about):
    other = {**ENTRY, "accuracy": 0.9}
    evaluated(about, 2, ledger={"greedy": {"8": other}})
    sampled = {"none": {**ENTRY, "samples": 4}}
    evaluated(about, 3, ledger={"greedy": {"16": ENTRY, "8": ENTRY}, "sampled": sampled})
    card = cards.model_card(about)
    assert "| decoding | problems | 8 | 16 | none |" in card
    assert "| greedy | 500 | 50.0 [40.0, 62.5] | 50.0 [40.0, 62.5] | - |" in card
    assert "| sampled, mean of 4 | 500 | - | - | 50.0 [40.0, 62.5] |" in card
    assert "90.0" not in card and "was not evaluated" not in card


def evaluated_afterwards(about, name, sets, **settings):
    """Results that `bacr evaluate` wrote into the folder of the run."""
    folder = about.run / "evaluation" / name
    folder.mkdir(parents=True)
    results = {name: {"by_budget": {"greedy": {"8": ENTRY}}} for name in sets}
    (folder / "results.json").write_text(json.dumps({"sets": results, "settings": settings}))


def test_accuracy_on_training_questions_is_left_out(about):
    evaluated_afterwards(about, "step-000003-samples-8-split-train", ["math:x"], split="train")
    assert "This checkpoint was not evaluated by its run." in cards.model_card(about)
    evaluated_afterwards(about, "step-000003-samples-8", ["math500:x"])
    card = cards.model_card(about)
    assert "MATH-500, evaluated afterwards:" in card and "MATH, evaluated" not in card


@pytest.mark.parametrize("when", ["in training", "afterwards"])
def test_tables_of_several_sets_have_different_titles(about, when):
    names = ("jsonl:data/easy.jsonl", "csv:hard.csv", "jsonl:a/test.jsonl", "jsonl:b/test.jsonl")
    if when == "afterwards":
        evaluated_afterwards(about, "step-000003", names)
    else:
        evaluated(about, 3, **dict.fromkeys(names, {"greedy": {"8": ENTRY}}))
    titles = [
        line for line in cards.model_card(about).splitlines() if f", evaluated {when}:" in line
    ]
    assert titles[:2] == [f"easy, evaluated {when}:", f"hard, evaluated {when}:"]
    assert len(set(titles)) == len(names)


def test_a_checkpoint_without_an_evaluation_says_so(about):
    evaluated(about, 2, ledger={"greedy": {"8": ENTRY}})
    assert "This checkpoint was not evaluated by its run." in cards.model_card(about)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("eval.jsonl", {"x": 1}, "line 1: the field 'step' is missing"),
        ("eval.jsonl", {"step": 3, "when": "after"}, "line 1: the field 'sets' is missing"),
        ("eval.jsonl", {"step": 3, "when": "after", "sets": {"ledger": {}}}, "has no accuracies"),
        (
            "eval.jsonl",
            {"step": 3, "when": "x", "sets": {"a": {"greedy": {"8": ENTRY | {"samples": "n"}}}}},
            "mine: evaluations of step 3 hold content that this package did not write",
        ),
        ("results.json", {"sets": {"ledger": {}}}, "results.json is missing or damaged"),
        ("results.json", {"sets": {"a": {"by_budget": 3}}}, "evaluations of step 3 hold content"),
        ("results.json", {"ledger": {}}, "results.json is missing or damaged"),
    ],
)
def test_an_odd_evaluation_is_one_line(about, name, content, says):
    folder = about.run if name == "eval.jsonl" else about.run / "evaluation" / "step-000003"
    folder.mkdir(parents=True)
    (folder / name).write_text(json.dumps(content) + "\n")
    with pytest.raises(UserError, match=says):
        cards.model_card(about)


def test_it_says_how_a_budget_is_asked_for(about):
    card = cards.model_card(about)
    assert "model.generate(**inputs, budget=64)" in card and '"low" (16)' in card
    assert 'generate_within(LLM("FOLDER"), [question], [64])' in card
    assert "refuses `budget=`" in card
    config = config_io.override(about.config, ["conditioning.budget_input=prompt"])
    words = {**vars(about), "config": config}
    told = cards.model_card(cards.Exported(**words))
    assert "question, budget=64, return_tensors" in told and "refuses `budget=`" not in told
    merged = cards.model_card(cards.Exported(**{**words, "merged": True}))
    assert "trust_remote_code" not in merged and "nothing holds it" in merged
    # The folder can also contain a Qwen3 or a Llama.
    assert "A plain model without code" in merged and "Qwen2" not in merged


@pytest.mark.parametrize(
    ("files", "known"),
    [
        ({"README.md": "---\nlicense: apache-2.0\n---\n# A model"}, "apache-2.0"),
        ({"README.md": "---\nlicense: other\nlicense_name: qwen-research\n---\n"}, "qwen-research"),
        ({"LICENSE": "\n  Apache License\nVersion 2.0"}, "Apache License"),
        ({"README.md": "# A model"}, None),
        ({"README.md": "---\nlicense: [a\n---\n"}, None),
        ({}, None),
    ],
)
def test_the_license_of_the_base_is_what_its_folder_says(tmp_path, about, files, known):
    base = tmp_path / "base"
    base.mkdir()
    for name, text in files.items():
        (base / name).write_text(text)
    license_found = cards.license_of(base)
    assert known == (None if license_found is None else license_found.name)
    card = cards.model_card(cards.Exported(**{**vars(about), "base": base}))
    said = "unknown; its folder does not say." if known is None else f"{known}, as its folder says."
    assert f"License of the base: {said}" in card
    assert str(tmp_path) not in card


LINK = "https://huggingface.co/Qwen/Qwen2.5-3B/blob/main/LICENSE"
OTHER = {"license": "other", "license_name": "qwen-research", "license_link": LINK}


def header_of(about, base, **files):
    """The license entries in the header of the card of a policy that started from a base."""
    base.mkdir()
    for name, text in files.items():
        (base / name.replace("_md", ".md")).write_text(text)
    card = cards.model_card(cards.Exported(**{**vars(about), "base": base}))
    header = yaml.safe_load(card.split("---\n")[1])
    return {name: value for name, value in header.items() if name.startswith("license")}, card


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"license": "apache-2.0"}, {"license": "apache-2.0"}),
        (OTHER, OTHER),
        ({"license": "other"}, {"license": "other"}),
        (
            {"license": "other", "license_name": "Mine: v1"},
            {"license": "other", "license_name": "Mine: v1"},
        ),
        # The file LICENSE is not exported, and the name of the base on the hub is unknown.
        (
            OTHER | {"license_link": "LICENSE"},
            {"license": "other", "license_name": "qwen-research"},
        ),
        # The name of a license that has an identifier.
        ({"license": "mit", "license_name": "Mine"}, {"license": "mit"}),
        ({"license": "My own license"}, {}),
    ],
)
def test_the_header_has_the_license_in_the_form_that_the_hub_accepts(
    tmp_path, about, metadata, expected
):
    readme = f"---\n{yaml.safe_dump(metadata)}---\n# A model"
    header, card = header_of(about, tmp_path / "base", README_md=readme)
    assert header == expected
    name = metadata.get("license_name", metadata["license"])
    assert f"License of the base: {name}, as its folder says." in card
    # A policy that starts from this export has the same license.
    again, _ = header_of(about, tmp_path / "again", README_md=card)
    assert again == expected


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("LICENSE", "https://huggingface.co/Some-One/A.model-1b/blob/main/LICENSE"),
        ("./LICENSE.md", "https://huggingface.co/Some-One/A.model-1b/blob/main/LICENSE.md"),
        ("legal/TERMS.txt", "https://huggingface.co/Some-One/A.model-1b/blob/main/legal/TERMS.txt"),
        (LINK, LINK),
        ("../LICENSE", None),
        ("/LICENSE", None),
        ("ask us", None),
        ("mailto:us@example.org", None),
        (["LICENSE"], None),
    ],
)
def test_a_license_file_of_a_base_from_the_hub_is_linked_there(tmp_path, about, link, expected):
    """The file is not exported."""
    metadata = OTHER | {"license_link": link}
    readme = f"---\n{yaml.safe_dump(metadata)}---\n# A model"
    base = tmp_path / "models--Some-One--A.model-1b" / "snapshots" / ("0a" * 20)
    base.parent.mkdir(parents=True)
    header, _ = header_of(about, base, README_md=readme)
    without_link = {"license": "other", "license_name": "qwen-research"}
    links = {} if expected is None else {"license_link": expected}
    assert header == without_link | links


@pytest.mark.parametrize("line", ["Apache License", "license", "apache-2.0"])
def test_the_first_line_of_a_license_file_is_not_an_identifier_of_the_hub(tmp_path, about, line):
    header, card = header_of(about, tmp_path / "base", LICENSE=f"{line}\nVersion 2.0")
    assert header == {} and f"License of the base: {line}, as its folder says." in card


def test_a_policy_from_random_weights_has_no_base(about):
    assert cards.license_of(None) is None
    assert "no license of a base applies" in cards.model_card(about)
    assert Path(about.run).name in cards.model_card(about)


@pytest.mark.parametrize("name", ["LICENSE", "README.md"])
def test_a_license_that_is_a_link_to_outside_of_the_base_is_refused(tmp_path, about, name):
    base = tmp_path / "base"
    base.mkdir()
    (tmp_path / "id_rsa").write_text("-----BEGIN KEY-----")
    (base / name).symlink_to(tmp_path / "id_rsa")
    with pytest.raises(UserError, match=rf"{name} is a symbolic link to .*id_rsa"):
        cards.model_card(cards.Exported(**{**vars(about), "base": base}))
