"""Programs that need several devices, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path


def run_on_devices(program, *arguments, devices=8):
    """Runs a program text in a process with that many CPU devices; its standard output."""
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={
            **os.environ,
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root / 'tests'}",
            # Devices that wait for each other each need a thread, however few cores there are.
            "NPROC": str(4 * devices),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()
