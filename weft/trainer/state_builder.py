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

from weft import errors, serialization
from weft.config import REQUIRED, InstantiableConfig, Required, maybe_instantiate
from weft.core.spmd import get_concrete_mesh
from weft.distributed.preemption import InterruptibleJit, barrier_after
from weft.hierarchy import Module, base_state, with_base_state
from weft.interop.huggingface import load_huggingface_params
from weft.trainer.checkpointer import dirs, index
from weft.trainer.checkpointer.checkpointer import Checkpointer
from weft.trainer.checkpointer.storage import OrbaxStateStorage, StateStorage
from weft.trainer.mesh import build_mesh, named_sharding, rules_of
from weft.trainer.model import build_model
from weft.trainer.optimizers.base import at_least_float32
from weft.trainer.state import parameter_specs, with_shardings
from weft.trainer.train_step import TrainerState
from weft.typing import T, Tensor


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
    found = Builder.StateType.TENSORS in types
    return Builder.StateType.TENSORS if found else Builder.StateType.TENSOR_SPECS


class ChainBuilder(Builder):
    """Builder that applies several builders in turn."""

    class Config(Builder.Config):
        """Configures a ChainBuilder.

        Attributes:
            validation: how strictly the structures of result and input must agree; None for not.
        """

        builders: Required[Sequence[Builder.Config]] = REQUIRED
        validation: index.CheckpointValidationType | None = index.CheckpointValidationType.EXACT

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._builders: list[Any] = [
            self._add_child(f"builder{i}", builder) for i, builder in enumerate(cfg.builders)
        ]

    def input_state_type(self) -> Builder.StateType:
        return needs_tensors(*(builder.input_state_type() for builder in self._builders))

    def __call__(self, state: Builder.State) -> Builder.State:
        before = index.build_index(state.trainer_state)
        for builder in self._builders:
            state = builder(state)
        validation = self.config.validation
        if validation is not None:
            index.check_state_structure(
                index.build_index(state.trainer_state), before, validation=validation
            )
        return state


class Converter(Module):
    """Base of the converters between the form that is stored and the form that a run needs."""

    def target_state_type(self) -> Builder.StateType:
        """Returns the type of leaves that `target_to_source` takes."""
        return Builder.StateType.TENSOR_SPECS

    def target_to_source(self, target: Builder.State) -> tuple[Builder.State, Any]:
        """Returns the stored form of a run's state, for a builder, and data for the way back."""
        raise NotImplementedError(type(self))

    def source_to_target(self, source: Builder.State, aux: Any) -> Builder.State:
        """Returns a run's state from its stored form and the data of `target_to_source`."""
        raise NotImplementedError(type(self))


class ChainConverter(Converter):
    """Converter that applies several converters in turn, from the stored form to the target."""

    class Config(Converter.Config):
        """Configures a ChainConverter, from the converter of the stored form to the last."""

        converters: Required[Sequence[Converter.Config]] = REQUIRED

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._converters: list[Any] = [
            self._add_child(f"converter{i}", c) for i, c in enumerate(cfg.converters)
        ]

    def target_state_type(self) -> Builder.StateType:
        return needs_tensors(*(converter.target_state_type() for converter in self._converters))

    def target_to_source(self, target: Builder.State) -> tuple[Builder.State, Any]:
        auxes = []
        for converter in reversed(self._converters):
            target, aux = converter.target_to_source(target)
            auxes.append(aux)
        return target, auxes[::-1]

    def source_to_target(self, source: Builder.State, aux: Any) -> Builder.State:
        for converter, its in zip(self._converters, aux, strict=True):
            source = converter.source_to_target(source, its)
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

    def jit(fn: Callable[[Tensor], Any], layout: Any) -> Callable[[Tensor], Any]:
        jitted = jax.jit(fn, out_shardings=layout, compiler_options=compiler_options)
        return InterruptibleJit(jitted, "the initial state") if interruptible else jitted

    draw = jit(init, shardings)
    if builder is None:
        return draw(prng_key)
    specs = with_shardings(jax.eval_shape(init, prng_key), shardings)
    drawn_first = builder.input_state_type() is Builder.StateType.TENSORS
    state = draw(prng_key) if drawn_first else specs
    with barrier_after("building the first state"):
        built = builder(Builder.State(step=0, trainer_state=state))
    values = dict(index.flatten_state(built.trainer_state))
    wanted = dict(index.flatten_state(specs))
    missing = set() if drawn_first else wanted.keys() - built.built_keys
    _check_built(builder, values, wanted, missing)

    def draw_missing(prng_key: Tensor) -> dict[str, Any]:
        return {path: x for path, x in index.flatten_state(init(prng_key)) if path in missing}

    if missing:
        layouts = {path: wanted[path].sharding for path in missing}
        values |= jit(draw_missing, layouts)(prng_key)
    leaves = [jax.device_put(values[path], spec.sharding) for path, spec in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(specs), leaves)


def _check_built(
    builder: Builder, values: dict[str, Any], wanted: dict[str, Any], drawn: set[str]
) -> None:
    for path, spec in wanted.items():
        value = values.get(path)
        if path in drawn or (
            isinstance(value, jax.Array) and (value.shape, value.dtype) == (spec.shape, spec.dtype)
        ):
            continue
        got = "nothing" if value is None else f"{type(value).__name__} {_shown(value)}"
        raise errors.StateBuilderError(
            f"{builder.path()}, a {type(builder).__name__}, lists {path!r} as built and returns "
            f"{got}, but the run needs an array of {_shown(spec)}. Convert it with a converter, "
            "or omit it from `built_keys` to initialize it."
        )


def _shown(value: object) -> str:
    return f"{getattr(value, 'dtype', '')}{list(getattr(value, 'shape', ()))}"


def clone_tree(in_tree: T) -> T:
    """Returns a copy of a pytree with new containers and the same leaves."""
    return jax.tree.map(lambda x: x, in_tree)


class BaseStateStorageBuilder(Builder):
    """Base class of builders that read a checkpoint."""

    class Config(Builder.Config):
        """Configures a BaseStateStorageBuilder.

        Attributes:
            step: None for the newest undamaged checkpoint in `base_dir`.
            validation: required similarity of the checkpoint and the requested leaves, within each
                requested one of model, learner and PRNG key.
        """

        base_dir: str | None = None
        step: int | None = None
        validation: index.CheckpointValidationType = index.CheckpointValidationType.EXACT

    def _read(
        self, state: Builder.State, base_dir: str, step: int | None, storage: StateStorage.Config
    ) -> Builder.State:
        validation = self.config.validation
        cfg = Checkpointer.default_config().set(
            name="checkpointer", dir=base_dir, storage=storage, validation=validation.allowing_more
        )
        wanted = state.trainer_state
        with cfg.instantiate(parent=None) as checkpointer:
            found, restored = checkpointer.restore(step=step, state=wanted._asdict())
            if found is None:
                raise dirs.not_found_error(base_dir)
            if not validation.allows_more:
                asked = {path.split("/")[0] for path, _ in index.flatten_state(wanted)}
                saved = index.read_index_file(checkpointer.ckpt_dir(found))
                index.check_state_structure(
                    [(path, entry) for path, entry in saved if path.split("/")[0] in asked],
                    index.build_index(wanted),
                    validation=validation,
                )
        built = {path for path, leaf in index.flatten_state(wanted) if index.is_array(leaf)}
        return Builder.State(
            step=found, trainer_state=TrainerState(**restored), built_keys=state.built_keys | built
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
        return self._read(state, base_dir, dirs.parse_step_from_dir(cfg.dir), cfg.storage)


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


def import_weights(path: str, params: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a model with the values of a checkpoint.

    Args:
        path: The folder of a Hugging Face checkpoint, with its `config.json`; or safetensors files
            with the names of these parameters, as `weft export` writes them.
        params: The parameters, or their shapes (`jax.ShapeDtypeStruct`), with the target dtypes
            and shardings. Those of adapters are returned unchanged.

    Raises:
        WeightsReadError: if a file is missing or damaged.
        WeightsMismatchError: if the files do not match the model.
        HuggingFaceConfigError: if Weft has no counterpart of the checkpoint's model.
    """
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), base_state(params)
    )
    base: Any
    if (Path(path) / "config.json").exists():
        base = load_huggingface_params(path, target)
    else:
        base = serialization.load_safetensors(path, target, cast=True)
    return with_base_state(params, base)


class ImportedWeightsBuilder(Builder):
    """Builder that reads the parameters of a checkpoint; see `import_weights`."""

    class Config(Builder.Config):
        """Configures an ImportedWeightsBuilder; see `import_weights` for `path`."""

        path: Required[str] = REQUIRED

    def __call__(self, state: Builder.State) -> Builder.State:
        params: Any = state.trainer_state.model
        built = state.trainer_state._replace(model=import_weights(self.config.path, params))
        leaves = index.flatten_state({"model": built.model})
        read = {path for path, leaf in leaves if isinstance(leaf, jax.Array)}
        return dataclasses.replace(state, trainer_state=built, built_keys=state.built_keys | read)


class MergeStateSelection(enum.StrEnum):
    """Source of a leaf: the storage, under the same path, or the target, initialized as usual."""

    SOURCE = "SOURCE"
    TARGET = "TARGET"


class MergeStateConverter(Converter):
    """Converter that reads only some leaves, by path, under the same or other names."""

    class Config(Converter.Config):
        r"""Configures a MergeStateConverter.

        Attributes:
            selection_regexes: pairs of a regular expression for whole paths in the target, such as
                "model/decoder/.*", and the source of these leaves: a `MergeStateSelection`, or its
                name, or their paths in the storage, where "\1" is replaced by the first group of
                the match. The first matching pair counts. Leaves without a match are initialized as
                usual; but if all pairs are TARGET, they are read.
        """

        selection_regexes: list[tuple[str, str | MergeStateSelection]] = []

    def target_to_source(self, target: Builder.State) -> tuple[Builder.State, Any]:
        leaves = dict(index.flatten_state(target.trainer_state))
        taken = {}
        for path in leaves:
            source_path = self._source_path(path)
            if source_path is not None:
                taken[path] = source_path
        if not taken:
            raise errors.StateBuilderError(
                f"{self.path()}: no path of the state matches one of selection_regexes="
                f"{self.config.selection_regexes!r}; there are {', '.join(list(leaves)[:5])}, … "
                "Write expressions for whole paths."
            )
        source = _nested({at: leaves[path] for path, at in taken.items()}, self.path())
        return Builder.State(target.step, source), (target, taken)

    def _source_path(self, path: str) -> str | None:
        """Returns the path in the storage of a leaf of the target, None for one to initialize."""
        pairs = self.config.selection_regexes
        for regex, selected in pairs:
            match = re.fullmatch(regex, path)
            if match is not None:
                if selected.upper() == MergeStateSelection.TARGET:
                    return None
                is_same = selected.upper() == MergeStateSelection.SOURCE
                return path if is_same else match.expand(selected)
        excludes_only = all(selected.upper() == MergeStateSelection.TARGET for _, selected in pairs)
        return path if excludes_only else None

    def source_to_target(self, source: Builder.State, aux: Any) -> Builder.State:
        target, taken = aux
        read = dict(index.flatten_state(source.trainer_state))
        return _with_values(target, {path: read[at] for path, at in taken.items()}, source.step)


class EmaParamsConverter(Converter):
    """Converter that uses a run's moving average of parameters as the model's parameters."""

    def target_to_source(self, target: Builder.State) -> tuple[Builder.State, Any]:
        averages = {"ema": {"ema": at_least_float32(target.trainer_state.model)}}
        source = TrainerState(prng_key={}, model={}, learner=averages)
        return Builder.State(target.step, source), target

    def source_to_target(self, source: Builder.State, aux: Any) -> Builder.State:
        averages = index.flatten_state({"model": source.trainer_state.learner["ema"]["ema"]})
        return _with_values(aux, dict(averages), source.step)


class BaseConverterFromPretrainedModel(Converter):
    """Base class of converters from the model of another trainer's config."""

    class Config(Converter.Config):
        """Configures a BaseConverterFromPretrainedModel.

        Attributes:
            source_trainer_config: makes the config of the trainer that saved the checkpoint, or a
                function that does.
            mesh_shape: shape of the mesh that its arrays are read onto; None for the run's mesh.
        """

        source_trainer_config: Required[InstantiableConfig] = REQUIRED
        mesh_shape: Sequence[int] | None = None
        mesh_axis_names: Sequence[str] | None = None

    def target_to_source(self, target: Builder.State) -> tuple[Builder.State, Any]:
        source = TrainerState(prng_key={}, model=self._source_model(), learner={})
        return Builder.State(target.step, source), target

    def _source_model(self) -> Any:
        cfg = self.config
        made: Any = maybe_instantiate(cfg.source_trainer_config)
        trainer_cfg: Any = made() if callable(made) else made
        mesh: Any = get_concrete_mesh() or jax.sharding.get_mesh()
        if cfg.mesh_shape is not None:
            mesh = build_mesh(cfg.mesh_shape, cfg.mesh_axis_names or trainer_cfg.mesh_axis_names)
        model: Any = build_model(trainer_cfg)
        specs = dict(index.flatten_state(parameter_specs(model, rules_of(trainer_cfg).parameters)))
        shaped = {
            path: jax.ShapeDtypeStruct(
                spec.shape, spec.dtype, sharding=named_sharding(mesh, spec.partition_spec, path)
            )
            for path, spec in specs.items()
        }
        return _nested({f"model/{p}": s for p, s in shaped.items()}, self.path()).model


class ModelStateScopeConverter(BaseConverterFromPretrainedModel):
    """Converter that takes the model of another run, or some of its layers under any names."""

    class Config(BaseConverterFromPretrainedModel.Config):
        """Configures a ModelStateScopeConverter.

        Attributes:
            scope: path of a layer, such as "decoder/transformer", in both models; or a mapping from
                paths in this model to paths in the other. None or "" is the whole model.
        """

        scope: str | Mapping[str, str] | None = None

    @property
    def scopes(self) -> dict[str, str]:
        """Mapping from paths in this model to paths in the other."""
        scope = self.config.scope
        if scope is None:
            return {"": ""}
        return {scope: scope} if isinstance(scope, str) else dict(scope)

    def target_to_source(self, target: Builder.State) -> tuple[Builder.State, Any]:
        whole, aux = super().target_to_source(target)
        leaves = dict(index.flatten_state(whole.trainer_state))
        kept = {}
        for scope in self.scopes.values():
            inside = {p: x for p, x in leaves.items() if _within(p, f"model/{scope}".rstrip("/"))}
            if not inside:
                raise errors.StateBuilderError(
                    f"{self.path()}: the model of source_trainer_config has no layer {scope!r}; "
                    f"its parameters are {', '.join(list(leaves)[:5])}, … Use such a path, without "
                    "'model/'."
                )
            kept |= inside
        return Builder.State(target.step, _nested(kept, self.path())), aux

    def source_to_target(self, source: Builder.State, aux: Any) -> Builder.State:
        model = aux.trainer_state.model
        before = dict(index.flatten_state({"model": model}))
        for target_scope, source_scope in self.scopes.items():
            model = traverse_and_set_target_state_parameters(
                target_state=model,
                target_scope=target_scope,
                source_params=source.trainer_state.model,
                source_scope=source_scope,
            )
        after = dict(index.flatten_state({"model": model}))
        set_ = {path: x for path, x in after.items() if x is not before[path]}
        return _with_values(aux, set_, source.step)


class PosEmbeddingConverter(BaseConverterFromPretrainedModel):
    """Converter for a model with position tables of another length.

    All parameters are taken. Those below a layer called "pos_emb" are resized along the axes in
    which their shapes differ.
    """

    class Config(BaseConverterFromPretrainedModel.Config):
        """Configures a PosEmbeddingConverter.

        Attributes:
            strategy: "truncate" shortens a longer table; "interpolate" resizes it linearly.
        """

        strategy: Required[str] = REQUIRED

    def __init__(self, cfg: Config, *, parent: Any):
        super().__init__(cfg, parent=parent)
        if cfg.strategy not in ("truncate", "interpolate"):
            raise errors.StateBuilderError(
                f"{self.path()}: strategy={cfg.strategy!r}; expected 'truncate' or 'interpolate'."
            )

    def source_to_target(self, source: Builder.State, aux: Any) -> Builder.State:
        wanted = dict(index.flatten_state({"model": aux.trainer_state.model}))
        read = dict(index.flatten_state({"model": source.trainer_state.model}))
        values = {
            path: self._fitted(path, value, wanted[path].shape) if path in wanted else value
            for path, value in read.items()
        }
        return _with_values(aux, values, source.step)

    def _fitted(self, path: str, value: Any, shape: tuple[int, ...]) -> Any:
        if "pos_emb" not in path.split("/") or value.shape == shape or value.ndim != len(shape):
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
        of_state = state.trainer_state
        ema = of_state.learner.get("ema")
        if ema is None:
            return state
        known = {path for path, _ in index.flatten_state(of_state.model)}
        leaves = {p: x for p, x in index.flatten_state(ema.ema) if p in known}
        pruned = ema._replace(ema=_nested({f"model/{p}": x for p, x in leaves.items()}, "").model)
        learner = {**of_state.learner, "ema": pruned}
        kept = {f"learner/ema/ema/{path}" for path in leaves}
        built = {p for p in state.built_keys if not p.startswith("learner/ema/ema/") or p in kept}
        return Builder.State(state.step, of_state._replace(learner=learner), built)


def traverse_and_set_target_state_parameters(
    *, target_state: Any, target_scope: str, source_params: Any, source_scope: str
) -> Any:
    """Returns a model's parameters, or specs, with those of one layer taken from another model.

    A scope is the path of the layer in the model, with "/", or "" for the whole model.

    Raises StateBuilderError if a layer does not exist, or has other parameters.
    """
    of_target = {p: x for p, x in index.flatten_state(target_state) if _within(p, target_scope)}
    of_source = {
        f"{target_scope}/{path.removeprefix(source_scope).lstrip('/')}".strip("/"): x
        for path, x in index.flatten_state(source_params)
        if _within(path, source_scope)
    }
    differ = sorted(of_target.keys() ^ of_source.keys())
    if differ or not of_target:
        where = f"{target_scope or 'the model'} (from {source_scope or 'the whole'})"
        raise errors.StateBuilderError(
            f"{where} has other parameters than the source"
            + (f": {', '.join(differ[:5])} are on one side only" if differ else ": none at all")
            + ". Name layers of the same class and config."
        )
    leaves = [of_source.get(path, x) for path, x in index.flatten_state(target_state)]
    return jax.tree.unflatten(jax.tree.structure(target_state), leaves)


def is_dict(x: object, has_key: str | None = None) -> bool:
    """Returns whether `x` is a dict, and has a key if one is given."""
    return isinstance(x, dict) and (has_key is None or has_key in x)


def _within(path: str, scope: str) -> bool:
    return not scope or path == scope or path.startswith(f"{scope}/")


def _nested(leaves: Mapping[str, Any], where: str) -> TrainerState:
    """Returns a state of nested dicts from its leaves by path."""
    tree: dict[str, Any] = {name: {} for name in TrainerState._fields}
    for path, leaf in leaves.items():
        *above, name = path.split("/")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        if path.split("/")[0] not in TrainerState._fields or (above and name in node):
            raise errors.StateBuilderError(
                f"{where}: {path!r} is not a path of a state, or is requested twice; expected one "
                f"that begins with one of {', '.join(TrainerState._fields)}."
            )
        node[name] = leaf
    return TrainerState(**tree)


def _with_values(target: Builder.State, values: Mapping[str, Any], step: int) -> Builder.State:
    """Returns the target with some leaves replaced, each in its dtype and layout there."""
    wanted = index.flatten_state(target.trainer_state)
    known = dict(wanted)
    for path, value in values.items():
        if path not in known or tuple(value.shape) != tuple(known[path].shape):
            here = "nothing" if path not in known else list(known[path].shape)
            raise errors.StateBuilderError(
                f"{path!r} is {list(value.shape)} in the checkpoint, of "
                f"{math.prod(value.shape):,} elements, and {here} in this run. Select parts with "
                "the same shapes in both, or convert it."
            )
    leaves = [_like(values[path], leaf) if path in values else leaf for path, leaf in wanted]
    state = jax.tree.unflatten(jax.tree.structure(target.trainer_state), leaves)
    return Builder.State(step, state, target.built_keys | set(values))


def _like(value: Any, leaf: Tensor) -> Any:
    if value.dtype != leaf.dtype:
        value = value.astype(leaf.dtype)
    sharding = getattr(leaf, "sharding", None)  # an array of NumPy has none
    return value if sharding is None else jax.device_put(value, sharding)
