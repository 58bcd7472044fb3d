"""The public classes, methods and functions of Weft, with arguments that are mostly right.

An entry point is called by its name: "nnx.Linear" constructs, "nnx.Linear.__call__" calls a method
of a Linear, and "hierarchy.Linear.Config" sets fields of a config and builds what it describes.
"""

import dataclasses
import functools
import importlib
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers

import weft
from weft import hierarchy, nnx
from weft import linen as nn
from weft.config import Configurable, RequiredFieldValue, config_for_class, config_for_function
from weft.errors import WeftError
from weft.input import record_files
from weft.input.fake import FakeLmInput
from weft.input.grain import DispatchConfig
from weft.trainer import BaseMetricCalculator

SOURCE = Path(weft.__file__).parent
# Public modules that no table lists. Each offers what it defines.
MODULES = (
    "struct",
    "core.meta",
    "core.spmd",
    "cli.arguments",
    "cli.configs",
    "input.composite",
    "input.corpus",
    "input.datasets",
    "input.fake",
    "input.formats",
    "input.grain",
    "input.grain_lm",
    "input.grain_text",
    "input.in_memory",
    "input.packing",
    "input.record_files",
    "input.records",
    "input.text",
    "input.tokenizers",
    "functional.initializers",
    "recipes.digits",
    "recipes.lm",
    "recipes.lm_lora",
    "recipes.lm_nnx",
    "recipes.recipe",
    "serialization.safetensors",
    "trainer.parallelism",
    "trainer.state",
    "trainer.schedule",
)
# Not called, as a fuzzer cannot.
EXCLUDED = {
    # These start processes, or wait for other processes.
    "launch.LocalJob.run",
    "launch.SlurmJob.submit",
    "launch.joined_processes",
    # These read from the network.
    "input.datasets.hugging_face_dataset",
    "input.datasets.tfds_dataset",
    # These write to servers or databases.
    "trainer.MLflowWriter",
    "trainer.WandBWriter",
    # These train, or compile for machines that are not here; their configs are set and built.
    "fit",
    "trainer.SpmdTrainer.run",
    "trainer.compile_trainer_programs",
    "trainer.compile_inference_programs",
    # These read all of Python's library.
    "input.stdlib_corpus",
    # This sets a folder for the whole process.
    "utils.set_data_dir",
    # These change what all later calls do, and do not return it: the next cases would differ.
    "hierarchy.install_context_stack",
    "hierarchy.set_current_context",
    "io.set_mode",
    "nnx.register_data_type",
    "nnx.register_variable_name",
    "nnx.use_eager_sharding",
    "nnx.set_graph_mode",
    "nnx.set_graph_updates",
    "nnx.var_defaults",
    "linen.enable_named_call",
    "linen.disable_named_call",
    "linen.set_logical_axis_rules",
    "config.register_validator",
    "configurations.bool_flag",
    "configurations.int_flag",
    "configurations.Config.update",
    "serialization.register_serialization_state",
    "utils.register_per_param_settings",
}
OPERATORS = ("__call__", "__getitem__", "__setitem__", "__contains__", "__iter__", "__len__")

Call = Callable[..., Any]


def _modules() -> Iterator[tuple[str, list[str]]]:
    """Yields each public module below `weft`, with the names that it offers."""
    tables = sorted(SOURCE.rglob("__init__.pyi"))
    names = [".".join(table.relative_to(SOURCE).parent.parts) for table in tables]
    for name in sorted([*names, *MODULES], key=lambda name: name.startswith("compat")):
        if name == "as_flax":  # its import replaces Flax
            continue
        module = importlib.import_module(f"weft.{name}".rstrip("."))
        own = [
            n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__
        ]
        offered = getattr(module, "__all__", own)
        yield name, [n for n in offered if not n.startswith("_")]


@functools.cache
def names() -> list[str]:
    """Returns the names of all entry points, each object once."""
    found: dict[int, str] = {id(_attribute(name)): "" for name in EXCLUDED}
    for module, offered in _modules():
        for attribute in sorted(offered):
            name = f"{module}.{attribute}".lstrip(".")
            value = _attribute(name)
            is_ours = getattr(value, "__module__", "").startswith("weft")
            if id(value) in found or not callable(value) or not is_ours or _is_error(value):
                continue
            found[id(value)] = name
            for method in _methods(value):
                found.setdefault(id(inspect.getattr_static(value, method)), f"{name}.{method}")
    return [name for name in found.values() if name]


def _attribute(name: str) -> Any:
    """Returns what has a name such as "nnx.Linear.__call__"."""
    value: Any = weft
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _owner(name: str) -> Any:
    return _attribute(name.rpartition(".")[0] or name)


def _is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseException)


def _is_protocol(value: type) -> bool:
    return typing.Protocol in value.__bases__


def _methods(value: Any) -> list[str]:
    """Returns the public methods that a class has of its own or of private bases."""
    if not inspect.isclass(value) or inspect.isabstract(value) or _is_protocol(value):
        return []
    found = []
    for base in value.__mro__:
        is_ours = base.__module__.startswith("weft")
        for name, method in vars(base).items() if is_ours else ():
            is_public = not name.startswith("_") or name in OPERATORS
            if is_public and callable(getattr(value, name, None)) and not inspect.isclass(method):
                found.append(name)
    if issubclass(value, Configurable):
        found.append("Config")
    return sorted(set(found))


# Arguments that most functions accept, by the names of their parameters.
_BY_NAMES: Mapping[str, Callable[[], Any]] = {
    "rngs rng rng_key rngs_key": lambda: nnx.Rngs(0),
    "key prng_key dropout_rng": lambda: jax.random.key(0),
    "x inputs input y a logits hidden preds predictions lhs value array": lambda: jnp.ones((2, 3)),
    "q k v query key_ value_ images": lambda: jnp.ones((2, 4, 1, 3)),
    "labels targets ids indices target_labels": lambda: jnp.arange(2),
    "in_features input_dim dim query_dim model_dim": lambda: 3,
    "features out_features output_dim hidden_dim num_classes": lambda: 3,
    "num_heads n step steps num_layers batch_size length": lambda: 1,
    "axis dim_to_reduce": lambda: -1,
    "kernel_size window_shape strides": lambda: (1,),
    "shape lhs_shape": lambda: (2, 3),
    "dtype param_dtype": lambda: jnp.float32,
    "name prefix collection col method": lambda: "x",
    "path folder dir directory ckpt_dir filename base_dir": lambda: "file",
    "tree params state variables target updates gradients": lambda: _tree(),
    "model module node graph layer": lambda: _linear(),
    "cfg config trainer_config": lambda: hierarchy.Linear.default_config(),
    "f fn fun func function init_fn apply_fn": lambda: lambda *_: jnp.zeros(()),
    "tx optimizer": lambda: optax.sgd(0.1),
    "variable param": lambda: nnx.Param(jnp.ones(3)),
    "cell cell_type": lambda: nn.SimpleCell(features=3),
    "layers branches funcs": lambda: [lambda *_: jnp.zeros(())],
    "mesh global_mesh": lambda: jax.make_mesh((1,), ("data",)),
    "texts paths files": lambda: ["file"],
    "argv arguments": lambda: ["list"],
    "learning_rate decay rate": lambda: 0.1,
    "tokenizer": lambda: weft.input.ByteTokenizer(),
    "vocab": lambda: weft.input.ByteTokenizer(),
    "arrays": lambda: {"x": np.ones((4, 3)), "label": np.arange(4)},
    "data": lambda: np.ones((4, 3)),
    "documents": lambda: [np.arange(4)],
    "stream": lambda: np.arange(16),
    "parent": lambda: None,
    "is_training": lambda: True,
    "encoded_bytes": lambda: weft.serialization.to_bytes({"a": 1}),
    "encoded_pytree": lambda: weft.serialization.to_bytes({"a": 1}),
    "mask": lambda: jnp.ones((2, 3), bool),
}
ARGUMENTS = {name: make for names, make in _BY_NAMES.items() for name in names.split()}


def _tree() -> dict[str, Any]:
    return {"a": {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}}


def _argument(parameter: inspect.Parameter) -> Any:
    """Returns a value that the parameter probably accepts, by its name, then by its type."""
    if parameter.name in ARGUMENTS:
        return ARGUMENTS[parameter.name]()
    annotation = str(parameter.annotation)
    for words, make in _BY_TYPE.items():
        if any(word in annotation for word in words):
            return make()
    return jnp.ones((2, 3))


_BY_TYPE: Mapping[tuple[str, ...], Callable[[], Any]] = {
    ("Module",): ARGUMENTS["model"],
    ("Array", "Tensor", "Nested"): ARGUMENTS["x"],
    ("Callable",): ARGUMENTS["fn"],
    ("bool",): lambda: False,
    ("int",): lambda: 2,
    ("float",): lambda: 0.5,
    ("str",): lambda: "x",
    ("dict", "Mapping"): ARGUMENTS["tree"],
    ("Sequence", "tuple", "list", "Iterable"): lambda: (2, 3),
}


def _filled(cfg: Any) -> Any:
    """Sets the required fields of a config and of the configs in it, to what they accept."""

    def fill(each: Any) -> None:
        for key, value in each.items():
            if isinstance(value, RequiredFieldValue):
                by_name = [ARGUMENTS[key]()] if key in ARGUMENTS else []
                _set_first(each, key, [*by_name, *_field_values()])

    hierarchy.for_each_config(cfg, fill)
    # What was set may be a config.
    hierarchy.for_each_config(cfg, fill)
    return cfg


def _field_values() -> list[Any]:
    """Returns values of the types that required fields have."""
    return [
        2,
        "x",
        ("x",),
        (2,),
        [],
        {"x": True},
        {},
        hierarchy.Linear.default_config(),
        hierarchy.LSTMCell.default_config(),
        _sgd(),
        hierarchy.AveragePooling.default_config(),
        [hierarchy.LSTMCell.default_config()],
        FakeLmInput.default_config(),
        weft.trainer.EvalMetric("x", "x"),
        weft.trainer.NoOpWriter.default_config(),
        {"x": weft.trainer.NoOpWriter.default_config()},
        lambda *_: None,
    ]


def _sgd() -> Any:
    cfg = config_for_function(weft.trainer.sgd_optimizer)
    return cfg.set(learning_rate=0.1, decouple_weight_decay=True)


def _set_first(cfg: Any, key: str, values: list[Any]) -> None:
    """Sets a field to the first of the values that its type accepts."""
    for value in values:
        try:
            cfg.set(**{key: value})
        except WeftError:
            continue
        return


def _instantiate(cls: Any, **fields: Any) -> Any:
    cfg = _filled(cls.default_config()).set(**fields)
    others: dict[str, Any] = {}
    for parameter in inspect.signature(cls.__init__).parameters.values():
        is_required = parameter.default is parameter.empty
        if parameter.kind == parameter.KEYWORD_ONLY and is_required:
            others[parameter.name] = _argument(parameter)
    if issubclass(cls, BaseMetricCalculator):
        others["model"] = _instantiate(hierarchy.Linear, name="model")
    return cfg.instantiate(**others)


class _Mean(nnx.Metric):
    def __init__(self) -> None:
        self.total = nnx.metrics.MetricState(jnp.zeros(()))

    def reset(self) -> None: ...
    def update(self, **kwargs: Any) -> None: ...
    def compute(self) -> jax.Array:
        return self.total[...]


def _linear() -> nnx.Linear:
    return nnx.Linear(3, 2, rngs=nnx.Rngs(0))


def _array_input() -> Any:
    arrays = weft.input.Arrays({"x": np.ones((4, 3)), "label": np.arange(4)})
    return _instantiate(weft.input.ArrayInput, arrays=arrays)


def _heads(name: str) -> Callable[[], Any]:
    """Returns what makes a layer that projects to queries, keys and values of equal sizes."""
    cls = getattr(hierarchy, name)
    sizes = {"query_dim": 4, "key_dim": 4, "value_dim": 4, "num_heads": 2, "per_head_dim": 2}
    return lambda: _instantiate(cls, **sizes)


# Instances whose arguments the table above does not have.
INSTANCES: Mapping[str, Callable[[], Any]] = {
    "hierarchy.FusedGroupedQKVLinear": _heads("FusedGroupedQKVLinear"),
    "hierarchy.FusedQKVLinear": _heads("FusedQKVLinear"),
    "hierarchy.GroupedQKVLinear": _heads("GroupedQKVLinear"),
    "hierarchy.GroupNorm": lambda: _instantiate(hierarchy.GroupNorm, num_groups=1),
    "hierarchy.InvocationContext": lambda: hierarchy.InvocationContext(
        name="x",
        parent=None,
        module=_instantiate(hierarchy.Linear),
        state={},
        is_training=True,
        prng_key=jax.random.key(0),
    ),
    "cursor.Cursor": lambda: weft.cursor.cursor({"x": [1, 2]}),
    "trainer.Supervised": lambda: _instantiate(weft.trainer.Supervised, loss="mse"),
    "trainer.SpmdTrainer": lambda: _instantiate(weft.trainer.SpmdTrainer, mesh_shape=(1,)),
    "trainer.InferenceRunner": lambda: _instantiate(weft.trainer.InferenceRunner, mesh_shape=(1,)),
    "trainer.DataPartitionType": lambda: weft.trainer.DataPartitionType.FULL,
    "input.grain.DispatchConfig": lambda: DispatchConfig(num_shards=(2,), shard_index=(0,)),
    "nnx.GraphDef": lambda: nnx.graphdef(_linear()),
    "nnx.GraphState": lambda: nnx.GraphState(*nnx.split(_linear())),
    "nnx.Metric": _Mean,
    "nnx.MultiMetric": lambda: nnx.MultiMetric(mean=_Mean()),
    "nnx.Optimizer": lambda: nnx.Optimizer(_linear(), optax.sgd(0.1), wrt=nnx.Param),
    "nnx.EMA": lambda: nnx.EMA(_linear(), 0.9),
    "nnx.Einsum": lambda: nnx.Einsum("bi,io->bo", (3, 2), rngs=nnx.Rngs(0)),
    "nnx.GroupNorm": lambda: nnx.GroupNorm(3, num_groups=1, rngs=nnx.Rngs(0)),
    "config.ClassConfigBase": lambda: config_for_class(nnx.Linear),
    "config.FunctionConfigBase": _sgd,
    "config.ConfigBase": lambda: hierarchy.Linear.default_config(),
    "input.ArrayInput": _array_input,
    "input.IterableInput": lambda: _instantiate(
        weft.input.IterableInput, batches=weft.input.Batches([{"x": np.ones((2, 3))}])
    ),
    "input.Corpus": lambda: weft.input.Corpus("x", (weft.input.TextFile("a", b"text"),)),
    "input.PrefetchingIterator": lambda: weft.input.PrefetchingIterator(
        weft.input.savable_iterator(lambda: range(3), "x")
    ),
    "input.HuggingFaceTokenizer": lambda: weft.input.HuggingFaceTokenizer("tokenizer.json"),
    "input.record_files.JsonLinesFile": lambda: record_files.JsonLinesFile("records.jsonl"),
    "serialization.TensorFiles": lambda: weft.serialization.TensorFiles("x.safetensors"),
    "struct.VDict": lambda: weft.struct.VDict(a=jnp.ones((2, 3))),
}


def write_files(folder: Path) -> None:
    """Writes the files that some instances and arguments name."""
    (folder / "file").write_text("text\n", encoding="utf-8")
    (folder / "records.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    (folder / "tokenizer.json").write_bytes(_tokenizer())
    weft.serialization.save_safetensors(folder / "x.safetensors", {"x": np.ones(3)})


@functools.cache
def _tokenizer() -> bytes:
    words = {"[UNK]": 0, "text": 1, "</s>": 2}
    return tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]")).to_str().encode()


@functools.cache
def _makers() -> dict[type, Callable[[], Any]]:
    return {_attribute(name): make for name, make in INSTANCES.items()}


def _instance(cls: Any) -> Any:
    """Returns an instance of a public class."""
    if cls in _makers():
        return _makers()[cls]()
    if issubclass(cls, Configurable):
        return _instantiate(cls)
    return EntryPoint(cls, inspect.signature(cls).parameters).call({})


@dataclasses.dataclass
class EntryPoint:
    """Something public that can be called, and the parameters it has."""

    fn: Call
    parameters: Mapping[str, inspect.Parameter]

    def arguments(self) -> dict[str, Any]:
        """Returns the required arguments, mostly right."""
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        found = {}
        for name, parameter in self.parameters.items():
            if parameter.default is parameter.empty and parameter.kind not in variadic:
                found[name] = _argument(parameter)
        return found

    def call(self, given: Mapping[str, Any], *, by_keyword: bool = False) -> Any:
        """Calls it with the required arguments; those in `given` replace or add to them."""
        by_name = {**self.arguments(), **given}
        positional = []
        for name, parameter in self.parameters.items():
            if name in by_name and parameter.kind in (
                parameter.VAR_POSITIONAL,
                parameter.POSITIONAL_ONLY,
            ):
                positional.append(by_name.pop(name))
            elif parameter.kind == parameter.POSITIONAL_OR_KEYWORD and not by_keyword:
                # Those after one that is left out are given by keyword.
                by_keyword = name not in by_name
                positional += [] if by_keyword else [by_name.pop(name)]
        return self.fn(*positional, **by_name)


def entry_point(name: str, *, in_context: bool) -> EntryPoint:
    """Returns the entry point of a name; constructs the instance that a method needs.

    Args:
        name: such as "linen.Dense.__call__".
        in_context: whether a layer gets its parameters and the context in which it may be called.

    Raises:
        Exception: the class cannot be constructed with the arguments above.
    """
    value, owner = _attribute(name), _owner(name)
    method = name.rpartition(".")[2]
    if method == "Config" and inspect.isclass(owner):
        keys = _filled(owner.default_config()).keys()
        fields = [inspect.Parameter(k, inspect.Parameter.KEYWORD_ONLY, default=None) for k in keys]
        return EntryPoint(functools.partial(_instantiate, owner), {f.name: f for f in fields})
    if not inspect.isclass(owner) or owner is value:
        return EntryPoint(value, inspect.signature(value).parameters)
    if isinstance(inspect.getattr_static(owner, method), (staticmethod, classmethod)):
        return EntryPoint(value, inspect.signature(value).parameters)
    instance = _instance(owner)
    bound = getattr(instance, method)
    parameters = inspect.signature(bound).parameters
    if in_context and isinstance(instance, nn.Module) and method == "__call__":
        return EntryPoint(
            functools.partial(instance.init_with_output, jax.random.key(0)), parameters
        )
    if in_context and isinstance(instance, hierarchy.BaseLayer):
        return EntryPoint(functools.partial(_call_layer, instance, method), parameters)
    return EntryPoint(bound, parameters)


def _call_layer(layer: hierarchy.BaseLayer, method: str, *args: Any, **kwargs: Any) -> Any:
    """Calls a method in the context of a layer, with initial parameters."""

    key = jax.random.key(0)
    state = layer.initialize_parameters_recursively(key)
    # Arguments by position and by name cannot be given together.
    inputs = args or kwargs
    return hierarchy.functional(layer, key, state, inputs, method=method, is_training=True)
