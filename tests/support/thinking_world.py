"""Folders of models that were trained to think: R1-Distill's and Qwen3's tokens and templates."""

import json
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import hf_world

TEMPLATES = Path(__file__).parents[1] / "prompts" / "templates"
R1_BEGIN, R1_END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
# Added tokens with their ids, of the released tokenizers.
ADDED = {
    "r1": {
        R1_END: 151643,
        "<｜User｜>": 151644,
        "<｜Assistant｜>": 151645,
        R1_BEGIN: 151646,
        "<|EOT|>": 151647,
        "<think>": 151648,
        "</think>": 151649,
    },
    "qwen3": {
        "<|endoftext|>": 151643,
        "<|im_start|>": 151644,
        "<|im_end|>": 151645,
        "<think>": 151667,
        "</think>": 151668,
    },
}
NAMED = {
    "r1": {"bos_token": R1_BEGIN, "eos_token": R1_END, "pad_token": R1_END},
    "qwen3": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
}
# As released: R1's says Llama's class, and that a text begins with a token of its own.
CLASSES = {
    "r1": {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True},
    "qwen3": {"tokenizer_class": "Qwen2Tokenizer"},
}
ENDS = {
    "r1": {"config.json": {"eos_token_id": 151643}},
    "qwen3": {
        "config.json": {"eos_token_id": 151645},
        "generation_config.json": {"eos_token_id": [151645, 151643]},
    },
}


def template(kind):
    return (TEMPLATES / f"{kind}.jinja").read_text()


def released(kind, qwen_tokenizer, out):
    """A folder with the ids of a released tokenizer, made of Qwen2.5's, whose words it shares."""
    raw = json.loads((qwen_tokenizer / "tokenizer.json").read_text())
    like, added = raw["added_tokens"][0], ADDED[kind]
    taken = set(added.values())
    others = [token for token in raw["added_tokens"] if token["id"] not in taken]
    last = max(taken)
    # Ids between: tokens that no test writes.
    missing = set(range(151665, last + 1)) - taken
    fill = [{**like, "id": number, "content": f"<|unused_{number}|>"} for number in missing]
    own = [{**like, "id": number, "content": text} for text, number in added.items()]
    raw["added_tokens"] = sorted([*others, *own, *fill], key=lambda token: token["id"])
    if kind == "r1":
        raw["post_processor"] = json.loads(
            processors.TemplateProcessing(
                f"{R1_BEGIN} $A", special_tokens=[(R1_BEGIN, added[R1_BEGIN])]
            ).__getstate__()
        )
    out.mkdir()
    (out / "tokenizer.json").write_text(json.dumps(raw))
    settings = NAMED[kind] | CLASSES[kind] | {"chat_template": template(kind)}
    (out / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, content in ENDS[kind].items():
        (out / name).write_text(json.dumps(content))
    return out


def small(kind):
    """Bytes, the added tokens and the template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(ADDED[kind]))
    found = PreTrainedTokenizerFast(tokenizer_object=backend, **NAMED[kind])
    found.chat_template = template(kind)
    return found


def thinking_folder(path, kind, shape):
    """A model folder with random weights, as wide as its small tokenizer."""
    tokenizer = small(kind)
    hf_world.make_folder(path, replace(shape, vocab_size=len(tokenizer)), tokenizer=tokenizer)
    return path
