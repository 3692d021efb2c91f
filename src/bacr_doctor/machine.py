"""Checks the environment: software versions, devices, disk, grader, and the model folder.

`checks` lists the functions of this module that return a `Record`. Unlike the checks in `paths` and
`rates`, these checks do not run a model.
"""

import contextlib
import os
import platform
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import jax

from bacr_client.fingerprint import MANIFEST, file_digests, file_sizes
from bacr_doctor.records import Record, Subject, ok_or_broken
from bacr_grading import Grader
from bacr_jax.config import io as config_io
from bacr_jax.config.gpus import has_driver
from bacr_jax.errors import UserError, first_of
from bacr_jax.files import replace_file
from bacr_jax.model.hf.archive import check_files
from bacr_jax.model.hf.hub import local_folder
from bacr_jax.model.hf.reading import check_folder
from bacr_jax.parallel import processes
from bacr_jax.prompts.encoding import encode_prompts, eos_ids, frame
from bacr_jax.prompts.formats import format_for
from bacr_jax.prompts.tokenizers import decode_ids, load_tokenizer
from bacr_jax.runs.agreement import start_facts
from bacr_jax.runs.folder import LOCK, lock_folder
from bacr_jax.runs.provenance import commit

# Matches further packages that can break a run or change its speed. The versions of the packages in
# `start_facts`, which every run records, are reported in any case.
_MORE_PACKAGES = re.compile(
    r"orbax-checkpoint|transformers|jax-cuda1\d-p\w+|nvidia-(nccl|cudnn)\S*"
)
# Names of the versions that are printed. The JSON file contains all versions.
_PRINTED = ("python", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "commit")
# Fields that are requested from `nvidia-smi --query-gpu`.
_GPU_QUERY = (
    "name,memory.total,clocks.sm,clocks.max.sm,temperature.gpu,power.limit,ecc.mode.current"
)
# A disk counts as slow if the replacement of a small file, including fsync, takes longer than this
# number of seconds.
_SLOW_FSYNC = 1.0
# Minimum free disk space in GiB for the checkpoints of a run.
_LITTLE_ROOM = 1.0
# Size in bytes of the file used to measure write speed.
_LARGE_FILE = 2**24
# Maximum total size in bytes of the hashed files of a model folder. At 20 MB/s, which is slow for a
# network disk, reading them takes 100 s, and a check has 120 s.
MOST_HASHED = 2_000_000_000
# Answers that a grading worker must compare with sympy, and whether each is equal to _GOLD.
_GOLD = "(x+1)^2"
_FIRST_ANSWERS = {"x^2+2x+1": True, "x^2+2x+2": False, "(x+1)(x+1)": True, "(x+1)(x-1)": False}
_SECOND_ANSWERS = {"1+2x+x^2": True, "1+3x+x^2": False}
# Answer that is sent while all workers are suspended, so that grading must time out.
_STOPPED_ANSWER = "x(x+2)+1"
# Question with braces and angle brackets, which a chat template must not change.
_QUESTION = "How much is 17 + 25? {Give} the number <alone>."
# Matches link types in the output of `nvidia-smi topo -m`.
_LINKS = re.compile(r"\b(?:NV\d+|PIX|PXB|PHB|NODE|SYS)\b")
# Matches special tokens of common chat templates, such as `<|im_end|>` or `[INST]`.
_MARKUP = re.compile(r"<[|｜][^<>\n]{1,40}[|｜]>|\[/?INST\]|<(?:start|end)_of_turn>")
_NO_FOLDER = Record("ok", "no model.path in the config")


def _output_of(*command: str) -> str:
    """Runs a command and returns its stdout without ANSI colour codes.

    Returns:
      The output, or an empty string if the program is not installed or fails.
    """
    if shutil.which(command[0]) is None:
        return ""
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if result.returncode != 0:
        return ""
    return re.sub(r"\x1b\[[\d;]*m", "", result.stdout).strip()


def versions(subject: Subject) -> Record:
    """Reports the versions of software that can change the results of a run.

    The status is `warn` if jaxlib and its CUDA plugin have different versions.
    """
    config_keys = config_io.flatten(subject.config)
    recorded = start_facts(config_keys, {})
    values: dict[str, Any] = {
        "python": platform.python_version(),
        "commit": commit(),
    }
    for name, value in recorded.items():
        # Config values may contain paths, which must not appear in doctor.json.
        if name not in config_keys:
            values[name] = value
    installed = {
        package.name.lower(): package.version for package in distributions() if package.name
    }
    for name, version in installed.items():
        if _MORE_PACKAGES.fullmatch(name):
            values[name] = version
    measured = ", ".join(f"{name} {values[name]}" for name in _PRINTED if values.get(name))
    plugin_versions = {values[name] for name in values if name.endswith("-plugin")}
    if plugin_versions - {values["jaxlib"]}:
        advice = (
            f'run pip install "jax[cuda12]=={values["jax"]}" (or cuda13), because the versions of '
            "plugin and jaxlib differ"
        )
        return Record("warn", measured, advice, values=values)
    return Record("ok", measured, values=values)


def devices(subject: Subject) -> Record:
    """Reports the JAX devices, their memory and clocks, and the links between GPUs.

    The status is `warn` if an NVIDIA driver is installed but JAX does not use a GPU.
    """
    jax_devices = jax.devices()
    first = jax_devices[0]
    limit = (first.memory_stats() or {}).get("bytes_limit")
    host_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    measured = f"{len(jax_devices)} x {first.device_kind}"
    if limit:
        measured += f", {limit / 2**30:.1f} GiB each for JAX"
    cores = processes.cores()
    load = os.getloadavg()[0]
    measured += f"; host {host_gib:.0f} GiB, {cores} cores, load {load:.1f}"
    status = _output_of("nvidia-smi", f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader")
    topology = _output_of("nvidia-smi", "topo", "-m")
    values = {
        "platform": first.platform,
        "limit": limit,
        "nvidia_smi": [status, topology],
    }
    if has_driver() and first.platform != "gpu":
        advice = 'run pip install -e ".[cuda12]" (or cuda13), and leave JAX_PLATFORMS unset'
        measured += "; a GPU's driver is installed, but JAX does not use a GPU"
        return Record("warn", measured, advice, values=values)
    if status:
        first_gpu = status.splitlines()[0]
        measured += f"; clocks {first_gpu}"
    # Cut off the legend of the output, because it lists all link types, including those that do not
    # occur.
    matrix = topology.split("Legend")[0]
    links = set(_LINKS.findall(matrix))
    measured += f"; joined by {', '.join(sorted(links)) or 'none'}"
    return Record("ok", measured, values=values)


def files(subject: Subject) -> Record:
    """Checks the file system of the run's output folder.

    It measures free disk space and write speed, and tests atomic replacement and file locks.

    Args:
      subject: the run for which the machine is checked.
    """
    free_gib = shutil.disk_usage(subject.folder).free / 2**30
    values = {"free_gib": free_gib}
    measured = f"{free_gib:,.0f} GiB free"
    with subject.temporary_folder() as folder:
        try:
            values |= _write_speed(folder)
            problems = _sharing_problems(folder)
        except OSError as error:
            problems = [str(error).replace(str(folder), "output.dir")]
    if problems:
        return ok_or_broken(measured, problems, values)
    mb_per_s = values["mb_per_s"]
    fsync_seconds = values["fsync_s"]
    measured += f", {mb_per_s:,.0f} MB/s, fsync in {1e3 * fsync_seconds:.3g} ms"
    if free_gib < _LITTLE_ROOM or fsync_seconds > _SLOW_FSYNC:
        advice = "set output.dir to a folder on a faster or emptier disk"
        return Record("warn", measured, advice, values=values)
    return ok_or_broken(measured, problems, values)


def _write_speed(folder: Path) -> dict[str, float]:
    """Measures the write speed of a large file and the time to replace a small file.

    Returns:
      `mb_per_s`: write speed in MB/s. `fsync_s`: time in seconds to replace the small file.

    Raises:
      OSError: if a file cannot be written, or if the large file has different content when read
        back.
    """
    content = os.urandom(_LARGE_FILE)
    started = time.perf_counter()
    with (folder / "large").open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    large_done = time.perf_counter()
    replace_file(folder / "small", "one")
    small_done = time.perf_counter()
    if (folder / "large").read_bytes() != content:
        raise OSError("a file that was just written has different content when it is read back")
    large_seconds = large_done - started
    return {
        "mb_per_s": _LARGE_FILE / 1e6 / large_seconds,
        "fsync_s": small_done - large_done,
    }


def _sharing_problems(folder: Path) -> list[str]:
    """Checks that a file can be replaced and that a folder cannot be locked twice.

    Returns:
      A description of each problem.
    """
    problems = []
    replace_file(folder / "small", "other")
    if (folder / "small").read_text() != "other":
        problems.append("a replaced file has its old content")
    with lock_folder(folder, "output.dir"), contextlib.suppress(UserError):
        lock_folder(folder, "output.dir").close()
        problems.append(f"two runs get {LOCK} at the same time")
    return problems


def _grading_problems(grader: Grader, answers: Mapping[str, bool]) -> list[str]:
    """Checks the grader's verdicts on answers to a question whose correct answer is `_GOLD`.

    Args:
      grader: the grader to test.
      answers: maps each answer to True if it is correct.

    Returns:
      A description of each answer with a wrong verdict.
    """
    texts = [f"<answer>{answer}</answer>" for answer in answers]
    golds = [_GOLD] * len(answers)
    verdicts = grader.grade(texts, golds)
    problems = []
    for (answer, right), verdict in zip(answers.items(), verdicts):
        if verdict.correct != right:
            problems.append(f"{answer} is judged {verdict.correct}")
    return problems


def grader(subject: Subject) -> Record:
    """Checks that grading workers grade correctly and that hanging workers are replaced."""
    limits = subject.config.grading
    pool = Grader(
        workers=limits.workers,
        deadline=limits.deadline,
        memory_mb=limits.memory_mb,
    )
    with pool:
        problems = _grading_problems(pool, _FIRST_ANSWERS)
        # Suspend all workers, because the next answer may be sent to any of them.
        live = pool.worker_pids
        for pid in live:
            os.kill(pid, signal.SIGSTOP)
        (stopped,) = pool.grade([f"<answer>{_STOPPED_ANSWER}</answer>"], [_GOLD])
        for pid in set(live) & set(pool.worker_pids):
            os.kill(pid, signal.SIGCONT)
        if not stopped.timed_out:
            problems.append("a hanging worker does not time out")
        problems += _grading_problems(pool, _SECOND_ANSWERS)
        counts = pool.counters()
    measured = (
        f"{counts['graded']} answers judged, "
        f"{counts['worker_starts']} workers started, "
        f"{counts['timeouts']} that hung killed"
    )
    return ok_or_broken(measured, problems, counts)


def _model_folder(subject: Subject) -> Path | None:
    """Returns the local folder of `model.path`, or None without a config or a `model.path`."""
    path = subject.config.model.path if subject.named else None
    if path is None:
        return None
    return Path(local_folder(path, download=False, where="model.path"))


def model(subject: Subject) -> Record:
    """Checks the model folder: checksums (manifest or Hub), file headers and tensor shapes.

    The largest files are not hashed if the folder is larger than `MOST_HASHED`. Reading their
    headers still finds truncated weights.
    """
    folder = _model_folder(subject)
    if folder is None:
        return _NO_FOLDER
    digests = file_digests(folder, most_bytes=MOST_HASHED)
    check_files(folder, digests=digests)
    check_folder(folder)
    problems = []
    hub_files = 0
    for name, digest in digests.items():
        # In the Hugging Face Hub cache, the file name of a large file's blob is its SHA-256.
        blob = (folder / name).resolve().name
        if re.fullmatch("[0-9a-f]{64}", blob):
            hub_files += 1
            if blob != digest:
                problems.append(f"{name}: is not what the hub has")
    has_manifest = (folder / MANIFEST).is_file()
    source = "equal to the manifest" if has_manifest else f"{hub_files} equal to the hub's names"
    measured = f"{len(digests)} files, {source}; SHA-256 of each in the JSON file"
    sizes = file_sizes(folder)
    unhashed = {name: size for name, size in sizes.items() if name not in digests}
    if unhashed:
        gigabytes = sum(unhashed.values()) / 1e9
        measured += (
            f"; not hashed, because it would take too long: {first_of(list(unhashed), 3)} "
            f"({gigabytes:,.1f} GB)"
        )
    values = digests | {name: f"{size} bytes, not hashed" for name, size in unhashed.items()}
    return ok_or_broken(measured, problems, values)


def template(subject: Subject) -> Record:
    """Checks the chat template of the model.

    The template must preserve the question, use only special tokens of the tokenizer, and encode to
    valid token ids that decode to the same prompt.
    """
    folder = _model_folder(subject)
    if folder is None:
        return _NO_FOLDER
    source = subject.config.model.tokenizer or folder
    tokenizer = load_tokenizer(source, where="model.tokenizer", model=folder)
    style = format_for(subject.config.data)
    head, tail = frame(tokenizer, style)
    expected_prompt = head + _QUESTION + tail
    prompts, _ = encode_prompts(tokenizer, [_QUESTION], style, max_tokens=10**6)
    ids = prompts.tokens[0].tolist()
    added_tokens = {token.content for token in tokenizer.added_tokens_decoder.values()}
    markup = dict.fromkeys(_MARKUP.findall(head + tail))
    problems = []
    for text in markup:
        if text not in added_tokens:
            problems.append(f"writes {text}, which is not a token of this tokenizer")
    if decode_ids(tokenizer, ids) != expected_prompt:
        problems.append("the prompt's tokens decode to another text")
    size = len(tokenizer)
    if not set(ids) <= set(range(size)):
        problems.append("the prompt has ids above the size of the tokenizer")
    turn_ends = [tokenizer.decode([id]) for id in eos_ids(tokenizer, style)]
    measured = f"{len(ids)} tokens, {style.name}; a turn ends at {' '.join(turn_ends)}"
    values = {"prompt": expected_prompt, "ends": turn_ends}
    advice = "use the tokenizer and the chat template of the model's folder"
    return ok_or_broken(measured, problems, values, advice)
