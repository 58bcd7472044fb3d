"""Hugging Face checkpoint folders: `config.json` and `model.safetensors`."""

import collections
import contextlib
import dataclasses
import functools
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from weft import config, errors, hierarchy
from weft.core import spmd
from weft.hierarchy.stored_weight import (
    ParameterFromParts,
    with_stored_weights,
    without_stored_weights,
)
from weft.interop.huggingface import folder as folders
from weft.interop.huggingface.encoder_family import (
    body_of,
    classes_settings,
    encoder_of,
)
from weft.interop.huggingface.families.table import FAMILIES
from weft.interop.huggingface.family import (
    Family,
    ModelConfig,
    hidden_dim,
    layers_of,
    no_settings,
    stack_of,
)
from weft.interop.huggingface.folder import CONFIG, GENERATION_CONFIG
from weft.interop.huggingface.output_layer import (
    check_copies,
    check_output_layer,
)
from weft.interop.huggingface.rotary_decoder import similar_settings
from weft.interop.huggingface.settings import (
    NO_PADDING,
    ROPE_NAMES,
    Settings,
    changed_rope_settings,
)
from weft.interop.huggingface.tensors import (
    FileTensor,
    TensorLocation,
    file_tensors,
    tensor_locations,
)
from weft.serialization import safetensors, untrusted
from weft.serialization.directory import Directory
from weft.typing import DType, NestedTensor, PyTree, Tensor

logger = logging.getLogger(__name__)

_PathLike = str | os.PathLike[str]

# Of the format of the files, and names in `config.json`.
_FLOATS = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
}
_DTYPE_NAMES = ("dtype", "torch_dtype")  # of transformers 5, and before
_KEPT_IN_OTHER_FAMILIES = (
    *folders.SPECIAL_IDS,
    *_DTYPE_NAMES,
    "max_position_embeddings",
)

# Parts of paths in a config that do not change what a trained model computes.
_WITHOUT_EFFECT = re.compile(
    r"name|dtype|.*param_init|param_noise|.*partition_spec|remat_spec|tensor_stats|.*dropout\d?"
    r"|dropout_rate|stochastic_depth|metrics|.*_axis_names|scan_chunk|vocab_chunk_size|kv_cache"
    r"|class_names|decoding|add_.*|logits_forward_dtype|forward_dtype|scale_kv_before_cache_update"
)


# Reading.


def huggingface_model_config(
    folder: _PathLike,
    *,
    dtype: DType = jnp.float32,
    stack: hierarchy.BaseStackedTransformerLayer.Config | None = None,
) -> ModelConfig:
    """Returns the config of a checkpoint's model: a causal LM, or an encoder or a model of one.

    Args:
        folder: a folder with the `config.json` of a model of one of the types `FAMILIES`.
        stack: stack of layers; `RepeatedTransformerLayer` if None.

    Raises:
        WeightsReadError: if the config is missing, or not JSON.
        HuggingFaceConfigError: if the model is not supported.
    """
    settings = _settings_with_files(_settings(folder), folder)
    cfg: Any = _family(settings).read(settings).set(dtype=dtype)
    if stack is not None:
        for body in _bodies(cfg):
            body.transformer = stack_of(layers_of(body.transformer), stack)
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


def _settings_with_files(settings: Settings, folder: _PathLike) -> Settings:
    """Returns settings with what other files than `config.json` say of the model."""
    family = _family(settings)
    has_files = any(Path(folder).glob(f"*{safetensors.SUFFIX}"))
    if has_files and family.settings_of_files is not no_settings:
        with safetensors.TensorFiles(folder) as files:
            settings_of_files = family.settings_of_files(files.tensors)
        settings = Settings(
            {**settings.values, **settings_of_files}, settings.source
        )
    if family.generates:
        settings = _with_generation_ends(settings, folder)
    return settings


def _with_generation_ends(settings: Settings, folder: _PathLike) -> Settings:
    """Returns settings with the ids at which the generation config stops, in addition to theirs.

    A model of conversations often has the end of a turn only there.
    """
    if not os.path.lexists(Path(folder) / GENERATION_CONFIG):
        return settings
    ends: list[int] = []
    for end in [
        *settings.end_ids(),
        *_settings(folder, GENERATION_CONFIG).end_ids(),
    ]:
        if end != NO_PADDING and end not in ends:
            ends.append(end)
    return Settings(
        {**settings.values, "eos_token_id": ends or None}, settings.source
    )


def _family(settings: Settings) -> Family:
    model_type = settings.get("model_type")
    if not (isinstance(model_type, str) and model_type in FAMILIES):
        raise settings.refusal(
            "model_type",
            model_type,
            f"can be {' or '.join(map(repr, FAMILIES))}",
        )
    quantization = settings.values.get("quantization_config")
    if quantization is not None:
        method = (
            quantization.get("quant_method")
            if isinstance(quantization, dict)
            else None
        )
        raise errors.HuggingFaceConfigError(
            f"the weights of {settings.source} are quantized ({method or 'by an unknown method'}), "
            "and plain ones can be read. Choose the checkpoint that they were made from."
        )
    return FAMILIES[model_type]


def check_generates_text(folder: _PathLike) -> None:
    """Raises HuggingFaceConfigError if the model of a checkpoint is not a causal LM.

    For other errors see `huggingface_model_config`.
    """
    settings = _settings(folder)
    family = _family(settings)
    if family.has_source:
        raise errors.HuggingFaceConfigError(
            f"{settings.source} has model_type={family.model_type!r}, a model that writes a target "
            "for a source. It continues no text, is not evaluated by the next token, and is not "
            "tuned on answers or preferences. Choose a causal LM for that, such as a Llama; or "
            "call the methods of this model, such as sample_decode, with source_ids."
        )
    if family.generates:
        return
    names = settings.get("architectures", [family.architecture])
    raise errors.HuggingFaceConfigError(
        f"{settings.source} has architectures={names!r}, an encoder, which reads a whole text or "
        "image and does not continue it. It generates no text, is not evaluated by the next "
        "token, and is not tuned on answers or preferences. Choose a causal LM for that, such as "
        "a Llama; tune an encoder with weft.fit(model, data, base=folder)."
    )


def load_huggingface_params(
    folder: _PathLike, target: NestedTensor
) -> NestedTensor:
    """Reads the parameters of a checkpoint, one tensor of its files at a time.

    `target` has the model's parameters, or their shapes; values get their dtypes and shardings, and
    weights are rounded to 8 or 4 bits where `target` has codes. Of a tensor, a process reads what
    its devices hold. A warning names each tensor with NaN or infinite numbers.

    Raises:
        WeightsReadError: if a file is missing or damaged.
        WeightsMismatchError: if the files do not match the model.
        HuggingFaceConfigError: if the model is not supported.
        MeshError: if a sharding does not divide its parameter.
    """
    with safetensors.TensorFiles(folder) as files:
        plan = reading_plan(files, target)
        family = plan.family
        for entry in family.entries(plan.settings):
            if entry.weft_name == "decoder.emb.token_emb.weight":
                check_output_layer(
                    files,
                    plan.expected,
                    plan.settings,
                    output_layer=family.output_layer,
                    prefix=plan.prefix,
                    table_name=plan.prefix + entry.hf_name,
                )
        check_copies(files, family.copies)
        safetensors.check_tensors(
            files,
            plan.expected,
            cast=True,
            extra_allowed=plan.is_extra_allowed,
        )
        values = [
            _read(files, location, plan.prefix) for location in plan.locations
        ]
    logger.info(
        "%s: %d tensors are now %d parameters. Not read: %s.",
        folder,
        len(plan.expected),
        len(values),
        ", ".join(files.tensors.keys() - plan.expected.keys()) or "none",
    )
    structure = jax.tree.structure(with_stored_weights(target))
    return without_stored_weights(jax.tree.unflatten(structure, values))


class ReadingPlan(NamedTuple):
    """The parts of a folder that are read for a target.

    Attributes:
        prefix: of the names in the files.
        locations: the tensors of each parameter, in the order of the target.
        expected: the tensors that the files should have.
    """

    settings: Settings
    family: Family
    prefix: str
    locations: list[TensorLocation]
    expected: dict[str, jax.ShapeDtypeStruct]

    def is_extra_allowed(self, name: str) -> bool:
        """Returns whether the files may have another tensor, which is not read."""
        prefix, names = re.escape(self.prefix), self.family.extra_allowed
        return re.fullmatch(rf"({prefix})?({names})", name) is not None


def reading_plan(files: safetensors.TensorFiles, target: PyTree) -> ReadingPlan:
    """Returns what to read of a folder for a target; see `load_huggingface_params`."""
    folder = files.path
    settings = _settings_with_files(_settings(folder), folder)
    family = _family(settings)
    for name, parameter in safetensors.tensor_names(target):
        sharding = getattr(parameter, "sharding", None)
        if isinstance(sharding, jax.sharding.NamedSharding):
            spmd.check_divides(name, parameter.shape, sharding)
    parameters = safetensors.tensor_names(with_stored_weights(target))
    locations = tensor_locations(family, settings, dict(parameters))
    prefix = family.prefix
    if not any(name.startswith(prefix) for name in files.tensors):
        prefix = ""  # of the model without a head for logits
    expected: dict[str, jax.ShapeDtypeStruct] = {}
    for name, tensor in file_tensors(locations, prefix).items():
        expected[name] = jax.ShapeDtypeStruct(tensor.shape(), tensor.dtype)
    return ReadingPlan(settings, family, prefix, locations, expected)


def from_huggingface(
    folder: _PathLike,
    *,
    dtype: DType = jnp.float32,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[ModelConfig, NestedTensor]:
    """Reads a checkpoint: the config of its model, and the parameters.

    Other arguments and errors are those of `huggingface_model_config` and
    `load_huggingface_params`.

    Args:
        mesh: devices to shard the parameters over, by the names of its axes: the config gets the
            layouts of `weft.hierarchy.set_partition_specs_recursively`. None for one device.
    """
    cfg = huggingface_model_config(folder, dtype=dtype)
    if mesh is not None:
        hierarchy.set_partition_specs_recursively(cfg, mesh.axis_names)
    return cfg, load_huggingface_params(folder, parameter_shapes(cfg, mesh))


def parameter_shapes(
    cfg: ModelConfig, mesh: spmd.AnyMesh | None = None
) -> PyTree:
    """Returns the shapes of a model's parameters, a target for `load_huggingface_params`.

    On a mesh, they have the layouts that the config sets, over the axes that the mesh has.
    """
    model: Any = cfg.clone(name="model").instantiate(parent=None)
    shapes = jax.eval_shape(
        model.initialize_parameters_recursively, jax.random.key(0)
    )
    if mesh is None:
        return shapes

    def laid_out(
        x: jax.ShapeDtypeStruct, spec: hierarchy.ParameterSpec
    ) -> jax.ShapeDtypeStruct:
        entries: list[Any] = []
        for entry in spec.partition_spec:
            names = spmd.axes_of(entry)
            present = tuple(name for name in names if name in mesh.axis_names)
            entries.append(entry if present == names else present or None)
        spec = dataclasses.replace(spec, mesh_axes=entries)
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=spec.sharding(mesh)
        )

    return jax.tree.map(
        laid_out, shapes, model.create_parameter_specs_recursively()
    )


def new_classifier(
    folder: _PathLike,
    class_names: Sequence[str],
    *,
    dtype: DType = jnp.float32,
    seed: int = 0,
) -> tuple[ModelConfig, NestedTensor]:
    """Returns a classifier with the encoder of a checkpoint, and a new output layer.

        cfg, params = new_classifier("bert-base-uncased", ["bad", "good"])
        to_huggingface("start", cfg, params, base="bert-base-uncased")
        result = weft.fit(cfg, data, base="start", epochs=3)

    Args:
        folder: a folder with an encoder, or with a model of one, such as a `BertForMaskedLM`.
        class_names: at least two.
        seed: of the parameters that the checkpoint lacks: the output layer, and a pooler that the
            classifier needs.

    Raises HuggingFaceConfigError if the model is of another kind; for other errors see
    `from_huggingface`.
    """
    settings = _settings(folder)
    classifier = _family(settings).classifier
    if classifier is None:
        types = [name for name, x in FAMILIES.items() if x.classifier]
        raise settings.refusal(
            "model_type",
            settings.get("model_type"),
            f"can be {' or '.join(map(repr, types))} for a classifier",
        )
    values = {
        **settings.values,
        "architectures": [classifier],
        "problem_type": None,
        **classes_settings(class_names),
    }
    cfg = _family(settings).read(Settings(values, settings.source))
    cfg.dtype = dtype
    model: Any = cfg.clone(name="model").instantiate(parent=None)
    params = jax.jit(model.initialize_parameters_recursively)(
        jax.random.key(seed)
    )
    base_cfg, base_params = from_huggingface(folder, dtype=dtype)
    if encoder_of(base_cfg) is not base_cfg:
        base_params = base_params["encoder"]
    for name in params["encoder"]:
        if name in base_params:
            params["encoder"][name] = base_params[name]
    return cfg, params


def _read(
    files: safetensors.TensorFiles, location: TensorLocation, prefix: str
) -> Any:
    """Returns the array of a parameter, or the `StoredWeight`."""
    array = ParameterFromParts(location.parameter)
    for name, index in location.pieces(prefix):
        box = array.box(index)
        if box is None:
            continue  # on devices of other processes
        values = location.read(files, name, box)
        num_invalid = values.size - np.count_nonzero(np.isfinite(values))
        if num_invalid:
            logger.warning(
                "%d of the %d numbers of %r in %r are NaN or infinite.",
                num_invalid,
                values.size,
                name,
                str(files.path),
            )
        array.write(index, values)
    return array.on_devices()


# Writing.


def to_huggingface(
    folder: _PathLike,
    cfg: ModelConfig,
    params: NestedTensor,
    *,
    max_position_embeddings: int | None = None,
    base: _PathLike | None = None,
    tokenizer: _PathLike | None = None,
    dtype: DType | None = None,
    max_shard_bytes: int = safetensors.MAX_SHARD_BYTES,
) -> list[Path]:
    """Writes a causal LM, or a model of an encoder, as a checkpoint that `transformers` loads.

    Args:
        folder: created if missing; files of an earlier checkpoint are replaced, or removed where
            the new one has none, such as a chat template of an earlier tokenizer.
        cfg: the config of a model that computes what one of the `FAMILIES` does; a fused projection
            and scaled embeddings are converted.
        max_position_embeddings: longest sequence, which rotary models do not define themselves; by
            default that of `base`, or else 2048.
        base: the folder of the checkpoint that the model was made from. Its settings, tokenizer,
            generation config and chat templates are written too, in the same bytes where training
            has changed nothing, and its padding, which is not learned.
        tokenizer: file of the tokenizer, `*.json` or `*.model`; that of `base` if None. Files next
            to it, such as `tokenizer_config.json`, belong to it.
        dtype: of the tensors; by default that of each floating-point tensor in `base`, or else that
            of the parameter.
        max_shard_bytes: largest size of a file's tensors, unless a single tensor is larger.

    Returns the files that were written.

    Raises:
        HuggingFaceConfigError: if no family of Hugging Face computes the same; lists differences.
        WeightsMismatchError: if the parameters are not those of the model.
        WeightsReadError: if a file of `base` or of the tokenizer cannot be read.
        WeightsWriteError: if a value is too large for its dtype.
    """
    equivalent = _config_dict_or_differences(cfg)
    if isinstance(equivalent, list):
        # A model without these parts is of another kind, which is explained next.
        with contextlib.suppress(AttributeError):
            cfg, params = _equivalent_form(cfg, params)
        equivalent = _config_dict(cfg)
    family, model_values = equivalent
    source = None
    changed_ids: dict[str, Any] = {}
    if base is None:
        config_file = folders.ObjectFile({}, b"")
        values = {"architectures": [family.architecture], **model_values}
        if family.generates:
            # A reader would put in the ids of its own default vocabulary.
            values = {"bos_token_id": None, **values}
        if _is_length_free(family, values):
            values.setdefault("max_position_embeddings", 2048)
    else:
        source = folders.SourceFolder(base)
        merged = _merged_with_base(cfg, family, model_values, source)
        family, values, config_file = merged.family, merged.values, merged.file
        changed_ids = merged.changed_ids
    if _is_length_free(family, values) and max_position_embeddings is not None:
        values["max_position_embeddings"] = max_position_embeddings

    for name in family.settings_of_files(()):
        values.pop(name, None)  # the tensors tell it
    tensors = _tensors_to_write(
        family,
        Settings(values, "the model"),
        params,
        dtype,
        {} if base is None else _dtypes_of(base),
    )
    for name in _DTYPE_NAMES:
        if base is None or values.get(name) is not None:
            values[name] = _dtype_name(tensors, values.get(name))
    generation_file: dict[str, bytes] = {}
    if family.generates:
        generation_file = folders.generation_file(values, source, changed_ids)
    small_files = {
        folders.CONFIG: config_file.bytes_of(values),
        **generation_file,
        **folders.tokenizer_files(values, tokenizer, source),
    }
    # "pt" is the layout that other programs expect.
    weights = safetensors.write_tensors(
        Path(folder) / "model.safetensors",
        tensors,
        metadata={"format": "pt"},
        max_shard_bytes=max_shard_bytes,
    )
    directory = Directory(os.fspath(folder))
    target = folders.SourceFolder(folder)
    for name in folders.outdated_names(target, small_files):
        directory.remove(name)
    for name, data in small_files.items():
        directory.write(name, data)
    return [*weights, *(Path(folder) / name for name in small_files)]


def _is_length_free(family: Family, settings: Mapping[str, Any]) -> bool:
    """Returns whether the length of sequences does not follow from the parameters."""
    return family.generates and "n_positions" not in settings


class _MergedSettings(NamedTuple):
    """Settings of a base, with what training has changed.

    Attributes:
        family: that of the base, if it computes what the model does.
        values: the content of the new `config.json`.
        file: the `config.json` of the base.
        changed_ids: the special tokens that differ from those of the base.
    """

    family: Family
    values: dict[str, Any]
    file: folders.ObjectFile
    changed_ids: dict[str, Any]


def _merged_with_base(
    cfg: ModelConfig,
    family: Family,
    model_values: dict[str, Any],
    base: folders.SourceFolder,
) -> _MergedSettings:
    """Returns the settings of a base with what training has changed.

    A model that another family computes has nothing of the base's settings but special ids.
    """
    file = base.read_object_file(folders.CONFIG)
    if file is None:
        raise errors.WeightsReadError(
            f"{str(base.path / CONFIG)!r} is missing. Give as base the folder of the checkpoint "
            "that the model was made from."
        )
    base_settings = Settings(file.values, str(base.path / CONFIG))
    base_family = _family(base_settings)
    base_cfg: Any = base_family.read(
        _settings_with_files(base_settings, base.path)
    )
    # What Weft would write for the base: what it has in common with the model did not change.
    written_for_base = model_values
    if base_cfg.set(dtype=cfg.dtype) != cfg:
        _, written_for_base = _config_dict(base_cfg)
    changes: dict[str, Any] = {}
    for name, value in model_values.items():
        if name not in written_for_base or written_for_base[name] != value:
            changes[name] = value
    if file.values.get("pad_token_id") is None:
        # Inputs pad by position, with any id.
        changes.pop("pad_token_id", None)
    changed_ids: dict[str, Any] = {}
    for name in (*folders.SPECIAL_IDS, folders.DECODER_START):
        if name in changes:
            changed_ids[name] = changes[name]
    if "model_type" in changes:
        values = {"architectures": [family.architecture], **model_values}
        if _is_length_free(family, values):
            values["max_position_embeddings"] = 2048
        for name in _KEPT_IN_OTHER_FAMILIES:
            if name in file.values and name not in changed_ids:
                values[name] = file.values[name]
        return _MergedSettings(family, values, file, changed_ids)
    if ROPE_NAMES & changes.keys():
        for name in ROPE_NAMES:
            changes.pop(name, None)
        changes |= changed_rope_settings(
            file.values,
            model_values["rope_parameters"],
            written_for_base["rope_parameters"],
        )
    architectures = file.values.get("architectures")
    if (
        "architectures" not in model_values
        and architectures
        and base_family.architecture not in architectures
    ):
        changes["architectures"] = [base_family.architecture]
    values = {**file.values, **changes}
    return _MergedSettings(base_family, values, file, changed_ids)


def _dtypes_of(base: _PathLike) -> dict[str, np.dtype]:
    """Returns the dtypes of the floating-point tensors of a checkpoint, none if it has no files."""
    if not any(Path(base).glob(f"*{safetensors.SUFFIX}")):
        return {}
    dtypes: dict[str, np.dtype] = {}
    with safetensors.TensorFiles(base) as files:
        for name, tensor in files.tensors.items():
            if tensor.dtype in _FLOATS:
                dtypes[name] = jnp.dtype(_FLOATS[tensor.dtype])
    return dtypes


def _tensors_to_write(
    family: Family,
    settings: Settings,
    params: PyTree,
    dtype: DType | None,
    base_dtypes: Mapping[str, np.dtype],
) -> dict[str, safetensors.PendingTensor]:
    """Returns the tensors of a checkpoint by name; the base's may lack the family's prefix."""
    parameters = dict(safetensors.tensor_names(params))
    tensors: dict[str, safetensors.PendingTensor] = {}
    locations = tensor_locations(family, settings, parameters)
    for name, tensor in file_tensors(locations, family.prefix).items():
        tensor_dtype = dtype
        for base_name in (name, name.removeprefix(family.prefix)):
            if tensor_dtype is None:
                tensor_dtype = base_dtypes.get(base_name)
        if tensor_dtype is None:
            tensor_dtype = tensor.dtype
        tensor_dtype = jnp.dtype(tensor_dtype)
        tensors[name] = safetensors.PendingTensor(
            tensor.shape(),
            tensor_dtype,
            functools.partial(_values_to_write, name, tensor, tensor_dtype),
        )
    return tensors


def _values_to_write(
    name: str, tensor: FileTensor, dtype: np.dtype
) -> np.ndarray:
    values = tensor.values()
    if values.dtype == dtype:
        return values
    if values.dtype.itemsize < 4:
        values = values.astype(np.float32)  # whose overflow NumPy notices
    try:
        with np.errstate(over="raise"):
            return values.astype(dtype)
    except FloatingPointError as error:
        raise errors.WeightsWriteError(
            f"{name!r} has values of up to {np.abs(values).max():g}, which {dtype} "
            "cannot hold. Write it with dtype=jnp.float32, or --dtype float32."
        ) from error


def _dtype_name(
    tensors: Mapping[str, safetensors.PendingTensor], base_name: Any
) -> str:
    """Returns the dtype of tensors, of several that of the base or of most values."""
    counts: collections.Counter[str] = collections.Counter()
    for tensor in tensors.values():
        counts[jnp.dtype(tensor.dtype).name] += math.prod(tensor.shape)
    if isinstance(base_name, str) and base_name in counts:
        return base_name
    [(name, _)] = counts.most_common(1)
    return name


def _config_dict(cfg: ModelConfig) -> tuple[Family, dict[str, Any]]:
    """Returns the family that computes what a model does, and its `config.json` content."""
    differences = _config_dict_or_differences(cfg)
    if not isinstance(differences, list):
        return differences
    if differences:
        reason = " (its value → what would be needed):\n"
        reason += "".join(f"  {change}\n" for change in differences)
    else:
        model_class = getattr(cfg, "klass", type(cfg))
        reason = (
            f": it is a {model_class.__qualname__}, and they are causal LMs and encoders of "
            "weft.hierarchy. "
        )
    raise errors.HuggingFaceConfigError(
        f"no model of the types {', '.join(FAMILIES)} computes what this one does{reason}"
        "Export it as safetensors, which every model can."
    )


def _config_dict_or_differences(
    cfg: ModelConfig,
) -> tuple[Family, dict[str, Any]] | list[config.Change]:
    """Returns the family of a model, or else the differences from the closest one.

    There are no differences if a model has not even the parts of one.
    """
    closest: list[config.Change] = []
    unwritable: errors.HuggingFaceConfigError | None = None
    for write in [family.write for family in FAMILIES.values()] + [
        similar_settings
    ]:
        try:
            values = write(cfg)
            family = FAMILIES[values["model_type"]]
            rebuilt = family.read(Settings(values, "the model"))
        except (AttributeError, TypeError, IndexError):
            continue  # it has not even the parts of one
        except errors.HuggingFaceConfigError as error:
            unwritable = unwritable or error
            continue
        differences = _differences(cfg, rebuilt)
        if not differences:
            return family, values
        if not closest or len(differences) < len(closest):
            closest = differences
    if unwritable is not None:
        raise unwritable
    return closest


def _differences(cfg: ModelConfig, rebuilt: ModelConfig) -> list[config.Change]:
    """Returns the fields by which a model computes something else than its rebuilt form."""
    changes: list[config.Change] = []
    for change in config.diff(_comparable(cfg), _comparable(rebuilt)):
        names = re.split(r"[.\[\]]+", change.path)
        if not any(_WITHOUT_EFFECT.fullmatch(name) for name in names):
            changes.append(change)
    # Of a layer of another class, not its fields.
    prefixes = tuple(f"{change.path}." for change in changes)
    return [
        change for change in changes if not change.path.startswith(prefixes)
    ]


def _bodies(cfg: Any) -> list[Any]:
    """Returns the configs of the parts of a model that have layers."""
    if isinstance(cfg, hierarchy.EncoderDecoderModel.Config):
        return [cfg.decoder, cfg.encoder]
    return [body_of(cfg)]


def _comparable(cfg: ModelConfig) -> ModelConfig:
    """Returns the config without what does not count: how layers are stacked, and functions."""
    cfg = cfg.clone()
    dim = body_of(cfg).dim
    for body in _bodies(cfg):
        body.transformer = stack_of(
            layers_of(body.transformer),
            hierarchy.StackedTransformerLayer.default_config(),
        )
        for layer in layers_of(body.transformer):
            layer.feed_forward.hidden_dim = hidden_dim(layer.feed_forward, dim)
    return cfg


def _equivalent_form(
    cfg: ModelConfig, params: NestedTensor
) -> tuple[ModelConfig, PyTree]:
    """Returns the config and parameters of a model that computes the same, as families have it.

    One fused projection becomes those of queries, keys and values. Embeddings that are multiplied
    by the square root of the dimension become larger; if they are also the output layer, the norm
    before it becomes smaller. Unchanged parts are shared.

    Raises AttributeError if the model lacks the parts of a decoder with a stack of layers.
    """
    cfg = cfg.clone()
    decoder: Any = cfg.decoder
    has_fused_layer = False
    for layer in layers_of(decoder.transformer):
        self_attention = layer.self_attention
        if _is_fused(self_attention.attention):
            has_fused_layer = True
            self_attention.attention = _grouped(
                self_attention.attention, decoder.dim
            )
    if has_fused_layer:
        params = _split(params)
    embedding = decoder.emb.token_emb
    if (
        embedding.scale is hierarchy.Embedding.Scale.UNIT
        and decoder.emb.norm is None
    ):
        embedding.scale = None
        params = _scaled(
            params, math.sqrt(decoder.dim), tied=decoder.lm_head is None
        )
    return cfg, params


def _is_fused(attention: config.InstantiableConfig) -> bool:
    qkv = attention.input_linear
    fused_classes = (hierarchy.FusedQKVLinear, hierarchy.QKVLinear)
    if attention.klass is not hierarchy.MultiheadAttention:
        return False
    if not isinstance(qkv, hierarchy.RoFormerQKVLinear.Config):
        return False
    return getattr(qkv.input_linear, "klass", None) in fused_classes


def _grouped(
    attention: config.InstantiableConfig, dim: int
) -> config.InstantiableConfig:
    """Returns the config of attention with as many heads of keys as of queries."""
    grouped_linear = _as(
        hierarchy.GroupedQKVLinear,
        attention.input_linear.input_linear,
        num_kv_heads=attention.num_heads,
    )
    qkv = attention.input_linear.clone(input_linear=grouped_linear)
    return _as(
        hierarchy.GroupedQueryAttention,
        attention,
        input_linear=qkv,
        hidden_dim=attention.hidden_dim or dim,
    )


def _as(
    layer: type[hierarchy.BaseLayer],
    cfg: config.InstantiableConfig,
    **fields: Any,
) -> config.InstantiableConfig:
    """Returns a config of another class of layer with the same values of the common fields."""
    converted: Any = layer.default_config()
    common_names = set(cfg.keys()).intersection(converted.keys()) - {"klass"}
    for name in common_names:
        fields.setdefault(name, getattr(cfg, name))
    return converted.set(**fields)


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
        decoder["output_norm"] = {
            name: _times(x, 1 / factor) for name, x in norm.items()
        }
    return {**params, "decoder": decoder}


def _times(x: Tensor, factor: float) -> Tensor:
    return (x * np.float32(factor)).astype(x.dtype)
