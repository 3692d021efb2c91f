"""Writes the measurements of a benchmark to a JSON file, and reads such files.

Every benchmark with the option `--record FILE` calls `write`. `compare.py` compares two files, and
docs/make_performance.py writes the tables of docs/performance.md from benchmarks/baselines/*.json.
This module does not measure anything. Standard library only.

A file contains the benchmark's name and settings, the date, the commit, the machine with its kernel
and NVIDIA driver, the versions of the packages, and XLA_FLAGS if it is set. For each measurement it
contains the values with their median and quartiles. A ratio names two measurements; its value is
the ratio of their medians.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("bacr_jax", "jax", "jaxlib", "numpy", "torch", "transformers", "trl")
# Names of the packages of JAX's plug-in for NVIDIA GPUs, such as jax-cuda13-pjrt.
PLUGIN = re.compile(r"jax[-_]cuda\d+[-_](plugin|pjrt)")
# Options that select files or an environment. They do not affect the measurement.
NOT_SETTINGS = ("record", "out", "folder", "ours", "trl", "run", "python", "on_demand")
# Minimum number of values for a bootstrap interval of a median. With fewer, only the ratio is
# computed.
FEWEST_VALUES = 5
RESAMPLES = 2000


def add_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--record` to a benchmark's command line."""
    parser.add_argument(
        "--record", type=new_file, metavar="FILE", help="also write all values to this new file"
    )


def new_file(text: str) -> Path:
    """Returns the path of a file that can be created.

    Raises:
      argparse.ArgumentTypeError: the file exists, or its folder does not.
    """
    path = Path(text)
    if path.exists():
        raise argparse.ArgumentTypeError(f"{path}: found a file; use the name of a new one")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path}: its folder is missing; create {path.parent}")
    return path


def measurement(
    values: Sequence[float], unit: str = "s", better: str = "lower", exact: bool = False
) -> dict[str, Any]:
    """Returns the record of one measurement.

    Args:
      values: one value per round.
      unit: unit of the values.
      better: "lower" or "higher".
      exact: True if the value is counted, so that it is the same in every round.
    """
    numbers = [round(float(value), 6) for value in values]
    low, high = numbers[0], numbers[0]
    if len(numbers) > 1:
        low, _, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return {
        "unit": unit,
        "better": better,
        "exact": exact,
        "values": numbers,
        "median": round(statistics.median(numbers), 6),
        "quartiles": [round(low, 6), round(high, 6)],
    }


def seconds(times: Mapping[str, Sequence[float]], part: str = "") -> dict[str, dict[str, Any]]:
    """Returns measurements of seconds, with the name of a part at the beginning of their names."""
    prefix = f"{part}, " if part else ""
    return {f"{prefix}{name}": measurement(values) for name, values in times.items()}


def write(
    arguments: argparse.Namespace,
    measurements: Mapping[str, Mapping[str, Any]],
    ratios: Mapping[str, tuple[str, str]] | None = None,
) -> None:
    """Writes a record if `--record` was given.

    Args:
      arguments: the benchmark's command line; its options become the settings of the record.
      measurements: results of `measurement` by name.
      ratios: for each ratio, the names of the numerator and the denominator.
    """
    if arguments.record is None:
        return
    fractions = {}
    for name, (over, under) in (ratios or {}).items():
        value = measurements[over]["median"] / measurements[under]["median"]
        fractions[name] = {"over": over, "under": under, "value": round(value, 4)}
    flags = os.environ.get("XLA_FLAGS", "").split()
    content = {
        "benchmark": Path(sys.argv[0]).stem,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **commit(),
        "machine": machine(),
        "versions": versions(),
        **({"xla_flags": flags} if flags else {}),
        "settings": settings(arguments),
        "measurements": dict(measurements),
        "ratios": fractions,
    }
    arguments.record.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the options that affect the measurement. Of a path, only the last part is kept."""
    options = {}
    for name, value in vars(arguments).items():
        if name not in NOT_SETTINGS:
            options[name] = value.name if isinstance(value, Path) else value
    return options


def commit() -> dict[str, Any]:
    """Returns the commit of this clone, and True if tracked files differ from it."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--untracked-files=no")
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(changes)}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "changed": None}


def machine() -> dict[str, Any]:
    """Returns the processor, usable cores, memory, kernel release, accelerators and their driver.

    The driver is missing if the machine has no NVIDIA driver.
    """
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    driver_version = driver()
    return {
        "processor": fields.get("model name", platform.machine()),
        "family": fields.get("cpu family"),
        "model": fields.get("model"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30),
        "kernel_release": platform.release(),
        "accelerators": accelerators(),
        **({} if driver_version is None else {"driver": driver_version}),
        "load_before": round(os.getloadavg()[2], 2),
    }


def accelerators() -> list[str]:
    """Returns the kinds of the devices that JAX computes on, without the CPU."""
    jax = sys.modules.get("jax")
    if jax is None or jax.default_backend() == "cpu":
        return []
    return [device.device_kind for device in jax.devices()]


def driver(root: Path = Path("/")) -> str | None:
    """Returns the version of the NVIDIA driver, or None if there is no driver.

    Args:
      root: root folder of the file system.
    """
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    text = ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        text = done.stdout
    except (OSError, subprocess.SubprocessError):
        # Containers may have the driver without nvidia-smi.
        with contextlib.suppress(OSError):
            text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8")
    match = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return match[0] if match else None


def gpu_packages() -> list[str]:
    """Returns the names of the installed packages of JAX's GPU plug-in, and of its cuDNN.

    The list is empty without a plug-in, because other packages also install cuDNN.
    """
    names = sorted({package.name or "" for package in importlib.metadata.distributions()})
    plugins = [name for name in names if PLUGIN.fullmatch(name)]
    if not plugins:
        return []
    return plugins + [name for name in names if name.startswith("nvidia-cudnn-")]


def versions() -> dict[str, str]:
    """Returns the versions of Python, of the measured packages and of JAX's GPU plug-in."""
    result = {"python": platform.python_version()}
    for name in (*PACKAGES, *gpu_packages()):
        try:
            result[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return result


def read(path: Path) -> dict[str, Any]:
    """Returns the content of a record.

    Raises:
      ValueError: the file is missing, is not JSON, or is not a record.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; use the path of a record") from None
    except ValueError:
        raise ValueError(f"{path}: not JSON; use the path of a record") from None
    if not isinstance(content, dict) or "measurements" not in content:
        raise ValueError(f"{path}: not a record; use a file that --record wrote")
    return content


def ratio_interval(
    over: Sequence[float], under: Sequence[float]
) -> tuple[float, tuple[float, float] | None]:
    """Returns the ratio of two medians and its 95 % bootstrap interval.

    The rounds of both sides are resampled independently. The interval is None if a side has fewer
    than `FEWEST_VALUES` values.
    """
    ratio = statistics.median(over) / statistics.median(under)
    if min(len(over), len(under)) < FEWEST_VALUES:
        return ratio, None
    draw = random.Random(0)
    resampled = []
    for _ in range(RESAMPLES):
        above = statistics.median(draw.choices(over, k=len(over)))
        below = statistics.median(draw.choices(under, k=len(under)))
        resampled.append(above / below)
    resampled.sort()
    low = resampled[round(0.025 * RESAMPLES)]
    high = resampled[round(0.975 * RESAMPLES) - 1]
    return ratio, (low, high)
