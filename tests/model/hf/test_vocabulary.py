"""Tokenizer files: their ids fit the embedding."""

from pathlib import Path

import pytest

from bacr_jax.errors import UserError
from bacr_jax.model.hf import reading
from bacr_jax.model.hf.vocabulary import TOKENIZER, check_links, copy_companions
from hf_world import refusal, tokenizer_json


def test_a_vocabulary_larger_than_the_embedding(folder):
    (folder / "tokenizer.json").write_text(tokenizer_json(37))
    reading.load_policy(folder)
    (folder / "tokenizer.json").write_text(tokenizer_json(38))
    assert "the tokenizer has 38 token ids, but the embedding has only 37 rows" in refusal(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text('{"a": 0, "b": 36}')
    reading.load_policy(folder)
    (folder / "added_tokens.json").write_text('{"c": 40}')
    assert "has 41 token ids" in refusal(folder)


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "home" / "key.json"
    path.parent.mkdir()
    path.write_text('{"secret": 1}')
    return path


def test_links_to_outside_of_a_folder_are_not_copied(tmp_path, secret):
    """Neither by a chain, nor from a folder that is itself reached by a link."""
    out = tmp_path / "out"
    out.mkdir()
    for number, target in enumerate((secret, Path("../home/key.json"), tmp_path / "chain")):
        folder = tmp_path / f"model{number}"
        folder.mkdir()
        (tmp_path / "chain").unlink(missing_ok=True)
        (tmp_path / "chain").symlink_to(secret)
        (folder / "tokenizer_config.json").symlink_to(target)
        (tmp_path / f"link{number}").symlink_to(folder)
        for where in (folder, tmp_path / f"link{number}"):
            with pytest.raises(
                UserError, match=r"tokenizer_config.json is a symbolic link to .*key.json"
            ):
                copy_companions(where, out, TOKENIZER)
    assert not any(out.iterdir())


def test_links_inside_a_folder_and_to_the_blobs_of_the_hubs_cache_are_copied(tmp_path, secret):
    repository = tmp_path / "models--owner--name"
    blobs, folder, out = repository / "blobs", repository / "snapshots" / "abc", tmp_path / "out"
    for path in (blobs, folder, out):
        path.mkdir(parents=True)
    (blobs / "0123").write_text('{"a": 1}')
    (folder / "tokenizer.json").symlink_to("../../blobs/0123")
    (folder / "real.json").write_text("{}")
    (folder / "vocab.json").symlink_to("real.json")
    copy_companions(folder, out, TOKENIZER)
    assert {path.name for path in out.iterdir()} == {"tokenizer.json", "vocab.json"}
    assert (out / "tokenizer.json").read_text() == '{"a": 1}'
    # Another repository's blobs, or a blob that is a link itself, are outside.
    for target in (secret, tmp_path / "models--other--name" / "blobs" / "0123"):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
        (blobs / "0124").unlink(missing_ok=True)
        (blobs / "0124").symlink_to(target)
        (folder / "merges.txt").unlink(missing_ok=True)
        (folder / "merges.txt").symlink_to("../../blobs/0124")
        with pytest.raises(UserError, match=r"merges.txt is a symbolic link to "):
            check_links(folder, TOKENIZER)
