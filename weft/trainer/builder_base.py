"""Builders of a run's initial state, and converters between state formats.

A builder takes a state in the form that the run needs, and returns it with values for some of its
leaves, which it lists; the others are initialized randomly. If a storage holds another form, a
converter translates:

    target --target_to_source--> source --read by a builder--> source --source_to_target--> target

The leaves are either arrays (`TENSORS`) or only shapes, dtypes and layouts (`TENSOR_SPECS`), so
that nothing is initialized that is then read.
"""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax

from weft.config import REQUIRED, Required, config_class
from weft.errors import StateBuilderError
from weft.hierarchy.module import Module
from weft.trainer.checkpoint_index import (
    CheckpointValidationType,
    build_index,
    check_state_structure,
    flatten_state,
)
from weft.trainer.interruption import Interruptible, getting_ready
from weft.trainer.train_step import TrainerState
from weft.typing import Tensor


class Builder(Module):
    """Base of the builders."""

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
        raise NotImplementedError(type(self))

    def __call__(self, state: "Builder.State") -> "Builder.State":
        """Returns a state, given in the form that the run needs, with arrays at `built_keys`."""
        raise NotImplementedError(type(self))


def needs_tensors(*types: Builder.StateType) -> Builder.StateType:
    """Returns TENSORS if one of several types is TENSORS."""
    found = Builder.StateType.TENSORS in types
    return Builder.StateType.TENSORS if found else Builder.StateType.TENSOR_SPECS


class ChainBuilder(Builder):
    """Builder that applies several builders in turn."""

    @config_class
    class Config(Builder.Config):
        """Configures a ChainBuilder.

        Attributes:
            validation: how strictly the structures of the result and the input must agree; None
                to skip the check.
        """

        builders: Required[Sequence[Builder.Config]] = REQUIRED
        validation: CheckpointValidationType | None = CheckpointValidationType.EXACT

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._builders: list[Any] = [
            self._add_child(f"builder{i}", builder) for i, builder in enumerate(cfg.builders)
        ]

    def input_state_type(self) -> Builder.StateType:
        return needs_tensors(*(builder.input_state_type() for builder in self._builders))

    def __call__(self, state: Builder.State) -> Builder.State:
        before = build_index(state.trainer_state)
        for builder in self._builders:
            state = builder(state)
        validation = self.config.validation
        if validation is not None:
            check_state_structure(build_index(state.trainer_state), before, validation=validation)
        return state


class Converter(Module):
    """Base of the converters between the form that is stored and the form that a run needs."""

    def target_state_type(self) -> Builder.StateType:
        """Returns the type of leaves that `target_to_source` takes."""
        raise NotImplementedError(type(self))

    def target_to_source(self, target: Builder.State) -> tuple[Builder.State, Any]:
        """Returns the stored form of a run's state, for a builder, and data for the way back."""
        raise NotImplementedError(type(self))

    def source_to_target(self, source: Builder.State, aux: Any) -> Builder.State:
        """Returns a run's state from its stored form and the data of `target_to_source`."""
        raise NotImplementedError(type(self))


class ChainConverter(Converter):
    """Converter that applies several converters in turn, from the stored form to the target."""

    @config_class
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

    @config_class
    class Config(Builder.Config):
        """Configures a RestoreAndConvertBuilder."""

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
) -> tuple[int, TrainerState]:
    """Returns the number of completed steps, always 0, and the state of a new run.

    Args:
        builder: provides values; None to initialize all.
        init: initializes a whole state; compiled, it computes only the missing leaves.
        prng_key: for `init`.
        shardings: the layout of each array.
        interruptible: whether a stop request interrupts the compilation.

    Raises:
        StateBuilderError: if the builder's values do not match the state of the run.
    """

    def jit(fn: Callable[[Tensor], Any], layout: Any) -> Callable[[Tensor], Any]:
        jitted = jax.jit(fn, out_shardings=layout)
        return Interruptible(jitted, "the initial state") if interruptible else jitted

    draw = jit(init, shardings)
    if builder is None:
        return 0, draw(prng_key)
    specs = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(init, prng_key),
        shardings,
    )
    drawn_first = builder.input_state_type() is Builder.StateType.TENSORS
    state = draw(prng_key) if drawn_first else specs
    with getting_ready("building the first state"):
        built = builder(Builder.State(step=0, trainer_state=state))
    values, wanted = dict(flatten_state(built.trainer_state)), dict(flatten_state(specs))
    missing = set() if drawn_first else wanted.keys() - built.built_keys
    _check_built(builder, values, wanted, missing)

    def draw_missing(prng_key: Tensor) -> dict[str, Any]:
        return {path: x for path, x in flatten_state(init(prng_key)) if path in missing}

    if missing:
        layouts = {path: wanted[path].sharding for path in missing}
        values |= jit(draw_missing, layouts)(prng_key)
    leaves = [jax.device_put(values[path], spec.sharding) for path, spec in wanted.items()]
    return 0, jax.tree.unflatten(jax.tree.structure(specs), leaves)


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
        raise StateBuilderError(
            f"{builder.path()}, a {type(builder).__name__}, lists {path!r} as built and returns "
            f"{got}, but the run needs an array of {_shown(spec)}. Convert it with a converter, "
            "or omit it from `built_keys` to initialize it."
        )


def _shown(value: Any) -> str:
    return f"{getattr(value, 'dtype', '')}{list(getattr(value, 'shape', ()))}"


def clone_tree(in_tree: Any) -> Any:
    """Returns a copy of a pytree with new containers and the same leaves."""
    return jax.tree.map(lambda x: x, in_tree)
