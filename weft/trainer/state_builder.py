"""Builders of a run's initial state, and converters between forms of a state.

The field `init_state_builder` of a trainer's config takes a `Builder`. The trainer calls it once,
if the run has no checkpoint of its own, with a state in the form that the run needs. The builder
returns it with values for some of its leaves, which it lists; the others are initialized randomly.
If a storage holds another form, a converter translates parts, names, models or lengths:

    target --target_to_source--> source --read by a builder--> source --source_to_target--> target

The leaves are either arrays (`TENSORS`) or only shapes, dtypes and layouts (`TENSOR_SPECS`), so
that nothing is initialized that is then read. Builders that read a checkpoint read only the
requested leaves, into their layouts, and check every file: a damaged checkpoint is named, and
skipped if any step is acceptable. A run can also start from a Hugging Face checkpoint or an
exported file; adapters (`weft.hierarchy.lora`) are then initialized as in any new run:

    cfg.init_state_builder = ImportedWeightsBuilder.default_config().set(path="checkpoints/llama")
"""

import dataclasses
import enum
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from weft import errors
from weft.config import (
    REQUIRED,
    InstantiableConfig,
    Required,
    maybe_instantiate,
)
from weft.core.spmd import get_concrete_mesh
from weft.distributed.preemption import InterruptibleJit, barrier_after
from weft.hierarchy import Module, base_state, with_base_state
from weft.hierarchy.stored_weight import (
    ParameterFromParts,
    StoredWeight,
    with_stored_weights,
    without_stored_weights,
)
from weft.interop.huggingface import load_huggingface_params
from weft.serialization import safetensors
from weft.trainer.checkpointer import dirs, index
from weft.trainer.checkpointer.checkpointer import Checkpointer
from weft.trainer.checkpointer.storage import OrbaxStateStorage, StateStorage
from weft.trainer.mesh import build_mesh, named_sharding, rules_of
from weft.trainer.model import build_model
from weft.trainer.optimizers.base import at_least_float32
from weft.trainer.state import parameter_specs, with_shardings
from weft.trainer.train_step import TrainerState
from weft.typing import PyTree, T, Tensor

Leaf = Any  # an array, or its shape, dtype and layout


class Builder(Module):
    """Base of what builds the initial state of a run, such as pretrained parameters."""

    class StateType(enum.Enum):
        """Types of the leaves of a state.

        Attributes:
            TENSORS: arrays.
            TENSOR_SPECS: `jax.ShapeDtypeStruct`s with the target shardings.
        """

        TENSORS = "TENSORS"
        TENSOR_SPECS = "TENSOR_SPECS"

    @dataclasses.dataclass
    class State:
        """State while it is being built.

        Attributes:
            step: the step of the state; 0 for none.
            built_keys: the paths of the leaves that have their final values, such as
                "model/decoder/emb/weight".
        """

        step: int
        trainer_state: TrainerState
        built_keys: set[str] = dataclasses.field(default_factory=set)

    def input_state_type(self) -> "Builder.StateType":
        """Returns the type of leaves that `__call__` takes."""
        return self.StateType.TENSOR_SPECS

    def __call__(self, state: "Builder.State") -> "Builder.State":
        """Returns a state, given in the form that the run needs, with arrays at `built_keys`."""
        raise NotImplementedError(type(self))


def needs_tensors(*types: Builder.StateType) -> Builder.StateType:
    """Returns TENSORS if one of several types is TENSORS."""
    if Builder.StateType.TENSORS in types:
        return Builder.StateType.TENSORS
    return Builder.StateType.TENSOR_SPECS


class ChainBuilder(Builder):
    """Builder that applies several builders in turn."""

    class Config(Builder.Config):
        """Configures a ChainBuilder."""

        builders: Required[Sequence[Builder.Config]] = REQUIRED
        validation: index.CheckpointValidationType | None = (
            index.CheckpointValidationType.EXACT
        )
        """How strictly the structures of result and input must agree; None for not."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._builders: list[Any] = []
        for i, builder in enumerate(cfg.builders):
            self._builders.append(self._add_child(f"builder{i}", builder))

    def input_state_type(self) -> Builder.StateType:
        return needs_tensors(
            *(builder.input_state_type() for builder in self._builders)
        )

    def __call__(self, state: Builder.State) -> Builder.State:
        index_before = index.build_index(state.trainer_state)
        for builder in self._builders:
            state = builder(state)
        if self.config.validation is not None:
            index_after = index.build_index(state.trainer_state)
            index.check_state_structure(
                index_after, index_before, validation=self.config.validation
            )
        return state


class Converter(Module):
    """Base of the converters between the form that is stored and the form that a run needs."""

    def target_state_type(self) -> Builder.StateType:
        """Returns the type of leaves that `target_to_source` takes."""
        return Builder.StateType.TENSOR_SPECS

    def target_to_source(
        self, target: Builder.State
    ) -> tuple[Builder.State, Any]:
        """Returns the stored form of a run's state, for a builder, and data for the way back."""
        raise NotImplementedError(type(self))

    def source_to_target(
        self, source: Builder.State, aux: Any
    ) -> Builder.State:
        """Returns a run's state from its stored form and the data of `target_to_source`."""
        raise NotImplementedError(type(self))


class ChainConverter(Converter):
    """Converter that applies several converters in turn, from the stored form to the target."""

    class Config(Converter.Config):
        """Configures a ChainConverter, from the converter of the stored form to the last."""

        converters: Required[Sequence[Converter.Config]] = REQUIRED

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._converters: list[Any] = []
        for i, converter in enumerate(cfg.converters):
            self._converters.append(self._add_child(f"converter{i}", converter))

    def target_state_type(self) -> Builder.StateType:
        return needs_tensors(
            *(converter.target_state_type() for converter in self._converters)
        )

    def target_to_source(
        self, target: Builder.State
    ) -> tuple[Builder.State, Any]:
        # From the target's end of the chain to the source's; `auxes` is in the order of the chain.
        auxes = []
        for converter in reversed(self._converters):
            target, aux = converter.target_to_source(target)
            auxes.append(aux)
        return target, auxes[::-1]

    def source_to_target(
        self, source: Builder.State, aux: Any
    ) -> Builder.State:
        for converter, converter_aux in zip(self._converters, aux, strict=True):
            source = converter.source_to_target(source, converter_aux)
        return source


class RestoreAndConvertBuilder(Builder):
    r"""Builder that reads a stored state with another builder and converts it.

    Example: the decoder of another run, whose model uses another name for it.

        RestoreAndConvertBuilder.default_config().set(
            builder=TensorStoreStateStorageBuilder.default_config().set(
                base_dir="runs/pretrained/checkpoints",
                validation=CheckpointValidationType.CONTAINS_STATE,
            ),
            converter=MergeStateConverter.default_config().set(
                selection_regexes=[(r"model/decoder/(.*)", r"model/lm/\1")]
            ),
        )
    """

    class Config(Builder.Config):
        builder: Required[Builder.Config] = REQUIRED
        converter: Required[Converter.Config] = REQUIRED

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._builder: Any = self._add_child("builder", cfg.builder)
        self._converter: Any = self._add_child("converter", cfg.converter)

    def input_state_type(self) -> Builder.StateType:
        return self._converter.target_state_type()

    def __call__(self, state: Builder.State) -> Builder.State:
        source, aux = self._converter.target_to_source(state)
        return self._converter.source_to_target(self._builder(source), aux)


# The trainer's use of a builder.


def initial_state(
    builder: Builder | None,
    init: Callable[[Tensor], TrainerState],
    prng_key: Tensor,
    shardings: TrainerState,
    *,
    interruptible: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> TrainerState:
    """Returns the state of a new run.

    Args:
        builder: provides values; None to initialize all.
        init: initializes a whole state; compiled, it computes only the missing leaves.
        interruptible: whether a stop request interrupts the compilation.

    Raises StateBuilderError if the builder's values do not match the state of the run.
    """

    def compute(fn: Callable[[Tensor], T], out_shardings: PyTree) -> T:
        jitted = jax.jit(
            fn, out_shardings=out_shardings, compiler_options=compiler_options
        )
        if interruptible:
            jitted = InterruptibleJit(jitted, "the initial state")
        return jitted(prng_key)

    if builder is None:
        return compute(init, shardings)
    # A builder of shapes is asked first, and what it leaves out is computed. A builder of arrays
    # gets a whole state, and may leave any part of it as it is.
    specs = with_shardings(jax.eval_shape(init, prng_key), shardings)
    is_initialized = builder.input_state_type() is Builder.StateType.TENSORS
    state = specs
    if is_initialized:
        state = compute(init, shardings)
    with barrier_after("building the first state"):
        built = builder(Builder.State(step=0, trainer_state=state))
    values = _leaves_by_path(built.trainer_state)
    specs_by_path = _leaves_by_path(specs)
    missing_paths: set[str] = set()
    if not is_initialized:
        missing_paths = specs_by_path.keys() - built.built_keys
    for path, spec in specs_by_path.items():
        if path not in missing_paths:
            _check_built(builder, path, values.get(path), spec)

    # XLA drops the computation of all other leaves.
    def init_missing(prng_key: Tensor) -> dict[str, Tensor]:
        initialized = _leaves_by_path(init(prng_key))
        return {path: initialized[path] for path in missing_paths}

    if missing_paths:
        missing_shardings = {
            path: specs_by_path[path].sharding for path in missing_paths
        }
        values |= compute(init_missing, missing_shardings)
    leaves = [
        jax.device_put(values[path], spec.sharding)
        for path, spec in specs_by_path.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(specs), leaves)


def _check_built(
    builder: Builder, path: str, value: object, spec: jax.ShapeDtypeStruct
) -> None:
    """Raises a StateBuilderError unless a value that was built is an array as the run needs it."""
    if isinstance(value, jax.Array) and (value.shape, value.dtype) == (
        spec.shape,
        spec.dtype,
    ):
        return
    description = "nothing"
    if value is not None:
        description = f"{type(value).__name__} {_describe(value)}"
    raise errors.StateBuilderError(
        f"{builder.path()}, a {type(builder).__name__}, lists {path!r} as built and returns "
        f"{description}, but the run needs an array of {_describe(spec)}. Convert it with a "
        "converter, or omit it from `built_keys` to initialize it."
    )


def _describe(value: object) -> str:
    return f"{getattr(value, 'dtype', '')}{list(getattr(value, 'shape', ()))}"


def clone_tree(in_tree: T) -> T:
    """Returns a copy of a pytree with new containers and the same leaves."""
    return jax.tree.map(lambda x: x, in_tree)


class BaseStateStorageBuilder(Builder):
    """Base class of builders that read a checkpoint."""

    class Config(Builder.Config):
        """Configures a BaseStateStorageBuilder."""

        base_dir: str | None = None
        step: int | None = None
        """None for the newest undamaged checkpoint in `base_dir`."""
        validation: index.CheckpointValidationType = (
            index.CheckpointValidationType.EXACT
        )
        """Required similarity of the checkpoint and the requested leaves, within each requested one
        of model, learner and PRNG key."""

    def _read(
        self,
        state: Builder.State,
        base_dir: str,
        step: int | None,
        storage: StateStorage.Config,
    ) -> Builder.State:
        validation = self.config.validation
        # The state may be a part of the checkpoint; the structure of that part is compared below.
        cfg = Checkpointer.default_config().set(
            name="checkpointer",
            dir=base_dir,
            storage=storage,
            validation=validation.allowing_more,
        )
        target = state.trainer_state
        with cfg.instantiate(parent=None) as checkpointer:
            restored_step, restored = checkpointer.restore(
                step=step, state=target._asdict()
            )
            if restored_step is None:
                raise dirs.not_found_error(base_dir)
            if not validation.allows_more:
                saved_index = index.read_index_file(
                    checkpointer.ckpt_dir(restored_step)
                )
                _check_requested_parts(saved_index, target, validation)
        built_keys = set(state.built_keys)
        for path, leaf in index.flatten_state(target):
            if index.is_array(leaf):
                built_keys.add(path)
        return Builder.State(
            restored_step, TrainerState(**restored), built_keys
        )


def _check_requested_parts(
    saved_index: index.Index,
    target: TrainerState,
    validation: index.CheckpointValidationType,
) -> None:
    """Compares the structures of those of model, learner and PRNG key that are requested."""
    target_index = index.build_index(target)
    requested_parts = {path.split("/")[0] for path, _ in target_index}
    saved_parts = [
        (path, entry)
        for path, entry in saved_index
        if path.split("/")[0] in requested_parts
    ]
    index.check_state_structure(
        saved_parts, target_index, validation=validation
    )


class TensorStoreStateStorageBuilder(BaseStateStorageBuilder):
    """Builder that reads a checkpoint of a `Checkpointer`."""

    class Config(BaseStateStorageBuilder.Config):
        """Configures a TensorStoreStateStorageBuilder.

        `dir`, the directory of one checkpoint, replaces `base_dir` and `step`.
        """

        dir: str | None = None
        storage: StateStorage.Config = OrbaxStateStorage.default_config()

    def __call__(self, state: Builder.State) -> Builder.State:
        cfg = self.config
        if (cfg.dir is None) == (cfg.base_dir is None):
            raise errors.StateBuilderError(
                f"{self.path()} got dir={cfg.dir!r} and base_dir={cfg.base_dir!r}; expected one of "
                "the two: `dir` of one checkpoint, or `base_dir` of all checkpoints of a run."
            )
        if cfg.dir is None:
            return self._read(state, cfg.base_dir, cfg.step, cfg.storage)
        base_dir = os.path.dirname(os.path.normpath(cfg.dir))
        return self._read(
            state, base_dir, dirs.parse_step_from_dir(cfg.dir), cfg.storage
        )


class OrbaxStateBuilder(BaseStateStorageBuilder):
    """Builder that reads a checkpoint of a `Checkpointer` with an `OrbaxStateStorage`."""

    def __call__(self, state: Builder.State) -> Builder.State:
        cfg = self.config
        if cfg.base_dir is None:
            raise errors.StateBuilderError(
                f"{self.path()}: base_dir is None; expected the directory of all checkpoints of a "
                "run, such as 'runs/lm/checkpoints'."
            )
        storage: Any = OrbaxStateStorage.default_config()
        return self._read(state, cfg.base_dir, cfg.step, storage)


def import_weights(path: str, params: dict[str, PyTree]) -> dict[str, PyTree]:
    """Returns the parameters of a model with the values of a checkpoint.

    Args:
        path: The folder of a Hugging Face checkpoint, with its `config.json`; or safetensors files
            with the names of these parameters, as `weft export` writes them.
        params: The parameters, or their shapes (`jax.ShapeDtypeStruct`), with the target dtypes
            and shardings. Those of adapters are returned unchanged. Weights that are stored in 8
            or 4 bits are rounded one layer after the other.

    Raises:
        WeightsReadError: if a file is missing or damaged.
        WeightsMismatchError: if the files do not match the model.
        HuggingFaceConfigError: if Weft has no counterpart of the checkpoint's model.
    """
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        base_state(params),
    )
    if (Path(path) / "config.json").exists():
        values: Any = load_huggingface_params(path, target)
    else:
        values = _load_exported_params(path, target)
    return with_base_state(params, values)


def _load_exported_params(path: str, target: PyTree) -> PyTree:
    """Returns the values of a file that has the names of a model's parameters."""
    target = with_stored_weights(target)
    parameters = dict(safetensors.tensor_names(target))
    values: list[PyTree] = []
    with safetensors.TensorFiles(path) as files:
        safetensors.check_tensors(files, parameters, cast=True)
        for name, parameter in parameters.items():
            array = ParameterFromParts(parameter)
            indices: list[tuple[int, ...]] = [()]
            if isinstance(parameter, StoredWeight) and len(parameter.shape) > 2:
                # It is rounded in float32, one layer after the other.
                indices = [(i,) for i in range(parameter.shape[0])]
            for index in indices:
                box = array.box(index)
                if box is None:
                    continue
                leading = tuple(slice(i, i + 1) for i in index)
                part = files.read(name, leading + box)
                array.write(index, part.reshape(part.shape[len(index) :]))
            values.append(array.on_devices())
    tree = jax.tree.unflatten(jax.tree.structure(target), values)
    return without_stored_weights(tree)


class ImportedWeightsBuilder(Builder):
    """Builder that reads the parameters of a checkpoint; see `import_weights`."""

    class Config(Builder.Config):
        """Configures an ImportedWeightsBuilder; see `import_weights` for `path`."""

        path: Required[str] = REQUIRED

    def __call__(self, state: Builder.State) -> Builder.State:
        params: Any = state.trainer_state.model
        imported = import_weights(self.config.path, params)
        built_keys = set(state.built_keys)
        for path, leaf in index.flatten_state({"model": imported}):
            if isinstance(leaf, jax.Array):  # adapters have shapes only
                built_keys.add(path)
        return Builder.State(
            state.step, state.trainer_state._replace(model=imported), built_keys
        )


class MergeStateSelection(enum.StrEnum):
    """Source of a leaf: the storage, under the same path, or the target, initialized as usual."""

    SOURCE = "SOURCE"
    TARGET = "TARGET"


class MergeStateConverter(Converter):
    """Converter that reads only some leaves, by path, under the same or other names."""

    class Config(Converter.Config):
        r"""Configures a MergeStateConverter."""

        selection_regexes: list[tuple[str, str | MergeStateSelection]] = []
        """Pairs of a regular expression for whole paths in the target, such as "model/decoder/.*",
        and the source of these leaves: a `MergeStateSelection`, or its name, or their paths in the
        storage, where "\1" is replaced by the first group of the match. The first matching pair
        counts. Leaves without a match are initialized as usual; but if all pairs are TARGET, they
        are read."""

    def target_to_source(
        self, target: Builder.State
    ) -> tuple[Builder.State, Any]:
        leaves = _leaves_by_path(target.trainer_state)
        source_paths: dict[str, str] = {}  # by the paths in the target
        source_leaves: dict[str, Leaf] = {}
        for path, leaf in leaves.items():
            source_path = self._source_path(path)
            if source_path is not None:
                source_paths[path] = source_path
                source_leaves[source_path] = leaf
        if not source_paths:
            raise errors.StateBuilderError(
                f"{self.path()}: no path of the state matches one of selection_regexes="
                f"{self.config.selection_regexes!r}; there are {', '.join(list(leaves)[:5])}, … "
                "Write expressions for whole paths."
            )
        source = _state_of_leaves(source_leaves, self.path())
        return Builder.State(target.step, source), (target, source_paths)

    def _source_path(self, path: str) -> str | None:
        """Returns the path in the storage of a leaf of the target, None for one to initialize."""
        selects_source = False
        for regex, selection in self.config.selection_regexes:
            match = re.fullmatch(regex, path)
            if selection.upper() == MergeStateSelection.TARGET:
                if match is not None:
                    return None
                continue
            selects_source = True
            if match is not None:
                is_same_path = selection.upper() == MergeStateSelection.SOURCE
                return path if is_same_path else match.expand(selection)
        return None if selects_source else path

    def source_to_target(
        self, source: Builder.State, aux: Any
    ) -> Builder.State:
        target, source_paths = aux
        source_leaves = _leaves_by_path(source.trainer_state)
        values = {
            path: source_leaves[source_path]
            for path, source_path in source_paths.items()
        }
        return _with_values(target, values, source.step)


class EmaParamsConverter(Converter):
    """Converter that uses a run's moving average of parameters as the model's parameters."""

    def target_to_source(
        self, target: Builder.State
    ) -> tuple[Builder.State, Any]:
        averages = {
            "ema": {"ema": at_least_float32(target.trainer_state.model)}
        }
        source = TrainerState(prng_key={}, model={}, learner=averages)
        return Builder.State(
            target.step, source
        ), target  # `aux` is the target itself

    def source_to_target(
        self, source: Builder.State, aux: Any
    ) -> Builder.State:
        averages = source.trainer_state.learner["ema"]["ema"]
        return _with_values(
            aux, _leaves_by_path({"model": averages}), source.step
        )


class BaseConverterFromPretrainedModel(Converter):
    """Base class of converters from the model of another trainer's config."""

    class Config(Converter.Config):
        """Configures a BaseConverterFromPretrainedModel."""

        source_trainer_config: Required[InstantiableConfig] = REQUIRED
        """Makes the config of the trainer that saved the checkpoint, or a function that does."""
        mesh_shape: Sequence[int] | None = None
        """Shape of the mesh that its arrays are read onto; None for the run's mesh."""
        mesh_axis_names: Sequence[str] | None = None

    def target_to_source(
        self, target: Builder.State
    ) -> tuple[Builder.State, Any]:
        source = TrainerState(
            prng_key={}, model=self._source_model(), learner={}
        )
        return Builder.State(target.step, source), target

    def _source_model(self) -> PyTree:
        """Returns the shapes and layouts of the other model's parameters, as nested dicts."""
        cfg = self.config
        trainer_cfg: Any = maybe_instantiate(cfg.source_trainer_config)
        if callable(trainer_cfg):
            trainer_cfg = trainer_cfg()
        mesh: Any = get_concrete_mesh() or jax.sharding.get_mesh()
        if cfg.mesh_shape is not None:
            mesh = build_mesh(
                cfg.mesh_shape,
                cfg.mesh_axis_names or trainer_cfg.mesh_axis_names,
            )
        specs = parameter_specs(
            build_model(trainer_cfg), rules_of(trainer_cfg).parameters
        )
        shapes: dict[str, Leaf] = {}
        for path, spec in index.flatten_state(specs):
            sharding = named_sharding(mesh, spec.partition_spec, path)
            shapes[f"model/{path}"] = jax.ShapeDtypeStruct(
                spec.shape, spec.dtype, sharding=sharding
            )
        return _state_of_leaves(shapes, self.path()).model


class ModelStateScopeConverter(BaseConverterFromPretrainedModel):
    """Converter that takes the model of another run, or some of its layers under any names."""

    class Config(BaseConverterFromPretrainedModel.Config):
        """Configures a ModelStateScopeConverter."""

        scope: str | Mapping[str, str] | None = None
        """Path of a layer, such as "decoder/transformer", in both models; or a mapping from paths
        in this model to paths in the other. None or "" is the whole model."""

    @property
    def scopes(self) -> dict[str, str]:
        """Mapping from paths in this model to paths in the other."""
        scope = self.config.scope
        if scope is None:
            return {"": ""}
        if isinstance(scope, str):
            return {scope: scope}
        return dict(scope)

    def target_to_source(
        self, target: Builder.State
    ) -> tuple[Builder.State, Any]:
        source, aux = super().target_to_source(target)
        model_leaves = _leaves_by_path(source.trainer_state)
        selected_leaves: dict[str, Leaf] = {}
        for scope in self.scopes.values():
            scope_leaves = _leaves_within(
                model_leaves, f"model/{scope}".rstrip("/")
            )
            if not scope_leaves:
                raise errors.StateBuilderError(
                    f"{self.path()}: the model of source_trainer_config has no layer {scope!r}; "
                    f"its parameters are {', '.join(list(model_leaves)[:5])}, … Use such a path, "
                    "without 'model/'."
                )
            selected_leaves |= scope_leaves
        return Builder.State(
            target.step, _state_of_leaves(selected_leaves, self.path())
        ), aux

    def source_to_target(
        self, source: Builder.State, aux: Any
    ) -> Builder.State:
        model = aux.trainer_state.model
        leaves_before = _leaves_by_path({"model": model})
        for target_scope, source_scope in self.scopes.items():
            model = traverse_and_set_target_state_parameters(
                target_state=model,
                target_scope=target_scope,
                source_params=source.trainer_state.model,
                source_scope=source_scope,
            )
        values: dict[str, Leaf] = {}
        for path, leaf in _leaves_by_path({"model": model}).items():
            if leaf is not leaves_before[path]:
                values[path] = leaf
        return _with_values(aux, values, source.step)


class PosEmbeddingConverter(BaseConverterFromPretrainedModel):
    """Converter for a model with position tables of another length.

    All parameters are taken. Those below a layer called "pos_emb" are resized along the axes in
    which their shapes differ.
    """

    class Config(BaseConverterFromPretrainedModel.Config):
        """Configures a PosEmbeddingConverter."""

        strategy: Required[str] = REQUIRED
        """"truncate" shortens a longer table; "interpolate" resizes it linearly."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if cfg.strategy not in ("truncate", "interpolate"):
            raise errors.StateBuilderError(
                f"{self.path()}: strategy={cfg.strategy!r}; expected 'truncate' or 'interpolate'."
            )

    def source_to_target(
        self, source: Builder.State, aux: Any
    ) -> Builder.State:
        target_leaves = _leaves_by_path({"model": aux.trainer_state.model})
        values = _leaves_by_path({"model": source.trainer_state.model})
        for path, value in values.items():
            if path in target_leaves and "pos_emb" in path.split("/"):
                values[path] = self._resize(
                    path, value, target_leaves[path].shape
                )
        return _with_values(aux, values, source.step)

    def _resize(
        self, path: str, value: Tensor, shape: tuple[int, ...]
    ) -> Tensor:
        if value.shape == shape or value.ndim != len(shape):
            return value
        if self.config.strategy == "interpolate":
            return jax.image.resize(value, shape, "linear")
        if any(n > m for n, m in zip(shape, value.shape, strict=True)):
            raise errors.StateBuilderError(
                f"{self.path()}: {path!r} is {list(value.shape)} in the checkpoint and "
                f"{list(shape)} here; 'truncate' only shortens tables. Use 'interpolate'."
            )
        return value[tuple(slice(n) for n in shape)]


class PruneEmaStateBuilder(Builder):
    """Builder that drops entries from the moving average that the model does not have."""

    def input_state_type(self) -> Builder.StateType:
        return Builder.StateType.TENSORS

    def __call__(self, state: Builder.State) -> Builder.State:
        trainer_state = state.trainer_state
        ema = trainer_state.learner.get("ema")
        if ema is None:
            return state
        model_paths = set(_leaves_by_path(trainer_state.model))
        pruned_leaves: dict[str, Leaf] = {}
        built_keys = set(state.built_keys)
        for path, leaf in _leaves_by_path(ema.ema).items():
            if path in model_paths:
                pruned_leaves[f"model/{path}"] = leaf
            else:
                built_keys.discard(f"learner/ema/ema/{path}")
        pruned_ema = ema._replace(ema=_state_of_leaves(pruned_leaves, "").model)
        learner = {**trainer_state.learner, "ema": pruned_ema}
        return Builder.State(
            state.step, trainer_state._replace(learner=learner), built_keys
        )


def traverse_and_set_target_state_parameters(
    *,
    target_state: PyTree,
    target_scope: str,
    source_params: PyTree,
    source_scope: str,
) -> PyTree:
    """Returns a model's parameters, or specs, with those of one layer taken from another model.

    A scope is the path of the layer in the model, with "/", or "" for the whole model.

    Raises StateBuilderError if a layer does not exist, or has other parameters.
    """
    target_leaves = _leaves_by_path(target_state)
    replaced_leaves = _leaves_within(target_leaves, target_scope)
    new_leaves: dict[str, Leaf] = {}
    for path, leaf in _leaves_within(
        _leaves_by_path(source_params), source_scope
    ).items():
        path_in_layer = path.removeprefix(source_scope).lstrip("/")
        new_leaves[f"{target_scope}/{path_in_layer}".strip("/")] = leaf
    unmatched_paths = sorted(replaced_leaves.keys() ^ new_leaves.keys())
    if unmatched_paths or not replaced_leaves:
        layer = f"{target_scope or 'the model'} (from {source_scope or 'the whole'})"
        difference = "none at all"
        if unmatched_paths:
            difference = (
                f"{', '.join(unmatched_paths[:5])} are on one side only"
            )
        raise errors.StateBuilderError(
            f"{layer} has other parameters than the source: {difference}. Name layers of the same "
            "class and config."
        )
    leaves = target_leaves | new_leaves
    return jax.tree.unflatten(jax.tree.structure(target_state), leaves.values())


def is_dict(x: object, has_key: str | None = None) -> bool:
    """Returns whether `x` is a dict, and has a key if one is given."""
    return isinstance(x, dict) and (has_key is None or has_key in x)


def _leaves_by_path(state: PyTree) -> dict[str, Leaf]:
    return dict(index.flatten_state(state))


def _leaves_within(leaves: Mapping[str, Leaf], scope: str) -> dict[str, Leaf]:
    """Returns the leaves of the layer at a path; those of all layers for ""."""
    if not scope:
        return dict(leaves)
    prefix = f"{scope}/"
    return {
        path: x
        for path, x in leaves.items()
        if path == scope or path.startswith(prefix)
    }


def _state_of_leaves(
    leaves: Mapping[str, Leaf], converter_path: str
) -> TrainerState:
    """Returns a state of nested dicts from its leaves by path."""
    tree: dict[str, Any] = {name: {} for name in TrainerState._fields}
    for path, leaf in leaves.items():
        *parent_names, name = path.split("/")
        parent = tree
        for parent_name in parent_names:
            parent = parent.setdefault(parent_name, {})
        if path.split("/")[0] not in TrainerState._fields or (
            parent_names and name in parent
        ):
            raise errors.StateBuilderError(
                f"{converter_path}: {path!r} is not a path of a state, or is requested twice; "
                f"expected one that begins with one of {', '.join(TrainerState._fields)}."
            )
        parent[name] = leaf
    return TrainerState(**tree)


def _with_values(
    target: Builder.State, values: Mapping[str, Leaf], step: int
) -> Builder.State:
    """Returns the target with some leaves replaced, each in its dtype and layout there."""
    leaves = _leaves_by_path(target.trainer_state)
    for path, value in values.items():
        if path not in leaves or tuple(value.shape) != tuple(
            leaves[path].shape
        ):
            shape_here = "nothing"
            if path in leaves:
                shape_here = list(leaves[path].shape)
            raise errors.StateBuilderError(
                f"{path!r} is {list(value.shape)} in the checkpoint, of "
                f"{math.prod(value.shape):,} elements, and {shape_here} in this run. Select parts "
                "with the same shapes in both, or convert it."
            )
    for path, value in values.items():
        leaves[path] = _like(value, leaves[path])
    state = jax.tree.unflatten(
        jax.tree.structure(target.trainer_state), leaves.values()
    )
    return Builder.State(step, state, target.built_keys | set(values))


def _like(value: Leaf, leaf: Leaf) -> Leaf:
    if value.dtype != leaf.dtype:
        value = value.astype(leaf.dtype)
    sharding = getattr(leaf, "sharding", None)  # an array of NumPy has none
    if sharding is None:
        return value
    return jax.device_put(value, sharding)
