"""Identifies exported folders and checks that their files are complete and unchanged.

The exporter writes the manifest. Servers, evaluations and rollouts compare fingerprints.
"""

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Pieces of a weight file, spread over the file, that its fingerprint depends on.
_PIECES = 64
_PIECE_BYTES = 4096
# File of an exported folder with the SHA-256 of the other files, by name.
MANIFEST = "manifest.json"
_WEIGHTS = ".safetensors"


def fingerprint(folder: Path) -> str:
    """Returns a hash, of 12 hexadecimal digits, of a folder's config and pieces of its weights.

    Raises:
      FileNotFoundError: the folder has no config or no safetensors weights.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    paths = sorted(folder.glob(f"*{_WEIGHTS}"))
    if not paths:
        raise FileNotFoundError(f"{folder}: contains no safetensors weights")
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for offset in _piece_offsets(size):
                file.seek(offset)
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()[:12]


def _piece_offsets(size: int) -> Iterator[int]:
    """Yields evenly spaced offsets in a file, from the first byte to the last piece."""
    last = max(size - _PIECE_BYTES, 0)
    step = last / (_PIECES - 1)
    for index in range(_PIECES - 1):
        yield int(index * step)
    yield last


def file_digests(folder: Path, *, weights: bool = True) -> dict[str, str]:
    """Returns the SHA-256 of the files in a folder by name, without hidden files.

    Args:
      weights: include weight files, which takes time.
    """
    names = []
    for path in sorted(folder.rglob("*")):
        relative_path = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in relative_path.parts)
        if not path.is_file() or is_hidden:
            continue
        if weights or path.suffix != _WEIGHTS:
            names.append(relative_path.as_posix())
    paths = [folder / name for name in names]
    # Threads help, because hashlib releases Python's lock.
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(_file_digest, paths)))


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path) -> None:
    """Writes the manifest of a folder, after all its other files."""
    (folder / MANIFEST).write_text(json.dumps(file_digests(folder), indent=2) + "\n")


def check_manifest(folder: Path, *, weights: bool = True) -> None:
    """Compares a folder with its manifest, if it has one.

    Markdown files may differ, because users edit them.

    Args:
      weights: compare weight files too, which takes time.

    Raises:
      ValueError: a file has changed or is missing, or the manifest is damaged.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return
    try:
        expected = json.loads(path.read_text()).items()
    except (ValueError, AttributeError):
        raise ValueError(f"{path}: is damaged; copy or export the folder again") from None
    digests = file_digests(folder, weights=weights)
    ignored_suffixes = (".md",) if weights else (".md", _WEIGHTS)
    for name, digest in expected:
        if digests.get(name) != digest and not name.endswith(ignored_suffixes):
            raise ValueError(
                f"{folder / name}: is not what was written, according to {MANIFEST}; copy or "
                f"export the folder again, or remove {MANIFEST} if you changed the file yourself"
            )
