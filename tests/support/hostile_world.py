"""Runs hostile inputs of every command, each in a separate process, and counts the outcomes.

    python tests/support/hostile_world.py [--part K/N]
    python tests/support/hostile_world.py --folders N

The first command prints a line for each input of `hostile_tables` that was not refused (exit code
2, and only error messages on stderr, within ten seconds of CPU time). The last line contains the
counts of all outcomes as JSON. `--part K/N` runs every N-th input, beginning with number K.

The second command damages random files in N copies of a Hugging Face folder, and then runs `train
--check` and loads the weights. A damaged folder may be accepted or refused, and any other outcome
is printed.
"""

import argparse
import collections
import itertools
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from commands_world import QUESTIONS, SMALL, TEMPLATE, WORDS
from hostile_tables import CASES, FIFO, FOLDER, ODD, RATES, cases

# Limits of a process in seconds: CPU time, and wall-clock time. The latter is longer, because the
# machine may be busy.
SECONDS, BY_THE_CLOCK = 10, 20
# Limit of the address space, in bytes.
MEMORY = 12 << 30


def words_of(line, folder):
    """Splits a command line into words, and replaces `{}` by the folder of its files."""
    import re

    words = [a or b for a, b in re.findall(r"'([^']*)'|(\S+)", line)]
    # A word may be quoted as a whole. Quotes inside a word are part of it.
    return [word.replace("{}", str(folder)) for word in words]


def write_files(folder, model, changes):
    """Writes the files of an input into a folder.

    Args:
      model: contents of the files of a model folder, by name.
      changes: changed files, as in `hostile_tables.cases`.
    """
    files = {f"model/{name}": content for name, content in model.items()}
    files |= {"small.yaml": SMALL, "questions.jsonl": QUESTIONS}
    files |= {"rates.jsonl": RATES, "cases.jsonl": CASES}
    for name, change in changes.items():
        files[name] = change(files[name]) if callable(change) else change
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content == FIFO:
            os.mkfifo(path)
        elif content == FOLDER:
            path.mkdir()
        elif content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())


def tiny_model(folder):
    """Writes a random model with a tokenizer that has one token per byte."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    import hf_world
    from bacr_jax.export import policy_folder
    from bacr_jax.model.sizes import Qwen2Config

    shape = Qwen2Config(
        257, 16, 24, 2, 2, 1, 8, rope_theta=1e4, tie_embeddings=True, max_positions=512
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    policy_folder.save_policy(
        folder, hf_world.random_params(shape), config=shape, tokenizer=tokenizer
    )


def outcome(model, line, changes, then=None):
    """Runs one command line in a forked process.

    Args:
      model: contents of the files of a model folder, by name.
      line: command line, in which `{}` stands for the folder of its files.
      changes: changed files, as in `hostile_tables.cases`.
      then: function that runs in the same process after exit code 0. It takes the folder and
        returns a new exit code.

    Returns:
      (outcome, seconds, exit code and end of stderr). The outcome is "refused", "accepted", "hang",
      "crash", or "odd" for any other end.
    """
    folder = Path(tempfile.mkdtemp(prefix="hostile_"))
    write_files(folder, model, changes)
    log = folder / "stderr"
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        run_child(line, folder, log, then)
    code = wait_for(pid, start + BY_THE_CLOCK)
    seconds = time.monotonic() - start
    said = log.read_text(errors="replace") if log.exists() else ""
    shutil.rmtree(folder, ignore_errors=True)
    # There can be several lines, because all errors of a config are reported together.
    only_faults = all(text.startswith("error: ") for text in said.splitlines() or [""])
    if code is None or code == -signal.SIGXCPU:
        word = "hang"
    elif code == 2 and only_faults:
        word = "refused"
    elif "Traceback" in said or code < 0 or code == 134:
        word = "crash"
    elif code == 0:
        word = "accepted"
    else:
        word = "odd"
    return word, round(seconds, 1), f"exit {code}: {said[-300:]!r}"


def run_child(line, folder, log, then):
    """Runs a command line under the limits, writes stderr to `log`, and exits this process."""
    code = 99
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
        handle = os.open(log, os.O_CREAT | os.O_WRONLY)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number, to in ((0, nothing), (1, nothing), (2, handle)):
            os.dup2(to, number)
        os.chdir(folder)
        from bacr_jax import __main__

        code = __main__.main(words_of(line, folder))
        if code == 0 and then is not None:
            code = then(folder)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    finally:
        sys.stderr.flush()
        os._exit(code or 0)


def wait_for(pid, until):
    """Waits for a process and returns its exit code, or kills it at a deadline and returns None.

    Args:
      until: the deadline, a value of `time.monotonic()`.
    """
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def reads_weights(folder):
    """Loads the weights of a model folder and returns the exit code of a command that does so."""
    from bacr_jax.errors import UserError
    from bacr_jax.model.hf import reading

    try:
        reading.load_policy(folder / "model")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def damaged_bytes(rng, content, others):
    """Returns a randomly damaged copy of a file's content.

    Bits are flipped, bytes are inserted, removed or duplicated, or the file is cut, emptied or
    replaced by another file.

    Args:
      others: contents of the files that can replace it.
    """
    content = bytearray(content)
    kind = rng.choice(["flip", "cut", "double", "insert", "remove", "other", "empty"])
    start = rng.randrange(len(content) + 1)
    stop = min(len(content), start + rng.choice([1, 7, 64, 4096]))
    if kind == "flip":
        for _ in range(rng.choice([1, 3, 50])):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del content[start:]
    elif kind == "double":
        content[start:start] = content[start:stop]
    elif kind == "insert":
        content[start:start] = rng.randbytes(rng.choice([1, 7, 300]))
    elif kind == "remove":
        del content[start:stop]
    return {"other": rng.choice(others), "empty": b""}.get(kind, bytes(content))


def damaged_json(rng, content):
    """Returns a JSON text in which a random value has been replaced, removed or renamed."""
    tree = json.loads(content)
    here = tree
    while True:
        if not isinstance(here, dict | list) or not here:
            return json.dumps(rng.choice(ODD)).encode()
        key = rng.choice(list(here) if isinstance(here, dict) else range(len(here)))
        if isinstance(here[key], dict | list) and here[key] and rng.random() < 0.7:
            here = here[key]
            continue
        kind = rng.choice(["odd", "odd", "odd", "gone", "name"])
        value = here[key] if kind == "name" else rng.choice(ODD)
        if kind != "odd":
            del here[key]
        if kind == "odd":
            here[key] = value
        elif kind == "name" and isinstance(here, dict):
            here[str(key) + rng.choice(["x", " ", "\0", "\ud800"])] = value
        return json.dumps(tree).encode()


def damaged_weights(rng, content):
    """Returns a safetensors file with a damaged header, whose stored length is correct."""
    size = int.from_bytes(content[:8], "little")
    header = damaged_json(rng, content[8 : 8 + size])
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


def damaged_folder(rng, model):
    """Returns damaged contents for one to three files of a model folder.

    Args:
      model: contents of the files, by name.

    Returns:
      The new contents, by path. None means that the file is missing.
    """
    changes = {}
    for name in rng.sample(sorted(model), rng.choice([1, 1, 2, 3])):
        content, kind = model[name], rng.random()
        if kind < 0.05:
            changed = None
        elif kind < 0.5 and name.endswith(".json"):
            changed = damaged_json(rng, content)
        elif kind < 0.5 and name.endswith(".safetensors"):
            changed = damaged_weights(rng, content)
        else:
            changed = damaged_bytes(rng, content, list(model.values()))
        changes[f"model/{name}"] = changed
    return changes


def folders(count, show=print):
    """Loads damaged folders and returns the counts of the outcomes.

    Args:
      count: number of folders.
      show: called with a line for each outcome other than "refused" and "accepted".
    """
    counts = collections.Counter()
    model = started()
    for seed in range(count):
        changes = damaged_folder(random.Random(seed), model)
        word, seconds, said = outcome(model, WORDS + "--check", changes, then=reads_weights)
        counts[word] += 1
        if word not in ("refused", "accepted"):
            show(f"{word:9} {seconds:5} s  folder {seed}: {', '.join(changes)}  {said}")
            sys.stdout.flush()
    return dict(counts)


def started():
    """Imports the modules of the commands, and returns the files of a tiny model.

    The modules are imported before the forks, because importing them in each process takes long.
    """
    import orbax.checkpoint
    import transformers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

    import bacr_plan.__main__  # noqa: F401  (imported once, before the forks)

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "model"
        # Write the model in a child process, because a process that has used JAX can't be forked.
        pid = os.fork()
        if pid == 0:
            tiny_model(folder)
            os._exit(0)
        os.waitpid(pid, 0)
        model = {file.name: file.read_bytes() for file in folder.iterdir()}
        transformers.AutoTokenizer.from_pretrained(folder)
    assert orbax, "imported once, before the forks"
    return model


def probe(part=(0, 1), show=print):
    """Runs hostile inputs and returns the counts of the outcomes.

    Args:
      part: (K, N) to run every N-th input, beginning with number K.
      show: called with a line for each input that was not refused.
    """
    model = started()
    counts = collections.Counter()
    for group, line, changes in itertools.islice(cases(), part[0], None, part[1]):
        word, seconds, said = outcome(model, line, changes)
        counts[word] += 1
        if word != "refused":
            show(f"{word:9} {seconds:5} s  {group}  {said}")
            sys.stdout.flush()
    return dict(counts)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--part", type=lambda text: tuple(map(int, text.split("/"))), default=(0, 1)
    )
    parser.add_argument("--folders", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps(folders(options.folders) if options.folders else probe(options.part)))
