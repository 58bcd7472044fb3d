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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

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


T = TypeVar("T")
Dict = TypeVar("Dict", bound=dict[Any, Any])
StateDict = PyTree  # nested dicts with string keys, or a leaf


class _Rule(NamedTuple):
    """The conversion of a type to state dicts and back."""

    to_state: Callable[[Any], StateDict]
    from_state: Callable[[Any, StateDict], Any]


_rules: dict[type, _Rule] = {}


def register_serialization_state(
    ty: type,
    ty_to_state_dict: Callable[[Any], StateDict],
    ty_from_state_dict: Callable[[Any, StateDict], Any],
    override: bool = False,
) -> None:
    """Registers the conversion of a type to state dicts and back. Subclasses do not inherit it.

    Args:
        ty_to_state_dict: returns a value's state dict; calls `to_state_dict` for nested values.
        ty_from_state_dict: takes a target and a state dict, returns a value like the target. It
            calls `from_state_dict` for nested values, with `name` for the path.

    Raises SerializationHandlerError if the type has a rule and `override` is False.
    """
    if not override and (ty in _rules or _is_struct(ty)):
        raise errors.SerializationHandlerError(
            f"{ty.__name__!r} already has a rule for its state dict; give override=True to replace "
            "it."
        )
    _rules[ty] = _Rule(ty_to_state_dict, ty_from_state_dict)


def _is_struct(ty: type) -> bool:
    return "_weft_struct" in vars(ty)


def _rule_for(ty: type) -> _Rule | None:
    if ty in _rules:
        return _rules[ty]
    if _is_struct(ty):
        return _Rule(_struct_to_state, _struct_from_state)
    if issubclass(ty, tuple) and hasattr(ty, "_fields"):
        return _Rule(_namedtuple_to_state, _namedtuple_from_state)
    if issubclass(ty, dict):
        return _rules[dict]
    return None


def is_serializable(target: PyTree | type) -> bool:
    """Returns whether there is a rule for the state dict of a type, or of a value's type.

    >>> is_serializable({"a": 1}), is_serializable(1)
    (True, False)
    """
    ty = target if isinstance(target, type) else type(target)
    return _rule_for(ty) is not None


def to_state_dict(target: PyTree) -> StateDict:
    """Returns the state dict of a tree of dicts, lists, tuples, structs and registered types.

    Values of other types are leaves, returned unchanged.

    Raises StateDictKeyError if keys of a dict are equal as strings.

    >>> to_state_dict({"layers": [1.0, 2.0]})
    {'layers': {'0': 1.0, '1': 2.0}}
    """
    rule = _rule_for(type(target))
    if rule is None:
        return target
    if _path.names:
        return rule.to_state(target)
    with _enter("."):
        return rule.to_state(target)


def from_state_dict(
    target: PyTree, state: StateDict, name: str = "."
) -> PyTree:
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
    if not name:
        return _from_state(target, state)
    with _enter(name):
        return _from_state(target, state)


def _from_state(target: PyTree, state: StateDict) -> PyTree:
    rule = _rule_for(type(target))
    if rule is None:
        return _leaf_from_state(target, state)
    return rule.from_state(target, state)


# A rule takes the children of a value, by name, to their state dicts and back.


def _children_to_state(children: Mapping[str, PyTree]) -> dict[str, StateDict]:
    state = {}
    for name, child in children.items():
        with _enter(name):
            state[name] = to_state_dict(child)
    return state


def _children_from_state(
    kind: str, children: Mapping[str, PyTree], state: Mapping[str, StateDict]
) -> dict[str, PyTree]:
    """Returns values like the children; raises unless the state dict has their names as keys."""
    _check_keys(kind, list(children), state)
    values = {}
    for name, child in children.items():
        values[name] = from_state_dict(child, state[name], name=name)
    return values


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _check_keys(
    kind: str,
    names: list[str],
    state: StateDict,
    *,
    extra_allowed: bool = False,
) -> None:
    if not isinstance(state, Mapping):
        raise _mismatch(
            kind,
            f"expected a dict with the keys {_quoted(names)}, got a {type(state).__name__}",
        )
    missing_names = [name for name in names if name not in state]
    extra_names = [str(key) for key in state if key not in names]
    if not missing_names and (extra_allowed or not extra_names):
        return
    differences = []
    if missing_names:
        differences.append(f"it lacks {_quoted(missing_names)}")
    if extra_names:
        differences.append(
            f"it has {_quoted(extra_names)}, which the target has not"
        )
    for name in missing_names:
        near_names = difflib.get_close_matches(name, extra_names, n=1)
        if near_names:
            differences.append(f"{near_names[0]!r} is near {name!r}")
    raise _mismatch(kind, "; ".join(differences))


def _mismatch(kind: str, reason: str) -> errors.StateDictMismatchError:
    """Returns the error for a part of the target, of a kind such as "a dict"."""
    return errors.StateDictMismatchError(
        f"the state dict does not fit {kind} of the target at {current_path()!r}: {reason}. Make "
        "the target as the saved one was made, or change the state dict to the target's structure."
    )


def _dict_to_state(xs: dict[Any, PyTree]) -> dict[str, StateDict]:
    children = {str(key): value for key, value in xs.items()}
    if len(children) < len(xs):
        names = [str(key) for key in xs]
        repeated_names = sorted(
            {name for name in names if names.count(name) > 1}
        )
        raise errors.StateDictKeyError(
            f"keys of the dict at {current_path()!r} are equal as strings: "
            f"{_quoted(repeated_names)}; a state dict has string keys, so rename one of the keys."
        )
    return _children_to_state(children)


def _dict_from_state(xs: Dict, state: Mapping[str, StateDict]) -> Dict:
    _check_keys("a dict", [str(key) for key in xs], state, extra_allowed=True)
    new_dict = copy.copy(xs)  # also one of an OrderedDict or another subclass
    for key, value in xs.items():
        name = str(key)
        new_dict[key] = from_state_dict(value, state[name], name=name)
    return new_dict


def _numbered(xs: Sequence[PyTree]) -> dict[str, PyTree]:
    return {str(i): x for i, x in enumerate(xs)}


def _sequence_to_state(xs: Sequence[PyTree]) -> dict[str, StateDict]:
    return _children_to_state(_numbered(xs))


def _sequence_from_state(
    xs: list[PyTree] | tuple[PyTree, ...], state: Mapping[str, StateDict]
) -> list[PyTree] | tuple[PyTree, ...]:
    kind = f"a {type(xs).__name__}"
    if isinstance(state, Mapping) and len(state) != len(xs):
        raise _mismatch(
            kind,
            f"the target has {len(xs)} entries, the state dict {len(state)}",
        )
    values = _children_from_state(kind, _numbered(xs), state)
    return type(xs)(values.values())


def _namedtuple_to_state(xs: Any) -> dict[str, StateDict]:
    return _children_to_state(xs._asdict())


def _namedtuple_from_state(xs: T, state: Mapping[str, StateDict]) -> T:
    namedtuple: Any = xs
    old_keys = {
        "name",
        "fields",
        "values",
    }  # of files of before fields had their names
    if isinstance(state, Mapping) and set(state) == old_keys != set(
        namedtuple._fields
    ):
        state = {
            field: state["values"][i] for i, field in state["fields"].items()
        }
    kind = f"the named tuple {type(xs).__name__}"
    values = _children_from_state(kind, namedtuple._asdict(), state)
    return type(xs)(*values.values())


def _struct_children(xs: PyTree) -> dict[str, PyTree]:
    return {name: getattr(xs, name) for name in struct.child_names(type(xs))}


def _struct_to_state(xs: PyTree) -> dict[str, StateDict]:
    return _children_to_state(_struct_children(xs))


def _struct_from_state(xs: PyTree, state: Mapping[str, StateDict]) -> PyTree:
    kind = f"the struct {type(xs).__name__}"
    values = _children_from_state(kind, _struct_children(xs), state)
    return dataclasses.replace(xs, **values)


def _partial_to_state(xs: jax.tree_util.Partial) -> dict[str, StateDict]:
    return _children_to_state({"args": xs.args, "keywords": xs.keywords})


def _partial_from_state(
    xs: jax.tree_util.Partial, state: Mapping[str, StateDict]
) -> jax.tree_util.Partial:
    children = {"args": xs.args, "keywords": xs.keywords}
    values = _children_from_state("a Partial", children, state)
    return jax.tree_util.Partial(xs.func, *values["args"], **values["keywords"])


_rules[dict] = _Rule(_dict_to_state, _dict_from_state)
_rules[list] = _Rule(_sequence_to_state, _sequence_from_state)
_rules[tuple] = _Rule(_sequence_to_state, _sequence_from_state)
_rules[jax.tree_util.Partial] = _Rule(_partial_to_state, _partial_from_state)


def is_prng_key(x: object) -> bool:
    """Returns whether a value is an array of typed PRNG keys."""
    return isinstance(x, jax.Array) and jnp.issubdtype(
        x.dtype, jax.dtypes.prng_key
    )


def is_stored_dtype(dtype: np.dtype) -> bool:
    """Returns whether TensorStore has a dtype: numbers, except of 80 bits or more, and booleans."""
    if dtype.kind in "SUTOMm" or dtype.names or dtype.char in "gG":
        return False
    return dtype == np.bool_ or jnp.issubdtype(dtype, np.number)


def _leaf_from_state(target: PyTree, state: StateDict) -> StateDict:
    if isinstance(target, jax.Array | np.ndarray) and isinstance(
        state, Mapping
    ):
        names = _quoted(map(str, state))
        raise _mismatch(
            "an array", f"expected an array, got a dict with {names}"
        )
    if is_prng_key(target) and isinstance(state, np.ndarray):
        # Bytes of Flax hold what `jax.random.key_data` gave, as Flax itself writes no typed keys.
        return jax.random.wrap_key_data(
            jnp.asarray(state), impl=jax.random.key_impl(target)
        )
    return state
