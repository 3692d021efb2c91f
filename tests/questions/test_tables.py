"""Rows come back as they were written, or one line says which place of which file is wrong."""

import json
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bacr_jax.errors import UserError
from bacr_jax.questions import tables
from bacr_jax.questions.tables import read_rows

ROWS = [{"question": '1+1, "quoted"\nand broken?', "answer": "2"}, {"question": "é", "answer": "x"}]


def read(path, split="train", *, any_split=False, base="."):
    return read_rows(str(path), base=str(base), split=split, any_split=any_split, where="jsonl:x")


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def lines(*rows):
    return "\n".join(json.dumps(row) for row in rows)


class TestFormats:
    def test_json_lines_with_blank_ones_and_a_byte_order_mark(self, tmp_path):
        path = put(
            tmp_path / "a.jsonl", "\ufeff" + lines(ROWS[0]) + "\r\n\n" + lines(ROWS[1]) + "\n"
        )
        assert read(path) == ROWS

    def test_a_line_separator_inside_a_string_ends_no_line(self, tmp_path):
        row = {"question": "a\u2028b\x85c", "answer": "1"}
        path = put(tmp_path / "a.jsonl", json.dumps(row, ensure_ascii=False))
        assert read(path) == [row]

    @pytest.mark.parametrize("text", [json.dumps(ROWS), lines(*ROWS)])
    def test_json_as_a_list_or_as_lines(self, tmp_path, text):
        assert read(put(tmp_path / "a.json", text)) == ROWS

    def test_one_object_a_file_as_in_the_original_math(self, tmp_path):
        for name, row in zip(("train/algebra/0.json", "train/geometry/0.json"), ROWS):
            put(tmp_path / name, json.dumps(row, indent=2))
        put(tmp_path / "test/algebra/0.json", json.dumps({"question": "held out"}))
        assert read(tmp_path) == ROWS

    @pytest.mark.parametrize(("suffix", "comma"), [("csv", ","), ("csv", ", "), ("tsv", "\t")])
    def test_csv_with_quotes_and_line_breaks_in_a_field(self, tmp_path, suffix, comma):
        text = f'question{comma}answer\r\n"1+1, ""quoted""\nand broken?"{comma}2\r\né{comma}x\r\n'
        assert read(put(tmp_path / f"a.{suffix}", text)) == ROWS

    @pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
    @pytest.mark.parametrize("inside", ["\u2028", "\u2029", "\x85", "\x0c", "\x0b", "\x1c"])
    def test_csv_lines_end_at_line_feeds_and_carriage_returns_alone(self, tmp_path, inside, end):
        text = f"question,answer{end}one{inside}two,2{end}three,{inside}3{end}"
        assert read(put(tmp_path / "a.csv", text)) == [
            {"question": f"one{inside}two", "answer": "2"},
            {"question": "three", "answer": f"{inside}3"},
        ]

    def test_a_long_field_of_a_csv(self, tmp_path):
        text = "question,answer\n" + "x" * 200_000 + ",1\n"
        assert len(read(put(tmp_path / "a.csv", text))[0]["question"]) == 200_000

    def test_parquet(self, tmp_path):
        pyarrow = pytest.importorskip("pyarrow", reason="the extra hub is not installed")
        parquet = pytest.importorskip("pyarrow.parquet")
        # The folder's name must not become a column.
        path = tmp_path / "level=1" / "a.parquet"
        path.parent.mkdir()
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
        assert read(path) == ROWS

    @pytest.mark.parametrize(
        ("kind", "cell", "read_as"),
        [
            ("timestamp", 1001, "1970-01-01 00:00:00.000001001"),
            ("list_", [1001], None),
            ("string", b"\xff", None),
        ],
    )
    def test_parquet_columns_that_python_can_not_hold_leave_the_others(
        self, tmp_path, kind, cell, read_as
    ):
        pyarrow = pytest.importorskip("pyarrow", reason="the extra hub is not installed")
        parquet = pytest.importorskip("pyarrow.parquet")
        kinds = {
            "timestamp": pyarrow.timestamp("ns"),
            "list_": pyarrow.list_(pyarrow.timestamp("ns")),
            "string": pyarrow.binary(),
        }
        odd = pyarrow.array([cell, None], kinds[kind])
        odd = odd.view(pyarrow.string()) if kind == "string" else odd
        table = pyarrow.Table.from_pylist(ROWS).append_column("odd", odd)
        parquet.write_table(table, tmp_path / "a.parquet")
        odd_cells = [{"odd": read_as}, {"odd": None}]
        assert read(tmp_path / "a.parquet") == [row | one for row, one in zip(ROWS, odd_cells)]

    @pytest.mark.parametrize(("bits", "cell"), [(16, 0.1), (32, 100.45), (64, 100.44999694824219)])
    def test_parquet_floats_have_the_digits_of_their_width(self, tmp_path, bits, cell):
        pyarrow = pytest.importorskip("pyarrow", reason="the extra hub is not installed")
        parquet = pytest.importorskip("pyarrow.parquet")
        kind = getattr(pyarrow, f"float{bits}")()
        nested = pyarrow.list_(pyarrow.struct([("b", kind)]))
        columns = {
            "a": pyarrow.array([cell, None], kind),
            "often": pyarrow.array([cell, cell], kind).dictionary_encode(),
            "deep": pyarrow.array([[{"b": cell}], None], nested),
        }
        parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
        assert read(tmp_path / "a.parquet") == [
            {"a": cell, "often": cell, "deep": [{"b": cell}]},
            {"a": None, "often": cell, "deep": None},
        ]

    @given(st.lists(st.dictionaries(st.text(max_size=4), st.text()), min_size=1, max_size=4))
    def test_whatever_json_can_write_comes_back(self, tmp_path_factory, rows):
        path = tmp_path_factory.mktemp("rows") / "a.jsonl"
        put(path, lines(*rows))
        assert read(path) == rows


class TestPlaces:
    def test_relative_paths_start_from_the_data_folder(self, tmp_path):
        put(tmp_path / "math/train.jsonl", lines(*ROWS))
        assert read("math/train.jsonl", base=tmp_path) == ROWS
        assert read(tmp_path / "math/train.jsonl", base="/nowhere") == ROWS

    def test_a_folder_gives_the_files_of_the_split(self, tmp_path):
        put(tmp_path / "data/train-00000-of-00002.jsonl", lines(ROWS[0]))
        put(tmp_path / "data/train-00001-of-00002.jsonl", lines(ROWS[1]))
        put(tmp_path / "data/test-00000-of-00001.jsonl", lines({"question": "held out"}))
        put(tmp_path / ".cache/train.jsonl", "not read")
        assert read(tmp_path) == ROWS
        assert read(tmp_path, "test") == [{"question": "held out"}]

    @pytest.mark.parametrize("folders", ["train_test", "test/train", "train/test", "of-train"])
    def test_the_name_of_a_file_says_its_split_before_the_names_of_folders(self, tmp_path, folders):
        for split in ("train", "test"):
            put(tmp_path / folders / f"{split}.jsonl", lines({"question": split}))
        for split in ("train", "test"):
            assert read(tmp_path, split) == [{"question": split}]

    def test_the_nearest_folder_says_the_split_before_those_around_it(self, tmp_path):
        for split in ("train", "test"):
            put(tmp_path / "train_test" / split / "0.json", json.dumps({"question": split}))
        for split in ("train", "test"):
            assert read(tmp_path, split) == [{"question": split}]

    @pytest.mark.parametrize("end", ["", "-0f1e2d3c4b5a6978"])
    @pytest.mark.parametrize(("stem", "any_split"), [("test", False), ("part", False), ("a", True)])
    def test_a_table_of_which_parts_are_missing_is_refused(self, tmp_path, stem, any_split, end):
        files = [f"data/{stem}-{index:05}-of-00003{end}.jsonl" for index in range(3)]
        for file in files:
            put(tmp_path / file, lines(*ROWS))
        # Parts of another split, whose rows are not read.
        put(tmp_path / "data/train-00000-of-00002.jsonl", lines(*ROWS))
        if stem != "test":
            (tmp_path / "data/train-00000-of-00002.jsonl").unlink()
        assert len(read(tmp_path, "test", any_split=any_split)) == 6
        for left in (2, 1):
            (tmp_path / files[left]).unlink()
            with pytest.raises(
                UserError, match=rf"only {left} of the 3 files data/{stem}-\*-of-00003\*\.jsonl; "
            ) as error:
                read(tmp_path, "test", any_split=any_split)
            assert "\n" not in str(error.value)
        assert read(tmp_path / files[0]) == ROWS

    def test_held_out_questions_never_come_from_training_files(self, tmp_path):
        put(tmp_path / "train.jsonl", lines(*ROWS))
        with pytest.raises(UserError, match="files of the split train, but none of the split test"):
            read(tmp_path, "test")

    def test_a_set_in_one_piece_is_read_whatever_its_files_are_called(self, tmp_path):
        put(tmp_path / "train-00000-of-00001.jsonl", lines(*ROWS))
        assert read(tmp_path, "test", any_split=True) == ROWS

    def test_a_folder_without_splits_is_the_set(self, tmp_path):
        put(tmp_path / "questions.jsonl", lines(*ROWS))
        assert read(tmp_path) == read(tmp_path, "test") == ROWS


class TestHub:
    def fake(self, monkeypatch, folder):
        asked = []

        class Hub:
            @staticmethod
            def snapshot_download(repo, **how):
                asked.append((repo, how))
                return str(folder)

        monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
        return asked

    def test_a_dataset_is_read_like_the_folder_it_becomes(self, tmp_path, monkeypatch):
        put(tmp_path / "main/train-00000-of-00001.jsonl", lines(*ROWS))
        asked = self.fake(monkeypatch, tmp_path)
        assert read("hf://openai/gsm8k@abc/main") == ROWS
        repo, how = asked[0]
        assert (repo, how["revision"], how["repo_type"]) == ("openai/gsm8k", "abc", "dataset")
        assert "main/*.parquet" in how["allow_patterns"]

    def test_one_file_of_a_dataset(self, tmp_path, monkeypatch):
        put(tmp_path / "test.jsonl", lines(*ROWS))
        asked = self.fake(monkeypatch, tmp_path)
        assert read("hf://datasets/HuggingFaceH4/MATH-500/test.jsonl") == ROWS
        assert asked[0][0] == "HuggingFaceH4/MATH-500"
        assert asked[0][1]["allow_patterns"] == ["test.jsonl"]

    @pytest.mark.parametrize("name", ["hf://$OWNER/$SET", "hf://${OWNER}/gsm8k", "$HUB/$SET"])
    def test_a_name_may_contain_variables(self, tmp_path, monkeypatch, name):
        for variable, value in (("OWNER", "openai"), ("SET", "gsm8k"), ("HUB", "hf://openai")):
            monkeypatch.setenv(variable, value)
        put(tmp_path / "main/train.jsonl", lines(*ROWS))
        asked = self.fake(monkeypatch, tmp_path)
        assert read(f"{name}/main") == ROWS
        assert asked[0][0] == "openai/gsm8k"

    @pytest.mark.parametrize("name", ["hf://me/sums", "hf://me/sums/data"])
    def test_a_download_that_was_interrupted_is_no_complete_set(self, tmp_path, monkeypatch, name):
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        # The cache of the hub's client after it was killed while it wrote the second file.
        repository = tmp_path / "datasets--me--sums"
        revision = "a" * 40
        put(repository / "refs/main", revision)
        put(repository / f"blobs/{'b' * 64}.incomplete", "")
        data = repository / "snapshots" / revision / "data"
        put(data / "train-00000-of-00002.jsonl", lines(*ROWS))
        with pytest.raises(UserError, match="only 1 of the 2 files .*; download the missing files"):
            read(name)
        put(data / "train-00001-of-00002.jsonl", lines(*ROWS))
        assert read(name) == ROWS * 2

    def test_a_failed_download_says_why_in_one_line(self, monkeypatch):
        class Hub:
            @staticmethod
            def snapshot_download(repo, **how):
                raise ConnectionError("no route\nto host")

        monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
        with pytest.raises(UserError, match=r"can't be downloaded") as error:
            read("hf://a/b")
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("path", ["hf://", "hf://gsm8k", "hf://a b/c"])
    def test_a_name_that_is_none(self, path):
        with pytest.raises(UserError, match="use hf://OWNER/NAME"):
            read(path)

    def test_only_parquet_needs_the_extra(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        put(tmp_path / "train.jsonl", lines(*ROWS))
        self.fake(monkeypatch, tmp_path)
        assert read("hf://a/b") == ROWS
        with pytest.raises(UserError, match=r"pyarrow.*\.\[hub\]"):
            read(put(tmp_path / "a.parquet", b"PAR1"))


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "content", "says"),
        [
            ("a.jsonl", '{"question": "x"}\n{"question"', "a.jsonl line 2: .*one JSON object"),
            ("a.jsonl", "[1]", "line 1: the JSON value is a list"),
            ("a.jsonl", "[" * 100_000, "line 1: "),
            ("a.jsonl", b'{"question": "\xff"}', "not valid UTF-8 at byte 14"),
            ("a.jsonl", "\n", "no row"),
            ("a.json", "[]", "no row"),
            ("a.json", "[1]", "entry 1 of a.json is of the type int"),
            ("a.csv", "", "no row"),
            ("a.csv", "question,answer\n", "no row"),
            ("a.csv", "question,answer\n1,000,2\n", "row 1 of a.csv has more or fewer fields"),
            ("a.csv", "question,answer\n1\n", "row 1 of a.csv has more or fewer fields"),
            ("a.csv", 'question,answer\n"1"2,3\n', "a.csv line 2: "),
            ("a.csv", b"question,answer\n\xe9,1\n", "not valid UTF-8 at byte 16"),
            (
                "a.csv",
                "answer,question,answer\n1,2,3\n",
                "a.csv: the name 'answer' occurs twice; keep only one of them",
            ),
            (
                "a.jsonl",
                '{"a": 1}\n{"a": {"b": 1, "b": 1}}',
                "line 2: the name 'b' occurs twice; keep only one of them",
            ),
            (
                "a.json",
                '[{"a": 1}, {"a": 1, "a": 2}]',
                "a.json: the name 'a' occurs twice; keep only one of them",
            ),
        ],
    )
    def test_a_damaged_file_by_its_place(self, tmp_path, name, content, says):
        with pytest.raises(UserError, match=says) as error:
            read(put(tmp_path / name, content))
        assert "\n" not in str(error.value)

    def test_a_damaged_parquet_file(self, tmp_path):
        pytest.importorskip("pyarrow", reason="the extra hub is not installed")
        with pytest.raises(UserError, match="not a readable Parquet file"):
            read(put(tmp_path / "a.parquet", b"PAR1 and then nothing"))

    def test_a_column_of_a_parquet_file_that_stands_twice(self, tmp_path):
        pyarrow = pytest.importorskip("pyarrow", reason="the extra hub is not installed")
        parquet = pytest.importorskip("pyarrow.parquet")
        cells = [pyarrow.array([text]) for text in ("1+1", "1", "2")]
        table = pyarrow.Table.from_arrays(cells, names=["question", "answer", "answer"])
        parquet.write_table(table, tmp_path / "a.parquet")
        with pytest.raises(
            UserError, match="jsonl:x: a.parquet: found 'answer' twice; keep only one of them"
        ):
            read(tmp_path / "a.parquet")

    def test_what_is_neither_file_nor_folder(self, tmp_path):
        (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
        os.mkfifo(tmp_path / "pipe.jsonl")
        for name in ("loop.jsonl", "pipe.jsonl"):
            with pytest.raises(UserError, match=f"{name}' is not a regular file; use another path"):
                read(tmp_path / name)

    def test_nothing_there(self, tmp_path):
        with pytest.raises(UserError, match="no file or folder .*nowhere.jsonl"):
            read(tmp_path / "nowhere.jsonl")

    def test_a_folder_without_tables(self, tmp_path):
        put(tmp_path / "README.md", "#")
        with pytest.raises(UserError, match=r"contains no file that ends in .*\.parquet"):
            read(tmp_path)


def test_columns_in_order_of_appearance():
    assert tables.columns([{"b": 1}, {"a": 1, "b": 2}]) == ["b", "a"]
