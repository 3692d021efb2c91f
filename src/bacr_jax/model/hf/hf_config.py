"""Reads and writes config.json of Hugging Face folders: model shape, budget module and prompts."""

import dataclasses
from pathlib import Path
from typing import Any

from bacr_jax import files
from bacr_jax.config import ConditioningConfig
from bacr_jax.config import io as config_io
from bacr_jax.config.values import TypeMismatch, convert, describe, shown
from bacr_jax.errors import UserError
from bacr_jax.model.sizes import Qwen2Config, RopeScaling


@dataclasses.dataclass(frozen=True)
class Family:
    """A supported model family: its fixed properties, and its defaults for keys of config.json.

    Attributes:
      name: prefix of the family's class names in transformers.
      qkv_bias: True if queries, keys and values have a bias.
      qk_norm: True if queries and keys are normalized. No two families have the same combination of
        qkv_bias and qk_norm.
      head_dim: default of head_dim in transformers. None for hidden_size / num_attention_heads.
      max_positions: default of max_position_embeddings in transformers, in tokens.
      kv_heads: default of num_key_value_heads in transformers. None for num_attention_heads.
      off: keys that must be false, because this library does not support the feature.
      unset: keys that must be missing or null, because they change the computation in transformers.
    """

    name: str
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    max_positions: int = 32768
    kv_heads: int | None = None
    off: tuple[str, ...] = ()
    unset: tuple[str, ...] = ("attention_chunk_size", "per_layer_config", "text_config")

    @property
    def plain(self) -> str:
        """Returns the architecture name of the family's models without a budget module."""
        return f"{self.name}ForCausalLM"

    @property
    def conditioned(self) -> str:
        """Returns the architecture name of the family's models with a budget module.

        The model_type does not depend on the budget module, so transformers can load the config
        and the tokenizer without this library.
        """
        return f"Bacr{self.name}ForCausalLM"


# Families, keyed by model_type. All other differences between models are values in config.json.
FAMILIES = {
    "qwen2": Family("Qwen2", qkv_bias=True, kv_heads=32),
    "qwen3": Family("Qwen3", qk_norm=True, head_dim=128, kv_heads=32, off=("attention_bias",)),
    "llama": Family(
        "Llama",
        max_positions=2048,
        off=("attention_bias", "mlp_bias"),
        # Llama does not have use_sliding_window, and sliding_window is enough to shorten the cache
        # in transformers.
        unset=(*Family.unset, "sliding_window"),
    ),
}
# Maps model_type in conditioned folders that version 0.1.0 exported to the current model_type.
_EARLIER = {"bacr_qwen2": "qwen2"}
MODELING = "modeling_bacr"
# Key of config.json: the prompt format, stop strings and lengths of a policy
# (`prompts.thinking_section`).
THINKING = "thinking"
# Key of config.json: the sentence that contains the budget in a prompt.
WORDS = "budget_words"
# Conditioning settings that belong to prompts and not to the budget module.
_NOT_OF_THE_MODULE = {"budget_input", "prompt_text"}
# Value of `site` in folders that version 0.1.0 exported: the embedding is added after the layer.
_SITE = "after_block"
# Key of config.json: named budgets.
LEVELS = "budget_levels"

# Upper bounds of integers, far beyond any existing model. They detect typing errors in config.json
# at once. Otherwise, a run could fail only after hours.
_MAXIMA = {"num_hidden_layers": 10_000, "vocab_size": 1 << 26, "num_attention_heads": 1 << 16}
_MAXIMUM = 1 << 28

# transformers' defaults for all families.
_DEFAULT_THETA = 10000.0
_DEFAULT_EPS = 1e-6
# The only supported layer type in layer_types.
_FULL = "full_attention"
# Prefixes of the keys factor, low_freq_factor and high_freq_factor of llama3's rotary scaling.
_LLAMA3 = ("", "low_freq_", "high_freq_")


@dataclasses.dataclass(frozen=True)
class BudgetModule:
    """Settings of a saved budget module.

    Attributes:
      conditioning: how a budget is encoded and added to the residual stream.
      b_max: budget in tokens that the inputs `log` and `normalised` map to 1000.
    """

    conditioning: ConditioningConfig
    b_max: int


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file.

    Raises:
      UserError: If the file cannot be read or does not contain a JSON object.
    """
    try:
        return files.read_object(path)
    except OSError as error:
        raise UserError(
            f"{path}: the file can't be read ({error.strerror}); use a model folder in the "
            "Hugging Face format"
        ) from None
    except ValueError as error:
        raise UserError(
            f"{path} can't be read as a JSON object ({error}); replace it by an undamaged copy"
        ) from None


def _positive_int(raw: dict[str, Any], key: str, where: Path, default: int | None = None) -> int:
    """Returns an integer from config.json, or the default if it is missing or null.

    Args:
      raw: parsed file.
      where: path of the file, for error messages.

    Raises:
      UserError: If the value is not an integer between 1 and the key's maximum.
    """
    number = raw.get(key)
    if number is None:
        number = default
    maximum = _MAXIMA.get(key, _MAXIMUM)
    if type(number) is not int or not 1 <= number <= maximum:
        raise UserError(
            f"{where}: `{key}` must be a whole number from 1 to {maximum}, but is {shown(number)}"
        )
    return number


def _positive_float(
    raw: dict[str, Any], key: str, where: Path, default: float | None = None
) -> float:
    """Returns a positive number from config.json, or the default if the key is missing.

    Raises:
      UserError: If the value is not a positive number.
    """
    number = raw.get(key, default)
    if not isinstance(number, int | float) or isinstance(number, bool) or not number > 0:
        raise UserError(f"{where}: `{key}` must be a positive number, but is {shown(number)}")
    return float(number)


def _rope(raw: dict[str, Any], where: Path) -> tuple[float, RopeScaling | None]:
    """Returns the rotary base and scaling that transformers would use for a config.json.

    A nonempty rope_scaling takes precedence over rope_parameters. If neither contains the base, the
    base is read from the top level of the file, where older files store it.

    Raises:
      UserError: If the type of rotary embedding is not supported, or a number is malformed.
    """
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    settings = raw.get(key) or {}
    if not isinstance(settings, dict):
        raise UserError(f"{where}: `{key}` must be an object or null, but is {shown(settings)}")
    for name, value in settings.items():
        # `name` is a layer type. The value of a layer type may be null instead of an object.
        if isinstance(value, dict) or name.endswith("_attention"):
            raise UserError(
                f"{where}: `{key}` has separate rotary parameters for the layer type "
                f"{shown(name)}, which is not supported; use a model with one set of rotary "
                "parameters for all layers"
            )
    _refuse_partial_rotation(raw | settings, where)
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(
            f"{where}: `{key}` selects {shown(kind)} scaling of the rotary embeddings, which is "
            "not supported; use a model without scaling, or with the scaling type llama3"
        )
    source = settings if "rope_theta" in settings else raw
    theta = _positive_float(source, "rope_theta", where, _DEFAULT_THETA)
    scaling = _llama3(raw, settings, where) if kind == "llama3" else None
    return theta, scaling


def _refuse_partial_rotation(settings: dict[str, Any], where: Path) -> None:
    """Rejects partially rotated heads, because inference engines interpret them differently."""
    share = settings.get("partial_rotary_factor")
    if share is not None and share != 1:
        raise UserError(
            f"{where}: `partial_rotary_factor` is {shown(share)}, but only 1 is supported (a "
            "rotation of all dimensions of a head); use another model"
        )


def _llama3(raw: dict[str, Any], settings: dict[str, Any], where: Path) -> RopeScaling:
    """Returns the rotary scaling of type llama3.

    The original context length is read from the top level of config.json, else from the rotary
    settings, else from max_position_embeddings.
    """
    factor, low, high = (_positive_float(settings, f"{name}factor", where) for name in _LLAMA3)
    if low >= high:
        raise UserError(
            f"{where}: `low_freq_factor` is {low:g}, but must be below `high_freq_factor`, which "
            f"is {high:g}; use the unmodified config.json of the model"
        )
    positions_key = "original_max_position_embeddings"
    source = raw if positions_key in raw else settings
    if positions_key not in source:
        source = raw
        positions_key = "max_position_embeddings"
    return RopeScaling(factor, low, high, _positive_int(source, positions_key, where))


def _family(raw: dict[str, Any], where: Path) -> Family:
    """Returns the model family of a folder.

    Raises:
      UserError: If the family is not supported.
    """
    kind = raw.get("model_type")
    family = None
    if isinstance(kind, str):
        family = FAMILIES.get(_EARLIER.get(kind, kind))
    architectures = raw.get("architectures") or [family.plain if family else None]
    if family is None or architectures not in ([family.plain], [family.conditioned]):
        supported = ", ".join(f"{name} ({other.plain})" for name, other in FAMILIES.items())
        raise UserError(
            f"{where}: a model with `model_type` {shown(kind)} and `architectures` "
            f"{shown(architectures)} is not supported; use a model of one of these types: "
            f"{supported}"
        )
    return family


def _refuse_other_models(raw: dict[str, Any], family: Family, where: Path) -> None:
    """Raises a UserError if a config.json enables a feature that is not supported."""
    required: dict[str, Any] = {
        "hidden_act": "silu",
        "use_sliding_window": False,
        "is_causal": True,
    }
    required |= dict.fromkeys(family.off, False)
    for key, value in required.items():
        if raw.get(key, value) != value:
            raise UserError(
                f"{where}: `{key}` is {shown(raw[key])}, but only {shown(value)} is supported; "
                "use another model"
            )
    for key in family.unset:
        if raw.get(key) not in (None, {}):
            raise UserError(
                f"{where}: `{key}` is {shown(raw[key])}, but only null is supported; use another "
                "model"
            )
    if raw.get("quantization_config") is not None:
        raise UserError(
            f"{where}: the weights of this model are quantized, which is not supported; use the "
            "folder of the same model in bfloat16"
        )
    _check_layer_types(raw, where)


def _check_layer_types(raw: dict[str, Any], where: Path) -> None:
    """Raises a UserError if layer_types specifies anything other than full attention."""
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise UserError(
            f"{where}: `layer_types` must be a list of names or null, but is {shown(kinds)}"
        )
    others = [kind for kind in kinds if kind != _FULL]
    if others:
        raise UserError(
            f"{where}: `layer_types` contains {shown(others[0], quote=False)}, but only {_FULL} "
            "is supported; use another model"
        )
    if kinds and len(kinds) != raw.get("num_hidden_layers"):
        raise UserError(
            f"{where}: `layer_types` lists {len(kinds)} layers, but `num_hidden_layers` is "
            f"{shown(raw.get('num_hidden_layers'))}; use the unmodified config.json of the model"
        )


def parse_config(raw: dict[str, Any], where: Path) -> Qwen2Config:
    """Returns the model shape specified in a parsed config.json.

    Args:
      raw: parsed file.
      where: path of the file, for error messages.

    Raises:
      UserError: If the model is not supported, or a value is malformed.
    """
    family = _family(raw, where)
    _refuse_other_models(raw, family, where)
    heads, kv_heads = _head_counts(raw, family, where)
    head_dim = _head_dim(raw, family, heads, where)
    tied = raw.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise UserError(
            f"{where}: `tie_word_embeddings` must be true or false, but is {shown(tied)}"
        )
    theta, scaling = _rope(raw, where)
    return Qwen2Config(
        vocab_size=_positive_int(raw, "vocab_size", where),
        hidden_size=_positive_int(raw, "hidden_size", where),
        intermediate_size=_positive_int(raw, "intermediate_size", where),
        num_layers=_positive_int(raw, "num_hidden_layers", where),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=theta,
        rms_norm_eps=_positive_float(raw, "rms_norm_eps", where, _DEFAULT_EPS),
        tie_embeddings=tied,
        max_positions=_positive_int(raw, "max_position_embeddings", where, family.max_positions),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        rope_scaling=scaling,
    )


def _head_counts(raw: dict[str, Any], family: Family, where: Path) -> tuple[int, int]:
    """Returns the number of query heads and the number of key/value heads."""
    heads = _positive_int(raw, "num_attention_heads", where)
    # null means the number of query heads in every family, while a missing key means the family's
    # default.
    default = heads if "num_key_value_heads" in raw else family.kv_heads or heads
    kv_heads = _positive_int(raw, "num_key_value_heads", where, default)
    if heads % kv_heads:
        raise UserError(
            f"{where}: `num_attention_heads` is {heads}, which is not a multiple of "
            f"`num_key_value_heads`, {kv_heads}; use the unmodified config.json of the model"
        )
    return heads, kv_heads


def _head_dim(raw: dict[str, Any], family: Family, heads: int, where: Path) -> int:
    """Returns the head dimension, which must be even."""
    width = _positive_int(raw, "hidden_size", where)
    if raw.get("head_dim", family.head_dim) is None and width % heads:
        raise UserError(
            f"{where}: `hidden_size` is {width}, which is not a multiple of "
            f"`num_attention_heads`, {heads}; add `head_dim` to the file"
        )
    head_dim = _positive_int(raw, "head_dim", where, family.head_dim or width // heads)
    if head_dim % 2:
        raise UserError(
            f"{where}: `head_dim` is {head_dim}, but must be even, because rotary embeddings "
            "rotate pairs of dimensions; use the unmodified config.json of the model"
        )
    return head_dim


def read_hf_config(folder: str | Path) -> Qwen2Config:
    """Reads the shape of the model in a Hugging Face folder.

    Raises:
      UserError: If the folder does not exist, or `parse_config` raises it.
    """
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise UserError(
            f"{folder}: there is no such folder; use a model folder in the Hugging Face format"
        )
    return parse_config(read_json(path), path)


def read_budget_module(folder: str | Path) -> BudgetModule | None:
    """Reads the settings of a folder's budget module. Returns None if the model has none."""
    path = Path(folder) / "config.json"
    raw = read_json(path)
    conditioned = raw.get("architectures") == [_family(raw, path).conditioned]
    if not conditioned and raw.get("model_type") not in _EARLIER:
        return None
    return parse_module(raw, path)


def parse_module(raw: dict[str, Any], path: Path) -> BudgetModule:
    """Returns the settings of a budget module in a parsed file.

    Args:
      raw: parsed file, with the key budget_module.
      path: path of the file, for error messages.

    Raises:
      UserError: If budget_module is missing or malformed.
    """
    described = raw.get("budget_module")
    if isinstance(described, dict) and described.get("site") == _SITE:
        described = {name: value for name, value in described.items() if name != "site"}
    fields = {field.name for field in dataclasses.fields(ConditioningConfig)}
    fields -= _NOT_OF_THE_MODULE
    if not isinstance(described, dict) or set(described) != fields | {"b_max"}:
        raise UserError(
            f"{path}: `budget_module` is incomplete or invalid (found {shown(described)}); run "
            "bacr export again"
        )
    settings: dict[str, Any] = {}
    for name in fields:
        hint = config_io.schema()[f"conditioning.{name}"].hint
        try:
            settings[name] = convert(hint, described[name])
        except TypeMismatch:
            raise UserError(
                f"{path}: `budget_module.{name}` must be {describe(hint)}, but is "
                f"{shown(described[name])}; run bacr export again"
            ) from None
    b_max = _positive_int(described, "b_max", path)
    return BudgetModule(ConditioningConfig(**settings), b_max)


def read_budget_words(folder: str | Path) -> str | None:
    """Reads the sentence that contains the budget in the prompts of a folder's model.

    Returns:
      A sentence that contains {budget} exactly once, or None if prompts do not contain the budget.

    Raises:
      UserError: If the value is not such a sentence.
    """
    path = Path(folder) / "config.json"
    words = read_json(path).get(WORDS)
    if words is not None and (not isinstance(words, str) or words.count("{budget}") != 1):
        raise UserError(
            f"{path}: `{WORDS}`, the sentence that puts the budget in a prompt, is "
            f"{shown(words)}; use a sentence that contains {{budget}} once"
        )
    return words


def read_levels(folder: str | Path) -> dict[str, int]:
    """Reads the named budgets of a folder. Most folders do not have any.

    Returns:
      The budgets in tokens, keyed by name. The dictionary is empty if there are none.

    Raises:
      UserError: If the value is not an object of integers.
    """
    path = Path(folder) / "config.json"
    levels = read_json(path).get(LEVELS) or {}
    is_valid = isinstance(levels, dict) and all(
        type(tokens) is int and 0 <= tokens <= _MAXIMUM for tokens in levels.values()
    )
    if not is_valid:
        raise UserError(
            f"{path}: `{LEVELS}` must map names to numbers of tokens, but is {shown(levels)}; run "
            "bacr export again"
        )
    return levels


def read_thinking(folder: str | Path) -> dict[str, Any] | None:
    """Reads the section `thinking` of a folder's config.json without validating its keys.

    Returns:
      The section, or None if it is missing.

    Raises:
      UserError: If the section is not an object.
    """
    path = Path(folder) / "config.json"
    section = read_json(path).get(THINKING)
    if section is not None and not isinstance(section, dict):
        raise UserError(
            f"{path}: `{THINKING}` must be a JSON object, but is {shown(section)}; run bacr "
            "export again"
        )
    return section


def describe_module(module: BudgetModule) -> dict[str, Any]:
    """Returns the settings of a budget module in the format of the key budget_module."""
    described = {}
    for name, value in dataclasses.asdict(module.conditioning).items():
        if name not in _NOT_OF_THE_MODULE:
            described[name] = value
    described["b_max"] = module.b_max
    return described


def _describe_scaling(scaling: RopeScaling | None) -> dict[str, Any]:
    """Returns `rope_scaling` of config.json as a dictionary, which is empty for unscaled RoPE."""
    if scaling is None:
        return {}
    described: dict[str, Any] = {"rope_type": "llama3"}
    numbers = (scaling.factor, scaling.low, scaling.high)
    for prefix, number in zip(_LLAMA3, numbers, strict=True):
        described[f"{prefix}factor"] = number
    described["original_max_position_embeddings"] = scaling.positions
    return {"rope_scaling": described}


def _new_config_json(config: Qwen2Config) -> dict[str, Any]:
    """Builds a new config.json that both old and new versions of transformers can read."""
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
        **_describe_scaling(config.rope_scaling),
        # Version of the file layout. Without it, transformers warns about Mistral's tokenizers.
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
    """Builds the config.json of a folder.

    Args:
      dtype: dtype of the weights by its name in transformers, such as bfloat16.
      module: settings of the budget module, or None for a model without one.
      source: config.json of the model that training started from. All keys that do not concern
        shape, dtype and conditioning are copied from it, such as token ids. None builds a new file.
      budget_words: sentence after the question that contains the budget, or None if prompts do not
        contain the budget.

    Raises:
      UserError: If `source` describes a different shape than `config`.
    """
    content = _new_config_json(config) if source is None else dict(source)
    if source is not None and parse_config(source, Path("config.json")) != config:
        raise UserError(
            "export: the config.json of the source folder describes a model of another shape "
            "than the policy; export with the config.json of the model that training started "
            "from"
        )
    for key in ("auto_map", "budget_module", WORDS, LEVELS, THINKING, "dtype", "torch_dtype"):
        content.pop(key, None)
    kind, family = _family_of_shape(config)
    content["model_type"] = kind
    content["architectures"] = [family.plain if module is None else family.conditioned]
    if module is not None:
        content["auto_map"] = {
            "AutoConfig": f"{MODELING}.Bacr{family.name}Config",
            "AutoModelForCausalLM": f"{MODELING}.{family.conditioned}",
        }
        content["budget_module"] = describe_module(module)
    if budget_words is not None:
        # Engines that do not support this key ignore it.
        content[WORDS] = budget_words
    # transformers 5 writes `dtype` and version 4 reads `torch_dtype`. Both versions can read
    # `torch_dtype`.
    content["torch_dtype"] = dtype
    return content


def _family_of_shape(config: Qwen2Config) -> tuple[str, Family]:
    """Returns the model_type and the family of a model shape, based on its biases and norms."""
    for kind, family in FAMILIES.items():
        if family.qkv_bias == config.qkv_bias and family.qk_norm == config.qk_norm:
            return kind, family
    raise ValueError(
        f"no supported model family has qkv_bias={config.qkv_bias} and qk_norm={config.qk_norm}"
    )
