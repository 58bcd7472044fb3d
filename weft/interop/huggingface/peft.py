"""Low-rank adapters in the format of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight    (rank, inputs)
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight    (outputs, rank)

An adapter adds `scale * B @ A` to the weight of a module, with `scale = lora_alpha / r`. Weft has
its inputs and outputs in another order (heads have an axis, rotary pairs are adjacent), which is
that of the weight: the table of a `Family` changes the layout of a weight, and if it is given the
numbers of the inputs, or of the outputs, in place of the weight, it returns their order.

PEFT has one adapter for a fused weight, such as that of queries, keys and values (GPT-2, Phi-3), or
of both inputs of a gated layer (Phi-3); Weft has one for each part. Written, those of the parts
become one, whose rank is the sum of theirs.

    base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight   (experts × rank, inputs)
    base_model.model.model.layers.0.mlp.experts.base_layer.lora_B.weight   (outputs, rank × experts)

are those of the first of two parameters with the weights of all experts, `gate_up_proj`, and those
of the second, `down_proj`, lack `base_layer`. `target_parameters` names them.
"""

import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from weft import errors
from weft.hierarchy import (
    BaseStackedTransformerLayer,
    set_lora_recursively,
    with_base_state,
)
from weft.hierarchy.causal_lm import Model
from weft.hierarchy.lora import (
    EXPERTS,
    LORA_TARGETS,
    AdapterFactors,
    LoraExperts,
    map_adapted_layers,
)
from weft.interop.huggingface.checkpoint import huggingface_model_config
from weft.interop.huggingface.families.table import FAMILIES
from weft.interop.huggingface.family import TensorMapping, layers_of
from weft.interop.huggingface.settings import Settings
from weft.interop.huggingface.tensors import (
    IN_LAYERS,
    name_of_entry,
    stack_of_path,
)
from weft.serialization import safetensors, untrusted
from weft.serialization.directory import Directory
from weft.typing import DType, NestedTensor, PyTree, Shape

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_MODEL = "adapter_model.safetensors"

_PathLike = str | os.PathLike[str]

_PREFIX = "base_model.model."
_TENSOR = re.compile(
    rf"{re.escape(_PREFIX)}(.+)\.lora_([AB])(?:\.default)?\.weight"
)
# Parameters of the experts of a layer, in the order of PEFT's wrappers, from the inside.
_EXPERTS = "layers.{}.mlp.experts"
_INPUTS, _OUTPUT = f"{_EXPERTS}.gate_up_proj", f"{_EXPERTS}.down_proj"
_INNER = ".base_layer"
# What an adapter of Weft cannot be; each value is one that it can have.
_REFUSED: dict[str, tuple[object, ...]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "modules_to_save": (None, []),
    "layers_to_transform": (None,),
    "trainable_token_indices": (None,),
    "lora_bias": (False,),
    "alora_invocation_tokens": (None,),
}


class _Entry(NamedTuple):
    """A weight of Weft in a weight of the base.

    Attributes:
        hf_name: of the base's module, or parameter with experts, with `{}` for the layer's number.
        to_hf: changes the layout of the weight.
        rows: the outputs that it is of the base's weight; None for all.
        part: its index among queries, keys and values that are one weight in Weft; None for others,
            and `to_hf` changes the layout of all three.
        num_experts: 1 for a linear map.
    """

    hf_name: str
    to_hf: Callable[[Any], Any]
    rows: tuple[int, int] | None = None
    part: int | None = None
    num_experts: int = 1


class _Place(NamedTuple):
    """A weight of one layer of Weft, and where it is in the base.

    Attributes:
        module: the name in the base, such as `model.layers.0.self_attn.q_proj`.
        path: of the weight in Weft.
        layer: index in a stack of layers; None for none.
    """

    module: str
    entry: _Entry
    path: str
    layer: int | None


class _Adapter(NamedTuple):
    """Matrices of an adapter for one module. Those of linear maps have one expert."""

    a: np.ndarray  # (experts, rank, inputs)
    b: np.ndarray  # (experts, outputs, rank)
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[1]


# Writing.


def to_peft(
    folder: _PathLike,
    cfg: Model.Config,
    params: NestedTensor,
    *,
    base: _PathLike,
) -> list[Path]:
    """Writes the adapters of a model as a folder that PEFT loads on top of the base.

    Args:
        folder: created if missing.
        cfg: the config of the model with adapters.
        params: its parameters. Those of the base are not written, and may be shapes.
        base: the folder of the Hugging Face checkpoint that the model was made from.

    Returns the files that were written.

    Raises:
        WeightsMismatchError: if the model has no adapters, or the base has no counterpart of a
            layer with one.
        HuggingFaceConfigError: if the model of the base is not supported.
    """
    table = _Table(base, cfg)
    factors, dropout = _factors_by_path(cfg, params)
    adapters: dict[str, _Adapter] = {}
    for module, places in table.places_by_module(factors).items():
        adapters[module] = _written(places, factors, table)
    targets = table.target_modules(adapters)
    target_parameters = table.target_parameters(adapters)
    if target_parameters:
        dropout = 0.0  # PEFT has none for experts
    rank, alpha = _default_rank(adapters)
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float | int] = {}
    for module, adapter in adapters.items():
        alpha_of_module = adapter.scale * adapter.rank
        if (adapter.rank, alpha_of_module) != (rank, alpha):
            rank_pattern[module] = adapter.rank
            alpha_pattern[module] = _whole(alpha_of_module)
    task_type = "CAUSAL_LM"
    if table.family.has_source:
        task_type = "SEQ_2_SEQ_LM"
    values = {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": os.fspath(base),
        "r": rank,
        "lora_alpha": _whole(alpha),
        "lora_dropout": dropout,
        "target_modules": targets,
        "target_parameters": target_parameters or None,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "bias": "none",
        "fan_in_fan_out": table.family.model_type == "gpt2",
        "inference_mode": True,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
    }
    pending: dict[str, safetensors.PendingTensor] = {}
    for name, matrix in _tensors(adapters).items():
        pending[name] = safetensors.PendingTensor(
            matrix.shape, matrix.dtype, functools.partial(np.copy, matrix)
        )
    # "pt" is the layout that other programs expect.
    files = safetensors.write_tensors(
        Path(folder) / ADAPTER_MODEL, pending, metadata={"format": "pt"}
    )
    text = json.dumps(values, indent=2, sort_keys=True) + "\n"
    Directory(os.fspath(folder)).write(ADAPTER_CONFIG, text)
    return [Path(folder) / ADAPTER_CONFIG, *files]


def _factors_by_path(
    cfg: Model.Config, params: PyTree
) -> tuple[dict[str, AdapterFactors], float]:
    """Returns the adapters by the paths of their weights, and the rate of their dropout."""
    factors: dict[str, AdapterFactors] = {}
    dropout = 0.0

    def collect(path: str, layer: Any, state: dict[str, Any]) -> Any:
        nonlocal dropout
        if not isinstance(layer, LoraExperts):
            dropout_cfg = layer.config.adapter.lora_dropout
            dropout = max(dropout, dropout_cfg.rate or 0.0)
        for weight_path, value in layer.factors(state).items():
            factors[f"{path}.{weight_path}"] = value
        return state

    map_adapted_layers(_instantiate(cfg), params, collect)
    if not factors:
        raise errors.WeightsMismatchError(
            "the model has no adapters. Add them with set_lora_recursively, or write all weights "
            "with to_huggingface."
        )
    return factors, dropout


def _instantiate(cfg: Any) -> Any:
    return cfg.clone(name="model").instantiate(parent=None)


def _whole(x: float) -> float | int:
    return int(x) if float(x).is_integer() else float(x)


def _written(
    places: Sequence[_Place],
    factors: Mapping[str, AdapterFactors],
    table: "_Table",
) -> _Adapter:
    """Returns the adapter of a module, from those of the weights that are its parts."""
    downs: list[np.ndarray] = []
    ups: list[np.ndarray] = []
    orders: list[_Orders] = []
    for place in places:
        part = factors[place.path]
        downs.append(_by_expert(part.down, place).swapaxes(-1, -2))
        ups.append(_by_expert(part.up, place).swapaxes(-1, -2))
        orders.append(_orders(place.entry, part))
    a = np.concatenate(downs, axis=1)[..., orders[0].inputs]
    num_outputs = table.num_outputs(places[0].entry, ups[0].shape[1])
    b = np.zeros((len(a), num_outputs, a.shape[1]), ups[0].dtype)
    # The outputs of a part are of its own ranks alone.
    start = 0
    for up, order in zip(ups, orders, strict=True):
        ranks = slice(start, start + up.shape[-1])
        b[:, order.rows, ranks] = up[:, order.outputs]
        start = ranks.stop
    return _Adapter(a, b, factors[places[0].path].scale)


def _default_rank(adapters: dict[str, _Adapter]) -> tuple[int, float]:
    """Returns the rank and alpha that most modules have; gives all experts the same, in place.

    PEFT warns of patterns for parameters of experts.
    """
    expert_modules: list[str] = []
    for module in adapters:
        if _is_of_experts(module):
            expert_modules.append(module)
    rank = min(adapter.rank for adapter in adapters.values())
    if expert_modules:
        rank = max(adapters[module].rank for module in expert_modules)
    scale = next(
        adapter.scale
        for module, adapter in adapters.items()
        if adapter.rank == rank and module in (expert_modules or adapters)
    )
    for module in expert_modules:
        a, b, scale_of_module = adapters[module]
        num_zeros = rank - a.shape[1]
        a = np.pad(a, ((0, 0), (0, num_zeros), (0, 0)))
        b = np.pad(
            b * (scale_of_module / scale), ((0, 0), (0, 0), (0, num_zeros))
        )
        adapters[module] = _Adapter(a, b.astype(a.dtype), scale)
    return rank, scale * rank


def _is_of_experts(name: str) -> bool:
    return re.search(r"\.experts\.\w+$", name) is not None


def _by_expert(x: Any, place: _Place) -> np.ndarray:
    """Returns the factor of one layer, with an axis of experts."""
    of_layer = np.asarray(x if place.layer is None else x[place.layer])
    return of_layer.reshape(place.entry.num_experts, *of_layer.shape[-2:])


def _tensors(adapters: Mapping[str, _Adapter]) -> dict[str, np.ndarray]:
    """Returns the matrices of adapters by the names of their tensors."""
    tensors: dict[str, np.ndarray] = {}
    for module, adapter in adapters.items():
        num_experts, rank, num_inputs = adapter.a.shape
        a = adapter.a.reshape(num_experts * rank, num_inputs)
        # (outputs, rank × experts): the expert is the faster of the two.
        b = adapter.b.transpose(1, 2, 0).reshape(-1, rank * num_experts)
        name = f"{_PREFIX}{_wrapper(module, adapters)}"
        tensors[f"{name}.lora_A.weight"] = a
        tensors[f"{name}.lora_B.weight"] = b
    return tensors


def _wrapper(module: str, modules: Iterable[str]) -> str:
    """Returns the name of PEFT's layer around a module, or around the parameters of experts.

    Around two parameters of one module there are two: that of the first is inside.
    """
    if not _is_of_experts(module):
        return module
    parent, _, name = module.rpartition(".")
    if name == "gate_up_proj" and f"{parent}.down_proj" in modules:
        return parent + _INNER
    return parent


class _Orders(NamedTuple):
    """For each input and output of a weight in PEFT's order, its number in Weft's.

    Attributes:
        rows: the number of each output among those of all parts, in PEFT's order.
    """

    inputs: np.ndarray
    outputs: np.ndarray
    rows: np.ndarray


def _orders(entry: _Entry, factors: AdapterFactors) -> _Orders:
    shape, input_axes = factors.weight_shape, factors.input_axes
    if entry.part is not None:  # the numbers of all three parts
        shape = (3, *shape)
        input_axes = tuple(axis + 1 for axis in input_axes)
    output_axes = tuple(
        axis for axis in range(len(shape)) if axis not in input_axes
    )
    inputs = entry.to_hf(_numbers(shape, input_axes))
    outputs = entry.to_hf(_numbers(shape, output_axes))
    # Kernels of torch's Linear are (outputs, inputs), those of Conv1D (inputs, outputs).
    num_inputs = math.prod(shape[axis] for axis in input_axes)
    if np.unique(inputs[0]).size == num_inputs:
        inputs, outputs = inputs[0], outputs[:, 0]
    else:
        inputs, outputs = inputs[:, 0], outputs[0]
    if entry.part is not None:
        size = len(outputs) // 3
        rows = np.flatnonzero(outputs // size == entry.part)
        return _Orders(inputs, outputs[rows] % size, rows)
    first, _ = entry.rows or (0, 0)
    return _Orders(inputs, outputs, first + np.arange(len(outputs)))


def _numbers(shape: Shape, axes: tuple[int, ...]) -> np.ndarray:
    """Returns an array of a shape that has the number of an entry of some axes everywhere."""
    sizes = [shape[axis] for axis in axes]
    numbers = np.arange(math.prod(sizes), dtype=np.int32).reshape(sizes)
    other_axes = [axis for axis in range(len(shape)) if axis not in axes]
    return np.broadcast_to(np.expand_dims(numbers, other_axes), shape)


# Reading.


def from_peft(
    folders: _PathLike | Sequence[_PathLike],
    cfg: Model.Config,
    params: NestedTensor,
    *,
    base: _PathLike,
    weights: Sequence[float] | None = None,
    dtype: DType = jnp.float32,
) -> tuple[Model.Config, NestedTensor]:
    """Adds adapters of PEFT to a model.

    Several adapters become one, whose effect is the sum of theirs, and whose rank is the sum of
    their ranks.

    Args:
        folders: the folder of an adapter, or several.
        cfg: the config of the model without adapters.
        params: its parameters, or their shapes.
        base: the folder of the Hugging Face checkpoint of the model.
        weights: factor of the effect of each adapter; None for 1.
        dtype: of the adapters' weights.

    Returns the config of the model with adapters, and its parameters.

    Raises:
        WeightsReadError: if a file is missing or damaged.
        HuggingFaceConfigError: if an adapter is of a kind that Weft has no counterpart of.
        WeightsMismatchError: if an adapter does not fit the model.
    """
    paths = [folders] if isinstance(folders, str | os.PathLike) else [*folders]
    factors = [1.0] * len(paths) if weights is None else [*weights]
    if len(factors) != len(paths):
        raise errors.ArgumentValueError(
            f"from_peft got {len(paths)} adapters and weights={factors}; expected one for each."
        )
    table = _Table(base, cfg)
    adapters: dict[str, list[_Adapter]] = {}
    for path, factor in zip(paths, factors, strict=True):
        for name, adapter in _read_adapters(Path(path), table).items():
            scaled = adapter._replace(scale=adapter.scale * factor)
            adapters.setdefault(name, []).append(scaled)
    rank = 0
    for of_module in adapters.values():
        rank = max(rank, sum(adapter.rank for adapter in of_module))
    adapted_cfg = cfg.clone()
    # All scales are in the matrices.
    set_lora_recursively(
        adapted_cfg,
        rank=rank,
        alpha=float(rank),
        targets=table.targets(adapters, paths),
        dtype=dtype,
    )
    model = _instantiate(adapted_cfg)
    shapes = jax.eval_shape(
        model.initialize_parameters_recursively, jax.random.key(0)
    )

    targets: dict[str, AdapterFactors] = {}

    def filled(path: str, layer: Any, state: dict[str, Any]) -> dict[str, Any]:
        new_factors: dict[str, AdapterFactors] = {}
        for weight_path, target in layer.factors(_zeros(state)).items():
            full_path = f"{path}.{weight_path}"
            targets[full_path] = target
            new_factors[weight_path] = _read(table, full_path, target, adapters)
        return layer.with_factors(_zeros(state), new_factors)

    state = map_adapted_layers(model, shapes, filled)
    unknown = sorted(adapters.keys() - table.places_by_module(targets).keys())
    if unknown:
        raise errors.WeightsMismatchError(
            f"{', '.join(map(str, paths))}: the model has no {', '.join(unknown[:8])}. Use the "
            "base of the adapter."
        )
    return adapted_cfg, with_base_state(state, params)


def _zeros(state: PyTree) -> dict[str, Any]:
    """Returns the state of a layer with an adapter of zeros; the layer's own stays."""
    adapter = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), state["adapter"]
    )
    return {**state, "adapter": adapter}


def _read_adapters(folder: Path, table: "_Table") -> dict[str, _Adapter]:
    """Returns the adapters of a folder by the names of their modules."""
    path = folder / ADAPTER_CONFIG
    try:
        values = untrusted.read_json_file(path)
        untrusted.check_json(
            values,
            {"peft_type": str, "r": int, "lora_alpha": float},
        )
    except (OSError, ValueError) as error:
        raise errors.WeightsReadError(
            f"{str(path)!r} cannot be read ({error}). Name the folder of an adapter of PEFT."
        ) from error
    settings = Settings(values, str(path))
    settings.require("peft_type", "LORA")
    for name, allowed in _REFUSED.items():
        value = values.get(name)
        if name in values and value not in allowed:
            raise settings.refusal(name, value, f"can be {allowed[0]!r}")
    target_parameters = _target_parameters(settings)
    matrices: dict[str, dict[str, np.ndarray]] = {}
    with safetensors.TensorFiles(folder / ADAPTER_MODEL) as files:
        for tensor in files.tensors:
            match = _TENSOR.fullmatch(tensor)
            if match is None:
                raise errors.WeightsMismatchError(
                    f"{str(folder / ADAPTER_MODEL)!r} has {tensor!r}, which is not a matrix of a "
                    "low-rank adapter of a linear layer."
                )
            module, letter = match.groups()
            matrices.setdefault(module, {})[letter] = files.read(tensor)
    adapters: dict[str, _Adapter] = {}
    for wrapper, pair in matrices.items():
        a, b = pair.get("A"), pair.get("B")
        module = _module_of(wrapper, matrices, target_parameters)
        num_experts = table.num_experts(module)
        expected = "lora_A of (rank, inputs) and lora_B of (outputs, rank)"
        if num_experts > 1:
            expected = (
                "lora_A of (experts × rank, inputs) and lora_B of (outputs, rank × experts), with "
                f"{num_experts} experts"
            )
        if (
            a is None
            or b is None
            or a.ndim != 2
            or b.shape[1:] != a.shape[:1]
            or len(a) % num_experts
        ):
            shapes = {f"lora_{name}": x.shape for name, x in pair.items()}
            raise errors.WeightsMismatchError(
                f"{str(folder / ADAPTER_MODEL)!r}: {wrapper!r} has {shapes}; expected {expected}."
            )
        rank = len(a) // num_experts
        adapters[module] = _Adapter(
            a.reshape(num_experts, rank, -1),
            b.reshape(-1, rank, num_experts).transpose(2, 0, 1),
            _scale(settings, module, rank),
        )
    if not adapters:
        raise errors.WeightsMismatchError(
            f"{str(folder / ADAPTER_MODEL)!r} is empty."
        )
    return adapters


def _target_parameters(settings: Settings) -> list[str]:
    """Returns the parameters with adapters, which are those of experts."""
    value = settings.get("target_parameters", None)
    if value is None:
        return []
    allowed = (_INPUTS.rpartition(".")[2], _OUTPUT.rpartition(".")[2])
    for name in value if isinstance(value, list) else [None]:
        if not isinstance(name, str) or name.split(".")[-1] not in allowed:
            raise settings.refusal(
                "target_parameters",
                value,
                f"can name {' and '.join(allowed)} of experts",
            )
    return value


def _module_of(
    wrapper: str, wrappers: Iterable[str], target_parameters: Sequence[str]
) -> str:
    """Returns the module of PEFT's layer around it, or the parameter of experts: see `_wrapper`."""
    module = wrapper.removesuffix(_INNER)
    if not module.endswith(".experts"):
        return module
    inputs, output = f"{module}.gate_up_proj", f"{module}.down_proj"
    if wrapper != module:
        return inputs
    if module + _INNER in wrappers:
        return output
    is_of_inputs = any(
        name.endswith("gate_up_proj") for name in target_parameters
    )
    return inputs if is_of_inputs else output


def _scale(settings: Settings, module: str, rank: int) -> float:
    """Returns the factor of an adapter, from the first pattern that fits its module."""
    alpha = settings.number("lora_alpha", least=-1e30)
    patterns = settings.get("alpha_pattern", {})
    if not isinstance(patterns, dict):
        raise settings.refusal("alpha_pattern", patterns, "can be an object")
    for pattern in patterns:
        # Not an expression of a stranger's, which may take forever: names and their ends.
        name = pattern.removeprefix("^").replace("\\.", ".")
        if module == name or module.endswith(f".{name}"):
            alpha = Settings(patterns, settings.source).number(
                pattern, least=-1e30
            )
            break
    if settings.flag("use_rslora", False):
        return alpha / math.sqrt(rank)
    return alpha / rank


def _read(
    table: "_Table",
    path: str,
    target: AdapterFactors,
    adapters: Mapping[str, list[_Adapter]],
) -> AdapterFactors:
    """Returns the adapter of a weight of Weft, with zeros where there is none."""
    down = np.zeros(target.down.shape, target.down.dtype)
    up = np.zeros(target.up.shape, target.up.dtype)
    orders = None
    for place in table.places(path, target):
        entry = place.entry
        if orders is None:  # the same in all layers
            orders = _orders(entry, target)
        num_inputs, num_outputs = len(orders.inputs), len(orders.outputs)
        all_outputs = table.num_outputs(entry, num_outputs)
        index = ... if place.layer is None else place.layer
        down_of_layer = down[index].reshape(entry.num_experts, num_inputs, -1)
        up_of_layer = up[index].reshape(entry.num_experts, -1, num_outputs)
        start = 0
        for adapter in adapters.get(place.module, []):
            _, adapter_inputs = adapter.a.shape[1:]
            adapter_outputs = adapter.b.shape[1]
            if (adapter_inputs, adapter_outputs) != (num_inputs, all_outputs):
                raise errors.WeightsMismatchError(
                    f"the adapter of {place.module!r} is for {adapter_inputs} inputs and "
                    f"{adapter_outputs} outputs; the model has {num_inputs} and {all_outputs}. Use "
                    "the base of the adapter."
                )
            ranks = slice(start, start + adapter.rank)
            start = ranks.stop
            a = adapter.a.astype(np.float32)
            b = adapter.b.astype(np.float32) * np.float32(adapter.scale)
            new_down = np.empty_like(a)
            new_down[..., orders.inputs] = a
            new_up = np.empty_like(b[:, orders.rows])
            new_up[:, orders.outputs] = b[:, orders.rows]
            down_of_layer[:, :, ranks] = new_down.swapaxes(-1, -2)
            up_of_layer[:, ranks] = new_up.swapaxes(-1, -2)
    return target._replace(down=jnp.asarray(down), up=jnp.asarray(up))


class _Table:
    """The names of the weights of a base in both libraries.

    Args:
        base: the folder of the base.
        cfg: the config of the model, with adapters or without.
    """

    def __init__(self, base: _PathLike, cfg: Any):
        base_cfg: Any = huggingface_model_config(
            base
        )  # raises if not supported
        path = Path(base) / "config.json"
        settings = Settings(untrusted.read_json_file(path), str(path))
        self.source = str(base)
        self.family = FAMILIES[settings.get("model_type")]
        if not self.family.generates:
            raise errors.HuggingFaceConfigError(
                f"{self.source!r} has an encoder (model_type={self.family.model_type!r}), and "
                "adapters are read and written in PEFT's format for causal LMs. Merge them, and "
                "write all weights: to_huggingface(folder, without_lora(cfg), "
                "merge_adapters(model, params), base=base)."
            )
        self._block_size = _block_size(cfg)
        self._entries: dict[str, _Entry] = {}
        experts = _experts_of(base_cfg)
        for mapping in self.family.entries(settings):
            if mapping.has_experts:
                assert experts is not None, "the family has them"
                self._entries[mapping.weft_name] = self._expert_entry(
                    mapping, experts
                )
            elif mapping.hf_name.endswith(".weight"):
                self._entries |= self._linear_entries(mapping)
        self._num_outputs: dict[str, int] = {}
        for entry in self._entries.values():
            if entry.rows is not None:
                end = max(
                    entry.rows[1], self._num_outputs.get(entry.hf_name, 0)
                )
                self._num_outputs[entry.hf_name] = end

    def _linear_entries(self, mapping: TensorMapping) -> dict[str, _Entry]:
        """Returns the entry of a weight, or those of queries, keys and values in one weight."""
        hf_name = mapping.hf_name.removesuffix(".weight")
        if not mapping.is_output_layer:
            hf_name = self.family.prefix + hf_name
        weft_name, to_hf = mapping.weft_name, mapping.change.to_hf
        parent = weft_name.removesuffix("qkv_proj.weight")
        if parent == weft_name:
            return {weft_name: _Entry(hf_name, to_hf, mapping.rows)}
        entries: dict[str, _Entry] = {}
        for part, name in enumerate(("q_proj", "k_proj", "v_proj")):
            entries[f"{parent}{name}.weight"] = _Entry(
                hf_name, to_hf, part=part
            )
        return entries

    def _expert_entry(self, mapping: TensorMapping, experts: Any) -> _Entry:
        """Returns the entry of a weight of experts. PEFT has those of both inputs in one."""
        hf_name, rows = _OUTPUT, None
        to_hf, num_experts = mapping.change.to_hf, experts.num_experts
        dim = experts.hidden_dim
        if mapping.weft_name.endswith("wi_0_weight"):
            hf_name, rows = _INPUTS, (0, dim)
        elif mapping.weft_name.endswith("wi_1_weight"):
            hf_name, rows = _INPUTS, (dim, 2 * dim)
        return _Entry(
            self.family.prefix + hf_name, to_hf, rows, num_experts=num_experts
        )

    def num_outputs(self, entry: _Entry, size: int) -> int:
        """Returns the number of outputs of a weight of the base, from that of one part of it."""
        if entry.part is not None:
            return 3 * size
        return self._num_outputs.get(entry.hf_name, size)

    def num_experts(self, module: str) -> int:
        """Returns the number of experts whose weights a parameter of the base has."""
        for entry in self._entries.values():
            if re.fullmatch(_numbered(entry.hf_name), module):
                return entry.num_experts
        return 1

    def places(self, path: str, factors: AdapterFactors) -> Iterator[_Place]:
        """Yields where the weight of a path is in the base, in each layer.

        Raises WeightsMismatchError if the base has no such weight.
        """
        match = IN_LAYERS.fullmatch(path)
        name_in_layer = path
        layers: list[tuple[int | None, int | None]] = [(None, None)]
        if match is not None:
            repeat, number, name_in_layer = match.groups()
            name_in_layer = name_of_entry(
                stack_of_path(path), name_in_layer, self._entries
            )
            first = int(number or 0)
            layers = [(None, first)]
            if repeat is not None:
                layers = []
                for i in range(factors.down.shape[0]):
                    layers.append((i, first + i * self._block_size))
        entry = self._entries.get(name_in_layer)
        if entry is None:
            raise errors.WeightsMismatchError(
                f"the adapter of {path!r} has no counterpart among the modules of "
                f"{self.source!r}. Merge it: `weft export --merge`."
            )
        for index, number in layers:
            yield _Place(entry.hf_name.format(number), entry, path, index)

    def places_by_module(
        self, factors: Mapping[str, AdapterFactors]
    ) -> dict[str, list[_Place]]:
        """Returns the places of weights by module, its parts in the order of their outputs."""
        places: dict[str, list[_Place]] = {}
        for path, value in factors.items():
            for place in self.places(path, value):
                places.setdefault(place.module, []).append(place)
        for parts in places.values():
            parts.sort(
                key=lambda place: place.entry.rows or (place.entry.part or 0, 0)
            )
        return places

    def targets(
        self, names: Mapping[str, object], folders: Sequence[_PathLike]
    ) -> list[str]:
        """Returns the targets of `set_lora_recursively`, by the names of modules."""
        targets: set[str] = set()
        for name in names:
            targets_of_name: set[str] = set()
            for weft_name, entry in self._entries.items():
                if re.fullmatch(_numbered(entry.hf_name), name):
                    targets_of_name |= _targets_of(weft_name)
            if not targets_of_name:
                raise errors.WeightsMismatchError(
                    f"{', '.join(map(str, folders))}: there is no counterpart of {name!r} that can "
                    f"have an adapter in the model of {self.source!r}. Use the base of the "
                    "adapter, and adapters of attention and feed-forward layers."
                )
            targets |= targets_of_name
        return sorted(targets)

    def target_modules(self, names: Iterable[str]) -> list[str]:
        """Returns the shortest ends of the names of modules that no module without has."""
        return self._endings(names, of_experts=False)

    def target_parameters(self, names: Iterable[str]) -> list[str]:
        """Returns such ends of the names of parameters of experts."""
        endings = self._endings(names, of_experts=True)
        return [f"experts.{ending.rpartition('.')[2]}" for ending in endings]

    def _endings(self, names: Iterable[str], *, of_experts: bool) -> list[str]:
        all_names = list(names)
        adapted: list[str] = []
        others: list[str] = []
        for entry in self._entries.values():
            pattern = re.compile(_numbered(entry.hf_name))
            is_adapted = any(map(pattern.fullmatch, all_names))
            if _is_of_experts(entry.hf_name) != of_experts:
                continue
            (adapted if is_adapted else others).append(entry.hf_name)
        endings: set[str] = set()
        for hf_name in adapted:
            words = hf_name.split(".")
            for count in range(1, len(words) + 1):
                ending = ".".join(words[-count:])
                if not any(f".{x}".endswith(f".{ending}") for x in others):
                    break
            endings.add(ending)
        return sorted(endings)


def _block_size(cfg: Any) -> int:
    """Returns the number of layers that are repeated together."""
    block = cfg.decoder.transformer.layer
    if isinstance(block, BaseStackedTransformerLayer.Config):
        return block.num_layers
    return 1


def _experts_of(cfg: Any) -> Any:
    """Returns the config of the experts of a model; None if no layer has them."""
    for layer in layers_of(cfg.decoder.transformer):
        feed_forward = getattr(layer, "feed_forward", None)
        if hasattr(feed_forward, "num_experts"):
            return feed_forward
    return None


def _numbered(hf_name: str) -> str:
    return re.escape(hf_name).replace(r"\{\}", r"\d+")


def _targets_of(weft_name: str) -> set[str]:
    """Returns the targets that the adapter of a weight belongs to."""
    if weft_name.endswith(("wi_0_weight", "wi_1_weight", "wo_weight")):
        return {EXPERTS}
    layer = weft_name.split(".")[-2]
    target = layer.partition("_0")[0].partition("_1")[0]
    return {target} & set(LORA_TARGETS)
