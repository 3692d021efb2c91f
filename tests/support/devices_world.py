"""Runs programs that need several devices, each in a separate process."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]


def environment(devices):
    """Returns the environment of a process with the given number of CPU devices.

    The process compiles with the same settings of XLA as the tests.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    return {
        **os.environ,
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(str(ROOT / p) for p in ("src", "tests/support", "tests")),
        # Devices that wait for each other need one thread each, even if there are fewer cores.
        "NPROC": "32",
    }


def run_on_devices(program, *arguments, devices=8):
    """Runs Python code in a process with several CPU devices and returns its standard output.

    Args:
      program: source code.
      arguments: command line arguments of the program.
      devices: number of CPU devices.
    """
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=environment(devices),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def sums_between_copies(text, devices):
    """Returns the sizes of the arrays that two data-parallel copies of a model sum up.

    Args:
      text: HLO of a compiled program.
      devices: number of devices. The first half is one copy of the model, the second half the
        other copy.

    Returns:
      Two lists with the number of elements of each all-reduce or reduce-scatter between the copies:
      one list for the bodies of loops, and one for the rest of the program.
    """
    inside, outside, loops = [], [], set(re.findall(r"body=(%[\w.-]+)", text))
    groups = r"(mesh\[.*?\{.*?\}|\{\{.*?\}\}|\S+)"
    summed = re.compile(rf"= (.*?) (?:all-reduce|reduce-scatter)[\w-]*\(.*replica_groups={groups}")
    for block in re.split(r"\n(?=\S)", text):
        found = inside if block.split(" ")[0] in loops else outside
        for line in block.splitlines():
            match = summed.search(line)
            if match and _crosses(match[2], devices):
                shapes = re.findall(r"f\d+\[([\d,]*)\]", match[1])
                found.append(sum(math.prod(map(int, filter(None, s.split(",")))) for s in shapes))
    return inside, outside


def _crosses(groups, devices):
    """True if any group of devices contains devices of both halves.

    Args:
      groups: value of `replica_groups` in HLO. It is a list of groups, a range of devices with a
        shape (iota), or a mesh with the names of axes.
    """
    numbers = lambda text: [int(n) for n in text.split(",")]
    listed = [numbers(group) for group in re.findall(r"\{([\d,]+)\}", groups)]
    order = np.arange(devices)
    if iota := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", groups):
        shape, sizes, moved = iota.groups()
        order = order.reshape(numbers(sizes))
        order = order.transpose(numbers(moved)) if moved else order
        listed = order.reshape(numbers(shape)).tolist()
    if mesh := re.match(r"mesh\[(.*?)\](?:.*\(\[([\d,]+)\]T\(([\d,]+)\)\))?[^{]*\{(.*)\}", groups):
        axes, sizes, moved, over = mesh.groups()
        if sizes:
            order = order.reshape(numbers(sizes)).transpose(numbers(moved))
        named = re.findall(r"'(\w+)'=(\d+)", axes)
        order = order.reshape([int(size) for _, size in named])
        inner = [i for i, (name, _) in enumerate(named) if f"'{name}'" in over]
        outer = [i for i in range(len(named)) if i not in inner]
        across = int(np.prod([order.shape[i] for i in inner]))
        listed = order.transpose(outer + inner).reshape(-1, across).tolist()
    return any(min(group) < devices // 2 <= max(group) for group in listed)
