"""Trees of state as dicts of plain values.

A *state dict* has the structure of a tree in dicts with string keys: lists and tuples have the keys
"0", "1", ..., named tuples and `weft.struct` classes their fields' names; other types use
`register_serialization_state`, or are leaves. It does not contain the types, so reading takes a
*target*, a tree of the same structure.
"""

import contextlib
import copy
import dataclasses
import difflib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from weft import errors, struct


class FlaxPart:
    """Part of an object that Flax pickled, for the `__setstate__` of the object to read."""

    def __init__(self, *args: object):
        pass


class _Path(threading.local):
    def __init__(self) -> None:
        self.names: list[str] = []


_path = _Path()


@contextlib.contextmanager
def _enter(name: str) -> Iterator[None]:
    _path.names.append(name)
    try:
        yield
    finally:
        _path.names.pop()


def current_path() -> str:
    """Returns the current path of `to_state_dict` or `from_state_dict`, such as "./params/dense".

    For messages of functions passed to `register_serialization_state`; empty outside of the two.
    """
    return "/".join(map(str, _path.names))


ToState = Callable[[Any], Any]
FromState = Callable[[Any, Any], Any]
_registry: dict[type, tuple[ToState, FromState]] = {}


def register_serialization_state(
    ty: type,
    ty_to_state_dict: Callable[[Any], Any],
    ty_from_state_dict: Callable[[Any, Any], Any],
    override: bool = False,
) -> None:
    """Registers the conversion of a type to state dicts and back. Subclasses do not inherit it.

    Args:
        ty_to_state_dict: returns a value's state dict; calls `to_state_dict` for nested values.
        ty_from_state_dict: takes a target and a state dict, returns a value like the target. It
            calls `from_state_dict` for nested values, with `name` for the path.

    Raises SerializationHandlerError if the type has a rule and `override` is False.
    """
    if not override and (ty in _registry or _is_struct(ty)):
        raise errors.SerializationHandlerError(
            f"{ty.__name__!r} already has a rule for its state dict; give override=True to replace "
            "it."
        )
    _registry[ty] = (ty_to_state_dict, ty_from_state_dict)


def _is_struct(ty: type) -> bool:
    return "_weft_struct" in vars(ty)


def _handlers(ty: type) -> tuple[ToState, FromState] | None:
    if ty in _registry:
        return _registry[ty]
    if _is_struct(ty):
        return _struct_to_state, _struct_from_state
    if issubclass(ty, tuple) and hasattr(ty, "_fields"):
        return _namedtuple_to_state, _namedtuple_from_state
    return _registry[dict] if issubclass(ty, dict) else None


def is_serializable(target: object) -> bool:
    """Returns whether there is a rule for the state dict of a type, or of a value's type.

    >>> is_serializable({"a": 1}), is_serializable(1)
    (True, False)
    """
    return _handlers(target if isinstance(target, type) else type(target)) is not None


def to_state_dict(target: object) -> Any:
    """Returns the state dict of a tree of dicts, lists, tuples, structs and registered types.

    Values of other types are leaves, returned unchanged.

    Raises StateDictKeyError if keys of a dict are equal as strings.

    >>> to_state_dict({"layers": [1.0, 2.0]})
    {'layers': {'0': 1.0, '1': 2.0}}
    """
    with _enter(".") if not _path.names else contextlib.nullcontext():
        rule = _handlers(type(target))
        return target if rule is None else rule[0](target)


def from_state_dict(target: object, state: object, name: str = ".") -> Any:
    """Returns a tree like `target` with the leaves of a state dict.

    Leaves are those of the state dict, regardless of the target's shapes and dtypes. Entries
    missing in a dict of the target are ignored.

    Args:
        target: a tree of the state dict's structure; None returns the state dict.
        name: first or next part of the path in messages; "" adds nothing.

    Raises StateDictMismatchError if the structures differ; the message names the path.

    >>> from_state_dict([0, 0], {"0": 1, "1": 2})
    [1, 2]
    """
    with _enter(name) if name else contextlib.nullcontext():
        rule = _handlers(type(target))
        return _leaf_from_state(target, state) if rule is None else rule[1](target, state)


def _children_to_state(entries: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    state = {}
    for name, value in entries:
        with _enter(name):
            state[name] = to_state_dict(value)
    return state


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _check_keys(wanted: list[str], state: object, what: str, extra_allowed: bool = False) -> None:
    if not isinstance(state, Mapping):
        raise _mismatch(
            what, f"expected a dict with the keys {_quoted(wanted)}, got a {type(state).__name__}"
        )
    lacks = [name for name in wanted if name not in state]
    extra = [str(key) for key in state if key not in wanted]
    if not lacks and (extra_allowed or not extra):
        return
    said = []
    if lacks:
        said.append(f"it lacks {_quoted(lacks)}")
    if extra:
        said.append(f"it has {_quoted(extra)}, which the target has not")
    for name in lacks:
        if near := difflib.get_close_matches(name, extra, n=1):
            said.append(f"{near[0]!r} is near {name!r}")
    raise _mismatch(what, "; ".join(said))


def _mismatch(what: str, why: str) -> errors.StateDictMismatchError:
    return errors.StateDictMismatchError(
        f"the state dict does not fit {what} of the target at {current_path()!r}: {why}. Make the "
        "target as the saved one was made, or change the state dict to the target's structure."
    )


def _dict_to_state(xs: dict[Any, Any]) -> dict[str, Any]:
    names = [str(key) for key in xs]
    if len(set(names)) < len(names):
        same = sorted({name for name in names if names.count(name) > 1})
        raise errors.StateDictKeyError(
            f"keys of the dict at {current_path()!r} are equal as strings: {_quoted(same)}; a "
            "state dict has string keys, so rename one of the keys."
        )
    return _children_to_state(zip(names, xs.values(), strict=True))


def _dict_from_state(xs: dict[Any, Any], state: Mapping[str, Any]) -> dict[Any, Any]:
    _check_keys([str(key) for key in xs], state, "a dict", extra_allowed=True)
    made = copy.copy(xs)  # also one of an OrderedDict or another subclass
    for key, value in xs.items():
        made[key] = from_state_dict(value, state[str(key)], name=str(key))
    return made


def _sequence_to_state(xs: list[Any] | tuple[Any, ...]) -> dict[str, Any]:
    return _children_to_state((str(i), x) for i, x in enumerate(xs))


def _sequence_from_state(xs: Any, state: Mapping[str, Any]) -> Any:
    what = f"a {type(xs).__name__}"
    if isinstance(state, Mapping) and len(state) != len(xs):
        raise _mismatch(what, f"the target has {len(xs)} entries, the state dict {len(state)}")
    _check_keys([str(i) for i in range(len(xs))], state, what)
    return type(xs)(from_state_dict(x, state[str(i)], name=str(i)) for i, x in enumerate(xs))


def _namedtuple_to_state(xs: Any) -> dict[str, Any]:
    return _children_to_state(zip(xs._fields, xs, strict=True))


def _namedtuple_from_state(xs: Any, state: Any) -> Any:
    old = {"name", "fields", "values"}  # the keys of files of before fields had their names
    if isinstance(state, Mapping) and set(state) == old != set(xs._fields):
        state = {field: state["values"][i] for i, field in state["fields"].items()}
    _check_keys(list(xs._fields), state, f"the named tuple {type(xs).__name__}")
    return type(xs)(*(from_state_dict(getattr(xs, f), state[f], name=f) for f in xs._fields))


def _struct_to_state(xs: object) -> dict[str, Any]:
    return _children_to_state((name, getattr(xs, name)) for name in struct.child_names(type(xs)))


def _struct_from_state(xs: Any, state: Mapping[str, Any]) -> Any:
    names = list(struct.child_names(type(xs)))
    _check_keys(names, state, f"the struct {type(xs).__name__}")
    made = {name: from_state_dict(getattr(xs, name), state[name], name=name) for name in names}
    return dataclasses.replace(xs, **made)


def _partial_to_state(xs: jax.tree_util.Partial) -> dict[str, Any]:
    return _children_to_state((("args", xs.args), ("keywords", xs.keywords)))


def _partial_from_state(
    xs: jax.tree_util.Partial, state: Mapping[str, Any]
) -> jax.tree_util.Partial:
    _check_keys(["args", "keywords"], state, "a Partial")
    args = from_state_dict(xs.args, state["args"], name="args")
    keywords = from_state_dict(xs.keywords, state["keywords"], name="keywords")
    return jax.tree_util.Partial(xs.func, *args, **keywords)


_registry.update(
    {
        dict: (_dict_to_state, _dict_from_state),
        list: (_sequence_to_state, _sequence_from_state),
        tuple: (_sequence_to_state, _sequence_from_state),
        jax.tree_util.Partial: (_partial_to_state, _partial_from_state),
    }
)


def is_prng_key(x: object) -> bool:
    """Returns whether a value is an array of typed PRNG keys."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def is_stored_dtype(dtype: np.dtype) -> bool:
    """Returns whether TensorStore has a dtype: numbers, except of 80 bits or more, and booleans."""
    if dtype.kind in "SUTOMm" or dtype.names or dtype.char in "gG":
        return False
    return dtype == np.bool_ or jnp.issubdtype(dtype, np.number)


def _leaf_from_state(target: Any, state: Any) -> Any:
    if isinstance(target, jax.Array | np.ndarray) and isinstance(state, Mapping):
        raise _mismatch(
            "an array", f"expected an array, got a dict with {_quoted(map(str, state))}"
        )
    if is_prng_key(target) and isinstance(state, np.ndarray):
        # Bytes of Flax hold what `jax.random.key_data` gave, as Flax itself writes no typed keys.
        return jax.random.wrap_key_data(jnp.asarray(state), impl=jax.random.key_impl(target))
    return state
