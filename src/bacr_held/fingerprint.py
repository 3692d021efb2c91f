"""What makes an exported folder this one and no other."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Bytes of a weight file that are read to recognise it: many small pieces spread over the file.
_PIECES, _PIECE_BYTES = 64, 4096
# Of an exported folder: SHA-256 of its files, by name.
MANIFEST = "manifest.json"
_WEIGHTS = ".safetensors"


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
            # Evenly from the first byte to the last piece, both included.
            last = max(size - _PIECE_BYTES, 0)
            step = last / (_PIECES - 1)
            for place in (*(int(index * step) for index in range(_PIECES - 1)), last):
                file.seek(place)
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()[:12]


def file_digests(folder: Path, *, weights: bool = True) -> dict[str, str]:
    """SHA-256 of every file in a folder, or of all but weights, by its name; hidden ones aside."""

    def digest(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    parts = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    names = [one.as_posix() for one in parts if not any(part[0] == "." for part in one.parts)]
    names = [name for name in names if weights or not name.endswith(_WEIGHTS)]
    # Hashing works outside of Python's lock.
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(digest, names)))


def write_manifest(folder: Path) -> None:
    """Writes down what a folder's files are, once all of them are there."""
    (folder / MANIFEST).write_text(json.dumps(file_digests(folder), indent=2) + "\n")


def check_manifest(folder: Path, *, weights: bool = True) -> None:
    """Holds a folder against its manifest, if it has one; what is read by people may be edited.

    Without `weights` it takes no time. ValueError: names a file that is not what was written.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return
    try:
        expected = json.loads(path.read_text()).items()
    except (ValueError, AttributeError):
        raise ValueError(f"{path}: is damaged; copy or export the folder again") from None
    found = file_digests(folder, weights=weights)
    free = (".md",) if weights else (".md", _WEIGHTS)
    for name, digest in expected:
        if found.get(name) != digest and not name.endswith(free):
            raise ValueError(
                f"{folder / name}: is not what was written, as {MANIFEST} says; copy or export the "
                f"folder again, or remove {MANIFEST} if you changed the file yourself"
            )
