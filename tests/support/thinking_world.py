"""Creates folders and tokenizers like those of two reasoning models, R1-Distill-Qwen and Qwen3."""

import json
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import hf_world
from bacr_jax.model.hf import reading
from export_world import make_run

TEMPLATES = Path(__file__).parents[1] / "prompts" / "templates"
R1_BEGIN, R1_END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
# Special tokens of the released tokenizers, with their ids.
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
# Further keys of the released tokenizer_config.json. R1's specifies the class of Llama's tokenizer,
# and a token at the beginning of every text.
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
    """Returns the chat template of a model, "r1" or "qwen3"."""
    return (TEMPLATES / f"{kind}.jinja").read_text()


def released(kind, qwen_tokenizer, out):
    """Writes a folder with a released tokenizer and the files that specify the end tokens.

    The tokenizer is created from Qwen2.5's, which has the same vocabulary apart from special
    tokens.

    Args:
      kind: "r1" or "qwen3".
      qwen_tokenizer: folder of Qwen2.5's tokenizer.
      out: folder to create.
    """
    raw = json.loads((qwen_tokenizer / "tokenizer.json").read_text())
    like, added = raw["added_tokens"][0], ADDED[kind]
    taken = set(added.values())
    others = [token for token in raw["added_tokens"] if token["id"] not in taken]
    last = max(taken)
    # Fill the unused ids in between with placeholders, which no test uses.
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
    """Returns a tokenizer with one token per byte, and a model's special tokens and chat template.

    Args:
      kind: "r1" or "qwen3".
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(ADDED[kind]))
    found = PreTrainedTokenizerFast(tokenizer_object=backend, **NAMED[kind])
    found.chat_template = template(kind)
    return found


def thinking_folder(path, kind, shape, **sampling):
    """Writes a folder with random weights and the tokenizer `small(kind)`, and returns its path.

    Args:
      shape: sizes of the model, except for the vocabulary.
      sampling: content of generation_config.json. Without any, the folder has no such file.
    """
    tokenizer = small(kind)
    hf_world.make_folder(path, replace(shape, vocab_size=len(tokenizer)), tokenizer=tokenizer)
    if sampling:
        (path / "generation_config.json").write_text(json.dumps(sampling))
    return path


def thinking_run(path, base, **settings):
    """Writes a run folder whose policy is the model of a thinking folder, and returns its path.

    Args:
      base: result of `thinking_folder`.
      settings: sections of the config in addition to `model` and `data`.
    """
    _, params = reading.load_policy(base)
    data = {"train": "gsm8k:somewhere", "prompt_format": "native"}
    config = {"model": {"path": str(base)}, "conditioning": {"budget_input": "none"}, "data": data}
    return make_run(path, params, config | settings)
