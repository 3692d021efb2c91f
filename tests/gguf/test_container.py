"""The header of a GGUF file says what gguf's own reader says, and no number in it is trusted."""

import struct

import gguf
import numpy as np
import pytest

import gguf_world
from bacr_gguf import container
from bacr_gguf.container import GgufError


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return gguf_world.write(tmp_path_factory.mktemp("gguf") / "m.gguf", quantised="Q4_1")


def test_settings_and_places_are_those_of_the_packages_reader(whole):
    file, theirs = container.read(whole), gguf.GGUFReader(whole)
    names = {name: one for name, one in theirs.fields.items() if not name.startswith("GGUF.")}
    assert file.settings.keys() == names.keys()
    for name, one in names.items():
        value = file.settings[name]
        assert (list(value) if isinstance(value, tuple) else value) == one.contents()
    assert len(theirs.tensors) == len(file.tensors)
    for one in theirs.tensors:
        found = file.tensors[one.name]
        assert found.shape == tuple(one.shape.tolist()[::-1]) and found.kind == one.tensor_type
        assert (found.start, found.num_bytes) == (one.data_offset, one.n_bytes)


def patched(whole, tmp_path, at, value):
    content = bytearray(whole.read_bytes())
    content[at : at + len(value)] = value
    path = tmp_path / "patched.gguf"
    path.write_bytes(content)
    return path


def after(whole, text):
    """The byte after a text in the file."""
    return whole.read_bytes().index(text.encode()) + len(text)


U64 = struct.Struct("<Q").pack
HUGE = [2**31, 2**61, 2**64 - 1]


@pytest.mark.parametrize("count", HUGE)
def test_counts_beyond_the_file_are_refused(whole, tmp_path, count):
    for at in (8, 16):
        with pytest.raises(GgufError, match="specifies version 3, "):
            container.read(patched(whole, tmp_path, at, U64(count)))
    # Of the tokens, of the types, of the bytes of a text, of a tensor's axis and of its place.
    places = [
        after(whole, "tokenizer.ggml.tokens") + 8,
        after(whole, "tokenizer.ggml.token_type") + 8,
        after(whole, "general.license") + 4,
        after(whole, "token_embd.weight") + 12,
        after(whole, "token_embd.weight") + 24,
    ]
    for at in places:
        with pytest.raises(GgufError, match="file is truncated|header is larger"):
            container.read(patched(whole, tmp_path, at, U64(count)))


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (lambda _: 0, b"GGML", "begins with b'GGML'"),
        (lambda _: 4, b"\0\0\0\3", "version 50331648"),
        (lambda whole: after(whole, "general.license"), b"\x0d", "type number 13"),
        (lambda whole: after(whole, "token_embd.weight") + 20, b"\x14", "the type IQ4_NL, which"),
        (lambda whole: after(whole, "token_embd.weight") + 20, b"\xee", "the type 238, which"),
        (lambda whole: after(whole, "token_embd.weight") + 4, b"\x21", r"shape \[33, .* type Q4_1"),
        (
            lambda whole: after(whole, "token_embd.weight"),
            b"\0",
            "has 0 axes, but must have 1 to 4",
        ),
        (
            lambda whole: after(whole, "token_embd.weight"),
            b"\5",
            "has 5 axes, but must have 1 to 4",
        ),
        (lambda whole: after(whole, "token_embd.weight"), b"\xff" * 4, "has 4,294,967,295 axes"),
        (lambda whole: after(whole, "general.nam"), b"\xff", "utf-8"),
        (lambda whole: after(whole, "blk.0.attn_k.weigh") - 7, b"v", "have the same name"),
        # Two tensors in one place: together they are more than there is.
        (lambda whole: after(whole, "blk.0.ffn_up.weight") + 4, U64(2**21), "need .* bytes"),
    ],
)
def test_what_is_no_such_file_is_refused(whole, tmp_path, at, value, words):
    with pytest.raises((GgufError, UnicodeDecodeError), match=words):
        container.read(patched(whole, tmp_path, at(whole), value))


@pytest.mark.parametrize("share", [0, 0.0001, 0.01, 0.1, 0.5, 0.9, 0.9999])
def test_a_file_that_was_cut_is_refused(whole, tmp_path, share):
    content = whole.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(GgufError, match="file is truncated|header is larger"):
        container.read(path)


def test_the_alignment_is_the_files_own(whole, tmp_path):
    path = gguf_world.write(tmp_path / "a.gguf", alignment=256)
    assert {tensor.start % 256 for tensor in container.read(path).tensors.values()} == {0}
    for wrong in (0, 2, 48, 2**31):
        at = after(whole, "general.alignment") + 4
        with pytest.raises(GgufError, match="but must be a power of two from 8 to"):
            container.read(patched(whole, tmp_path, at, U64(wrong)[:4]))
    # A float32 of 32.0, whose positions would be no whole numbers.
    with pytest.raises(GgufError, match="alignment' is 32.0, but must be a power of two"):
        at = after(whole, "general.alignment")
        container.read(patched(whole, tmp_path, at, struct.pack("<If", 6, 32.0)))


def test_a_header_that_never_ends_is_not_read_whole(tmp_path):
    path = tmp_path / "long.gguf"
    size = container.LARGEST_HEADER + 1
    with path.open("wb") as file:
        file.write(struct.pack("<4sIQQQ4sIIQ", b"GGUF", 3, 0, 1, 4, b"long", 9, 0, size))
        file.truncate(2 * size)
    with pytest.raises(GgufError, match=f"larger than the {container.LARGEST_HEADER:,} bytes"):
        container.read(path)


@pytest.mark.parametrize("name", ["x" * 100_000, "\n" * 300, "a\x1b[2Jb\r\n" * 50])
@pytest.mark.parametrize("rank", [3, 4_000_000])
def test_a_message_is_a_line_whatever_the_file_holds(tmp_path, name, rank):
    """A tensor of a foreign type, and one of more axes than the header has room for."""
    text = name.encode()
    path = tmp_path / "name.gguf"
    with path.open("wb") as file:
        file.write(struct.pack(f"<4sIQQQ{len(text)}sI", b"GGUF", 3, 1, 0, len(text), text, rank))
        file.write(b"\x20\0\0\0\0\0\0\0" * min(rank, 10))
        file.truncate(8 * rank + len(text) + 100)
    with pytest.raises(GgufError) as caught:
        container.read(path)
    assert len(str(caught.value)) < 250 and str(caught.value).isprintable()


def test_arrays_of_every_type_are_read(tmp_path):
    values = {"a": [True, False], "b": [1.5, 2.5], "c": ["x", ""], "d": [7], "e": [-1]}
    settings = {f"general.{name}": ("array", value) for name, value in values.items()}
    found = container.read(gguf_world.write(tmp_path / "a.gguf", settings=settings)).settings
    assert {name: list(found[f"general.{name}"]) for name in values} == values
    assert np.float32(found["llama.rope.freq_base"]) == 10000
