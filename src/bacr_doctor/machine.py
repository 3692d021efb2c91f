"""What surrounds a run: software, devices, the disk, the grader, the folder of its model."""

import contextlib
import os
import platform
import re
import shutil
import signal
import subprocess
import time
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

from bacr_client.fingerprint import MANIFEST, file_digests
from bacr_doctor.records import Record, Subject, held
from bacr_grading import Grader
from bacr_jax.config import io as config_io
from bacr_jax.documents import replace_file
from bacr_jax.errors import UserError
from bacr_jax.model.hf.archive import check_files
from bacr_jax.model.hf.hub import local_folder
from bacr_jax.model.hf.reading import check_folder
from bacr_jax.prompts.encoding import encode_prompts, eos_ids, frame
from bacr_jax.prompts.formats import format_for
from bacr_jax.prompts.tokenizers import decode_ids, load_tokenizer
from bacr_jax.runs.agreement import told_at_start
from bacr_jax.runs.folder import LOCK, lock_folder
from bacr_jax.runs.provenance import commit

# Software besides what every run notes (`told_at_start`): it can break a run, or change its speed.
_MORE = re.compile(r"orbax-checkpoint|transformers|jax-cuda1\d-p\w+|nvidia-(nccl|cudnn)\S*")
_SHOWN = ("python", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "commit")
_ASKED = "name,memory.total,clocks.sm,clocks.max.sm,temperature.gpu,power.limit,ecc.mode.current"
# Seconds that a small file may take to reach the disk, and GiB that a run has no checkpoint in.
_SLOW_FSYNC, _LITTLE_ROOM = 1.0, 1.0
# Answers that only a worker's computer algebra can judge, and whether (x + 1)^2 is theirs.
_JUDGED = {"x^2+2x+1": True, "x^2+2x+2": False, "(x+1)(x+1)": True, "(x+1)(x-1)": False}
_ASKED_LATER = {"1+2x+x^2": True, "1+3x+x^2": False}
_QUESTION = "How much is 17 + 25? {Give} the number <alone>."
# What looks like a chat template's markup.
_MARKUP = re.compile(r"<[|｜][^<>\n]{1,40}[|｜]>|\[/?INST\]|<(?:start|end)_of_turn>")


def _told(*command: str) -> str:
    """What a program of NVIDIA's prints; empty: it is not there, or has nothing to say."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    plain = re.sub(r"\x1b\[[\d;]*m", "", done.stdout)
    return plain.strip() if done.returncode == 0 else ""


def versions(subject: Subject) -> Record:
    """Of what can change a run's numbers."""
    keys = config_io.flatten(subject.config)
    told = told_at_start(subject.config, {})
    found = {"python": platform.python_version(), "commit": commit()}
    found |= {name: value for name, value in told.items() if name not in keys}
    own = {one.name.lower(): one.version for one in distributions() if one.name}
    found |= {name: own[name] for name in own if _MORE.fullmatch(name)}
    seen = ", ".join(f"{name} {found[name]}" for name in _SHOWN if found.get(name))
    if {found[name] for name in found if name.endswith("-plugin")} - {found["jaxlib"]}:
        advice = f'pip install "jax[cuda12]=={found["jax"]}" (or cuda13): plugin and jaxlib differ'
        return Record("warn", seen, advice, values=found)
    return Record("ok", seen, values=found)


def devices(subject: Subject) -> Record:
    """What JAX computes on, its memory, its clocks, and how GPUs are joined."""
    found = jax.devices()
    limit = (found[0].memory_stats() or {}).get("bytes_limit")
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    seen = f"{len(found)} x {found[0].device_kind}"
    seen += f", {limit / 2**30:.1f} GiB each for JAX" if limit else ""
    seen += f"; host {host:.0f} GiB, {len(os.sched_getaffinity(0))} cores"
    seen += f", load {os.getloadavg()[0]:.1f}"
    told = _told("nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv,noheader")
    topology = _told("nvidia-smi", "topo", "-m")
    joined = set(re.findall(r"\b(?:NV\d+|PIX|PXB|PHB|NODE|SYS)\b", topology.split("Legend")[0]))
    values = {"platform": found[0].platform, "limit": limit, "nvidia_smi": [told, topology]}
    if Path("/proc/driver/nvidia/version").is_file() and found[0].platform != "gpu":
        advice = 'pip install -e ".[cuda12]" (or cuda13), and leave JAX_PLATFORMS unset'
        seen += "; a GPU's driver is there, but JAX uses none"
        return Record("warn", seen, advice, values=values)
    seen += f"; clocks {told.splitlines()[0]}" if told else ""
    return Record("ok", f"{seen}; joined by {', '.join(sorted(joined)) or 'none'}", values=values)


def files(subject: Subject) -> Record:
    """Room, fsync, read-back, rename and lock where the run is to write."""
    values = {"free_gib": shutil.disk_usage(subject.folder).free / 2**30}
    seen = f"{values['free_gib']:,.0f} GiB free"
    with TemporaryDirectory(prefix=".bacr-doctor-", dir=subject.folder) as made:
        try:
            values |= _written(Path(made))
            wrong = _shared(Path(made))
        except OSError as error:
            wrong = [str(error).replace(made, "output.dir")]
    if not wrong:
        milliseconds = 1e3 * values["fsync_s"]
        seen += f", {values['mb_per_s']:,.0f} MB/s, fsync in {milliseconds:.3g} ms"
    if not wrong and (values["free_gib"] < _LITTLE_ROOM or values["fsync_s"] > _SLOW_FSYNC):
        advice = "write output.dir=FOLDER on a faster or emptier disk"
        return Record("warn", seen, advice, values=values)
    return held(seen, wrong, values)


def _written(place: Path) -> dict[str, float]:
    """Speed of a large file, and seconds that a small one takes."""
    content, started = os.urandom(2**24), time.perf_counter()
    with (place / "large").open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    between = time.perf_counter()
    replace_file(place / "small", "one")
    ended = time.perf_counter()
    if (place / "large").read_bytes() != content:
        raise OSError("what was read is not what was written")
    return {"mb_per_s": len(content) / 1e6 / (between - started), "fsync_s": ended - between}


def _shared(place: Path) -> list[str]:
    """What goes wrong when a file is replaced, and when two want the same folder."""
    replace_file(place / "small", "other")
    wrong = [] if (place / "small").read_text() == "other" else ["a replaced file is the old one"]
    with lock_folder(place, "output.dir"), contextlib.suppress(UserError):
        lock_folder(place, "output.dir").close()
        wrong.append(f"two runs get {LOCK} at the same time")
    return wrong


def _judge(grader: Grader, cases: dict[str, bool]) -> list[str]:
    """Answers that are judged otherwise than they should be."""
    texts = [f"<answer>{text}</answer>" for text in cases]
    verdicts = grader.grade(texts, ["(x+1)^2"] * len(cases))
    pairs = zip(cases.items(), verdicts)
    return [f"{text} is judged {v.correct}" for (text, right), v in pairs if v.correct != right]


def grader(subject: Subject) -> Record:
    """Its workers start, judge, and are killed and replaced when one hangs."""
    limits = subject.config.grading
    settings = {name: getattr(limits, name) for name in ("workers", "deadline", "memory_mb")}
    with Grader(**settings) as own:
        wrong = _judge(own, _JUDGED)
        # Any of them may be asked next.
        live = own.worker_pids
        for pid in live:
            os.kill(pid, signal.SIGSTOP)
        stopped = own.grade(["<answer>x(x+2)+1</answer>"], ["(x+1)^2"])[0]
        for pid in set(live) & set(own.worker_pids):
            os.kill(pid, signal.SIGCONT)
        wrong += [] if stopped.timed_out else ["a worker that hangs is waited for"]
        wrong += _judge(own, _ASKED_LATER)
        counts = own.counters()
    seen = f"{counts['graded']} answers judged, {counts['worker_starts']} workers started, "
    seen += f"{counts['timeouts']} that hung killed"
    return held(seen, wrong, counts)


def _folder(subject: Subject) -> Path | None:
    path = subject.config.model.path if subject.named else None
    return None if path is None else Path(local_folder(path, download=False, where="model.path"))


def model(subject: Subject) -> Record:
    """The files of the model's folder: what its manifest says, and headers and shapes."""
    folder = _folder(subject)
    if folder is None:
        return Record("ok", "no model.path in the config")
    check_files(folder)
    check_folder(folder)
    found = file_digests(folder)
    # The hub's cache names large files after their SHA-256.
    blobs = {name: (folder / name).resolve().name for name in found}
    named = {name: blob for name, blob in blobs.items() if re.fullmatch("[0-9a-f]{64}", blob)}
    wrong = [f"{name}: is not what the hub has" for name in named if named[name] != found[name]]
    has = (folder / MANIFEST).is_file()
    how = "as its manifest says" if has else f"{len(named)} as the hub names them"
    return held(f"{len(found)} files, {how}; SHA-256 of each in the JSON file", wrong, found)


def template(subject: Subject) -> Record:
    """The chat template: keeps the question, and writes no markup but tokens of its tokenizer."""
    folder = _folder(subject)
    if folder is None:
        return Record("ok", "no model.path in the config")
    words = subject.config.model.tokenizer or folder
    tokenizer = load_tokenizer(words, where="model.tokenizer", model=folder)
    style = format_for(subject.config)
    head, tail = frame(tokenizer, style)
    prompts, _ = encode_prompts(tokenizer, [_QUESTION], style, max_tokens=10**6)
    ids = prompts.tokens[0].tolist()
    known = {token.content for token in tokenizer.added_tokens_decoder.values()}
    unknown = [text for text in _MARKUP.findall(head + tail) if text not in known]
    wrong = [f"writes {text}, no token of this tokenizer" for text in dict.fromkeys(unknown)]
    if decode_ids(tokenizer, ids) != head + _QUESTION + tail:
        wrong.append("tokens don't give back the prompt that it wrote")
    if not set(ids) <= set(range(len(tokenizer))):
        wrong.append("ids beyond its own size")
    ends = [tokenizer.decode([i]) for i in eos_ids(tokenizer, style)]
    seen = f"{len(ids)} tokens, {style.name}; a turn ends at {' '.join(ends)}"
    advice = "take tokenizer and chat template from the folder of the model itself"
    return held(seen, wrong, {"prompt": head + _QUESTION + tail, "ends": ends}, advice)
