"""The data folder from public sources: counts, fingerprints, archives, and what is refused."""

import io
import json
import tarfile
import zipfile

import pytest

from bacr_jax.errors import UserError
from bacr_jax.questions import prepare as module
from bacr_jax.questions import tables
from bacr_jax.questions.__main__ import main
from bacr_jax.questions.prepare import prepare
from bacr_jax.questions.published_sets import PUBLISHED_SETS, PublishedSet, fingerprint

GSM8K = [{"question": f"{i} + 1?", "answer": f"Add.\n#### {i + 1}"} for i in range(4)]
MATH = [
    {"problem": f"{i}?", "level": "Level 1", "type": "Algebra", "solution": f"\\boxed{{{i}}}"}
    for i in range(3)
]
KNOWN = fingerprint(["0 + 1?", "1 + 1?", "2 + 1?"], ["1", "2", "3"])


@pytest.fixture(autouse=True)
def small(monkeypatch):
    sources = {
        "gsm8k": PublishedSet(
            "hf://openai/gsm8k/main",
            {"train": 3, "test": 1},
            "MIT",
            ("gsm8k", "grade_school_math"),
            {"train": KNOWN},
        ),
        "math": PublishedSet("hf://a/math", {"train": 3, "test": 2}, "MIT", ("math", "MATH")),
        "aime24": PublishedSet("hf://a/aime", {"test": 30}, "own use", ("aime24",)),
    }
    monkeypatch.setattr(module, "PUBLISHED_SETS", sources)


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def copies(folder, *, train=GSM8K[:3], name="gsm8k"):
    place = folder / "copies" / name / "data"
    place.mkdir(parents=True)
    (place / "train.jsonl").write_text(lines(train))
    (place / "test.jsonl").write_text(lines(GSM8K[3:]))
    for i, row in enumerate(MATH):
        path = folder / "copies" / "MATH" / "train" / "algebra" / f"{i}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row))
    return folder / "copies"


def test_a_folder_of_copies_becomes_the_folder_that_configs_read(tmp_path):
    said = list(prepare(tmp_path / "data", [], copies(tmp_path)))
    assert said[0] == "gsm8k: 3 train rows, of the known texts and 1 test rows; MIT"
    assert said[1] == "math: 3 train rows; MIT"
    assert (
        said[2].startswith("aime24: left out: ")
        and "contains no folder with the name aime24" in said[2]
    )
    written = (tmp_path / "data" / "gsm8k" / "train.jsonl").read_text()
    assert [json.loads(line) for line in written.splitlines()] == GSM8K[:3]
    record = json.loads((tmp_path / "data" / "sources.json").read_text())
    assert set(record) == {"gsm8k/train.jsonl", "gsm8k/test.jsonl", "math/train.jsonl"}
    assert record["gsm8k/train.jsonl"]["fingerprint"] == KNOWN
    assert record["gsm8k/train.jsonl"]["as_known"] is True
    assert record["gsm8k/test.jsonl"]["as_known"] is None
    # Again: nothing to do, and nothing is lost.
    assert list(prepare(tmp_path / "data", ["gsm8k"], tmp_path / "copies"))
    assert json.loads((tmp_path / "data" / "sources.json").read_text()) == record


def test_other_texts_of_the_same_number_are_said(tmp_path):
    changed = [*GSM8K[:2], GSM8K[2] | {"answer": "#### 77"}]
    (said,) = prepare(tmp_path / "data", ["gsm8k"], copies(tmp_path, train=changed))
    assert "whose texts differ from those known here" in said
    record = json.loads((tmp_path / "data" / "sources.json").read_text())
    assert record["gsm8k/train.jsonl"]["as_known"] is False


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
def test_an_archive_of_copies(tmp_path, kind):
    folder = copies(tmp_path)
    archive = tmp_path / f"sets.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(archive, "w") as out:
            for path in folder.rglob("*.json*"):
                out.write(path, path.relative_to(tmp_path))
    else:
        with tarfile.open(archive, "w:gz") as out:
            out.add(folder, "copies")
    assert len(list(prepare(tmp_path / "data", ["gsm8k", "math"], archive))) == 2


def test_an_archive_that_writes_elsewhere_is_refused(tmp_path):
    archive = tmp_path / "sets.tar"
    with tarfile.open(archive, "w") as out:
        member = tarfile.TarInfo("../outside.jsonl")
        member.size = 2
        out.addfile(member, io.BytesIO(b"{}"))
    with pytest.raises(UserError, match="can't be unpacked"):
        list(prepare(tmp_path / "data", ["gsm8k"], archive))
    assert not (tmp_path / "outside.jsonl").exists()


def test_the_hub_is_asked_for_each_split(tmp_path, monkeypatch):
    folder = copies(tmp_path)
    asked = []

    def download(path, where):
        asked.append((path, where))
        return folder / "gsm8k" / "data"

    monkeypatch.setattr(tables, "_download", download)
    list(prepare(tmp_path / "data", ["gsm8k"]))
    assert asked == [("hf://openai/gsm8k/main", "gsm8k")] * 2
    record = json.loads((tmp_path / "data" / "sources.json").read_text())
    assert record["gsm8k/test.jsonl"]["from"] == "hf://openai/gsm8k/main"


def test_what_is_refused(tmp_path):
    folder = copies(tmp_path, train=GSM8K[:2])

    def refusal(*names, origin=folder):
        with pytest.raises(UserError) as refused:
            list(prepare(tmp_path / "data", names, origin))
        return str(refused.value)

    assert (
        "'gsm' is not one of the sets that can be prepared; use some of gsm8k, math, aime24"
        in refusal("gsm")
    )
    assert "could not get gsm8k" in refusal("gsm8k")
    assert "could not get aime24" in refusal("math", "aime24")
    assert "neither a tar nor a zip file; pass" in refusal(
        origin=folder / "gsm8k" / "data" / "test.jsonl"
    )
    assert "no such folder or archive" in refusal(origin=tmp_path / "none")
    (said, _, _) = list(prepare(tmp_path / "other", [], folder))
    assert "found 2 train rows" in said and "but the set has 3" in said
    assert not (tmp_path / "other" / "gsm8k").exists()


def test_a_set_that_is_there_is_not_written_over(tmp_path):
    mine = tmp_path / "data" / "gsm8k" / "train.jsonl"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    (said,) = [line for line in prepare(tmp_path / "data", [], copies(tmp_path)) if "gsm8k" in line]
    assert "already exists with other content" in said
    assert mine.read_text() == "mine"


def test_nothing_of_a_set_is_written_where_a_part_of_it_differs(tmp_path):
    mine = tmp_path / "data" / "gsm8k" / "test.jsonl"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(UserError):
        list(prepare(tmp_path / "data", ["gsm8k"], copies(tmp_path)))
    assert [path for path in mine.parents[1].rglob("*") if path.is_file()] == [mine]


def test_half_of_a_surrogate_pair_is_refused_and_leaves_no_folder(tmp_path, capsys):
    broken = [*GSM8K[:2], GSM8K[2] | {"question": "half \ud800"}]
    folder = copies(tmp_path, train=broken)
    assert main(["--prepare", str(tmp_path / "data"), "gsm8k", "--from", str(folder)]) == 2
    said = capsys.readouterr()
    assert said.out == (
        "gsm8k: left out: gsm8k: row 3 of the split train contains half of a Unicode "
        "surrogate pair, so the source is damaged; use the path of another copy\n"
    )
    assert said.err.count("\n") == 1 and "could not get gsm8k" in said.err
    assert not (tmp_path / "data").exists()


def test_a_record_that_is_none_is_not_written_over(tmp_path):
    record = tmp_path / "data" / "sources.json"
    record.parent.mkdir()
    record.write_text("[1]")
    said = next(prepare(tmp_path / "data", [], copies(tmp_path)))
    assert "is damaged (the JSON value is a list instead of an object); delete" in said
    assert record.read_text() == "[1]"


def test_the_command(tmp_path, capsys):
    line = ["--prepare", str(tmp_path / "data"), "gsm8k", "--from", str(copies(tmp_path))]
    assert main(line) == 0
    assert capsys.readouterr().out.startswith("gsm8k: 3 train rows, of the known texts")
    for option in (["--inspect", "x"], ["--show-prompts", "-5"], ["--config", "x"]):
        assert main([*line, *option]) == 2
        assert f"{option[0]} has no effect with --prepare; leave it out" in capsys.readouterr().err
    assert main(["--inspect", "ledger", "--from", "x"]) == 2
    assert "pass --prepare DIR" in capsys.readouterr().err


def test_a_fingerprint_knows_texts_and_not_their_order():
    once = fingerprint(["a", "b"], ["1", "2"])
    assert once == fingerprint(["b", "a"], ["2", "1"])
    assert once != fingerprint(["a", "b"], ["2", "1"])
    assert once != fingerprint(["a"], ["1"])


def test_the_published_sets_are_the_known_ones(tmp_path, shared_data, monkeypatch):
    monkeypatch.setattr(module, "PUBLISHED_SETS", PUBLISHED_SETS)
    said = list(prepare(tmp_path, ["gsm8k", "math", "math500"], shared_data))
    assert said[0].count("of the known texts") == 2
    assert all("of the known texts" in line for line in said[1:])
