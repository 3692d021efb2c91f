"""Measures the startup time of commands with a filled compilation cache.

    bacr train --config configs/quickstart.yaml output.dir=runs/quickstart
    python benchmarks/starts.py --run runs/quickstart [--record FILE]

There are three measurements. Each is the median over several repetitions; the first repetition
compiles and is not counted.

* `--help` of every command: its CPU time, and whether it imports JAX.
* Generating the answer to one question with the run.
* A new run of the quickstart with the warm-up of the run, until its first step is in metrics.jsonl.
  The time is split into parts.

The last line is one JSON object. Wall-clock times are only meaningful on an idle machine.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import record

ROOT = Path(__file__).parents[1]
COMMANDS = ("train", "evaluate", "generate", "export", "report", "plan", "data", "grading", "study")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", *words]


def help_of(name: str) -> float:
    """Returns the CPU seconds of `--help` of a command."""
    process = subprocess.Popen(command(f"bacr_jax.{name}", "--help"), stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    assert status == 0, name
    return used.ru_utime + used.ru_stime


def imports_jax(name: str) -> bool:
    line = command("bacr_jax." + name, "--help")
    found = subprocess.run([line[0], "-X", "importtime", *line[1:]], capture_output=True, text=True)
    return any(row.split("|")[-1].strip() == "jax" for row in found.stderr.splitlines())


def question(run: Path) -> float:
    started = time.perf_counter()
    words = command("bacr_jax.generate", "--run", str(run), "--budget", "16", "7a2b3")
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def first_step(run: Path) -> dict[str, float]:
    """Trains a new run until its first step is written.

    Returns:
      Wall-clock seconds from the start of the run to the start of each part.
    """
    begins = {
        "reading the warm-up": "warm-up  ",
        "evaluation": "evaluation before",
        "rollout's programs": "compiling rollouts",
        "first step": "training  ",
    }
    folder = Path(tempfile.mkdtemp(prefix="starts-"))
    words = command("bacr_jax.train", "--config", str(ROOT / "configs/quickstart.yaml"))
    words += [f"output.dir={folder / 'run'}", f"warmup.dir={run / 'warmup'}"]
    metrics, found = folder / "run" / "metrics.jsonl", {}
    started = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    try:
        while not (metrics.exists() and b"\n" in metrics.read_bytes()):
            assert process.poll() is None, "the run ended"
            for line in process.stdout:
                for name, words_of_it in begins.items():
                    if line.startswith(words_of_it):
                        found.setdefault(name, time.perf_counter() - started)
            time.sleep(0.02)
        found["step"] = time.perf_counter() - started
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)
    return found


def parts(found: dict[str, float]) -> dict[str, float]:
    """Converts the start times of the parts to durations."""
    names = ["imports and data", *found]
    times = [0.0, *found.values()]
    # Each part lasts until the next one starts. The last entry is the end of the measurement.
    lengths = {name: end - begin for name, begin, end in zip(names, times, times[1:])}
    return {
        **lengths,
        "whole": times[-1],
        "whole but evaluation": times[-1] - lengths["evaluation"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--run", type=Path, required=True, help="a finished quickstart")
    parser.add_argument("--rounds", type=int, default=3)
    record.add_option(parser)
    options = parser.parse_args()
    if not (options.run / "warmup").is_dir():
        parser.error(f"--run {options.run}: no finished quickstart; train one (see above)")
    rounds = range(options.rounds)
    help_times = {name: [help_of(name) for _ in rounds] for name in COMMANDS}
    help_s = {name: statistics.median(values) for name, values in help_times.items()}
    for name, seconds in help_s.items():
        print(f"{name} --help: {seconds:.2f} s of CPU, JAX imported: {imports_jax(name)}")
    asked = [question(options.run) for _ in range(options.rounds + 1)][1:]
    print(f"generate, one question: {statistics.median(asked):.2f} s")
    runs = [parts(first_step(options.run)) for _ in range(options.rounds + 1)][1:]
    median = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    for name, seconds in median.items():
        print(f"quickstart until its first step, {name}: {seconds:.2f} s")
    first_steps = {name: [run[name] for run in runs] for name in runs[0]}
    measurements = record.seconds(help_times, "--help")
    measurements |= record.seconds({"generate, one question": asked})
    measurements |= record.seconds(first_steps, "quickstart until its first step")
    record.write(options, measurements)
    result = {
        "help_s": max(help_s.values()),
        "generate_s": statistics.median(asked),
        "first_step_s": median["whole"],
        "first_step_but_evaluation_s": median["whole but evaluation"],
    }
    print(json.dumps({name: round(seconds, 2) for name, seconds in result.items()}))


if __name__ == "__main__":
    main()
