"""Hugging Face checkpoint folders: `config.json` and `model.safetensors`."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from weft import config, errors, hierarchy
from weft.hierarchy.causal_lm import Model
from weft.interop.huggingface.causal_lms import GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, similar_settings
from weft.interop.huggingface.family import Family, TensorMapping, hidden_dim
from weft.interop.huggingface.folder import (
    CONFIG,
    GENERATION_CONFIG,
    SPECIAL_IDS,
    SourceFolder,
    merged,
    write_generation_config,
    write_tokenizer,
)
from weft.interop.huggingface.settings import NO_PADDING, Settings
from weft.serialization import safetensors, untrusted
from weft.serialization.directory import Directory
from weft.typing import DType, NestedTensor, PyTree, Tensor

FAMILIES: Mapping[str, Family] = {
    family.model_type: family for family in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3)
}
"""The families of models by the model type of `config.json`."""

_PathLike = str | os.PathLike[str]

# Parts of paths in a config that do not change what a trained model computes.
_WITHOUT_EFFECT = re.compile(
    r"name|dtype|.*param_init|param_noise|.*partition_spec|remat_spec|tensor_stats|.*dropout\d?"
    r"|dropout_rate|stochastic_depth|metrics|.*_axis_names|scan_chunk|vocab_chunk_size|kv_cache"
    r"|decoding|add_.*|logits_forward_dtype|forward_dtype|scale_kv_before_cache_update"
)


# Reading.


def huggingface_model_config(
    folder: _PathLike,
    *,
    dtype: DType = jnp.float32,
    stack: hierarchy.BaseStackedTransformerLayer.Config | None = None,
) -> Model.Config:
    """Returns the config of a checkpoint's causal LM.

    Args:
        folder: a folder with the `config.json` of a model of one of the types `FAMILIES`.
        stack: stack of layers; `RepeatedTransformerLayer` if None.

    Raises:
        WeightsReadError: if the config is missing, or not JSON.
        HuggingFaceConfigError: if the model is not supported.
    """
    settings = _with_generation_ends(_settings(folder), folder)
    cfg: Any = _family(settings).read(settings).set(dtype=dtype)
    if stack is not None:
        read = cfg.decoder.transformer
        cfg.decoder.transformer = stack.clone(num_layers=read.num_layers, layer=read.layer)
    return cfg


def _settings(folder: _PathLike, name: str = CONFIG) -> Settings:
    path = Path(folder) / name
    try:
        values = untrusted.read_json_file(path)
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise errors.WeightsReadError(
            f"{str(path)!r} cannot be read ({error}). Name the folder of a Hugging Face checkpoint."
        ) from error
    return Settings(values, str(path))


def _with_generation_ends(settings: Settings, folder: _PathLike) -> Settings:
    """Returns settings with the ids at which the generation config stops, in addition to theirs.

    A model of conversations often has the end of a turn only there.
    """
    if not os.path.lexists(Path(folder) / GENERATION_CONFIG):
        return settings
    ends: list[int] = []
    for end in [*settings.end_ids(), *_settings(folder, GENERATION_CONFIG).end_ids()]:
        if end != NO_PADDING and end not in ends:
            ends.append(end)
    return Settings({**settings.values, "eos_token_id": ends or None}, settings.source)


def _family(settings: Settings) -> Family:
    model_type = settings.values.get("model_type")
    if not (isinstance(model_type, str) and model_type in FAMILIES):
        raise settings.refusal(
            "model_type", model_type, f"can be {' or '.join(map(repr, FAMILIES))}"
        )
    quantization = settings.values.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise errors.HuggingFaceConfigError(
            f"the weights of {settings.source} are quantized ({method or 'by an unknown method'}), "
            "and plain ones can be read. Choose the checkpoint that they were made from."
        )
    return FAMILIES[model_type]


def load_huggingface_params(folder: _PathLike, target: NestedTensor) -> NestedTensor:
    """Reads the parameters of a checkpoint, one at a time.

    `target` has the model's parameters, or their shapes; values get their dtypes and shardings.

    Raises:
        WeightsReadError: if a file is missing or damaged.
        WeightsMismatchError: if the files do not match the model.
        HuggingFaceConfigError: if the model is not supported.
    """
    settings = _settings(folder)
    family = _family(settings)
    locations = _tensor_locations(family, settings, dict(safetensors.tensor_names(target)))
    with safetensors.TensorFiles(folder) as files:
        prefix = family.prefix
        if not any(name.startswith(prefix) for name in files.tensors):
            prefix = ""  # of the model without a head for logits
        expected: dict[str, jax.ShapeDtypeStruct] = {}
        for location in locations:
            for layer in location.layers():
                expected[location.hf_name(layer, prefix)] = location.hf_shape()
        pattern_of_extra = re.compile(rf"({re.escape(prefix)})?({family.extra_allowed})")

        def is_extra_allowed(name: str) -> bool:
            return pattern_of_extra.fullmatch(name) is not None

        safetensors.check_tensors(files, expected, cast=True, extra_allowed=is_extra_allowed)
        values = [_read(files, location, prefix) for location in locations]
    return jax.tree.unflatten(jax.tree.structure(target), values)


def from_huggingface(
    folder: _PathLike, *, dtype: DType = jnp.float32
) -> tuple[Model.Config, NestedTensor]:
    """Reads a checkpoint: the config of its model, and the parameters.

    Arguments and errors are those of `huggingface_model_config` and `load_huggingface_params`.
    """
    cfg = huggingface_model_config(folder, dtype=dtype)
    model: Any = cfg.clone(name="model").instantiate(parent=None)
    shapes = jax.eval_shape(model.initialize_parameters_recursively, jax.random.key(0))
    return cfg, load_huggingface_params(folder, shapes)


# Where each parameter is.


_ALL_LAYERS = -1


@dataclasses.dataclass(frozen=True)
class _TensorLocation:
    """A parameter of Weft and its tensor in Hugging Face's files, or the tensors of all layers.

    Attributes:
        parameter: the array, or its shape.
        layer: None outside of layers, `_ALL_LAYERS` where all are in one array.
    """

    entry: TensorMapping
    parameter: Any
    layer: int | None

    def layers(self) -> list[int | None]:
        """Returns the layers, one tensor each."""
        if self.layer == _ALL_LAYERS:
            return list(range(self.parameter.shape[0]))
        return [self.layer]

    def index(self, layer: int | None) -> Any:
        """Returns where in the parameter the values of a tensor are."""
        return layer if self.layer == _ALL_LAYERS else ...

    def hf_name(self, layer: int | None, prefix: str) -> str:
        name = self.entry.hf_name.format(layer)
        # The layer of logits is outside of the model to whose tensors the prefix belongs.
        return name if name.startswith("lm_head.") else prefix + name

    def hf_values(self, layer: int | None) -> np.ndarray:
        values = np.asarray(self.parameter[self.index(layer)])
        return self.entry.change.to_hf(values)

    def hf_shape(self) -> jax.ShapeDtypeStruct:
        shape = self.parameter.shape
        if self.layer == _ALL_LAYERS:
            shape = shape[1:]
        weft_shape = jax.ShapeDtypeStruct(shape, self.parameter.dtype)
        return jax.eval_shape(self.entry.change.to_hf, weft_shape)


_IN_LAYERS = re.compile(r"decoder\.transformer\.(?:repeat\.layer|layer(\d+))\.(.*)")


def _tensor_locations(
    family: Family, settings: Settings, parameters: Mapping[str, Any]
) -> list[_TensorLocation]:
    entries = {entry.weft_name: entry for entry in family.entries(settings)}
    missing = dict(entries)
    unknown: list[str] = []
    locations: list[_TensorLocation] = []
    for name, parameter in parameters.items():
        layer, name_in_layer = None, name
        match = _IN_LAYERS.fullmatch(name)
        if match:
            number, name_in_layer = match.groups()
            layer = _ALL_LAYERS if number is None else int(number)
        if name_in_layer in entries:
            missing.pop(name_in_layer, None)
            locations.append(_TensorLocation(entries[name_in_layer], parameter, layer))
        else:
            unknown.append(name)
    if unknown or missing:
        # The family's model lacks what it does not know, and has what the parameters lack.
        raise errors.WeightsMismatchError(
            f"the parameters are not those of the {family.model_type} of {settings.source}: it "
            f"lacks {_first_names(unknown)}, and has {_first_names(missing)} besides. Make the "
            "model from huggingface_model_config, and merge adapters first."
        )
    return locations


def _first_names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)[:8]) or "none"


def _read(files: safetensors.TensorFiles, location: _TensorLocation, prefix: str) -> jax.Array:
    parameter = location.parameter
    value = np.empty(parameter.shape, jnp.dtype(parameter.dtype))
    for layer in location.layers():
        tensor = files.read(location.hf_name(layer, prefix))
        value[location.index(layer)] = location.entry.change.to_weft(tensor)
    sharding = getattr(parameter, "sharding", None)
    if sharding is None:
        return jnp.asarray(value)
    return jax.make_array_from_callback(parameter.shape, sharding, value.__getitem__)


# Writing.


def to_huggingface(
    folder: _PathLike,
    cfg: Model.Config,
    params: NestedTensor,
    *,
    max_position_embeddings: int | None = None,
    base: _PathLike | None = None,
    tokenizer: _PathLike | None = None,
    max_shard_bytes: int = safetensors.MAX_SHARD_BYTES,
) -> list[Path]:
    """Writes a causal LM as a Hugging Face checkpoint, which `transformers` loads.

    Args:
        folder: created if missing; files of an earlier checkpoint are replaced.
        cfg: the config of a model that computes what one of the `FAMILIES` does; a fused projection
            and scaled embeddings are converted.
        max_position_embeddings: longest sequence, which rotary models do not define themselves; by
            default that of `base`, or else 2048.
        base: the folder of the checkpoint that the model was made from. Its settings, tokenizer,
            generation config and chat template are written too, with what training has changed.
        tokenizer: file of the tokenizer, `*.json` or `*.model`; that of `base` if None. Files next
            to it, such as `tokenizer_config.json`, belong to it.

    Returns the files that were written.

    Raises:
        HuggingFaceConfigError: if no family of Hugging Face computes the same; lists differences.
        WeightsMismatchError: if the parameters are not those of the model.
        WeightsReadError: if a file of `base` or of the tokenizer cannot be read.
    """
    with contextlib.suppress(AttributeError):  # a model of another kind, which is explained next
        cfg, params = _equivalent_form(cfg, params)
    family, values = _config_dict(cfg)
    source = None if base is None else SourceFolder(base)
    if source is not None:
        family, values = _with_base(family, values, source)
    settings = Settings(values, "the model")
    parameters = dict(safetensors.tensor_names(params))
    tensors: dict[str, safetensors.PendingTensor] = {}
    for location in _tensor_locations(family, settings, parameters):
        for layer in location.layers():
            tensors[location.hf_name(layer, family.prefix)] = safetensors.PendingTensor(
                location.hf_shape().shape,
                location.parameter.dtype,
                functools.partial(location.hf_values, layer),
            )
    if family is not GPT2:
        length = max_position_embeddings or values.get("max_position_embeddings", 2048)
        values["max_position_embeddings"] = length
    # A reader would put in the ids of its own default vocabulary.
    values.setdefault("bos_token_id", None)
    dtype = max(jnp.dtype(parameter.dtype).name for parameter in parameters.values())
    values |= {"architectures": [family.architecture], "dtype": dtype, "torch_dtype": dtype}
    # "pt" is the layout that other programs expect.
    files = safetensors.write_tensors(
        Path(folder) / "model.safetensors",
        tensors,
        metadata={"format": "pt"},
        max_shard_bytes=max_shard_bytes,
    )
    directory = Directory(os.fspath(folder))
    directory.write(CONFIG, json.dumps(values, indent=2, sort_keys=True) + "\n")
    generation_config = write_generation_config(directory, values, source)
    written = [Path(folder) / CONFIG, Path(folder) / generation_config, *files]
    tokenizer_source = tokenizer or base
    if tokenizer_source is not None:
        for name in write_tokenizer(directory, values, tokenizer_source):
            written.append(Path(folder) / name)
    return written


def _with_base(
    family: Family, model_values: dict[str, Any], base: SourceFolder
) -> tuple[Family, dict[str, Any]]:
    """Returns the settings of a base with what training has changed, and its family.

    A model that another family computes has nothing of the base's settings but special ids.
    """
    base_values = base.read_object(CONFIG)
    if base_values is None:
        raise errors.WeightsReadError(
            f"{str(base.path / CONFIG)!r} is missing. Give as base the folder of the checkpoint "
            "that the model was made from."
        )
    base_settings = Settings(base_values, str(base.path / CONFIG))
    base_settings = _with_generation_ends(base_settings, base.path)
    base_family = _family(base_settings)
    _, rewritten_values = _config_dict(base_family.read(base_settings))
    if rewritten_values["model_type"] != model_values["model_type"]:
        values = dict(model_values)
        for name in SPECIAL_IDS:
            is_unchanged = model_values.get(name) == rewritten_values.get(name)
            if is_unchanged and name in base_values:
                values[name] = base_values[name]
        return family, values
    # Several families have the same models, such as Mistral without a window and Llama.
    base_values = {**base_values, "model_type": base_family.model_type}
    return base_family, merged(model_values, base_values, rewritten_values)


def _config_dict(cfg: Model.Config) -> tuple[Family, dict[str, Any]]:
    """Returns the family that computes what a model does, and its `config.json` content."""
    # Some families share a function.
    writers = dict.fromkeys(family.write for family in FAMILIES.values())
    for write in (*writers, similar_settings):
        try:
            values = write(cfg)
        except (AttributeError, TypeError, IndexError):
            continue  # it has not even the parts of one
        family = FAMILIES[values["model_type"]]
        rebuilt = family.read(Settings(values, "the model"))
        differences = _differences(cfg, rebuilt)
        if not differences:
            return family, values
        reason = " (its value → what would be needed):\n"
        reason += "".join(f"  {change}\n" for change in differences)
        break
    else:
        model_class = getattr(cfg, "klass", type(cfg))
        reason = (
            f": it is a {model_class.__qualname__}, and they are causal LMs of weft.hierarchy. "
        )
    raise errors.HuggingFaceConfigError(
        f"no model of the types {', '.join(FAMILIES)} computes what this one does{reason}"
        "Export it as safetensors, which every model can."
    )


def _differences(cfg: Model.Config, rebuilt: Model.Config) -> list[config.Change]:
    """Returns the fields by which a model computes something else than its rebuilt form."""
    cfg = cfg.clone()
    decoder: Any = cfg.decoder
    rebuilt_decoder: Any = rebuilt.decoder
    # How layers are stacked does not count.
    stack, rebuilt_stack = decoder.transformer, rebuilt_decoder.transformer
    rebuilt_decoder.transformer = stack.clone(
        num_layers=rebuilt_stack.num_layers, layer=rebuilt_stack.layer
    )
    stack.layer.feed_forward.hidden_dim = hidden_dim(stack.layer.feed_forward, decoder.dim)
    changes: list[config.Change] = []
    for change in config.diff(cfg, rebuilt):
        names = re.split(r"[.\[\]]+", change.path)
        if not any(_WITHOUT_EFFECT.fullmatch(name) for name in names):
            changes.append(change)
    # Of a layer of another class, not its fields.
    prefixes = tuple(f"{change.path}." for change in changes)
    return [change for change in changes if not change.path.startswith(prefixes)]


def _equivalent_form(cfg: Model.Config, params: NestedTensor) -> tuple[Model.Config, PyTree]:
    """Returns the config and parameters of a model that computes the same, as families have it.

    One fused projection becomes those of queries, keys and values. Embeddings that are multiplied
    by the square root of the dimension become larger; if they are also the output layer, the norm
    before it becomes smaller. Unchanged parts are shared.

    Raises AttributeError if the model lacks the parts of a decoder with a stack of layers.
    """
    cfg = cfg.clone()
    decoder: Any = cfg.decoder
    self_attention = decoder.transformer.layer.self_attention
    if _is_fused(self_attention.attention):
        self_attention.attention = _grouped(self_attention.attention, decoder.dim)
        params = _split(params)
    embedding = decoder.emb.token_emb
    if embedding.scale is hierarchy.Embedding.Scale.UNIT and decoder.emb.norm is None:
        embedding.scale = None
        params = _scaled(params, math.sqrt(decoder.dim), tied=decoder.lm_head is None)
    return cfg, params


def _is_fused(attention: Any) -> bool:
    qkv = attention.input_linear
    fused_classes = (hierarchy.FusedQKVLinear, hierarchy.QKVLinear)
    return (
        attention.klass is hierarchy.MultiheadAttention
        and isinstance(qkv, hierarchy.RoFormerQKVLinear.Config)
        and getattr(qkv.input_linear, "klass", None) in fused_classes
    )


def _grouped(attention: Any, dim: int) -> Any:
    """Returns the config of attention with as many heads of keys as of queries."""
    fused = attention.input_linear.input_linear
    qkv = attention.input_linear.clone(
        input_linear=_as(hierarchy.GroupedQKVLinear, fused, num_kv_heads=attention.num_heads)
    )
    return _as(
        hierarchy.GroupedQueryAttention,
        attention,
        input_linear=qkv,
        hidden_dim=attention.hidden_dim or dim,
    )


def _as(layer: type[hierarchy.BaseLayer], cfg: Any, **fields: object) -> Any:
    """Returns a config of another class of layer with the same values of the common fields."""
    converted: Any = layer.default_config()
    common = set(cfg.keys()).intersection(converted.keys()) - {"klass"}
    return converted.set(**{name: getattr(cfg, name) for name in common} | fields)


def _split(params: PyTree) -> PyTree:
    """Replaces each fused projection by three."""
    if not isinstance(params, dict):
        return params
    if "qkv_proj" not in params:
        return {name: _split(value) for name, value in params.items()}
    split = dict(params)
    fused = split.pop("qkv_proj")
    # Kernels are (3, model_dim, heads, dim) and biases (3, heads, dim), after the layers' axis.
    for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
        split[name] = {"weight": fused["weight"][..., i, :, :, :]}
        if "bias" in fused:
            split[name]["bias"] = fused["bias"][..., i, :, :]
    return split


def _scaled(params: PyTree, factor: float, *, tied: bool) -> PyTree:
    decoder = dict(params["decoder"])
    table = decoder["emb"]["token_emb"]["weight"]
    token_emb = {**decoder["emb"]["token_emb"], "weight": _times(table, factor)}
    decoder["emb"] = {**decoder["emb"], "token_emb": token_emb}
    if tied:
        norm = decoder["output_norm"]
        decoder["output_norm"] = {name: _times(x, 1 / factor) for name, x in norm.items()}
    return {**params, "decoder": decoder}


def _times(x: Tensor, factor: float) -> Tensor:
    return (x * np.float32(factor)).astype(x.dtype)
