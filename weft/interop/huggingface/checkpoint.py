"""Hugging Face checkpoint folders: `config.json` and `model.safetensors`."""

import contextlib
import functools
import json
import math
import os
import re
from collections.abc import Mapping
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
from weft.typing import DType, NestedTensor, Tensor

FAMILIES: Mapping[str, Family] = {f.model_type: f for f in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3)}
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
        made = cfg.decoder.transformer
        cfg.decoder.transformer = stack.clone(num_layers=made.num_layers, layer=made.layer)
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
    ends = [*settings.end_ids(), *_settings(folder, GENERATION_CONFIG).end_ids()]
    unique = [i for i in dict.fromkeys(ends) if i != NO_PADDING]
    return Settings({**settings.values, "eos_token_id": unique or None}, settings.source)


def _family(settings: Settings) -> Family:
    kind: Any = settings.values.get("model_type")
    if not (isinstance(kind, str) and kind in FAMILIES):
        raise settings.refusal("model_type", kind, f"can be {' or '.join(map(repr, FAMILIES))}")
    quantization = settings.values.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise errors.HuggingFaceConfigError(
            f"the weights of {settings.source} are quantized ({method or 'by an unknown method'}), "
            "and plain ones can be read. Choose the checkpoint that they were made from."
        )
    return FAMILIES[kind]


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
    places = _tensor_locations(family, settings, dict(safetensors.tensor_names(target)))
    with safetensors.TensorFiles(folder) as files:
        prefix = family.prefix
        if not any(name.startswith(prefix) for name in files.tensors):
            prefix = ""  # of the model without a head for logits
        wanted = {
            _hf_tensor_name(place, i, prefix): place.hf_shape()
            for place in places
            for i in place.numbers()
        }
        extra_allowed = re.compile(rf"({re.escape(prefix)})?({family.extra_allowed})")
        safetensors.check_tensors(
            files, wanted, cast=True, extra_allowed=lambda name: bool(extra_allowed.fullmatch(name))
        )
        values = [_read(files, place, prefix) for place in places]
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


class _TensorLocation:
    """A parameter of ours and its tensor of theirs, or the tensors of all layers.

    `layer` is None outside of layers, -1 where all are in one array.
    """

    def __init__(self, entry: TensorMapping, leaf: Any, layer: int | None):
        self.entry, self.leaf, self.layer = entry, leaf, layer

    def numbers(self) -> list[int | None]:
        """Returns the layers, one tensor each."""
        return list(range(self.leaf.shape[0])) if self.layer == -1 else [self.layer]

    def hf_values(self, layer: int | None) -> np.ndarray:
        """Returns the values of a tensor of theirs."""
        leaf = self.leaf[layer] if self.layer == -1 else self.leaf
        return self.entry.change.to_hf(np.asarray(leaf))

    def hf_shape(self) -> jax.ShapeDtypeStruct:
        """Returns the shape of a tensor of theirs."""
        shape = self.leaf.shape[1:] if self.layer == -1 else self.leaf.shape
        own = jax.ShapeDtypeStruct(shape, self.leaf.dtype)
        return jax.eval_shape(self.entry.change.to_hf, own)


_IN_LAYERS = re.compile(r"decoder\.transformer\.(?:repeat\.layer|layer(\d+))\.(.*)")


def _tensor_locations(
    family: Family, settings: Settings, leaves: Mapping[str, Any]
) -> list[_TensorLocation]:
    entries = {entry.weft_name: entry for entry in family.entries(settings)}
    places, unknown = [], []
    for name, leaf in leaves.items():
        match = _IN_LAYERS.fullmatch(name)
        layer, ours = None, name
        if match:
            layer, ours = -1 if match[1] is None else int(match[1]), match[2]
        if ours in entries:
            places.append(_TensorLocation(entries[ours], leaf, layer))
        else:
            unknown.append(name)
    lacking = entries.keys() - {place.entry.weft_name for place in places}
    if unknown or lacking:
        named = ", ".join(sorted(unknown)[:8]) or "none"
        raise errors.WeightsMismatchError(
            f"the parameters are not those of the {family.model_type} of {settings.source}: it "
            f"lacks {named}, and has {', '.join(sorted(lacking)[:8]) or 'none'} besides. Make the "
            "model from huggingface_model_config, and merge adapters first."
        )
    return places


def _hf_tensor_name(place: _TensorLocation, layer: int | None, prefix: str) -> str:
    name = place.entry.hf_name.format(layer)
    return name if name.startswith("lm_head.") else prefix + name


def _read(files: safetensors.TensorFiles, place: _TensorLocation, prefix: str) -> jax.Array:
    leaf, change = place.leaf, place.entry.change
    value = np.empty(leaf.shape, jnp.dtype(leaf.dtype))
    for i in place.numbers():
        read = change.to_weft(files.read(_hf_tensor_name(place, i, prefix)))
        value[i if place.layer == -1 else ...] = read
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return jnp.asarray(value)
    return jax.make_array_from_callback(leaf.shape, sharding, value.__getitem__)


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
    leaves = dict(safetensors.tensor_names(params))
    pending = {}
    for place in _tensor_locations(family, settings, leaves):
        for i in place.numbers():
            theirs = _hf_tensor_name(place, i, family.prefix)
            shape, dtype = place.hf_shape().shape, place.leaf.dtype
            pending[theirs] = safetensors.PendingTensor(
                shape, dtype, functools.partial(place.hf_values, i)
            )
    if family is not GPT2:
        length = max_position_embeddings or values.get("max_position_embeddings", 2048)
        values["max_position_embeddings"] = length
    # A reader would put in the ids of its own default vocabulary.
    values.setdefault("bos_token_id", None)
    dtype = max(jnp.dtype(leaf.dtype).name for leaf in leaves.values())
    values |= {"architectures": [family.architecture], "dtype": dtype, "torch_dtype": dtype}
    # "pt" is the layout that other programs expect.
    files = safetensors.write_tensors(
        Path(folder) / "model.safetensors",
        pending,
        metadata={"format": "pt"},
        max_shard_bytes=max_shard_bytes,
    )
    directory = Directory(os.fspath(folder))
    directory.write(CONFIG, json.dumps(values, indent=2, sort_keys=True) + "\n")
    names = [CONFIG, write_generation_config(directory, values, source)]
    others = []
    if tokenizer is not None or base is not None:
        others = write_tokenizer(directory, values, tokenizer or base or "")
    return [*(Path(folder) / name for name in names), *files, *(Path(folder) / n for n in others)]


def _with_base(
    family: Family, own: dict[str, Any], base: SourceFolder
) -> tuple[Family, dict[str, Any]]:
    """Returns the settings of a base with what training has changed, and its family.

    A model that another family computes has nothing of the base's settings but special ids.
    """
    values = base.read_object(CONFIG)
    if values is None:
        raise errors.WeightsReadError(
            f"{str(base.path / CONFIG)!r} is missing. Give as base the folder of the checkpoint "
            "that the model was made from."
        )
    settings = Settings(values, str(base.path / CONFIG))
    settings = _with_generation_ends(settings, base.path)
    theirs = _family(settings)
    _, own_of_base = _config_dict(theirs.read(settings))
    if own_of_base["model_type"] != own["model_type"]:
        same = {name for name in SPECIAL_IDS if own.get(name) == own_of_base.get(name)}
        return family, own | {name: values[name] for name in same & values.keys()}
    # Several families have the same models, such as Mistral without a window and Llama.
    kept = {**values, "model_type": theirs.model_type}
    return theirs, merged(own, kept, own_of_base)


def _config_dict(cfg: object) -> tuple[Family, dict[str, Any]]:
    """Returns the family that computes what a model does, and its `config.json` content."""
    # Some families share a function.
    writers = dict.fromkeys(family.write for family in FAMILIES.values())
    for write in (*writers, similar_settings):
        try:
            values = write(cfg)
        except (AttributeError, TypeError, IndexError):
            continue  # it has not even the parts of one
        family = FAMILIES[values["model_type"]]
        rebuilt: Any = family.read(Settings(values, "the model"))
        differences = _differences(cfg, rebuilt)
        if not differences:
            return family, values
        why = " (its value → what would be needed):\n"
        why += "".join(f"  {change}\n" for change in differences)
        break
    else:
        kind = getattr(cfg, "klass", type(cfg))
        why = f": it is a {kind.__qualname__}, and they are causal LMs of weft.hierarchy. "
    raise errors.HuggingFaceConfigError(
        f"no model of the types {', '.join(FAMILIES)} computes what this one does{why}"
        "Export it as safetensors, which every model can."
    )


def _differences(cfg: Any, rebuilt: Any) -> list[Any]:
    ours = cfg.clone()
    made, stack = rebuilt.decoder.transformer, ours.decoder.transformer
    # How layers are stacked does not count.
    rebuilt.decoder.transformer = stack.clone(num_layers=made.num_layers, layer=made.layer)
    stack.layer.feed_forward.hidden_dim = hidden_dim(stack.layer.feed_forward, ours.decoder.dim)
    changes = [
        change
        for change in config.diff(ours, rebuilt)
        if not any(_WITHOUT_EFFECT.fullmatch(part) for part in re.split(r"[.\[\]]+", change.path))
    ]
    # Of a layer of another class, not its fields.
    inside = tuple(f"{change.path}." for change in changes)
    return [change for change in changes if not change.path.startswith(inside)]


def _equivalent_form(cfg: Model.Config, params: NestedTensor) -> tuple[Any, Any]:
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
    kinds = (hierarchy.FusedQKVLinear, hierarchy.QKVLinear)
    return (
        attention.klass is hierarchy.MultiheadAttention
        and isinstance(qkv, hierarchy.RoFormerQKVLinear.Config)
        and getattr(qkv.input_linear, "klass", None) in kinds
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


def _as(layer: Any, cfg: Any, **fields: object) -> Any:
    """Returns a config of another class of layer with the same values of the common fields."""
    made = layer.default_config()
    common = {k: v for k, v in cfg.items() if k != "klass" and k in made.keys()}  # noqa: SIM118
    return made.set(**{**common, **fields})


def _split(params: Any) -> Any:
    """Replaces each fused projection by three."""
    if not isinstance(params, dict):
        return params
    if "qkv_proj" not in params:
        return {name: _split(value) for name, value in params.items()}
    rest = {name: value for name, value in params.items() if name != "qkv_proj"}
    for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
        part = {"weight": np.s_[..., i, :, :, :], "bias": np.s_[..., i, :, :]}
        rest[name] = {k: x[part[k]] for k, x in params["qkv_proj"].items()}
    return rest


def _scaled(params: Any, factor: float, *, tied: bool) -> Any:
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
