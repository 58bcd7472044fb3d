"""Variables: values by reference, with metadata.

A variable is a box that modules share and transformations know. Its value can be an array or any
pytree; its class says what it is for (`Param`, `BatchStat`, `Cache` ...), and metadata says more,
such as how its axes are laid out. It computes like the value in it.
"""

from __future__ import annotations

import builtins
import copy
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from weft.core.tracing import current_trace
from weft.errors import (
    ImmutableVariableError,
    VariableArgumentError,
    VariableAttributeError,
    VariableMetadataError,
    VariableOperationError,
    VariableTypeError,
)
from weft.nnx.eager_sharding import laid_out, named_layout
from weft.nnx.initial_metadata import HOOKS, VariableMetadata
from weft.nnx.naming import changed_elsewhere, origin
from weft.nnx.references import held, held_at_first, with_defaults, write
from weft.nnx.structure import EPOCH, Fixed

A = TypeVar("A")
V = TypeVar("V", bound="Variable[Any]")
_MISSING: Any = object()
_ARRAYS = (jax.Array, np.ndarray)


def _called(hooks: Any, variable: "Variable[Any]", *args: Any) -> Any:
    """Runs hooks one after the other, each on what the one before has given."""
    *first, value = args
    for hook in hooks if isinstance(hooks, tuple | list) else (hooks,):
        value = hook(variable, *first, value)
    return value


class Variable(Generic[A]):
    """A value by reference.

    Args:
        value: an array, or any pytree.
        **metadata: what else is known of it. `on_get_value`, `on_set_value` and `on_create_value`
            are functions of the variable and a value, which give the value to use instead, or
            tuples of such; a subclass can have them as methods. `tag` is what string filters look
            for; with `mutable=False` the value stays. `out_sharding` lays the value over a mesh
            (`weft.nnx.eager_sharding`); with `ref=True` it is held in a `jax.Ref`
            (`weft.nnx.references`).

    Raises:
        NoMeshError: if the value is to be laid out, and there is no mesh.
        MeshError: if the mesh has no axis of a name, or there are more names than axes.
        AxisMetadataError: if `out_sharding` is no layout.
        VariableArgumentError: with `ref=True`, if the value is no array.

    Example:
        >>> step = Variable(jnp.array(3))
        >>> step[...] += 1
        >>> int(step + 1)
        5
    """

    __slots__ = ("__weakref__", "_metadata", "_origin", "_trace", "_value", "_watched")
    __hash__ = None  # pyright: ignore[reportAssignmentType] - as of the arrays that they stand for
    _hooks: Mapping[str, Any] = {}
    # Whether the class has a `get_value` or `set_value` of its own, for those who save the call.
    _gets = _sets = False

    def __init__(self, value: A, **metadata: Any):
        set_ = object.__setattr__
        if isinstance(value, VariableMetadata):
            metadata, value = {**metadata, **value.entries()}, value.raw_value
        if self._hooks:
            metadata = {**self._hooks, **metadata}
        given, metadata = metadata, with_defaults(metadata)
        if metadata:
            metadata = named_layout(metadata, type(self).__name__)
        set_(self, "_metadata", metadata)
        set_(self, "_trace", current_trace())
        set_(self, "_origin", origin())
        set_(self, "_watched", False)
        if "on_create_value" in metadata:
            value = _called(metadata["on_create_value"], self, value)
        value = self.create_value(value)
        if metadata or type(value) is jax.Ref:
            value = _as_asked(value, metadata, given, type(self).__name__)
        set_(self, "_value", value)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = {name: vars(cls)[name] for name in HOOKS if name in vars(cls)}
        if own:
            cls._hooks = {**cls._hooks, **own}
        cls._gets = cls.get_value is not Variable.get_value
        cls._sets = cls.set_value is not Variable.set_value
        _register(cls)

    # The value.

    @property
    def type(self) -> "builtins.type[Variable[Any]]":
        """The class of the variable, which filters look for."""
        return type(self)

    var_type = type

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self.get_value().shape  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def sharding_names(self) -> Any:
        """How the value's axes are laid out, None where nothing is said of them."""
        return self._metadata.get("out_sharding")

    @property
    def ref(self) -> bool:
        """Whether the value was asked to be held in a `jax.Ref` (`weft.nnx.references`)."""
        return bool(self._metadata.get("ref"))

    @property
    def hijax(self) -> bool:
        """Whether that was asked for under this name."""
        return bool(self._metadata.get("hijax"))

    def create_value(self, value: A) -> A:
        """What a new variable holds; subclasses may make something else of it."""
        return value

    def get_value(self, *, index: Any = _MISSING) -> A:
        """The value; a subclass may give something else, which is then read everywhere.

        Args:
            index: gives a part of it; `...` is all of it.
        """
        value, metadata = self._value, self._metadata
        if metadata:
            if "ref" in metadata or "hijax" in metadata:
                value = _read(value)
            if "on_get_value" in metadata:
                value = _called(metadata["on_get_value"], self, value)
        return value if index is _MISSING or index is ... else value[index]  # pyright: ignore[reportIndexIssue]

    def set_value(self, value: A, *, index: Any = _MISSING) -> None:
        """Sets the value.

        Args:
            value: the new one; it may have another shape.
            index: sets a part of it; `...` keeps an array's shape and dtype.

        Raises:
            ImmutableVariableError: if the variable has the metadata `mutable=False`.
            TraceContextError: inside of a transformation that it did not go through.
            VariableShapeError: if the value is held in a `jax.Ref`, and the shape is another.
        """
        self._check_writable()
        if isinstance(value, Variable):
            value = value.get_value()
        if index is ...:
            value, index = self._in_shape(value), _MISSING
        metadata = self._metadata
        if not metadata and index is _MISSING:  # neither a hook nor a reference
            _set_value(self, value)
            return
        has_hook = "on_set_value" in metadata
        if not has_hook and self._is_held():
            write(self._value, value, ... if index is _MISSING else index, _shown(self))
            return
        if index is not _MISSING:
            before = _read(self._value) if self._is_held() else self._value
            value = _with_part(before, index, value)
        if has_hook:
            value = _called(metadata["on_set_value"], self, value)
        self._put(value)

    def _is_held(self) -> bool:
        """Whether the value is in a `jax.Ref`; metadata is asked first, as it answers sooner."""
        metadata = self._metadata
        is_asked = "ref" in metadata or "hijax" in metadata
        return is_asked and isinstance(self._value, jax.Ref)

    def _put(self, value: Any) -> None:
        """Puts a value in the place of the one that is there, or into its reference."""
        if self._is_held() and not isinstance(value, jax.Ref):
            write(self._value, value, ..., _shown(self))
        else:
            _set_value(self, value)

    def get_raw_value(self) -> A:
        """The value without hooks."""
        return self._value

    def set_raw_value(self, value: A, *, _unsafe_bypass_check: bool = False) -> None:
        """Sets the value without hooks; see `set_value`."""
        if not _unsafe_bypass_check:
            self._check_writable()
        self._put(value)

    def _check_writable(self) -> None:
        trace, here, metadata = self._trace, current_trace(), self._metadata
        # A reference may be written to in any trace: JAX carries the change out of it.
        if trace is not here and trace != here and not self._is_held():
            raise changed_elsewhere(self)
        if metadata and not metadata.get("mutable", True):
            raise ImmutableVariableError(_shown(self))

    @property
    def value(self) -> A:
        """The value, as `get_value()` gives it and `set_value` sets it."""
        return self.get_value() if self._metadata or self._gets else self._value  # pyright: ignore[reportReturnType]

    @value.setter
    def value(self, value: A) -> None:
        self.set_value(value)

    @property
    def raw_value(self) -> A:
        """The value without hooks."""
        return self._value

    # Metadata.

    def get_metadata(
        self, name: str | None = None, default: Any = _MISSING, *, exclude_required: bool = False
    ) -> Any:
        """All metadata, or one entry.

        Args:
            name: of the entry; None for all, as a new dict.
            default: where there is no such entry.
            exclude_required: ignored; no entry is there that was not given.

        Raises:
            VariableMetadataError: if there is no such entry, and no default.
        """
        if name is None:
            return dict(self._metadata)
        if name not in self._metadata and default is _MISSING:
            raise VariableMetadataError(
                f"{_shown(self)} has no metadata {name!r}; there are: "
                f"{', '.join(self._metadata) or 'none'}."
            )
        return self._metadata.get(name, default)

    def set_metadata(self, *args: Any, **metadata: Any) -> None:
        """Sets metadata.

        Args:
            *args: a name and a value; or a mapping that is to be all of the metadata.
            **metadata: names and values.

        Raises:
            VariableArgumentError: if it is called in another way.
            TraceContextError: inside of a transformation that the variable did not go through.
        """
        if self._trace != current_trace():
            raise changed_elsewhere(self)
        if not args:
            changed = {**self._metadata, **metadata}
        elif len(args) == 1 and isinstance(args[0], Mapping) and not metadata:
            changed = dict(args[0])
        elif len(args) == 2 and isinstance(args[0], str) and not metadata:
            changed = {**self._metadata, args[0]: args[1]}
        else:
            raise VariableArgumentError(
                f"{_shown(self)}: set_metadata was given {args!r} and {metadata!r}; give it names "
                "and values (name=value), or a mapping that is to be all of the metadata."
            )
        object.__setattr__(self, "_metadata", changed)
        self._changed()

    def has_metadata(self, name: str) -> bool:
        """Whether there is an entry."""
        return name in self._metadata

    def del_metadata(self, name: str) -> None:
        """Removes an entry.

        Raises:
            VariableMetadataError: if there is no such entry.
        """
        self.get_metadata(name)
        self.set_metadata({k: v for k, v in self._metadata.items() if k != name})

    def _changed(self) -> None:
        if self._watched:
            EPOCH.end()

    @classmethod
    def from_metadata(cls: builtins.type[V], value: Any, attributes: Mapping[str, Any]) -> V:
        """A variable of a value and metadata, without hooks being called."""
        variable = object.__new__(cls)
        set_ = object.__setattr__
        set_(variable, "_metadata", dict(attributes))
        set_(variable, "_trace", current_trace())
        set_(variable, "_watched", False)
        set_(variable, "_value", value)
        return variable

    # Copies.

    def copy(self: V, value: Any = _MISSING, *, _copy_ref: bool = True, **updates: Any) -> V:
        """A variable of its own.

        Args:
            value: what it holds, by default the same; what is in a `jax.Ref` is copied.
            **updates: metadata that it has instead.
        """
        new = self._value if value is _MISSING else value
        metadata = {**self._metadata, **updates}
        if metadata:
            metadata = (
                with_defaults(metadata) if "ref" in updates or "hijax" in updates else metadata
            )
            new = held(_read(new) if _copy_ref and self._is_held() else new, metadata)
        return type(self).from_metadata(new, metadata)

    replace = copy
    to_state = copy

    def copy_from(self, other: "Variable[A]") -> None:
        """Takes over the value and the metadata of another variable of the same class.

        Raises:
            VariableTypeError: if its class is another.
        """
        if type(other) is not type(self):
            raise VariableTypeError(
                f"{_shown(self)} cannot take over a {type(other).__name__}; give one of its "
                "own class."
            )
        self._check_writable()
        self._put(_read(other._value) if other._is_held() else other._value)
        self.set_metadata(_of_other(self, other))

    def update_from_state(self, variable_state: "Variable[A]") -> None:
        """Takes over the value, and metadata that differs."""
        self._check_writable()
        other = variable_state
        self._put(_read(other._value) if other._is_held() else other._value)
        if metadata_key(self) != metadata_key(variable_state):
            self.set_metadata(_of_other(self, variable_state))

    # Axes.

    def add_axis(self, axis_index: int, axis_name: str | None) -> None:
        """Tells the metadata that the value has gained an axis."""
        if "on_add_axis" in self._metadata:
            _called(self._metadata["on_add_axis"], self, axis_index, axis_name)

    def remove_axis(self, axis_index: int, axis_name: str | None) -> None:
        """Tells the metadata that the value has lost an axis."""
        if "on_remove_axis" in self._metadata:
            _called(self._metadata["on_remove_axis"], self, axis_index, axis_name)

    # Like the value.

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        metadata = object.__getattribute__(self, "_metadata")
        if name in metadata:
            return metadata[name]
        try:
            return getattr(self.get_value(), name)
        except AttributeError:
            raise VariableAttributeError(
                f"{_shown(self)} has no metadata {name!r}, and its value has no such attribute."
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("value", "raw_value"):
            object.__setattr__(self, name, value)
            return
        raise VariableAttributeError(
            f"{_shown(self)}: {name} cannot be set; metadata is set by "
            f"variable.set_metadata({name}=...), the value by variable[...] = ..."
        )

    def __getitem__(self, index: Any) -> Any:
        value = self.get_value() if self._metadata or self._gets else self._value
        return value if index is ... else value[index]  # pyright: ignore[reportIndexIssue]

    def __setitem__(self, index: Any, value: Any) -> None:
        if index is not ... or self._sets:
            self.set_value(value, index=index)
            return
        before = self._value
        kind = type(value)
        if not (kind is type(before) and _is_array(kind) and value.aval == before.aval):
            value = self._in_shape(value)  # most writes are not to cost more than this look
        self.set_value(value)

    def _in_shape(self, value: Any) -> Any:
        """A value as large as the array that is there."""
        before = self._value
        return _like(before, value) if isinstance(before, _ARRAYS) or self._is_held() else value

    def __delitem__(self, index: Any) -> None:
        changed = copy.copy(self.get_value())
        del changed[index]  # pyright: ignore[reportIndexIssue]
        self.set_value(changed)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.get_value()(*args, **kwargs)  # pyright: ignore[reportCallIssue]

    def __len__(self) -> int:
        return len(self.get_value())  # pyright: ignore[reportArgumentType]

    def __iter__(self) -> Any:
        return iter(self.get_value())  # pyright: ignore[reportCallIssue, reportArgumentType]

    def __contains__(self, item: Any) -> bool:
        return item in self.get_value()  # pyright: ignore[reportOperatorIssue]

    def __bool__(self) -> bool:
        return bool(self.get_value())

    def __int__(self) -> int:
        return int(self.get_value())  # pyright: ignore[reportArgumentType]

    def __float__(self) -> float:
        return float(self.get_value())  # pyright: ignore[reportArgumentType]

    def __complex__(self) -> complex:
        return complex(self.get_value())  # pyright: ignore[reportCallIssue, reportArgumentType]

    def __index__(self) -> int:
        return operator.index(self.get_value())  # pyright: ignore[reportArgumentType]

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.get_value())

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return jax.device_get(self.get_value()).__array__(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {"value": _read(self._value), "metadata": self._metadata}

    def __setstate__(self, state: dict[str, Any]) -> None:
        value = held(state["value"], state["metadata"])
        made = type(self).from_metadata(value, state["metadata"])
        for name in ("_metadata", "_trace", "_watched", "_value"):
            object.__setattr__(self, name, getattr(made, name))

    def __repr__(self) -> str:
        from weft.nnx.display import variable_repr

        return variable_repr(self)


_set_value = Variable._value.__set__  # pyright: ignore[reportAttributeAccessIssue]

NO_METADATA = Fixed(())


def metadata_key(variable: Variable[Any]) -> Fixed:
    """The metadata, compared by value."""
    metadata = variable._metadata
    return Fixed(tuple(sorted(metadata.items()))) if metadata else NO_METADATA


def _register(cls: type[Variable[Any]]) -> None:
    """Makes variables pytrees of their values."""

    def flatten(x: Variable[Any]) -> tuple[list[Any], Any]:
        return [x._value], metadata_key(x)

    def flatten_with_keys(x: Variable[Any]) -> tuple[list[Any], Any]:
        return [(jax.tree_util.GetAttrKey("value"), x._value)], metadata_key(x)

    def unflatten(metadata: Fixed, children: Any) -> Variable[Any]:
        return cls.from_metadata(children[0], dict(metadata.value))

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)


_register(Variable)


def _read(value: Any) -> Any:
    """What is held, without the reference that holds it."""
    return value[...] if isinstance(value, jax.Ref) else value


def _as_asked(value: Any, metadata: dict[str, Any], given: dict[str, Any], what: str) -> Any:
    """The value of a new variable as its metadata asks for it."""
    if isinstance(value, jax.Ref):
        raise VariableArgumentError(
            f"a {what} was given a jax.Ref; give it the array, and ref=True."
        )
    if metadata.get("out_sharding") is not None:
        value = laid_out(value, metadata, what)
    if "ref" in metadata or "hijax" in metadata:
        value = held_at_first(value, metadata, given, what)
    return value


def _of_other(variable: Variable[Any], other: Variable[Any]) -> dict[str, Any]:
    """The metadata of another variable, for one that is held in a reference or not, as before."""
    kept = {k: v for k, v in variable._metadata.items() if k in ("ref", "hijax")}
    return {**{k: v for k, v in other._metadata.items() if k not in ("ref", "hijax")}, **kept}


def _with_part(value: Any, index: Any, part: Any) -> Any:
    if isinstance(value, jax.Array):
        return value.at[index].set(part)
    if index is ...:
        return part
    changed = copy.copy(value)
    changed[index] = part
    return changed


@functools.cache
def _is_array(kind: type) -> bool:
    return issubclass(kind, jax.Array)


def _like(before: Any, value: Any) -> Any:
    """A value as large as the one that was there, as for the items of an array."""
    if isinstance(value, Variable):
        value = value.get_value()
    if isinstance(value, jax.Array):
        if (
            value.dtype == before.dtype
            and value.shape == before.shape
            # A counter that is weakly typed at first would be traced twice if it were not later.
            and (not getattr(value, "weak_type", False) or getattr(before, "weak_type", False))
        ):
            return value
    elif isinstance(before, np.ndarray):
        return np.broadcast_to(np.asarray(value, before.dtype), before.shape).copy()
    value = jnp.asarray(value, before.dtype)
    return value if value.shape == before.shape else jnp.broadcast_to(value, before.shape)


def _shown(variable: Variable[Any]) -> str:
    value = variable._value
    shape = f" of shape {value.shape}" if hasattr(value, "shape") else ""
    return f"{type(variable).__name__}{shape}"


def _binary(name: str, fn: Callable[[Any, Any], Any], reverse: bool = False) -> Any:
    def method(self: Variable[Any], other: Any) -> Any:
        other = other.get_value() if isinstance(other, Variable) else other
        return fn(other, self.get_value()) if reverse else fn(self.get_value(), other)

    method.__name__ = name
    return method


def _unary(name: str, fn: Callable[[Any], Any]) -> Any:
    def method(self: Variable[Any]) -> Any:
        return fn(self.get_value())

    method.__name__ = name
    return method


def _in_place(name: str, sign: str) -> Any:
    def method(self: Variable[Any], other: Any) -> Any:
        raise VariableOperationError(
            f"variable {sign} x would put the result in the variable's place; write variable[...] "
            f"{sign} x to change its value."
        )

    method.__name__ = name
    return method


_BINARY = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "matmul": "@", "and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>",
}  # fmt: skip
for _name, _sign in _BINARY.items():
    _fn = getattr(operator, {"and": "and_", "or": "or_"}.get(_name, _name))
    setattr(Variable, f"__{_name}__", _binary(f"__{_name}__", _fn))
    setattr(Variable, f"__r{_name}__", _binary(f"__r{_name}__", _fn, reverse=True))
    setattr(Variable, f"__i{_name}__", _in_place(f"__i{_name}__", f"{_sign}="))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Variable, f"__{_name}__", _binary(f"__{_name}__", getattr(operator, _name)))
for _name in ("neg", "pos", "abs", "invert"):
    setattr(Variable, f"__{_name}__", _unary(f"__{_name}__", getattr(operator, _name)))
Variable.__divmod__ = _binary("__divmod__", divmod)  # pyright: ignore[reportAttributeAccessIssue]
Variable.__rdivmod__ = _binary("__rdivmod__", divmod, reverse=True)  # pyright: ignore[reportAttributeAccessIssue]
Variable.__round__ = lambda self, n=0: round(self.get_value(), n)  # pyright: ignore[reportAttributeAccessIssue]
