"""Builders make the state that a new run begins with; converters fit what they read to it.

A builder is given the state as the run needs it, and returns it with values in some of its parts.
It says which: the others are drawn as for any new run. A storage often holds a state of another
form; then a converter stands between:

    target --target_to_source--> source --read by a builder--> source --source_to_target--> target

A state on its way is either arrays (`TENSORS`), or only shapes, dtypes and layouts
(`TENSOR_SPECS`), so that nothing is drawn that is read a moment later.
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
        """What the leaves of a state are.

        Attributes:
            TENSORS: arrays.
            TENSOR_SPECS: `jax.ShapeDtypeStruct`s with the layouts that arrays are to have.
        """

        TENSORS = "TENSORS"
        TENSOR_SPECS = "TENSOR_SPECS"

    @dataclasses.dataclass
    class State:
        """A state that is being built.

        Attributes:
            step: the step that it is from; 0 for none.
            trainer_state: the leaves.
            built_keys: the paths of the leaves that have their final values, such as
                "model/decoder/emb/weight".
        """

        step: int
        trainer_state: TrainerState
        built_keys: set[str] = dataclasses.field(default_factory=set)

    def input_state_type(self) -> "Builder.StateType":
        """Which leaves `__call__` is to be given."""
        raise NotImplementedError(type(self))

    def __call__(self, state: "Builder.State") -> "Builder.State":
        """Puts values into a state.

        Args:
            state: as the run needs it.

        Returns:
            A state of the same form, with arrays at `built_keys`.
        """
        raise NotImplementedError(type(self))


def needs_tensors(*types: Builder.StateType) -> Builder.StateType:
    """TENSORS if one of several needs them."""
    found = Builder.StateType.TENSORS in types
    return Builder.StateType.TENSORS if found else Builder.StateType.TENSOR_SPECS


class ChainBuilder(Builder):
    """Builders one after the other, each on what the one before has made."""

    @config_class
    class Config(Builder.Config):
        """Configures a ChainBuilder.

        Attributes:
            builders: in their order.
            validation: how alike the form of the result and of what came in must be; None for not
                at all.
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
        """Which leaves `target_to_source` is to be given."""
        raise NotImplementedError(type(self))

    def target_to_source(self, target: Builder.State) -> tuple[Builder.State, Any]:
        """The form in which a state is stored.

        Args:
            target: as the run needs it.

        Returns:
            What a builder is to read; anything that `source_to_target` needs beside.
        """
        raise NotImplementedError(type(self))

    def source_to_target(self, source: Builder.State, aux: Any) -> Builder.State:
        """A state as the run needs it.

        Args:
            source: as it was read.
            aux: of `target_to_source`.
        """
        raise NotImplementedError(type(self))


class ChainConverter(Converter):
    """Converters one after the other: the first takes what is stored, the last gives the target."""

    @config_class
    class Config(Converter.Config):
        """Configures a ChainConverter.

        Attributes:
            converters: in the order in which they convert what was read.
        """

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
    r"""Reads what is stored with a builder, and converts it.

    Example: the decoder of another run, whose model calls it by another name.

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
        """Configures a RestoreAndConvertBuilder.

        Attributes:
            builder: reads.
            converter: converts.
        """

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


# What the trainer does with a builder.


def initial_state(
    builder: Builder | None,
    init: Callable[[Tensor], TrainerState],
    prng_key: Tensor,
    shardings: TrainerState,
    *,
    interruptible: bool = False,
) -> tuple[int, TrainerState]:
    """The state of a new run: what a builder gives, and the rest drawn.

    Args:
        builder: gives values; None for no values.
        init: draws a whole state. It is compiled, and of a part only that part is computed.
        prng_key: for `init`.
        shardings: the layout of each array.
        interruptible: whether a run that is asked to stop leaves while this is compiled.

    Returns:
        The number of steps that were run, which is 0 whatever the step of what was read, and the
        state.

    Raises:
        StateBuilderError: if the builder gives something else than the run needs.
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
            f"{builder.path()}, a {type(builder).__name__}, says that it has built {path!r}, where "
            f"the run needs an array of {_shown(spec)}, and gives {got}. Let a converter fit it, "
            "or leave it out of `built_keys`, to have it drawn."
        )


def _shown(value: Any) -> str:
    return f"{getattr(value, 'dtype', '')}{list(getattr(value, 'shape', ()))}"


def clone_tree(in_tree: Any) -> Any:
    """A copy of a tree whose containers are new, and whose leaves are the same.

    Args:
        in_tree: a pytree.
    """
    return jax.tree.map(lambda x: x, in_tree)
