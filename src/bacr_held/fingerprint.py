"""What makes an exported folder this one and no other."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Bytes of a weight file that are read to recognise it: many small pieces spread over the file.
_PIECES, _PIECE_BYTES = 64, 4096


def fingerprint(folder: Path) -> str:
    """A short hash of a folder's config and of pieces all over its weight files.

    FileNotFoundError: it holds no config, or no safetensors weights.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: holds no safetensors weights")
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for place in _places(max(size - _PIECE_BYTES, 0)):
                file.seek(place)
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()[:12]


def file_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file that lies right in a folder, by name; hidden files aside."""

    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name[0] != ".")
    # Hashing works outside of Python's lock.
    with ThreadPoolExecutor() as pool:
        return dict(zip([path.name for path in files], pool.map(digest, files)))


def _places(last: int) -> list[int]:
    """Where the pieces begin: evenly from 0 to `last`, both included."""
    step = last / (_PIECES - 1)
    return [*(int(index * step) for index in range(_PIECES - 1)), last]
