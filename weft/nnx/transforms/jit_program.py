"""Programs that JAX compiles for jitted functions of objects, and the inspection of calls.

JAX does not receive objects that are arguments themselves, and receives an `ObjectRef` for objects
in containers. Their values are two flat lists, the first of them donated. The outputs are the
changed values with a note that identifies them, or all results if more than values has changed.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from weft.core.spmd import constrain_like_jit
from weft.errors import CallMismatchError, TransformArgumentError
from weft.lifting import Roles
from weft.lifting.kind import (
    PureArgs,
    PureResults,
    StateNode,
    Static,
    call_pure,
    commit_results,
    stateless_error,
)
from weft.lifting.roles import broadcast_roles, is_role
from weft.lifting.signature import named_after, signature_of
from weft.lifting.traces import current_trace
from weft.nnx.filters import Everything
from weft.nnx.graph import FlatGraph
from weft.nnx.pytree import Pytree
from weft.nnx.transforms.calls import Args, Kwargs, key_suffix, object_paths, parameter_names
from weft.nnx.transforms.kind import ObjectKind, is_object, trace_of
from weft.nnx.variables import NO_METADATA, Variable, metadata_key
from weft.nnx.versions import TransformCall

_INDEX_OF_OBJECT, _PATH_BELOW = operator.itemgetter(1), operator.itemgetter(slice(2, None))
MAY_HOLD_OBJECTS = (Pytree, Variable, dict, list, tuple)


class JitOptions(NamedTuple):
    """Options of `nnx.jit`, with shardings converted by `as_roles`.

    `static` and `donated` have positions and names of arguments.
    """

    kind: ObjectKind
    in_shardings: Any
    out_shardings: Any
    static: frozenset[int | str]
    donated: frozenset[int | str]
    others: tuple[tuple[str, Any], ...]

    def shardings_by_position(self, n_args: int) -> dict[int | str, Any]:
        """Returns the sharding of each positional argument that is not static, as in `jax.jit`.

        Raises CallMismatchError if there are more or fewer shardings.
        """
        positions = [i for i in range(n_args) if i not in self.static]
        given = self.in_shardings
        if not isinstance(given, tuple) or isinstance(given, Roles):
            return dict.fromkeys(positions, given)
        if len(given) != len(positions):
            not_static = "that are not static" if len(positions) < n_args else ""
            raise CallMismatchError(
                f"nnx.jit: in_shardings has {len(given)} entries, but the call has "
                f"{len(positions)} positional arguments {not_static}".rstrip()
                + "; use one entry per argument, or one sharding for all."
            )
        return dict(zip(positions, given, strict=True))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ObjectRef:
    """Placeholder for the object with an index in the arguments."""

    index: int


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class WrittenValues:
    """The values that come back.

    `at` has the positions of changed values that are not donated, `passed` the numbers of those
    that custom rules have returned unchanged.
    """

    at: tuple[int, ...]
    passed: tuple[int, ...] = ()


class NestedObject(Exception):
    """Raised in a trace that finds an object in a container among the arguments."""


class CallLayout(NamedTuple):
    """The structure of the objects of a call.

    Attributes:
        at: positions or names of arguments that are objects, which JAX does not receive.
        donated: whether the values of each object are donated.
        made: for each value the class and metadata of its variable, None for an attribute.
    """

    at: tuple[int | str, ...]
    n_args: int
    static: Any
    roles: tuple[Roles, ...]
    donated: tuple[bool, ...]
    made: tuple[tuple[type[Variable[Any]], Any] | None, ...]


@jax.tree_util.register_pytree_with_keys_class
class _NamedValues:
    def __init__(self, names: Iterable[str], values: Iterable[Any]):
        self._names, self._values = names, values

    def tree_flatten_with_keys(self):
        return [*zip(self._names, self._values, strict=True)], None

    @classmethod
    def tree_unflatten(cls, aux: None, values: Iterable[Any]) -> _NamedValues:
        return cls((), values)


class ProgramSignature(inspect.Signature):
    """Signature of the function of a program, with a name for each value of an object.

    JAX shows the names of bound arguments in compiled text and in errors.
    """

    # JAX keeps signatures, so this one must not hold the user's function and objects.
    def __init__(
        self,
        of_pure: inspect.Signature,
        fn: Callable[..., Any],
        layout: CallLayout,
        numbers: Iterable[int],
    ):
        super().__init__([*of_pure.parameters.values()])
        self._of_user, self._at = signature_of(fn), layout.at
        self._refs = [*map(ObjectRef, range(len(layout.roles)))]
        self._paths = [*map(layout.static.graphdef.paths.__getitem__, numbers)]

    def with_refs(self, rest: Iterable[Any], named: Kwargs) -> tuple[list[Any], Kwargs]:
        """Returns the user's arguments, with a placeholder for each object."""
        args, named = list(rest), dict(named)
        for place, ref in zip(self._at, self._refs, strict=False):
            if isinstance(place, int):
                args.insert(place, ref)
            else:
                named[place] = ref
        return args, dict(sorted(named.items()))

    def bind(
        self, donated: Sequence[Any], kept: Sequence[Any], /, *rest: Any, **named: Any
    ) -> inspect.BoundArguments:
        args, kwargs = self.with_refs(rest, named)
        arguments = self._of_user.bind(*args, **kwargs).arguments
        roots = {x.index: name for name, x in arguments.items() if isinstance(x, ObjectRef)}
        if len(roots) < len(self._refs):
            for name, x in arguments.items():
                for path, ref in jax.tree_util.tree_leaves_with_path(x, is_leaf=_is_ref_or_object):
                    if isinstance(ref, ObjectRef):
                        roots[ref.index] = name + jax.tree_util.keystr(path)
        # Without a loop in Python, since a model has many values.
        of_values = map(roots.__getitem__, map(_INDEX_OF_OBJECT, self._paths))
        suffixes = map(functools.partial(map, key_suffix), map(_PATH_BELOW, self._paths))
        names = map(operator.add, of_values, map("".join, suffixes))
        named_values = {"": _NamedValues([*names], (*donated, *kept))}
        return inspect.BoundArguments(self, OrderedDict({**named_values, **arguments}))


class Program:
    """The function that JAX compiles, for objects of one structure."""

    def __init__(self, fn: Callable[..., Any], options: JitOptions, layout: CallLayout):
        self._options, self.layout, self.n_traces = options, layout, 0
        is_donated = [layout.donated[i] for i, _ in layout.static.places]
        self.donated = [n for n, is_given in enumerate(is_donated) if is_given]
        self.kept = [n for n, is_given in enumerate(is_donated) if not is_given]
        self._shardings: list[Any] = []
        if options.in_shardings is not None:
            self._shardings = [layout.roles[i][g][1] for i, g in layout.static.places]

        numbers = *self.donated, *self.kept

        def pure(donated: list[Any], kept: list[Any], /, *rest: object, **named: object) -> Any:
            self.n_traces += 1
            of_numbers = dict(zip(numbers, (*donated, *kept), strict=True))
            values = [of_numbers[n] for n in range(len(numbers))]
            args, kwargs, pure_args = self._pure_args(values, rest, named)
            given = object_paths(args, parameter_names(fn), ObjectRef)
            given += object_paths((*kwargs.values(),), [*kwargs], ObjectRef)
            specs = "in_shardings", "out_shardings"
            with TransformCall("jit", fn, args, specs, given=given, place=None):
                results = call_pure(
                    options.kind, fn, pure_args, options.out_shardings, has_kwargs=True
                )
            return self._outputs(results, values)

        named_after(fn, pure, leading=("donated_state", "state"), left_out=layout.at)
        self._signature = ProgramSignature(inspect.signature(pure), fn, layout, numbers)
        pure.__signature__ = self._signature  # pyright: ignore[reportFunctionMemberAccess]
        self.jitted = jax.jit(pure, **self._jit_options(self._signature))

    def _jit_options(self, signature: inspect.Signature) -> dict[str, Any]:
        of, layout, parameters = self._options, self.layout, signature.parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        by_name = [p.name for p in parameters.values() if p.kind is not p.POSITIONAL_ONLY]
        positions = [i for i in range(layout.n_args) if i not in layout.at]
        result: dict[str, Any] = dict(of.others)
        for name, places, first in (("static", of.static, ()), ("donate", of.donated, (0,))):
            names = (x for x in places if isinstance(x, str) and (takes_any or x in by_name))
            numbers = (2 + n for n, i in enumerate(positions) if i in places)
            result |= {f"{name}_argnums": (*first, *numbers), f"{name}_argnames": sorted(names)}
        if of.in_shardings is not None:
            donated, kept = ([self._shardings[n] for n in at] for at in (self.donated, self.kept))
            by_position = of.shardings_by_position(layout.n_args)
            left = (_without_state(x) for i, x in by_position.items() if i not in layout.at)
            result["in_shardings"] = (donated, kept, *left)
        if of.out_shardings is not None:
            out = jax.tree.map(_as_node, of.out_shardings, is_leaf=is_role)
            result["out_shardings"] = (out, None, None, None, None)
        return result

    def _pure_args(
        self, values: Sequence[Any], rest: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], PureArgs]:
        """Returns the arguments with a placeholder for each object, and those for `call_pure`."""
        layout = self.layout
        groups: list[tuple[dict[int, Any], ...]]
        groups = [tuple({} for _ in roles) for roles in layout.roles]
        for n, (i, g) in enumerate(layout.static.places):
            groups[i][g][n] = self._input_leaf(n, values[n])
        args, kwargs = self._signature.with_refs(rest, named)
        leaves, tree = jax.tree.flatten((*args, kwargs), is_leaf=_is_ref_or_object)
        if any(map(is_object, leaves)):
            raise NestedObject
        packed = tree.unflatten(
            StateNode(groups[x.index]) if isinstance(x, ObjectRef) else x for x in leaves
        )
        roles = tuple(layout.roles[x.index] if isinstance(x, ObjectRef) else None for x in leaves)
        return (*args,), kwargs, PureArgs(Static(layout.static), Static(roles), packed)

    def _input_leaf(self, n: int, value: object) -> Any:
        """Returns a value as `weft.lifting` takes it, which makes plain variables itself."""
        made = self.layout.made[n]
        is_enough = made is not None and made[1] is NO_METADATA and not isinstance(value, Variable)
        return value if is_enough else self.as_leaf(n, value)

    def as_leaf(self, n: int, value: object) -> Any:
        """Returns a value in a copy of its variable, or itself for an attribute."""
        made = self.layout.made[n]
        return value if made is None else made[0].from_metadata(value, made[1].value)

    def values_of(self, flat: FlatGraph) -> tuple[list[Any], list[Any]]:
        """Returns the donated values and the others."""
        values = [x._value if isinstance(x, Variable) else x for x in flat.leaves]
        return [values[n] for n in self.donated], [values[n] for n in self.kept]

    def finish(self, flat: FlatGraph, outputs: tuple[Any, ...]) -> Any:
        """Writes the changes of a call, and returns its result."""
        result, of_donated, of_kept, more, written = outputs
        if more is None:
            numbers = [*self.donated, *(self.kept[i] for i in written.at)]
            values = zip(numbers, (*of_donated, *of_kept), strict=True)
            group: dict[int, Any] = {n: self.as_leaf(n, value) for n, value in values}
            group |= dict.fromkeys(~n for n in written.passed)
            more = Static(None), [StateNode((group,))]
        static, state_nodes = more
        return commit_results(self._options.kind, flat, PureResults(static, state_nodes, result))

    def _outputs(self, results: PureResults, values: list[Any]) -> tuple[Any, ...]:
        """Returns the result, the values to write, and if more has changed all changes."""
        self._constrain_outputs(results.state_nodes, values)
        changed = {n: x for p in results.state_nodes for of in p.groups for n, x in of.items()}
        made = self.layout.made
        if results.static.value is not None or any(
            isinstance(x, Variable) and metadata_key(x) != made[n][1]  # pyright: ignore[reportOptionalSubscript]
            for n, x in changed.items()
        ):
            for n in self.donated:
                i, g = self.layout.static.places[n]
                # Donated values no longer exist outside.
                results.state_nodes[i].groups[g].setdefault(n, self.as_leaf(n, values[n]))
            more = results.static, results.state_nodes
            return results.packed, [], [], more, WrittenValues(())
        new = {n: x._value if isinstance(x, Variable) else x for n, x in changed.items()}
        at = tuple(i for i, n in enumerate(self.kept) if n in new)
        donated = [new.get(n, values[n]) for n in self.donated]
        written = WrittenValues(at, tuple(n for n in new if ~n in new and n >= 0))
        return results.packed, donated, [new[self.kept[i]] for i in at], None, written

    def _constrain_outputs(self, state_nodes: list[StateNode], values: list[Any]) -> None:
        """Constrains all outputs to the input shardings, or each call would do it again."""
        for n, sharding in enumerate(self._shardings):
            i, g = self.layout.static.places[n]
            group = state_nodes[i].groups[g]
            x = group.get(n, self.as_leaf(n, values[n]))
            value = x._value if isinstance(x, Variable) else x
            if sharding is not None and _shapes(value) == _shapes(values[n]):
                value = constrain_like_jit(value, sharding)
            if n in group or self._options.kind.structure:
                group[n] = x.copy(value, _copy_ref=False) if isinstance(x, Variable) else value


class SplitCall(NamedTuple):
    """An inspected call: `rest` and `named` go to JAX, `at` has its objects by place."""

    flat: FlatGraph
    layout: CallLayout
    rest: Sequence[Any]
    named: dict[str, Any]
    at: Sequence[tuple[int | str, Any]]

    @property
    def is_cacheable(self) -> bool:
        """True if every change that a cached call depends on is observed."""
        here = current_trace()
        return (
            self.flat.is_tracked
            and all(isinstance(x, Variable) for x in self.flat.leaves)
            and not any(isinstance(x, Variable) for _, x in self.at)
            and all(trace_of(x) == here for x in self.flat.objects)
        )


def _by_place(args: Args, kwargs: Kwargs) -> dict[int | str, Any]:
    return {**dict(enumerate(args)), **dict(sorted(kwargs.items()))}


def object_arguments(
    options: JitOptions, args: Args, kwargs: Kwargs
) -> tuple[list[tuple[int | str, Any]], list[Any], Kwargs]:
    """Returns the objects by position or name, and the other arguments.

    Raises TransformArgumentError if an object was passed for a static argument.
    """
    at = [(i, x) for i, x in _by_place(args, kwargs).items() if is_object(x)]
    if static := [x for i, x in at if i in options.static]:
        raise TransformArgumentError(
            f"nnx.jit: a {type(static[0]).__name__} was passed for an argument that is static by "
            "static_argnums or static_argnames; an object cannot be static, so remove the argument "
            "there, or pass its static part, such as nnx.graphdef(...)."
        )
    places = [i for i, _ in at]
    rest = [x for i, x in enumerate(args) if i not in places]
    return at, rest, {name: x for name, x in kwargs.items() if name not in places}


def has_objects(x: object) -> bool:
    """Returns whether a pytree contains an object."""
    return any(map(is_object, jax.tree.leaves(x, is_leaf=is_object)))


def contains_objects(
    x: Pytree | Variable[Any] | dict[Any, Any] | list[Any] | tuple[Any, ...],
) -> bool:
    """Returns whether `x` is an object or a plain container with one, without calling JAX."""
    if isinstance(x, Pytree | Variable):
        return True
    for item in x.values() if isinstance(x, dict) else x:
        if isinstance(item, MAY_HOLD_OBJECTS) and contains_objects(item):
            return True
    return False


def split_object_arguments(options: JitOptions, args: Args, kwargs: Kwargs) -> SplitCall:
    """Inspects a call with objects only as arguments."""
    at, rest, named = object_arguments(options, args, kwargs)
    shardings = options.shardings_by_position(len(args))
    objects = [(x, shardings.pop(i, None), i in options.donated) for i, x in at]
    for i, role in shardings.items():
        if isinstance(role, Roles):
            raise stateless_error("in_shardings", role, args[i])  # pyright: ignore[reportArgumentType, reportCallIssue]
    return _split_call(options, len(args), objects, rest, named, at)


def split_nested_objects(options: JitOptions, args: Args, kwargs: Kwargs) -> SplitCall:
    """Inspects a call with objects also in containers, where it puts refs."""
    shardings = options.shardings_by_position(len(args))
    objects: list[tuple[Any, Any, bool]] = []

    def with_refs(arg: object, prefix: object, is_donated: bool) -> Any:
        leaves, tree = jax.tree.flatten(arg, is_leaf=is_object)
        of_leaves = broadcast_roles(prefix, arg, is_object, "in_shardings")
        for n, (x, role) in enumerate(zip(leaves, of_leaves, strict=True)):
            if is_object(x):
                leaves[n] = ObjectRef(len(objects))
                objects.append((x, role, is_donated))
            elif isinstance(role, Roles):
                raise stateless_error("in_shardings", role, x)
        return tree.unflatten(leaves)

    given = {
        i: x if i in options.static else with_refs(x, shardings.get(i), i in options.donated)
        for i, x in _by_place(args, kwargs).items()
    }
    rest = [given[i] for i in range(len(args))]
    return _split_call(options, len(args), objects, rest, {k: given[k] for k in kwargs})


def _split_call(
    options: JitOptions,
    n_args: int,
    objects: Sequence[tuple[Any, Any, bool]],
    rest: list[Any],
    named: dict[str, Any],
    at: Sequence[tuple[int | str, Any]] = (),
) -> SplitCall:
    """Splits objects, each given with its sharding and whether its values are donated."""
    carriers, shardings, donated = zip(*objects, strict=True) if objects else ((), (), ())
    roles = tuple(map(_roles, shardings))
    flat, static, _ = options.kind.split(carriers, [*map(tuple, roles)])
    made = tuple(
        [(type(x), metadata_key(x)) if isinstance(x, Variable) else None for x in flat.leaves]
    )
    layout = CallLayout(tuple([i for i, _ in at]), n_args, static, roles, donated, made)
    return SplitCall(flat, layout, rest, named, at)


_SHARED = Roles(((Everything(), None),))


def _roles(role: object) -> Roles:
    if role is None:
        return _SHARED
    return role if isinstance(role, Roles) else Roles(((Everything(), role),))


def _shapes(x: object) -> Any:
    return jax.tree.map(jax.numpy.shape, x)


def _without_state(shardings: object) -> Any:
    without = lambda x: None if isinstance(x, Roles) else x  # noqa: E731
    return jax.tree.map(without, shardings, is_leaf=is_role)


def _as_node(role: object) -> Any:
    return StateNode(role.roles) if isinstance(role, Roles) else role


def _is_ref_or_object(x: object) -> bool:
    return isinstance(x, ObjectRef) or is_object(x)
