"""Variables: values by reference, with metadata.

A variable is a box that modules share and transformations track. Its value is an array or any
pytree; its class states its purpose (`Param`, `BatchStat`, `Cache` ...), and metadata more, such as
its sharding. Operators apply to its value. The names of the classes are Linen's collections.
"""

from __future__ import annotations

import builtins
import copy
import dataclasses
import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Generic, TypeGuard, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from weft import errors
from weft.core import spmd
from weft.core.display import join_lines
from weft.lifting.traces import current_trace
from weft.nnx import versions
from weft.nnx.display import Enclosing, Shown, size_text, value_repr
from weft.nnx.eager_sharding import (
    shard_new_value,
    using_eager_sharding,
    with_out_sharding,
)
from weft.nnx.refs import (
    initial_ref,
    is_in_ref,
    read_ref,
    to_ref,
    with_var_defaults,
    write_ref,
)
from weft.nnx.versions import (
    STRUCTURE_VERSION,
    StaticValue,
    foreign_trace_error,
    origin,
)
from weft.typing import MISSING, ArrayLike, PyTree

A = TypeVar("A")
V = TypeVar("V", bound="Variable[Any]")
Hooks = Callable[..., Any] | Sequence[Callable[..., Any]]
Index = Any
"""Index of a part of a value: whatever arrays accept, or what a user's class of values does."""

_describe = versions.class_and_shape
_REQUIRED_METADATA = ("hijax", "ref", "eager_sharding")
"""Metadata that every variable has; `_metadata` holds only what differs from the defaults."""


def _default_metadata() -> dict[str, bool]:
    return {
        "hijax": False,
        "ref": False,
        "eager_sharding": using_eager_sharding(),
    }


def _without_defaults(metadata: dict[str, Any]) -> dict[str, Any]:
    """Drops defaults from metadata of `get_metadata()`, or equal variables would compare unequal.

    Called where there is an entry `hijax`, as in all such metadata.
    """
    stored = dict(metadata)
    for name, default in _default_metadata().items():
        if stored.get(name) is default:
            del stored[name]
    return stored


def _call_hooks(
    hooks: Hooks, variable: "Variable[Any]", *args: PyTree
) -> PyTree:
    """Returns the last argument after all hooks, which get the other ones as they are."""
    *constant_args, value = args
    if callable(hooks):
        hooks = (hooks,)
    for hook in hooks:
        value = hook(variable, *constant_args, value)
    return value


class Variable(Shown, Generic[A]):
    """Value held by reference.

    Args:
        value: array, or any pytree.
        **metadata: `on_get_value`, `on_set_value` and `on_create_value` are functions, or tuples of
            functions, of the variable and a value that return a replacement; subclasses can define
            them as methods. String filters compare `tag`; `mutable=False` makes the value
            immutable; `out_sharding` shards it (`weft.nnx.eager_sharding`); `ref=True` holds it in
            a `jax.Ref` (`weft.nnx.refs`), each array of a pytree in its own.

    Raises:
        NoMeshError: if the value has a layout, and there is no mesh.
        MeshError: if the mesh lacks an axis, or there are more names than axes.
        AxisMetadataError: if `out_sharding` is not a layout.
        VariableArgumentError: with `ref=True`, if the value has other leaves than arrays.

    >>> step = Variable(jnp.array(3))
    >>> step[...] += 1
    >>> int(step + 1)
    5
    """

    # `_passed`, unset in most variables: see `weft.nnx.transforms.object_state.note_passed`.
    __slots__ = (
        "__weakref__",
        "_metadata",
        "_origin",
        "_passed",
        "_trace",
        "_value",
        "_watched",
    )
    __hash__ = None  # pyright: ignore[reportAssignmentType] - as of the arrays that they stand for
    _hooks: Mapping[str, Any] = {}
    # Whether the class overrides `get_value` or `set_value`; callers skip the call otherwise.
    _gets = _sets = False

    def __init__(self, value: A, **metadata: Any):
        set_ = object.__setattr__
        if isinstance(value, VariableMetadata):
            metadata = {**metadata, **value.entries()}
            value = value.raw_value
        if self._hooks:
            metadata = {**self._hooks, **metadata}
        arguments = metadata
        metadata = with_var_defaults(metadata)
        if metadata:
            # After `with_var_defaults`, for which `hijax=False` is a choice and no default.
            if "hijax" in arguments:
                metadata = _without_defaults(metadata)
            metadata = with_out_sharding(metadata, type(self).__name__)
        set_(self, "_metadata", metadata)
        set_(self, "_trace", current_trace())
        set_(self, "_origin", origin())
        set_(self, "_watched", False)
        if "on_create_value" in metadata:
            value = _call_hooks(metadata["on_create_value"], self, value)
        value = self.create_value(value)
        if metadata or type(value) is jax.Ref:
            value = _initial_value(self, value, arguments)
        set_(self, "_value", value)

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        methods = vars(cls)
        class_hooks = {name: methods[name] for name in HOOKS if name in methods}
        if class_hooks:
            cls._hooks = {**cls._hooks, **class_hooks}
        cls._gets = cls.get_value is not Variable.get_value
        cls._sets = cls.set_value is not Variable.set_value
        _register(cls)

    # The value.

    @property
    def type(self) -> "builtins.type[Variable[Any]]":
        """Class of the variable."""
        return type(self)

    var_type = type

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self.get_value().shape  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def sharding_names(self) -> spmd.Layout | None:
        """Layout of the value's axes, or None; deprecated: the metadata `out_sharding`."""
        errors.warn_deprecated(
            "sharding_names", 'use get_metadata("out_sharding", None)'
        )
        return self._metadata.get("out_sharding")

    @property
    def ref(self) -> bool:
        """True if the value should be held in a `jax.Ref` (`weft.nnx.refs`)."""
        return bool(self._metadata.get("ref"))

    @property
    def hijax(self) -> bool:
        """True if `hijax` was requested, the alias of `ref`."""
        return bool(self._metadata.get("hijax"))

    def create_value(self, value: A) -> A:
        """Returns the initial value; a hook for subclasses."""
        return value

    def get_value(self, *, index: Index = MISSING) -> A:
        """Returns the value, or the part at `index`; subclasses may override it, for all reads."""
        value = self._value
        metadata = self._metadata
        if metadata:
            if "ref" in metadata or "hijax" in metadata:
                value = read_ref(value)
            if "on_get_value" in metadata:
                value = _call_hooks(metadata["on_get_value"], self, value)
        if index is MISSING or index is ...:
            return value
        return value[index]  # pyright: ignore[reportIndexIssue]

    def set_value(self, value: A, *, index: Index = MISSING) -> None:
        """Sets the value, or a part of it; the index `...` keeps the shape and dtype of an array.

        Raises:
            ImmutableVariableError: if the variable has the metadata `mutable=False`.
            TraceContextError: inside a transformation that the variable was not passed to.
            VariableShapeError: if the value is in a `jax.Ref` of another shape.
        """
        self._check_writable()
        if isinstance(value, Variable):
            value = value.get_value()
        if index is ...:
            value = self._cast_to_shape(value)
            index = MISSING
        metadata = self._metadata
        if not metadata and index is MISSING:  # neither a hook nor a reference
            _set_value(self, value)
            return
        hooks = metadata.get("on_set_value")
        if hooks is None and self._is_in_ref():
            ref_index = ... if index is MISSING else index
            write_ref(self._value, value, ref_index, _describe(self))
            return
        if index is not MISSING:
            value = _with_index(self._read(), index, value)
        if hooks is not None:
            value = _call_hooks(hooks, self, value)
        self._put(value)

    def _is_in_ref(self) -> bool:
        """Returns whether the value is in a `jax.Ref`; checks metadata first, which is faster."""
        metadata = self._metadata
        if "ref" not in metadata and "hijax" not in metadata:
            return False
        return is_in_ref(self._value)

    def _read(self) -> A:
        """Returns the value without hooks, not in a `jax.Ref`."""
        if self._is_in_ref():
            return read_ref(self._value)
        return self._value

    def _put(self, value: A) -> None:
        if self._is_in_ref() and not is_in_ref(value):
            write_ref(self._value, value, ..., _describe(self))
        else:
            _set_value(self, value)

    def get_raw_value(self) -> A:
        """Returns the value without hooks."""
        return self._value

    def set_raw_value(
        self, value: A, *, _unsafe_bypass_check: bool = False
    ) -> None:
        """Sets the value without hooks; see `set_value`."""
        if not _unsafe_bypass_check:
            self._check_writable()
        self._put(value)

    def _check_writable(self) -> None:
        trace = self._trace
        running_trace = current_trace()
        # A reference is writable in any trace: JAX propagates the change.
        if (
            trace is not running_trace
            and trace != running_trace
            and not self._is_in_ref()
        ):
            raise foreign_trace_error(self)
        metadata = self._metadata
        if metadata and not metadata.get("mutable", True):
            raise errors.ImmutableVariableError(_describe(self))

    @property
    def value(self) -> A:
        """Value, read by `get_value()` and written by `set_value`; deprecated."""
        errors.warn_deprecated(
            ".value", "read variable[...], or variable.get_value()"
        )
        return self.get_value()

    @value.setter
    def value(self, value: A) -> None:
        errors.warn_deprecated(
            "setting .value",
            "set variable[...], or call variable.set_value(value)",
        )
        self.set_value(value)

    @property
    def raw_value(self) -> A:
        """Value without hooks; deprecated."""
        errors.warn_deprecated(".raw_value", "call variable.get_raw_value()")
        return self._value

    @raw_value.setter
    def raw_value(self, value: A) -> None:
        errors.warn_deprecated(
            "setting .raw_value", "call variable.set_raw_value(value)"
        )
        self.set_raw_value(value)

    # Metadata.

    def get_metadata(
        self,
        name: str | None = None,
        default: Any = MISSING,
        *,
        exclude_required: bool = False,
    ) -> Any:
        """Returns all metadata as a new dict, or the entry `name`.

        Args:
            exclude_required: omits `hijax`, `ref` and `eager_sharding`, which every variable has.

        Raises VariableMetadataError if there is no such entry, and no default.
        """
        metadata = self._metadata
        if name is None:
            if not exclude_required:
                return {**_default_metadata(), **metadata}
            return {
                k: v for k, v in metadata.items() if k not in _REQUIRED_METADATA
            }
        if name in metadata:
            return metadata[name]
        if default is not MISSING:
            return default
        if name in _REQUIRED_METADATA:
            return _default_metadata()[name]
        raise errors.VariableMetadataError(
            f"{_describe(self)} has no metadata {name!r}; it has: "
            f"{', '.join(metadata) or 'none'}."
        )

    def set_metadata(self, *args: Any, **metadata: Any) -> None:
        """Sets metadata.

        Args:
            *args: a name and a value; or a mapping that replaces all metadata.

        Raises:
            VariableArgumentError: for other arguments.
            TraceContextError: inside a transformation that the variable was not passed to.
        """
        if self._trace != current_trace():
            raise foreign_trace_error(self)
        if not args:
            new_metadata = {**self._metadata, **metadata}
        elif len(args) == 1 and isinstance(args[0], Mapping) and not metadata:
            new_metadata = dict(args[0])
        elif len(args) == 2 and isinstance(args[0], str) and not metadata:
            new_metadata = {**self._metadata, args[0]: args[1]}
        else:
            raise errors.VariableArgumentError(
                f"{_describe(self)}: set_metadata was given {args!r} and {metadata!r}; give names "
                "and values (name=value), or a mapping that replaces all metadata."
            )
        if "hijax" in new_metadata:
            new_metadata = _without_defaults(new_metadata)
        new_metadata = with_out_sharding(new_metadata, type(self).__name__)
        object.__setattr__(self, "_metadata", new_metadata)
        if self._watched:
            STRUCTURE_VERSION.end()

    def has_metadata(self, name: str) -> bool:
        """Returns whether there is an entry, given or by default."""
        return name in self._metadata or name in _REQUIRED_METADATA

    def del_metadata(self, name: str) -> None:
        """Removes an entry.

        Raises VariableMetadataError if there is no such entry.
        """
        self.get_metadata(name)
        metadata = dict(self._metadata)
        metadata.pop(name, None)
        self.set_metadata(metadata)

    @classmethod
    def from_metadata(
        cls: builtins.type[V], value: PyTree, attributes: Mapping[str, Any]
    ) -> V:
        """Returns a variable from a value and metadata, without calling hooks."""
        variable = object.__new__(cls)
        set_ = object.__setattr__
        metadata = dict(attributes)
        if "hijax" in metadata:
            metadata = _without_defaults(metadata)
        set_(variable, "_metadata", metadata)
        set_(variable, "_trace", current_trace())
        set_(variable, "_watched", False)
        set_(variable, "_value", value)
        return variable

    # Copies.

    def copy(
        self: V,
        value: PyTree = MISSING,
        *,
        _copy_ref: bool = True,
        **updates: Any,
    ) -> V:
        """Returns a copy, with other value and metadata if given; a `jax.Ref` is copied."""
        new_value = self._value if value is MISSING else value
        metadata = {**self._metadata, **updates}
        if metadata:
            if "ref" in updates or "hijax" in updates:
                metadata = with_var_defaults(metadata)
            if "hijax" in updates:
                metadata = _without_defaults(metadata)
            if _copy_ref and self._is_in_ref():
                new_value = read_ref(new_value)
            new_value = to_ref(new_value, metadata)
        return type(self).from_metadata(new_value, metadata)

    replace = copy
    to_state = copy

    def copy_from(self, other: "Variable[A]") -> None:
        """Copies value and metadata from another variable of the same class.

        Raises VariableTypeError if its class differs.
        """
        if type(other) is not type(self):
            raise errors.VariableTypeError(
                f"{_describe(self)} cannot copy from a {type(other).__name__}; give a variable of "
                "its own class."
            )
        self.update_from_state(other)

    def update_from_state(self, variable_state: "Variable[A]") -> None:
        """Copies the value, and metadata that differs.

        Raises VariableTypeError if it is not a variable.
        """
        if not isinstance(variable_state, Variable):
            raise errors.VariableTypeError(
                f"{_describe(self)} cannot be updated from a {type(variable_state).__name__}; give "
                "a variable, as nnx.state has them, or set the value: variable[...] = array."
            )
        self._check_writable()
        self._put(variable_state._read())
        if metadata_key(self) != metadata_key(variable_state):
            self.set_metadata(_metadata_from(self, variable_state))

    # Axes.

    def add_axis(self, axis_index: int, axis_name: str | None) -> None:
        """Updates metadata after the value has gained an axis."""
        if "on_add_axis" in self._metadata:
            _call_hooks(
                self._metadata["on_add_axis"], self, axis_index, axis_name
            )

    def remove_axis(self, axis_index: int, axis_name: str | None) -> None:
        """Updates metadata after the value has lost an axis."""
        if "on_remove_axis" in self._metadata:
            _call_hooks(
                self._metadata["on_remove_axis"], self, axis_index, axis_name
            )

    # Like the value.

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        metadata = object.__getattribute__(self, "_metadata")
        if name in metadata:
            return metadata[name]
        if name in _REQUIRED_METADATA:
            return _default_metadata()[name]
        try:
            return getattr(self.get_value(), name)
        except AttributeError:
            raise errors.VariableAttributeError(
                f"{_describe(self)} has no metadata {name!r}, and its value has no such attribute."
            ) from None

    def __setattr__(self, name: str, value: PyTree) -> None:
        if name in ("value", "raw_value"):
            object.__setattr__(self, name, value)
            return
        raise errors.VariableAttributeError(
            f"{_describe(self)}: {name} cannot be set; set metadata with "
            f"variable.set_metadata({name}=...), the value with variable[...] = ..."
        )

    @overload
    def __getitem__(self, index: EllipsisType) -> A: ...
    @overload
    def __getitem__(self, index: Index) -> PyTree: ...
    def __getitem__(self, index: Index) -> PyTree:
        if self._metadata or self._gets:
            value = self.get_value()
        else:
            value = self._value  # without a call, as most variables are read
        return value if index is ... else value[index]  # pyright: ignore[reportIndexIssue]

    def __setitem__(self, index: Index, value: PyTree) -> None:
        if index is not ... or self._sets:
            self.set_value(value, index=index)
            return
        # Most writes: an array with the shape, dtype and weak type of the previous one.
        old_value = self._value
        value_type = type(value)
        is_alike = (
            value_type is type(old_value)
            and _is_array(value_type)
            and value.aval == old_value.aval
        )
        if not is_alike:
            value = self._cast_to_shape(value)
        self.set_value(value)

    def _cast_to_shape(self, value: PyTree) -> PyTree:
        old_value = self._value
        if isinstance(old_value, jax.Array | np.ndarray | jax.Ref):
            return _cast_like(old_value, value)
        return value

    def __delitem__(self, index: Index) -> None:
        new_value = copy.copy(self.get_value())
        del new_value[index]  # pyright: ignore[reportIndexIssue]
        self.set_value(new_value)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return self.get_value()(*args, **kwargs)  # pyright: ignore[reportCallIssue]

    def __contains__(self, item: object) -> bool:
        return item in self.get_value()  # pyright: ignore[reportOperatorIssue]

    if TYPE_CHECKING:  # defined below the class

        def __len__(self) -> int: ...
        def __iter__(self) -> Any: ...
        def __bool__(self) -> bool: ...
        def __int__(self) -> int: ...
        def __float__(self) -> float: ...
        def __complex__(self) -> complex: ...
        def __index__(self) -> int: ...
        def _binary(self, other: PyTree, /) -> A: ...
        def _unary(self) -> A: ...

        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _binary
        __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = (
            __rmod__
        ) = _binary
        __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __and__ = __rand__ = (
            _binary
        )
        __or__ = __ror__ = __xor__ = __rxor__ = __lshift__ = __rshift__ = (
            _binary
        )
        __lt__ = __le__ = __gt__ = __ge__ = _binary
        __neg__ = __pos__ = __abs__ = __invert__ = _unary

    __array_priority__ = (
        100  # of NumPy's and a variable's operators, the variable's run
    )

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.get_value())

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return jax.device_get(self.get_value()).__array__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def __getstate__(self) -> dict[str, Any]:
        return {"value": self._read(), "metadata": self._metadata}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_var_metadata" in state:
            # Pickled by Flax, which stores all its defaults.
            metadata = _without_defaults(state["_var_metadata"])
            value = state["_raw_value"]
        else:
            metadata = state["metadata"]
            value = state["value"]
        variable = type(self).from_metadata(to_ref(value, metadata), metadata)
        for name in ("_metadata", "_trace", "_watched", "_value"):
            object.__setattr__(self, name, getattr(variable, name))

    def _repr_inside(self, inside: Enclosing) -> str:
        items = [f"value={value_repr(self._value)}"]
        for name, entry in self._metadata.items():
            items.append(f"{name}={entry!r}")
        start = f"{type(self).__name__}("
        size = size_text(self._value)
        if size:
            start += f" # {size}"
        return join_lines(start, items, ")")

    def _repr_parts(self) -> dict[str, Any]:
        return {"value": self._value, **self._metadata}


def is_variable(x: PyTree) -> TypeGuard[Variable[Any]]:
    """Returns whether `x` is a variable."""
    return isinstance(x, Variable)


def value_of(x: PyTree) -> PyTree:
    """Returns the value of a variable; other values are unchanged."""
    return x.get_value() if isinstance(x, Variable) else x


def map_value(f: Callable[[PyTree], PyTree], x: PyTree) -> PyTree:
    """Returns a copy of a variable with `f` of each leaf of its value; `f(x)` for other values."""
    if isinstance(x, Variable):
        return x.copy(jax.tree.map(f, x._value))
    return f(x)


_set_value = Variable._value.__set__  # pyright: ignore[reportAttributeAccessIssue]

NO_METADATA = StaticValue(())


def metadata_key(variable: Variable[Any]) -> StaticValue:
    """Returns the metadata, compared by value."""
    metadata = variable._metadata
    if not metadata:
        return NO_METADATA
    return StaticValue(tuple(sorted(metadata.items())))


def _register(cls: type[Variable[Any]]) -> None:
    value_key = jax.tree_util.GetAttrKey("value")

    def flatten(x: Variable[A]) -> tuple[list[A], StaticValue]:
        return [x._value], metadata_key(x)

    def flatten_with_keys(
        x: Variable[A],
    ) -> tuple[list[tuple[Hashable, A]], StaticValue]:
        return [(value_key, x._value)], metadata_key(x)

    def unflatten(
        metadata: StaticValue, children: Iterable[PyTree]
    ) -> Variable[Any]:
        (value,) = children
        return cls.from_metadata(value, dict(metadata.value))

    jax.tree_util.register_pytree_with_keys(
        cls, flatten_with_keys, unflatten, flatten
    )


_register(Variable)


def _initial_value(
    variable: Variable[Any], value: PyTree, arguments: Mapping[str, Any]
) -> PyTree:
    """Returns the value of a new variable as it is held: laid out, and in references."""
    type_name = type(variable).__name__
    metadata = variable._metadata
    if isinstance(value, jax.Ref):
        raise errors.VariableArgumentError(
            f"a {type_name} was given a jax.Ref; give it the array, and ref=True."
        )
    if metadata.get("out_sharding") is not None:
        value = shard_new_value(value, metadata, type_name)
    if "ref" in metadata or "hijax" in metadata:
        value = initial_ref(value, metadata, arguments, type_name)
    return value


def _metadata_from(
    variable: Variable[Any], other: Variable[Any]
) -> dict[str, Any]:
    """Returns another variable's metadata, with `variable`'s own `ref` and `hijax`."""
    metadata = dict(other._metadata)
    for name in ("ref", "hijax"):
        metadata.pop(name, None)
        if name in variable._metadata:
            metadata[name] = variable._metadata[name]
    return metadata


def _with_index(value: PyTree, index: Index, part: PyTree) -> PyTree:
    if isinstance(value, jax.Array):
        return value.at[index].set(part)
    if index is ...:
        return part
    new_value = copy.copy(value)
    new_value[index] = part
    return new_value


@functools.cache
def _is_array(kind: type) -> bool:
    return issubclass(kind, jax.Array)


def _cast_like(
    like: jax.Array | np.ndarray | jax.Ref, value: ArrayLike | Variable[Any]
) -> jax.Array | np.ndarray:
    """Returns a value as an array of the shape, dtype and strong type of another one."""
    if isinstance(value, Variable):
        value = value.get_value()
    if isinstance(value, jax.Array):
        # Keeps weak types, as a change of a counter's type would cause another trace.
        becomes_weak = getattr(value, "weak_type", False) and not getattr(
            like, "weak_type", False
        )
        is_alike = value.dtype == like.dtype and value.shape == like.shape
        if is_alike and not becomes_weak:
            return value
    elif isinstance(like, np.ndarray):
        array = np.asarray(value, like.dtype)
        return np.broadcast_to(array, like.shape).copy()
    array = jnp.asarray(value, like.dtype)
    if array.shape != like.shape:
        array = jnp.broadcast_to(array, like.shape)
    return array


def _define(name: str, method: Callable[..., PyTree]) -> None:
    method.__name__ = f"__{name}__"
    setattr(Variable, method.__name__, method)


def _binary(name: str, fn: Callable[[PyTree, PyTree], PyTree]) -> None:
    def method(self: Variable[Any], other: PyTree) -> PyTree:
        if isinstance(other, Variable):
            other = other.get_value()
        return fn(self.get_value(), other)

    _define(name, method)


def _reverse_binary(name: str, fn: Callable[[PyTree, PyTree], PyTree]) -> None:
    def method(self: Variable[Any], other: PyTree) -> PyTree:
        # A variable at the left calls its own method.
        return fn(other, self.get_value())

    _define(name, method)


def _unary(fn: Callable[..., PyTree]) -> None:
    def method(self: Variable[Any], *args: PyTree) -> PyTree:
        return fn(self.get_value(), *args)

    _define(fn.__name__, method)


def _in_place(name: str, sign: str) -> None:
    def method(self: Variable[Any], other: PyTree) -> PyTree:
        raise errors.VariableOperationError(
            f"variable {sign} x would replace the variable by the result; write variable[...] "
            f"{sign} x to change its value."
        )

    _define(name, method)


_SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "matmul": "@", "and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>",
}  # fmt: skip
for _name, _sign in _SIGNS.items():
    _fn = getattr(operator, f"__{_name}__")
    _binary(_name, _fn)
    _reverse_binary(f"r{_name}", _fn)
    _in_place(f"i{_name}", f"{_sign}=")
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _binary(_name, getattr(operator, _name))
for _fn in (
    operator.neg,
    operator.pos,
    operator.abs,
    operator.invert,
    operator.index,
):
    _unary(_fn)
for _fn in (len, iter, bool, int, float, complex):
    _unary(_fn)
_binary("divmod", divmod)
_reverse_binary("rdivmod", divmod)
_define("round", lambda self, n=0: round(self.get_value(), n))


HOOKS = (
    "on_get_value",
    "on_set_value",
    "on_create_value",
    "on_add_axis",
    "on_remove_axis",
)


@dataclasses.dataclass
class VariableMetadata(Generic[A]):
    """Value with metadata, on its way into a variable; see `Variable` for the hooks."""

    raw_value: Any
    on_set_value: Hooks = ()
    on_get_value: Hooks = ()
    on_create_value: Hooks = ()
    on_add_axis: Hooks = ()
    on_remove_axis: Hooks = ()
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def entries(self) -> dict[str, Any]:
        """Returns the metadata of the variable, including the given hooks."""
        entries: dict[str, Any] = {}
        for name in HOOKS:
            hooks = getattr(self, name)
            if hooks:
                entries[name] = hooks
        entries.update(self.metadata)
        return entries


def with_metadata(
    initializer: Callable[..., A],
    on_set_value: Hooks = (),
    on_get_value: Hooks = (),
    on_create_value: Hooks = (),
    on_add_axis: Hooks = (),
    on_remove_axis: Hooks = (),
    **metadata: Any,
) -> Callable[..., VariableMetadata[A]]:
    """Returns an initializer whose values become variables with metadata.

    The hooks `on_*` are those of `Variable`, `Variable.add_axis` and `Variable.remove_axis`.

    >>> init = with_metadata(jax.nn.initializers.ones, tag="head")
    >>> nnx.Param(init(jax.random.key(0), (2,))).tag
    'head'
    """

    @functools.wraps(initializer)
    def initialize(*args: Any, **kwargs: Any) -> VariableMetadata[A]:
        return VariableMetadata(
            initializer(*args, **kwargs),
            on_set_value=on_set_value,
            on_get_value=on_get_value,
            on_create_value=on_create_value,
            on_add_axis=on_add_axis,
            on_remove_axis=on_remove_axis,
            metadata=metadata,
        )

    return initialize


Kind = TypeVar("Kind", bound=type[Variable[Any]])
_TYPES: dict[str, type[Variable[Any]]] = {}


@overload
def register_variable_name(
    name: str, typ: Kind, *, overwrite: bool = False
) -> Kind: ...
@overload
def register_variable_name(
    name: str, *, overwrite: bool = False
) -> Callable[[Kind], Kind]: ...
def register_variable_name(
    name: str, typ: Kind | None = None, *, overwrite: bool = False
) -> Kind | Callable[[Kind], Kind]:
    """Registers a name for a kind of variable.

    Args:
        typ: the class; if omitted, returns a class decorator.

    Raises VariableTypeError if the name is taken.

    >>> @register_variable_name("moving_averages")
    ... class MovingAverage(Variable): pass
    >>> variable_type_from_name("moving_averages") is MovingAverage
    True
    """
    if typ is None:

        def decorator(cls: Kind) -> Kind:
            return register_variable_name(name, cls, overwrite=overwrite)

        return decorator
    if name in _TYPES and not overwrite:
        raise errors.VariableTypeError(
            f"{name!r} is already the name of {_TYPES[name].__qualname__}, and was given for "
            f"{typ.__qualname__}; use another, or give overwrite=True."
        )
    _TYPES[name] = typ
    return typ


def variable_type_from_name(
    name: str,
    /,
    *,
    base: type[Variable[Any]] = Variable,
    allow_register: bool = False,
) -> type[Variable[Any]]:
    """Returns the kind of variable with a name.

    With `allow_register`, creates a class, derived from `base`, for an unknown name.

    Raises VariableTypeError if the name is unknown.
    """
    if name not in _TYPES:
        if not allow_register:
            raise errors.VariableTypeError(
                f"no kind of variable has the name {name!r}; known names: "
                f"{', '.join(sorted(_TYPES))}. Give allow_register=True to make one."
            )
        return register_variable_name(
            name, type(name, (base,), {"__slots__": ()})
        )
    return _TYPES[name]


def variable_name_from_type(
    typ: type[Variable[Any]], /, *, allow_register: bool = False
) -> str:
    """Returns the name of a kind of variable; with `allow_register`, registers the class name.

    Raises VariableTypeError if it has no name.
    """
    for name, registered_type in _TYPES.items():
        if registered_type is typ:
            return name
    if not isinstance(typ, type):
        raise errors.VariableTypeError(
            f"{typ!r} is not a kind of variable, but a {type(typ).__name__}; give a class, such as "
            "nnx.Param."
        )
    if not allow_register:
        raise errors.VariableTypeError(
            f"the kind of variable {typ.__qualname__} has no name; give it one with "
            f"nnx.register_variable_name({typ.__name__!r}, {typ.__name__}), or give "
            "allow_register=True."
        )
    register_variable_name(typ.__name__, typ)
    return typ.__name__


@register_variable_name("params")
class Param(Variable[A]):
    """Trainable parameter: what `nnx.grad` differentiates and optimizers update by default.

    >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> type(layer.kernel) is nnx.Param, layer.kernel.shape
    (True, (2, 3))
    """

    __slots__ = ()


@register_variable_name("batch_stats")
class BatchStat(Variable[A]):
    """Statistic of batches, such as a running mean."""

    __slots__ = ()


@register_variable_name("cache")
class Cache(Variable[A]):
    """Value cached between calls, such as keys and values of attention."""

    __slots__ = ()


@register_variable_name("intermediates")
class Intermediate(Variable[A]):
    """Value that a module stored by `sow`."""

    __slots__ = ()


@register_variable_name("perturbations")
class Perturbation(Intermediate[A]):
    """Zeros added to a value, whose gradient is the value's."""

    __slots__ = ()


def __getattr__(name: str) -> Any:
    if name == "VariableState":
        errors.warn_deprecated(name, "call it Variable")
        return Variable
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
