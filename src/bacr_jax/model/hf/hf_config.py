"""`config.json` of a Hugging Face folder: the shape it describes, and the one we write."""

import dataclasses
from pathlib import Path
from typing import Any

from bacr_jax import documents
from bacr_jax.config import ConditioningConfig
from bacr_jax.config import io as config_io
from bacr_jax.config.values import convert, describe, shown
from bacr_jax.errors import UserError
from bacr_jax.model.sizes import Qwen2Config

PLAIN, CONDITIONED = "Qwen2ForCausalLM", "BacrQwen2ForCausalLM"
# Of both: a type that transformers knows, so that it reads config and tokenizer without our code.
# The second is what conditioned folders were called before.
KIND = "qwen2"
ARCHITECTURES = {KIND: (PLAIN, CONDITIONED), "bacr_qwen2": (CONDITIONED,)}
MODELING = "modeling_bacr_qwen2"
# Key of config.json: how a prompt becomes thinking and an answer (`data.exported`).
THINKING = "thinking"
# Key of the sentence that tells a policy its budget, and settings that say nothing of the module.
WORDS = "budget_words"
_NOT_OF_THE_MODULE = {"told", "words", "branches"}
# What folders of earlier versions say of where the embedding joins the stream: after the layer.
_SITE = "after_block"
# Key of config.json: names of budgets.
LEVELS = "budget_levels"

# Far beyond any model there is; a larger number is a slip, which would take hours to refuse later.
_MOST = {"num_hidden_layers": 10_000, "vocab_size": 1 << 26, "num_attention_heads": 1 << 16}
_LARGEST = 1 << 28

# What transformers assumes for Qwen2 where config.json is silent.
_THETA_WHEN_ABSENT, _EPS_WHEN_ABSENT = 10000.0, 1e-6


@dataclasses.dataclass(frozen=True)
class BudgetModule:
    """How a saved budget module is to be used.

    Attributes:
      conditioning: gate, sharing, positions and input of the embedding.
      b_max: scale of the budget codes (`log` and `normalised` inputs), in tokens.
    """

    conditioning: ConditioningConfig
    b_max: int


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object."""
    try:
        content = documents.read_json(path)
    except OSError as error:
        raise UserError(
            f"{path}: can't read it ({error.strerror}); write a Hugging Face folder"
        ) from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); copy the file again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: found a {type(content).__name__}; write a JSON object")
    return content


def _positive_int(raw: dict[str, Any], key: str, where: Path, default: int | None = None) -> int:
    number = raw.get(key)
    if number is None:
        number = default
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise UserError(f"{where}: {key} is {shown(number)}; write a positive whole number")
    most = _MOST.get(key, _LARGEST)
    if number > most:
        raise UserError(f"{where}: {key} is {shown(number)}; write at most {most}")
    return number


def _positive_float(raw: dict[str, Any], key: str, where: Path, default: float) -> float:
    number = raw.get(key, default)
    if not isinstance(number, int | float) or isinstance(number, bool) or not number > 0:
        raise UserError(f"{where}: {key} is {shown(number)}; write a positive number")
    return float(number)


def _rope_theta(raw: dict[str, Any], where: Path) -> float:
    """The rotary base: top level in older files, inside `rope_parameters` in newer ones."""
    for key in ("rope_scaling", "rope_parameters"):
        inside = raw.get(key) or {}
        if not isinstance(inside, dict):
            raise UserError(f"{where}: {key} is {shown(inside)}; write an object or null")
        kind = inside.get("rope_type", inside.get("type", "default"))
        if kind != "default":
            raise UserError(
                f"{where}: {key} asks for {shown(kind)} rotary scaling, which is not supported; "
                "write a model with plain rotary embeddings"
            )
    inside = raw.get("rope_parameters") or {}
    source = inside if "rope_theta" in inside else raw
    return _positive_float(source, "rope_theta", where, _THETA_WHEN_ABSENT)


def _refuse_other_models(raw: dict[str, Any], where: Path) -> None:
    kind = raw.get("model_type")
    known = ARCHITECTURES.get(kind, ()) if isinstance(kind, str) else ()
    architectures = raw.get("architectures") or list(known[:1])
    if architectures not in [[name] for name in known]:
        raise UserError(
            f"{where}: model_type {shown(kind)}, architectures {shown(architectures)}; only "
            "Qwen2.5 causal language models (qwen2, Qwen2ForCausalLM) are supported"
        )
    supported: dict[str, Any] = {"hidden_act": "silu", "use_sliding_window": False}
    for key, value in supported.items():
        if raw.get(key, value) != value:
            raise UserError(
                f"{where}: {key} is {shown(raw[key])}, which is not supported; only {value!r} is"
            )
    if "quantization_config" in raw:
        raise UserError(f"{where}: the weights are quantised; write the bfloat16 model's folder")
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise UserError(f"{where}: layer_types is {shown(kinds)}; write a list of names or null")
    if "sliding_attention" in kinds:
        raise UserError(f"{where}: layer_types has sliding_attention, which is not supported")


def parse_config(raw: dict[str, Any], where: Path) -> Qwen2Config:
    """The shape in a parsed config.json; `where` is named in refusals."""
    _refuse_other_models(raw, where)
    width = _positive_int(raw, "hidden_size", where)
    heads = _positive_int(raw, "num_attention_heads", where)
    kv_heads = _positive_int(raw, "num_key_value_heads", where, heads)
    if heads % kv_heads:
        raise UserError(
            f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads "
            f"{kv_heads}; copy the file again"
        )
    if raw.get("head_dim") is None and width % heads:
        raise UserError(
            f"{where}: hidden_size {width} is not a multiple of num_attention_heads {heads}; "
            "write head_dim"
        )
    tied = raw.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise UserError(f"{where}: tie_word_embeddings is {shown(tied)}; write true or false")
    return Qwen2Config(
        vocab_size=_positive_int(raw, "vocab_size", where),
        hidden_size=width,
        intermediate_size=_positive_int(raw, "intermediate_size", where),
        num_layers=_positive_int(raw, "num_hidden_layers", where),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_positive_int(raw, "head_dim", where, width // heads),
        rope_theta=_rope_theta(raw, where),
        rms_norm_eps=_positive_float(raw, "rms_norm_eps", where, _EPS_WHEN_ABSENT),
        tie_embeddings=tied,
        max_positions=_positive_int(raw, "max_position_embeddings", where, 32768),
    )


def read_hf_config(folder: str | Path) -> Qwen2Config:
    """The shape of the model in a Hugging Face folder."""
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise UserError(f"{folder}: no such folder; write a Hugging Face folder")
    return parse_config(read_json(path), path)


def read_budget_module(folder: str | Path) -> BudgetModule | None:
    """How the budget module of a folder is to be used; None for a plain Qwen2 folder."""
    path = Path(folder) / "config.json"
    raw = read_json(path)
    if raw.get("architectures") != [CONDITIONED] and raw.get("model_type") != "bacr_qwen2":
        return None
    return parse_module(raw, path)


def parse_module(raw: dict[str, Any], path: Path) -> BudgetModule:
    """The description of a budget module in a parsed file; `path` is named in refusals."""
    inside = raw.get("budget_module")
    if isinstance(inside, dict) and inside.get("site") == _SITE:
        inside = {name: value for name, value in inside.items() if name != "site"}
    fields = {f.name for f in dataclasses.fields(ConditioningConfig)} - _NOT_OF_THE_MODULE
    if not isinstance(inside, dict) or set(inside) != fields | {"b_max"}:
        raise UserError(f"{path}: budget_module is {shown(inside)}; export the folder again")
    b_max = _positive_int(inside, "b_max", path)
    return BudgetModule(ConditioningConfig(**_settings(inside, fields, path)), b_max)


def _settings(inside: dict[str, Any], fields: set[str], where: Path) -> dict[str, Any]:
    """The settings of a budget module, in the types that they have in a config."""
    found = {}
    for name in fields:
        key = config_io.schema()[f"conditioning.{name}"]
        fits, found[name] = convert(key.hint, inside[name])
        if not fits:
            wanted = describe(key.hint)
            raise UserError(
                f"{where}: budget_module.{name} is {shown(inside[name])}; write {wanted}"
            )
    return found


def read_budget_words(folder: str | Path) -> str | None:
    """The sentence that tells a folder's policy its budget; None: it is told none in words."""
    path = Path(folder) / "config.json"
    words = read_json(path).get(WORDS)
    if words is not None and (not isinstance(words, str) or words.count("{budget}") != 1):
        raise UserError(f"{path}: {WORDS} is {shown(words)}; write a sentence with {{budget}} once")
    return words


def read_levels(folder: str | Path) -> dict[str, int]:
    """Names of budgets that a folder knows, with their tokens; mostly none."""
    path = Path(folder) / "config.json"
    found = read_json(path).get(LEVELS) or {}
    whole = lambda tokens: type(tokens) is int and 0 <= tokens <= _LARGEST
    if not isinstance(found, dict) or not all(map(whole, found.values())):
        raise UserError(f"{path}: {LEVELS} is {shown(found)}; export the folder again")
    return found


def read_thinking(folder: str | Path) -> dict[str, Any] | None:
    """Section `thinking` of a folder's config.json, as it stands there; None: it has none."""
    path = Path(folder) / "config.json"
    found = read_json(path).get(THINKING)
    if found is not None and not isinstance(found, dict):
        raise UserError(f"{path}: {THINKING} is {shown(found)}; export the folder again")
    return found


def describe_module(module: BudgetModule) -> dict[str, Any]:
    """How a budget module is used, as files say it."""
    settings = dataclasses.asdict(module.conditioning)
    own = {name: value for name, value in settings.items() if name not in _NOT_OF_THE_MODULE}
    return {**own, "b_max": module.b_max}


def _fresh(config: Qwen2Config) -> dict[str, Any]:
    """A config.json for a model that never had one, in the form old and new readers know."""
    return {
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_positions,
        # The layout's, not the writer's: without it transformers warns of Mistral's tokenizers.
        "transformers_version": "4.57.0",
    }


def to_json(
    config: Qwen2Config,
    *,
    dtype: str,
    module: BudgetModule | None = None,
    source: dict[str, Any] | None = None,
    budget_words: str | None = None,
) -> dict[str, Any]:
    """The config.json of a folder.

    Args:
      dtype: type of the stored weights, as torch calls it.
      source: the config.json the model came with; everything that is not about shape, type or
        conditioning (token ids, defaults of the hub) is kept from it.
      budget_words: sentence that tells the policy its budget after the question; None: none does.
    """
    kept = dict(source) if source is not None else _fresh(config)
    if source is not None and parse_config(source, Path("config.json")) != config:
        raise UserError("export: the source folder's config.json describes another shape")
    for key in ("auto_map", "budget_module", WORDS, LEVELS, THINKING, "dtype", "torch_dtype"):
        kept.pop(key, None)
    architecture = PLAIN if module is None else CONDITIONED
    ours: dict[str, Any] = {"model_type": KIND, "architectures": [architecture]}
    if module is not None:
        ours["auto_map"] = {
            "AutoConfig": f"{MODELING}.BacrQwen2Config",
            "AutoModelForCausalLM": f"{MODELING}.BacrQwen2ForCausalLM",
        }
        ours["budget_module"] = describe_module(module)
    if budget_words is not None:
        # Engines that do not know the key keep it and do nothing with it.
        ours[WORDS] = budget_words
    # transformers 5 writes `dtype`, 4 reads `torch_dtype`; both read this one.
    return {**kept, **ours, "torch_dtype": dtype}
