"""Defines hostile inputs of every command, as tables of command lines and changed files."""

import itertools
import json

from commands_world import (
    EVALUATE,
    GENERATE,
    GRADE,
    PLAN,
    REPORT,
    SMALL,
    TRAIN,
    WORDS,
)

INSPECT = "data --inspect jsonl:{}/questions.jsonl data.num_groups=1 "
RATED = INSPECT + "data.groups=solve_rate data.labels={}/rates.jsonl "
COMPARE = EVALUATE + "--compare {}/other "
BEST = "evaluate --run {}/run --step best "

CONFIG, TOKENIZER, WEIGHTS = "model/config.json", "model/tokenizer.json", "model/model.safetensors"
INDEX = "model/model.safetensors.index.json"
RUN = {"run/config.yaml": SMALL}
RATES = "".join(f'{{"id": "jsonl-train-{i}", "avg": 0.5, "samples": 2}}\n' for i in range(8))
CASES = '{"pred": "1", "gold": "1"}\n'
OTHER = {"other/evaluation.json": "{}", "other/results.json": "{}", "other/samples.jsonl": ""}
# In place of a file's content: create a named pipe, a folder, or no file.
FIFO, FOLDER, NONE = "<a pipe>", "<a folder>", None

# File contents that no command accepts.
DOCUMENTS = {
    "brackets": "[" * 100_000,
    "objects": '{"a":' * 100_000,
    "closed brackets": "[" * 900 + "]" * 900,
    "digits": '{"a": ' + "9" * 5000 + "}",
    "huge float": '{"a": 1e999}',
    "not a number": '{"a": NaN}',
    "text": '"x"',
    "number": "7",
    "half a pair": '{"\\ud800": "\\udfff"}',
    "cut": '{"a": [1, 2',
    "bytes": b"\xff\xfe{}",
    "nul": "\0\0\0",
    "html": "<html>not found</html>",
    "pipe": FIFO,
    "folder": FOLDER,
}
# For each file with a structure: the command line that reads it, and other files that this needs.
READERS = {
    CONFIG: (WORDS, {}),
    TOKENIZER: (WORDS, {}),
    "model/tokenizer_config.json": (WORDS, {}),
    INDEX: (WORDS, {WEIGHTS: NONE}),
    WEIGHTS: (WORDS, {}),
    "questions.jsonl": (INSPECT, {}),
    "rates.jsonl": (RATED, {}),
    "cases.jsonl": (GRADE, {}),
    "run/metrics.jsonl": (REPORT, RUN),
    "run/eval.jsonl": (REPORT, RUN),
    "run/summary.json": (REPORT, RUN),
    "run/best.json": (BEST, {**RUN, "run/checkpoints/3/state/_METADATA": "{"}),
    "other/evaluation.json": (COMPARE, OTHER),
    "small.yaml": (TRAIN, {}),
    "run/config.yaml": (REPORT, RUN),
}
# Files whose last line may be incomplete, because a run can be killed while it writes. This line is
# ignored.
LINES = ("run/metrics.jsonl", "run/eval.jsonl")
ODD = [-1, 0, 1.5, "x", True, [], {"a": 1}, 10**12, 2**62, 10**400, ["qwen2"], "\ud800"]
SHAPE_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "max_position_embeddings", "rope_theta"),
    *("rms_norm_eps", "model_type", "architectures", "layer_types", "rope_scaling"),
)
# Pairs of key and value in config.json that are valid, or that count as a missing key.
GOOD = {
    *((key, repr(v)) for key in ("rope_theta", "rms_norm_eps") for v in (1.5, 10**12, 2**62)),
    *((key, repr(v)) for key in ("layer_types", "architectures", "rope_scaling") for v in (0, [])),
    *(("rope_scaling", repr({"a": 1})), ("layer_types", repr(["qwen2"]))),
}
# Config keys with a number, and texts to set them to.
NUMBERS = (
    *("seed", "budget.max", "train.steps", "rollout.questions", "rollout.group_size"),
    *("model.hidden_size", "model.num_layers", "data.ledger.train_size", "output.log_every"),
    *("optimizer.learning_rate", "rollout.temperature", "checkpoint.every"),
)
WRITTEN = ("0100", "1:30", "1_000", "1e999", ".nan", "-5", "9" * 400, "[1]", "{a: 1}", "x", "'7'")
SIZES = {
    "model.hidden_size": "4611686018427387904",
    "model.intermediate_size": "4611686018427387904",
    "model.num_layers": "1000000000",
    "model.num_heads": "1000000007",
    "model.head_dim": "4611686018427387904",
    "data.ledger.train_size": "1000000000000",
}
YAML = {
    "laughs": "a: &a [x, x]\n"
    + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(24)
    ),
    "python": "seed: !!python/object/apply:os.system ['touch pwned']",
    "module": "seed: !!python/module:os",
    "flow": "seed: " + "[" * 5000,
    "flow of objects": "seed: " + "{a: " * 5000,
    "indents": "".join(" " * i + f"k{i}:\n" for i in range(2000)),
    "tab": "model:\n\thidden_size: 3",
    "tag": "seed: !!int x",
    "octal": "seed: 0100",
    "sexagesimal": "seed: 1:30",
    "half a pair": 'output: {dir: "\\ud800"}',
    "nul": 'output: {dir: "a\\0b"}',
    "itself": "model: &m {hidden_size: *m}",
    "two documents": "seed: 1\n---\nseed: 2",
    "a number": "7",
    "a list": "- 1",
    "a date": "seed: 2020-13-45",
    "binary": "seed: !!binary aGVsbG8=",
    "set": "seed: !!set {a, b}",
    "merge": "<<: {seed: [1]}",
}
TEMPLATES = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops that write": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}"
    ),
    "power": "{{ 9 ** 9 ** 9 ** 9 }}",
    "long": "{{ 'x' * 10 ** 12 }}",
    "macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "cut": "{% for",
    "include": "{% include '/etc/passwd' %}",
    "class": "{{ ''.__class__.__mro__ }}",
    "question twice": "{{ messages[1].content }}{{ messages[1].content }}",
    "nothing": "{{ '' }}",
    "raises": "{{ raise_exception('no') }}",
}
TOKENIZERS = {
    "text ids": {"model": {"type": "BPE", "vocab": {"a": "0"}, "merges": []}},
    "huge id": {"model": {"type": "BPE", "vocab": {"a": 2**40}, "merges": []}},
    "negative id": {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
    "float id": {"model": {"type": "BPE", "vocab": {"a": 1.5}, "merges": []}},
    "added text": {"added_tokens": "x"},
    "added numbers": {"added_tokens": [1, 2]},
    "added without id": {"added_tokens": [{"content": "x"}]},
    "added huge id": {"added_tokens": [{"id": 2**40, "content": "x"}]},
    "added text id": {"added_tokens": [{"id": "0", "content": "x"}]},
    "vocab text": {"model": {"type": "BPE", "vocab": "x", "merges": []}},
    "no vocab": {"model": {"type": "BPE"}},
    "merges": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b", "c"]]}},
    "unknown model": {"model": {"type": "XYZ"}},
    "model number": {"model": 7},
    "decoder": {"decoder": 7},
    "normalizer": {
        "normalizer": {"type": "Replace", "pattern": {"Regex": "(" * 99}, "content": ""}
    },
}
OPTIONS = [
    EVALUATE + "--samples 1000000000",
    EVALUATE + "--samples " + "9" * 400,
    EVALUATE + "--size 99999999999999999999",
    EVALUATE + "--slots 4611686018427387904",
    EVALUATE + "--slots 0",
    EVALUATE + "--every 99999999999999999999",
    EVALUATE + "--seed 99999999999999999999",
    EVALUATE + "--samples 2 --top-p nan",
    EVALUATE + "--samples 2 --temperature 1e999",
    EVALUATE + "--budgets 0100000000000000000000",
    EVALUATE + "--budgets ,",
    EVALUATE + "--data jsonl:~nosuchuser/x",
    EVALUATE + "--data jsonl:/dev/zero",
    EVALUATE + "--out /dev/null",
    EVALUATE + "--out /proc/1/x",
    EVALUATE + "--label-difficulty /proc/x --samples 2",
    GENERATE + "--seed 99999999999999999999 why",
    GENERATE + "--seed -1 why",
    GENERATE + "--temperature inf why",
    GENERATE + "--budget 1.5 why",
    GENERATE + "--budget 99999999999999999999 why",
    GENERATE + "'\ud800'",
    "generate --model {}/nothing --budget 4 why",
    "generate --model /dev/null --budget 4 why",
    PLAN + "--devices 99999999999999999999",
    PLAN + "--devices 1:30",
    PLAN + "--device-memory 1e300",
    PLAN + "model.hidden_size=4611686018427387904",
    PLAN + "model.num_layers=1000000000",
    "plan --config /dev/zero",
    "plan --config /dev/tty --compile none",
    "train --config /dev/zero",
    "train --config {}",
    TRAIN + "output.dir=~nosuchuser/x",
    TRAIN + "output.dir=/dev/null/x",
    TRAIN + "output.dir=/dev/full",
    TRAIN + "data.train=jsonl:~nosuchuser/x",
    TRAIN + "data.train=jsonl:/dev/zero",
    TRAIN + "method=/dev/zero.py",
    TRAIN + "--allow-change nokey",
    TRAIN + "--resume required",
    TRAIN + "warmup.dir={}/small.yaml warmup.steps=1",
    WORDS + "model.path=~nosuchuser/x",
    WORDS + "model.tokenizer=/dev/zero",
    GRADE + "--deadline 1e300",
    GRADE + "--deadline nan",
    GRADE + "--workers 99999999999999999999",
    GRADE + "--workers 100000000",
    GRADE + "--out /proc/nothing/x",
    "grade --cases /dev/zero",
    "grade --cases {}",
    "data --inspect jsonl:/dev/zero",
    "data --inspect jsonl:~nosuchuser/x",
    "data --inspect jsonl:{}/nothing/../..//nofile",
    "data --inspect ledger data.ledger.train_size=1000000000000",
    INSPECT + "--against jsonl:~nosuchuser/x",
    INSPECT + "--tokenizer /dev/zero",
    "report --run /dev/null",
    "report --run {}/run --out /proc/x",
    "export --run {}/run --out /dev/null",
]
RECORDS = {
    "run/eval.jsonl": [
        '{"step": 1, "when": "after", "sets": {"x": 5}}',
        '{"step": 1, "when": "after", "sets": {"x": {"greedy": 5}}}',
        '{"step": 1, "when": "after", "sets": {"x": {"greedy": {"8": 5}}}}',
        '{"step": 1, "when": "after", "sets": {"x": {"greedy": {"8": {"accuracy": "x"}}}}}',
        '{"step": 1, "when": "after", "sets": {"x": {"greedy": {"y": {}}}}}',
        '{"step": "1", "when": "after", "sets": {}}',
        '{"step": 1, "when": 5, "sets": {}}',
        '{"step": 1, "when": "after", "sets": {}, "dense": 5}',
        "[]",
        "5",
    ],
    "run/summary.json": [
        "[]",
        '{"steps": "x"}',
        '{"steps": 3, "generated_tokens": "many"}',
        '{"steps": 3, "wall_seconds": "long"}',
        '{"steps": 3, "departures": 5}',
    ],
    "run/metrics.jsonl": [
        '{"step": "x"}',
        '{"step": 1.5}',
        '{"step": 1, "rollout/tokens_total": "x"}',
    ],
    "run/config.yaml": ["", "seed: [1]", "nokey: 1", "[]", "\0"],
    "rates.jsonl": [
        '{"id": "x", "avg": "half", "samples": 2}',
        '{"id": "x", "avg": 2, "samples": 2}',
        '{"id": "x", "avg": 0.5, "samples": ' + "9" * 5000 + "}",
        '{"id": "x", "avg": 0.5, "samples": true}',
        '{"id": "x", "avg": 1e999, "samples": 2}',
        '{"id": "x"}',
    ],
    "questions.jsonl": [
        '{"question": 5, "answer": 5}',
        '{"question": "\\ud800", "answer": "5"}',
        '{"question": "x", "answer": "' + "1" + " " * 20_000 + 'x and"}',
        '{"question": "x", "answer": null}',
        '{"question": "x", "answer": {"a": 1}}',
        '{"question": "", "answer": "1"}',
        '{"answer": "1"}',
    ],
    "cases.jsonl": [
        '{"pred": 1, "gold": "1"}',
        '{"pred": "1"}',
        "[1]",
        '{"pred": null, "gold": ""}',
    ],
}


def cases():
    """Yields (group, command line, changed files) for every hostile input.

    The changed files map a path to a new content (text, bytes, `FIFO`, `FOLDER` or `NONE`), or to a
    function from the old content to the new one.
    """
    for (file, (line, files)), (name, content) in itertools.product(
        READERS.items(), DOCUMENTS.items()
    ):
        if file in LINES and content not in (FIFO, FOLDER):
            more = "\n{}\n"  # Append a line, because an incomplete last line is not an error.
            content = content + more.encode() if isinstance(content, bytes) else content + more
        if file in ("small.yaml", "run/config.yaml") and name in ("html", "cut"):
            continue  # As YAML, equivalent to other documents of the table.
        yield f"document: {name} in {file}", line, {**files, file: content}
    for key, value in itertools.product(SHAPE_KEYS, ODD):
        if (key, repr(value)) not in GOOD:
            yield f"config.json: {key}={str(value)[:20]!a}", WORDS, {CONFIG: edited(key, value)}
    for key, text in itertools.product(NUMBERS, WRITTEN):
        yield f"setting: {key}", f"{TRAIN}'{key}={text}'", {}
    for key, text in SIZES.items():
        yield f"size: {key}", f"{TRAIN}{key}={text}", {}
    for name, text in YAML.items():
        yield f"yaml: {name}", TRAIN, {"small.yaml": text}
    for name, text in TEMPLATES.items():
        yield f"template: {name}", WORDS, {"model/chat_template.jinja": text}
    for name, changes in TOKENIZERS.items():
        yield f"tokenizer: {name}", WORDS, {TOKENIZER: lambda old, c=changes: dumped(old, c)}
    for line in OPTIONS:
        yield f"option: {line[-40:]}", line, RUN if "report" in line or "export" in line else {}
    for file, texts in RECORDS.items():
        line, files = READERS[file]
        for text in texts:
            text += "\n{}" if file in LINES else ""
            yield f"record: {text[:40]} in {file}", line, {**files, file: text + "\n"}
    for target in ("/etc/passwd", "../small.safetensors", "x.bin", "\ud800", ".", ""):
        index = json.dumps({"weight_map": {"model.embed_tokens.weight": target}})
        yield f"index: {target!r}", WORDS, {WEIGHTS: NONE, INDEX: index}


def edited(key, value):
    """Returns a function that sets a key in the text of a JSON object."""
    return lambda old: dumped(old, {key: value})


def dumped(old, changes):
    """Sets keys in the text of a JSON object, and returns the new text."""
    # json.dumps also writes numbers of 400 digits, which are too large for every field.
    return json.dumps(json.loads(old) | changes)
