"""Programs that JAX compiles for jitted functions of objects, and the inspection of calls.

JAX does not receive objects that are arguments themselves, and receives an `ObjectRef` for objects
in containers. Their values are two flat lists, the first of them donated:

    jitted(donated_values, retained_values, *other_args, **other_kwargs)
        -> result, new_donated, new_retained, changes, written

If only values have changed, `new_donated` and `new_retained` are these, `written` says which they
are, and `changes` is None. If more has changed, `changes` has what a transformation collects.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
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
from weft.lifting.roles import Role, broadcast_roles, is_role
from weft.lifting.signature import named_after, signature_of
from weft.lifting.traces import current_trace
from weft.nnx.filters import Everything
from weft.nnx.graph import FlatGraph
from weft.nnx.pytree import Pytree
from weft.nnx.transforms.calls import (
    Args,
    Kwargs,
    key_suffix,
    object_paths,
    parameter_names,
)
from weft.nnx.transforms.kind import ObjectKind, is_object, trace_of
from weft.nnx.transforms.object_state import (
    Group,
    Leaf,
    Object,
    PassedValue,
    StaticObjects,
    empty_groups,
    merged_groups,
    value_of_leaf,
    with_value,
    without_mark,
)
from weft.nnx.variables import NO_METADATA, Variable, metadata_key
from weft.nnx.versions import StaticValue, TransformCall
from weft.typing import Fn, PyTree

Place = int | str  # position or name of an argument
Outputs = tuple[
    Any, ...
]  # see above; a plain tuple, since JAX makes it fastest
MAY_HOLD_OBJECTS = (Pytree, Variable, dict, list, tuple)


class JitOptions(NamedTuple):
    """Options of `nnx.jit`, with shardings converted by `as_roles`.

    Attributes:
        static, donated: positions and names of arguments.
        for_jax: options that `jax.jit` takes as they are.
    """

    kind: ObjectKind
    in_shardings: PyTree
    out_shardings: PyTree
    static: frozenset[Place]
    donated: frozenset[Place]
    for_jax: tuple[tuple[str, Any], ...]

    def shardings_by_position(self, n_args: int) -> dict[Place, PyTree]:
        """Returns the sharding of each positional argument that is not static, as in `jax.jit`.

        Raises CallMismatchError if there are more or fewer shardings.
        """
        positions = [i for i in range(n_args) if i not in self.static]
        shardings = self.in_shardings
        if not isinstance(shardings, tuple) or isinstance(shardings, Roles):
            return dict.fromkeys(positions, shardings)
        if len(shardings) != len(positions):
            arguments = "positional arguments"
            if len(positions) < n_args:
                arguments += " that are not static"
            raise CallMismatchError(
                f"nnx.jit: in_shardings has {len(shardings)} entries, but the call has "
                f"{len(positions)} {arguments}; use one entry per argument, or one sharding for "
                "all."
            )
        return dict(zip(positions, shardings, strict=True))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ObjectRef:
    """Placeholder for the object with an index in the arguments."""

    index: int


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class WrittenValues:
    """The values that come back besides the donated ones, which all do.

    Attributes:
        retained_indices: positions of changed values in the list of values that are not donated.
        passed: numbers of values that custom rules have returned unchanged.
    """

    retained_indices: tuple[int, ...]
    passed: tuple[int, ...] = ()


class NestedObject(Exception):
    """Raised in a trace that finds an object in a container among the arguments."""


class VariableClass(NamedTuple):
    """The class and the metadata of a variable."""

    type: type[Variable[Any]]
    metadata: StaticValue


class CallLayout(NamedTuple):
    """The structure of the objects of a call; calls with an equal one share a program.

    Attributes:
        places: those of arguments that are objects, which JAX does not receive.
        roles: for each object its filters, with the sharding of each.
        donated: for each object whether its values are donated.
        variables: for each value the class of its variable, None for an attribute.
    """

    places: tuple[Place, ...]
    n_args: int
    static: StaticObjects
    roles: tuple[Roles, ...]
    donated: tuple[bool, ...]
    variables: tuple[VariableClass | None, ...]


@jax.tree_util.register_pytree_with_keys_class
class _NamedValues:
    """Values with their names as keys, which JAX shows."""

    def __init__(self, names: Iterable[str], values: Iterable[Any]):
        self._names = names
        self._values = values

    def tree_flatten_with_keys(self):
        return list(zip(self._names, self._values, strict=True)), None

    @classmethod
    def tree_unflatten(cls, aux: None, values: Iterable[Any]) -> _NamedValues:
        return cls((), values)


class ProgramSignature(inspect.Signature):
    """Signature of the function of a program, with a name for each value of an object.

    JAX shows the names of bound arguments in compiled text and in errors. It keeps signatures, so
    this one must not hold the user's function and objects.

    Args:
        pure_signature: that of the program's function, whose parameters it has.
        fn: the user's function.
        numbers: those of the donated values and of the others.
    """

    def __init__(
        self,
        pure_signature: inspect.Signature,
        fn: Fn,
        layout: CallLayout,
        numbers: Iterable[int],
    ):
        super().__init__(list(pure_signature.parameters.values()))
        self._fn_signature = signature_of(fn)
        self._places = layout.places
        self._refs = list(map(ObjectRef, range(len(layout.roles))))
        # For each value the index of its object, and the user's notation of the path in it.
        self._value_paths: list[tuple[Any, str]] = []
        for number in numbers:
            _, object_index, *path = layout.static.graphdef.paths[number]
            suffix = "".join(map(key_suffix, path))
            self._value_paths.append((object_index, suffix))

    def with_refs(
        self, args: Iterable[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], Kwargs]:
        """Returns the user's arguments, with a placeholder for each object."""
        all_args = list(args)
        all_kwargs = dict(kwargs)
        # Objects in containers have no place of their own, and a placeholder already.
        for place, ref in zip(self._places, self._refs, strict=False):
            if isinstance(place, int):
                all_args.insert(place, ref)
            else:
                all_kwargs[place] = ref
        return all_args, dict(sorted(all_kwargs.items()))

    def bind(
        self,
        donated: Sequence[Any],
        retained: Sequence[Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> inspect.BoundArguments:
        all_args, all_kwargs = self.with_refs(args, kwargs)
        bound = self._fn_signature.bind(*all_args, **all_kwargs)
        object_names = self._object_names(bound.arguments)
        # JAX binds for each trace several times, and a model has many values.
        value_names = [object_names[i] + path for i, path in self._value_paths]
        named_values = _NamedValues(value_names, (*donated, *retained))
        arguments = OrderedDict({"": named_values, **bound.arguments})
        return inspect.BoundArguments(self, arguments)

    def _object_names(self, arguments: Mapping[str, PyTree]) -> dict[Any, str]:
        """Returns the user's notation of each object, by its index."""
        names: dict[Any, str] = {}
        for name, argument in arguments.items():
            if isinstance(argument, ObjectRef):
                names[argument.index] = name
        if len(names) == len(self._refs):
            return names
        # The others are in containers, and a walk of all arguments is slow.
        for name, argument in arguments.items():
            leaves = jax.tree_util.tree_leaves_with_path(
                argument, is_leaf=_is_ref_or_object
            )
            for path, leaf in leaves:
                if isinstance(leaf, ObjectRef):
                    names[leaf.index] = name + jax.tree_util.keystr(path)
        return names


class Program:
    """The function that JAX compiles, for objects of one structure.

    A value's number is its position among the values of all objects.

    Attributes:
        donated, retained: the numbers of the values in the first and in the second list.
        n_traces: how often JAX has traced the function.
    """

    def __init__(self, fn: Fn, options: JitOptions, layout: CallLayout):
        self._options = options
        self.layout = layout
        self.n_traces = 0
        self.donated: list[int] = []
        self.retained: list[int] = []
        for number, place in enumerate(layout.static.places):
            is_donated = layout.donated[place.object]
            numbers = self.donated if is_donated else self.retained
            numbers.append(number)

        def pure(
            donated: list[Any],
            retained: list[Any],
            /,
            *other_args: PyTree,
            **other_kwargs: PyTree,
        ) -> Outputs:
            self.n_traces += 1
            values = self._in_order(donated, retained)
            args, kwargs = self._signature.with_refs(other_args, other_kwargs)
            pure_args = self._pure_args(values, args, kwargs)
            object_places = [
                *object_paths(args, parameter_names(fn), ObjectRef),
                *object_paths((*kwargs.values(),), [*kwargs], ObjectRef),
            ]
            specs = ("in_shardings", "out_shardings")
            with TransformCall(
                "jit", fn, args, specs, given=object_places, place=None
            ):
                results = call_pure(
                    options.kind,
                    fn,
                    pure_args,
                    options.out_shardings,
                    has_kwargs=True,
                )
            return self._outputs(results, values)

        leading = ("donated_state", "state")
        named_after(fn, pure, leading=leading, left_out=layout.places)
        self._signature = ProgramSignature(
            inspect.signature(pure), fn, layout, (*self.donated, *self.retained)
        )
        pure.__signature__ = self._signature  # pyright: ignore[reportFunctionMemberAccess]
        self.jitted = jax.jit(pure, **self._jit_options())

    def _jit_options(self) -> dict[str, Any]:
        """Returns the options of `jax.jit` for the function of this program."""
        options = self._options
        positions: list[int] = []
        for i in range(self.layout.n_args):
            if i not in self.layout.places:
                positions.append(i)

        def argnums(places: Collection[Place]) -> list[int]:
            # The two lists of values come first.
            return [2 + n for n, i in enumerate(positions) if i in places]

        jit_options: dict[str, Any] = dict(options.for_jax)
        jit_options["static_argnums"] = argnums(options.static)
        jit_options["static_argnames"] = self._argnames(options.static)
        jit_options["donate_argnums"] = [0, *argnums(options.donated)]
        jit_options["donate_argnames"] = self._argnames(options.donated)
        if options.in_shardings is not None:
            shardings = options.shardings_by_position(self.layout.n_args)
            in_shardings: list[PyTree] = [
                list(map(self._sharding, self.donated)),
                list(map(self._sharding, self.retained)),
            ]
            for i, sharding in shardings.items():
                if i in positions:
                    in_shardings.append(_without_state(sharding))
            jit_options["in_shardings"] = tuple(in_shardings)
        if options.out_shardings is not None:
            result_shardings = jax.tree.map(
                _as_node, options.out_shardings, is_leaf=is_role
            )
            jit_options["out_shardings"] = (result_shardings, *[None] * 4)
        return jit_options

    def _argnames(self, places: Iterable[Place]) -> list[str]:
        """Returns the names that the program's function takes."""
        kinds = {p.name: p.kind for p in self._signature.parameters.values()}
        takes_any = inspect.Parameter.VAR_KEYWORD in kinds.values()
        by_position = inspect.Parameter.POSITIONAL_ONLY
        names: list[str] = []
        for place in places:
            # Objects are left out of the parameters, and some can be passed by position alone.
            if isinstance(place, str):
                is_by_name = kinds.get(place, by_position) != by_position
                if is_by_name or takes_any:
                    names.append(place)
        return sorted(names)

    def _sharding(self, number: int) -> PyTree:
        """Returns the sharding that `in_shardings` gives to a value."""
        place = self.layout.static.places[number]
        _, sharding = self.layout.roles[place.object][place.group]
        return sharding

    def _in_order(
        self, donated: Iterable[PyTree], retained: Iterable[PyTree]
    ) -> list[PyTree]:
        """Returns the values in the order of their numbers."""
        value_of_number = dict(zip(self.donated, donated, strict=True))
        value_of_number.update(zip(self.retained, retained, strict=True))
        return [value_of_number[n] for n in range(len(value_of_number))]

    def _pure_args(
        self, values: Sequence[PyTree], args: Sequence[PyTree], kwargs: Kwargs
    ) -> PureArgs:
        """Returns the arguments for `call_pure`, with groups of values for placeholders.

        Raises NestedObject if an argument holds an object that has no placeholder.
        """
        static = self.layout.static
        groups = empty_groups(self.layout.roles)
        for number, (_, i, g) in enumerate(static.places):
            groups[i][g][number] = self._input_leaf(number, values[number])
        # The last of the arguments has those by name, as `call_pure` takes them.
        leaves, structure = jax.tree.flatten(
            (*args, kwargs), is_leaf=_is_ref_or_object
        )
        roles: list[Roles | None] = []
        for i, leaf in enumerate(leaves):
            if is_object(leaf):
                raise NestedObject
            if isinstance(leaf, ObjectRef):
                leaves[i] = StateNode(groups[leaf.index])
                roles.append(self.layout.roles[leaf.index])
            else:
                roles.append(None)
        packed = structure.unflatten(leaves)
        return PureArgs(Static(static), Static(tuple(roles)), packed)

    def _input_leaf(self, number: int, value: PyTree) -> Leaf:
        """Returns a value as `weft.lifting` takes it, which makes plain variables itself."""
        variable_class = self.layout.variables[number]
        if (
            variable_class is not None
            and variable_class.metadata is NO_METADATA
            and not isinstance(value, Variable)
        ):
            return value
        return self.as_leaf(number, value)

    def as_leaf(self, number: int, value: PyTree) -> Leaf:
        """Returns a value in a copy of its variable, or itself for an attribute."""
        variable_class = self.layout.variables[number]
        if variable_class is None:
            return value
        metadata = variable_class.metadata.value
        return variable_class.type.from_metadata(value, metadata)

    def values_of(self, flat: FlatGraph) -> tuple[list[PyTree], list[PyTree]]:
        """Returns the donated values and the others."""
        leaves = flat.leaves
        donated = [value_of_leaf(leaves[number]) for number in self.donated]
        retained = [value_of_leaf(leaves[number]) for number in self.retained]
        return donated, retained

    def finish(self, flat: FlatGraph, outputs: Outputs) -> PyTree:
        """Writes the changes of a call, and returns its result."""
        result, new_donated, new_retained, changes, written = outputs
        if changes is None:
            written_numbers = [
                self.retained[i] for i in written.retained_indices
            ]
            numbers = [*self.donated, *written_numbers]
            group: Group = {}
            values = (*new_donated, *new_retained)
            for number, value in zip(numbers, values, strict=True):
                group[number] = self.as_leaf(number, value)
            for number in written.passed:
                group[number] = PassedValue(group[number])
            changes = Static(None), [StateNode((group,))]
        static, state_nodes = changes
        results = PureResults(static, state_nodes, result)
        return commit_results(self._options.kind, flat, results)

    def _outputs(
        self, results: PureResults, values: Sequence[PyTree]
    ) -> Outputs:
        """Returns the outputs of the program from what a call has collected."""
        state_nodes = results.state_nodes
        if self._options.in_shardings is not None:
            self._constrain_outputs(state_nodes, values)
        changed = merged_groups([node.groups for node in state_nodes])
        is_structural = results.static.value is not None
        if is_structural or self._has_new_metadata(changed):
            # Donated values no longer exist outside, so they come back even if unchanged.
            for number in self.donated:
                place = self.layout.static.places[number]
                group = state_nodes[place.object].groups[place.group]
                if number not in group:
                    group[number] = self.as_leaf(number, values[number])
            changes = results.static, state_nodes
            return results.packed, [], [], changes, WrittenValues(())

        new_values: dict[int, PyTree] = {}
        passed: list[int] = []
        for number, leaf in changed.items():
            if isinstance(leaf, PassedValue):
                passed.append(number)
            new_values[number] = value_of_leaf(leaf)
        new_donated: list[PyTree] = []
        for number in self.donated:
            new_donated.append(new_values.get(number, values[number]))
        new_retained: list[PyTree] = []
        retained_indices: list[int] = []
        for i, number in enumerate(self.retained):
            if number in new_values:
                new_retained.append(new_values[number])
                retained_indices.append(i)
        written = WrittenValues(tuple(retained_indices), tuple(passed))
        return results.packed, new_donated, new_retained, None, written

    def _has_new_metadata(self, changed: Group) -> bool:
        """Returns whether a call has changed the metadata of a variable."""
        for number, leaf in changed.items():
            variable = without_mark(leaf)
            if isinstance(variable, Variable):
                variable_class = self.layout.variables[number]
                assert variable_class is not None, "it was a variable before"
                if metadata_key(variable) != variable_class.metadata:
                    return True
        return False

    def _constrain_outputs(
        self, state_nodes: Sequence[StateNode], values: Sequence[PyTree]
    ) -> None:
        """Constrains all outputs to the input shardings, or each call would do it again."""
        for number, place in enumerate(self.layout.static.places):
            sharding = self._sharding(number)
            group = state_nodes[place.object].groups[place.group]
            is_changed = number in group
            if not is_changed and not self._options.kind.structure:
                continue
            leaf = group.get(number, self.as_leaf(number, values[number]))
            value = value_of_leaf(leaf)
            if sharding is None or _shapes(value) != _shapes(values[number]):
                group[number] = leaf
                continue
            new_value = constrain_like_jit(value, sharding)
            group[number] = with_value(leaf, new_value)


class SplitCall(NamedTuple):
    """An inspected call.

    Attributes:
        other_args, other_kwargs: the arguments for JAX.
        objects: the arguments that are objects.
    """

    flat: FlatGraph
    layout: CallLayout
    other_args: Sequence[Any]
    other_kwargs: Kwargs
    objects: Mapping[Place, Object]

    @property
    def is_cacheable(self) -> bool:
        """True if every change that a cached call depends on is observed."""
        if not self.flat.is_tracked:
            return False
        # A cached call reads and writes the values of variables, and finds objects by attributes.
        for leaf in self.flat.leaves:
            if not isinstance(leaf, Variable):
                return False
        for x in self.objects.values():
            if isinstance(x, Variable):
                return False
        # Objects of an outer trace are read-only, which only an inspection notices.
        trace = current_trace()
        return all(trace_of(x) == trace for x in self.flat.objects)


class ObjectArguments(NamedTuple):
    """The arguments of a call that are objects, and the others."""

    objects: dict[Place, Object]
    other_args: list[Any]
    other_kwargs: Kwargs


def object_arguments(
    options: JitOptions, args: Args, kwargs: Kwargs
) -> ObjectArguments:
    """Returns the objects by position or name, and the other arguments.

    Raises TransformArgumentError if an object was passed for a static argument.
    """
    objects: dict[Place, Object] = {}
    other_args: list[Any] = []
    other_kwargs: Kwargs = {}
    for i, arg in enumerate(args):
        if is_object(arg):
            objects[i] = arg
        else:
            other_args.append(arg)
    for name, arg in sorted(kwargs.items()):
        if is_object(arg):
            objects[name] = arg
        else:
            other_kwargs[name] = arg
    for place, x in objects.items():
        if place in options.static:
            raise TransformArgumentError(
                f"nnx.jit: a {type(x).__name__} was passed for an argument that is static by "
                "static_argnums or static_argnames; an object cannot be static, so remove the "
                "argument there, or pass its static part, such as nnx.graphdef(...)."
            )
    return ObjectArguments(objects, other_args, other_kwargs)


def has_objects(x: PyTree) -> bool:
    """Returns whether a pytree contains an object."""
    return any(map(is_object, jax.tree.leaves(x, is_leaf=is_object)))


def contains_objects(
    x: Object | dict[Any, Any] | list[Any] | tuple[Any, ...],
) -> bool:
    """Returns whether `x` is an object or a plain container with one, without calling JAX."""
    if isinstance(x, Pytree | Variable):
        return True
    for item in x.values() if isinstance(x, dict) else x:
        if isinstance(item, MAY_HOLD_OBJECTS) and contains_objects(item):
            return True
    return False


class _SplitArgument(NamedTuple):
    """An object, its sharding or those of its parts, and whether its values are donated."""

    object: Object
    sharding: Role | Roles
    is_donated: bool


def split_object_arguments(
    options: JitOptions, args: Args, kwargs: Kwargs
) -> SplitCall:
    """Inspects a call with objects only as arguments."""
    arguments = object_arguments(options, args, kwargs)
    shardings = options.shardings_by_position(len(args))
    for i, sharding in shardings.items():
        if isinstance(sharding, Roles) and i not in arguments.objects:
            raise stateless_error("in_shardings", sharding, args[i])  # pyright: ignore[reportArgumentType, reportCallIssue]
    objects: list[_SplitArgument] = []
    for place, x in arguments.objects.items():
        is_donated = place in options.donated
        objects.append(_SplitArgument(x, shardings.get(place), is_donated))
    return _split_call(options, len(args), objects, arguments)


def split_nested_objects(
    options: JitOptions, args: Args, kwargs: Kwargs
) -> SplitCall:
    """Inspects a call with objects also in containers, where it puts refs."""
    shardings = options.shardings_by_position(len(args))
    objects: list[_SplitArgument] = []

    def with_refs(place: Place, arg: PyTree) -> PyTree:
        if place in options.static:
            return arg
        is_donated = place in options.donated
        leaves, structure = jax.tree.flatten(arg, is_leaf=is_object)
        leaf_shardings = broadcast_roles(
            shardings.get(place), arg, is_object, "in_shardings"
        )
        for i, sharding in enumerate(leaf_shardings):
            leaf = leaves[i]
            if is_object(leaf):
                leaves[i] = ObjectRef(len(objects))
                objects.append(_SplitArgument(leaf, sharding, is_donated))
            elif isinstance(sharding, Roles):
                raise stateless_error("in_shardings", sharding, leaf)
        return structure.unflatten(leaves)

    other_args: list[Any] = []
    for i, arg in enumerate(args):
        other_args.append(with_refs(i, arg))
    other_kwargs: Kwargs = {}
    for name, arg in sorted(kwargs.items()):
        other_kwargs[name] = with_refs(name, arg)
    arguments = ObjectArguments({}, other_args, other_kwargs)
    return _split_call(options, len(args), objects, arguments)


_SHARED = Roles(((Everything(), None),))


def _split_call(
    options: JitOptions,
    n_args: int,
    objects: Sequence[_SplitArgument],
    arguments: ObjectArguments,
) -> SplitCall:
    """Splits objects, and puts their structure into a layout."""
    carriers: list[Object] = []
    roles: list[Roles] = []
    donated: list[bool] = []
    for x, sharding, is_donated in objects:
        if sharding is None:
            sharding = _SHARED
        elif not isinstance(sharding, Roles):
            sharding = Roles(((Everything(), sharding),))
        carriers.append(x)
        roles.append(sharding)
        donated.append(is_donated)
    flat, static, _ = options.kind.split(carriers, list(map(tuple, roles)))
    variables: list[VariableClass | None] = []
    for leaf in flat.leaves:
        variable_class = None
        if isinstance(leaf, Variable):
            variable_class = VariableClass(type(leaf), metadata_key(leaf))
        variables.append(variable_class)
    layout = CallLayout(
        tuple(arguments.objects),
        n_args,
        static,
        tuple(roles),
        tuple(donated),
        tuple(variables),
    )
    other_args, other_kwargs = arguments.other_args, arguments.other_kwargs
    return SplitCall(flat, layout, other_args, other_kwargs, arguments.objects)


def _shapes(x: PyTree) -> PyTree:
    return jax.tree.map(jax.numpy.shape, x)


def _without_state(shardings: PyTree) -> PyTree:
    """Returns the shardings of arguments, with None for objects, which JAX does not see."""

    def without_roles(sharding: Role | Roles) -> Role:
        if isinstance(sharding, Roles):
            return None
        return sharding

    return jax.tree.map(without_roles, shardings, is_leaf=is_role)


def _as_node(sharding: Role | Roles) -> Role | StateNode:
    """Returns a sharding as a prefix of packed results, where a node is in place of an object."""
    if isinstance(sharding, Roles):
        return StateNode(sharding.roles)
    return sharding


def _is_ref_or_object(x: PyTree) -> bool:
    return isinstance(x, ObjectRef) or is_object(x)
