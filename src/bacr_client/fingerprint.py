"""Fingerprints of exported model folders, and integrity checks against a manifest.

The exporter writes the manifest. Servers, evaluations and rollouts compare fingerprints.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Number and size in bytes of the evenly spaced pieces of each weight file that are hashed. Hashing
# whole weight files would be slow.
_PIECES = 64
_PIECE_BYTES = 4096
# Name of the file in an exported folder that contains the SHA-256 hashes of all other files.
MANIFEST = "manifest.json"
_WEIGHTS = ".safetensors"


def fingerprint(folder: Path) -> str:
    """Returns a hash that identifies the config and the weights of a folder.

    The hash covers config.json, and the name, the size and some parts of each weight file, because
    reading all weights would be slow.

    Returns:
      The first 12 hexadecimal digits of the hash.

    Raises:
      FileNotFoundError: if the folder has no config.json or no safetensors weights.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    paths = sorted(folder.glob(f"*{_WEIGHTS}"))
    if not paths:
        raise FileNotFoundError(
            f"{folder} contains no .safetensors files with weights; use a folder that bacr export "
            "wrote"
        )
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for offset in _piece_offsets(size):
                file.seek(offset)
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()[:12]


def _piece_offsets(size: int) -> Iterator[int]:
    """Yields the evenly spaced start offsets of the hashed pieces of a file.

    The first piece is at the start of the file and the last piece at its end.
    """
    last = max(size - _PIECE_BYTES, 0)
    step = last / (_PIECES - 1)
    for index in range(_PIECES - 1):
        yield int(index * step)
    yield last


def file_sizes(folder: Path) -> dict[str, int]:
    """Returns the sizes in bytes of all files in a folder, excluding hidden files.

    Args:
      folder: the folder, which is searched recursively.

    Returns:
      A dict from the path of a file, relative to the folder, to its size, sorted by path.
    """
    sizes = {}
    for path in sorted(folder.rglob("*")):
        relative_path = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in relative_path.parts)
        if path.is_file() and not is_hidden:
            sizes[relative_path.as_posix()] = path.stat().st_size
    return sizes


def file_digests(
    folder: Path, *, weights: bool = True, most_bytes: int | None = None
) -> dict[str, str]:
    """Returns the SHA-256 hashes of all files in a folder, excluding hidden files.

    Args:
      folder: the folder, which is searched recursively.
      weights: include weight files, which is slow for large models.
      most_bytes: maximum total size of the hashed files, or None for no limit. The largest files
        are left out until the rest is within the limit.

    Returns:
      A dict from the path of a file, relative to the folder, to its hash in hexadecimal.
    """
    sizes = file_sizes(folder)
    names = [name for name in sizes if weights or not name.endswith(_WEIGHTS)]
    if most_bytes is not None:
        names.sort(key=sizes.__getitem__)
        totals = itertools.accumulate(sizes[name] for name in names)
        names = sorted(name for name, total in zip(names, totals) if total <= most_bytes)
    paths = [folder / name for name in names]
    # Threads run in parallel here, because hashlib releases the GIL.
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(_file_digest, paths)))


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path) -> None:
    """Writes the manifest of a folder. Call this after all other files are written."""
    (folder / MANIFEST).write_text(json.dumps(file_digests(folder), indent=2) + "\n")


def check_manifest(
    folder: Path, *, weights: bool = True, digests: Mapping[str, str] | None = None
) -> None:
    """Checks the files of a folder against its manifest. Does nothing without a manifest.

    Markdown files are not checked, because users may edit them.

    Args:
      folder: the folder.
      weights: check weight files, too, which is slow for large models.
      digests: result of `file_digests` for the folder, or None to hash all files. Other files must
        only exist.

    Raises:
      ValueError: if a file has changed or is missing, or the manifest is malformed.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return
    try:
        expected = json.loads(path.read_text()).items()
    except (ValueError, AttributeError):
        raise ValueError(
            f"{path} is not a JSON object, so the folder is damaged; copy or export it again"
        ) from None
    unhashed: set[str] = set()
    if digests is None:
        digests = file_digests(folder, weights=weights)
    else:
        unhashed = set(file_sizes(folder)) - set(digests)
    ignored_suffixes = (".md",) if weights else (".md", _WEIGHTS)
    for name, digest in expected:
        is_compared = name not in unhashed and not name.endswith(ignored_suffixes)
        if is_compared and digests.get(name) != digest:
            raise ValueError(
                f"{folder / name} is not the file that was exported, because its SHA-256 differs "
                f"from {MANIFEST}; copy or export the folder again, or remove {MANIFEST} if you "
                "changed the file yourself"
            )
