"""jit: a call whose objects look as they did costs what `jax.jit` costs.

A call with objects that were met before has a *plan*: which variables to read, which function of
`jax.jit` to call with the list of their values, and which variables to write. It holds as long as
the epoch does (`weft.nnx.structure`), which ends when an object that a plan knows changes otherwise
than by the value of a variable. Then the objects are looked at again, once.

The *program* of a plan, the function that JAX compiles, is shared by all calls with objects that
look alike, and by all functions that are the same by value.
"""

import functools
import inspect
import sys
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from weft.core.tracing import current_trace
from weft.lifting import Roles
from weft.lifting.crossing import Cargo, Parcel, Results, Static, commit, run
from weft.lifting.functions import AtFirstCall
from weft.lifting.roles import broadcast_roles
from weft.nnx.filters import Everything
from weft.nnx.graph import Flat, take_apart
from weft.nnx.structure import EPOCH
from weft.nnx.transforms.abstract import eval_shape
from weft.nnx.transforms.calls import MISSING, Call, current_call, opened, recorded
from weft.nnx.transforms.kind import ObjectKind, is_object, trace_of, watched
from weft.nnx.transforms.modes import references_and_structure
from weft.nnx.transforms.symbols import StateSharding, as_roles
from weft.nnx.variables import Variable, metadata_key

_set_value = Variable._value.__set__  # pyright: ignore[reportAttributeAccessIssue]
_MAX_PLANS = 64


class _Options(NamedTuple):
    """What the user said of the function.

    Attributes:
        others: further parameters of `jax.jit`.
    """

    kind: ObjectKind
    in_shardings: Any
    out_shardings: Any
    static_argnums: frozenset[int]
    static_argnames: frozenset[str]
    donate_argnums: frozenset[int]
    donate_argnames: frozenset[str]
    others: tuple[tuple[str, Any], ...]


@jax.tree_util.register_static
class _Hole:
    """Stands in the arguments for the object with that index."""

    def __init__(self, index: int):
        self.index = index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hole) and self.index == other.index

    def __hash__(self) -> int:
        return self.index


@jax.tree_util.register_static
class _Written:
    """Which values come back.

    Attributes:
        at: the numbers of those that have changed, among those that were not given away.
        is_all: whether nothing but values has changed, and no object is returned.
    """

    def __init__(self, at: tuple[int, ...], is_all: bool):
        self.at, self.is_all = at, is_all

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Written) and (self.at, self.is_all) == (other.at, other.is_all)

    def __hash__(self) -> int:
        return hash(self.at)


class _HiddenObject(Exception):
    """Raised in a trace that finds an object inside of a container among the arguments."""


class _Layout(NamedTuple):
    """The objects of a call.

    Attributes:
        at: the positions of those that are arguments themselves; they are left out of what JAX is
            given. Of others, which are inside of containers, there is a hole.
        names: likewise, those given by name.
        n_args: how many arguments are given by position.
        static: the graph of all of them.
        roles: what is said of each.
        donated: whether its values are given away.
        made: for each value the class and metadata of its variable, None for an attribute.
    """

    at: tuple[int, ...]
    names: tuple[str, ...]
    n_args: int
    static: Any
    roles: tuple[Roles, ...]
    donated: tuple[bool, ...]
    made: tuple[tuple[type[Variable[Any]], Any] | None, ...]


class _Program:
    """The function that JAX compiles, for objects that look alike."""

    def __init__(self, fn: Callable[..., Any], options: _Options, layout: _Layout):
        self._fn, self._options, self._layout = recorded(fn), options, layout
        self._user_fn = fn
        is_donated = [layout.donated[i] for i, _ in layout.static.places]
        self.donated = [n for n, is_given in enumerate(is_donated) if is_given]
        self.kept = [n for n, is_given in enumerate(is_donated) if not is_given]
        self.jitted = jax.jit(self._pure, **self._jit_options())

    def _jit_options(self) -> dict[str, Any]:
        of, layout = self._options, self._layout

        def shifted(argnums: Iterable[int]) -> tuple[int, ...]:
            left = (i for i in argnums if i not in layout.at)
            return tuple(sorted(2 + i - sum(at < i for at in layout.at) for i in left))

        result: dict[str, Any] = dict(of.others)
        result["static_argnums"] = shifted(of.static_argnums)
        result["static_argnames"] = tuple(sorted(of.static_argnames))
        result["donate_argnums"] = (0, *shifted(of.donate_argnums))
        result["donate_argnames"] = tuple(sorted(of.donate_argnames))
        donated = None
        if of.in_shardings is not None:
            flat = [layout.roles[i][g][1] for i, g in layout.static.places]
            donated, kept = ([flat[n] for n in at] for at in (self.donated, self.kept))
            rest = enumerate(_per_argument(of.in_shardings, layout.n_args))
            left = (_without_state(x) for i, x in rest if i not in layout.at)
            result["in_shardings"] = (donated, kept, *left)
        if of.out_shardings is not None or donated is not None:
            out = jax.tree.map(_packed, of.out_shardings, is_leaf=_is_of_state)
            result["out_shardings"] = (out, donated, None, None, None)
        return result

    def _pure(self, donated: list[Any], kept: list[Any], /, *rest: Any, **named: Any) -> Any:
        layout, values = self._layout, self._in_order(donated, kept)
        groups: list[tuple[dict[int, Any], ...]]
        groups = [tuple({} for _ in roles) for roles in layout.roles]
        for n, (i, g) in enumerate(layout.static.places):
            groups[i][g][n] = self.as_leaf(n, values[n])
        args, kwargs = list(rest), dict(named)
        holes = map(_Hole, range(len(groups)))
        for i in layout.at:
            args.insert(i, next(holes))
        kwargs.update(zip(layout.names, holes, strict=False))
        leaves, tree = jax.tree.flatten((tuple(args), kwargs), is_leaf=_is_hole_or_object)
        if any(map(is_object, leaves)):
            raise _HiddenObject
        packed = tree.unflatten(Parcel(groups[x.index]) if isinstance(x, _Hole) else x for x in leaves)
        roles = tuple(layout.roles[x.index] if isinstance(x, _Hole) else None for x in leaves)
        with opened(Call("jit", self._user_fn, (args, kwargs), ("in_shardings", "out_shardings"))):
            results = run(
                self._options.kind,
                self._call,
                Cargo(Static((layout.static, roles)), packed),
                as_roles(self._options.out_shardings),
            )
        return self._outputs(results, values)

    def _call(self, args: Any) -> Any:
        if (call := current_call()) is not None:
            call.args = args[0]
        return self._fn(*args[0], **args[1])

    def _in_order(self, donated: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
        values = dict(zip((*self.donated, *self.kept), (*donated, *kept), strict=True))
        return [values[n] for n in range(len(values))]

    def as_leaf(self, n: int, value: Any) -> Any:
        """A value in a variable as it was, or itself."""
        made = self._layout.made[n]
        return value if made is None else made[0].from_metadata(value, made[1].value)

    def _outputs(self, results: Results, values: list[Any]) -> tuple[Any, ...]:
        """The result, the values to write, and where more has changed all that has."""
        changed = {n: x for p in results.parcels for group in p.groups for n, x in group.items()}
        made = self._layout.made
        if results.static.value is not None or any(
            isinstance(x, Variable) and metadata_key(x) != made[n][1]  # pyright: ignore[reportOptionalSubscript]
            for n, x in changed.items()
        ):
            for n in self.donated:
                i, g = self._layout.static.places[n]
                # What was given away is gone outside.
                results.parcels[i].groups[g].setdefault(n, self.as_leaf(n, values[n]))
            more = results.static, results.parcels
            return results.packed, [], [], more, _Written((), False)
        new = {n: x._value if isinstance(x, Variable) else x for n, x in changed.items()}
        at = tuple(i for i, n in enumerate(self.kept) if n in new)
        donated = [new.get(n, values[n]) for n in self.donated]
        return results.packed, donated, [new[self.kept[i]] for i in at], None, _Written(at, True)


class _Plan:
    """What a call with objects that were met before has to do. It does not keep them alive.

    Attributes:
        epoch: in which it holds.
        trace: in which the objects can be written to.
        at: positions of the objects, and weak references to them.
        names: likewise for those given by name.
        n_first: how many arguments come before those that JAX is given; more than there can be
            where objects come later.
        program: what is called.
        donated: the variables whose values are given away.
        kept: the other variables.
    """

    __slots__ = (
        "__weakref__", "at", "donated", "epoch", "jitted", "kept", "n_first", "names", "program",
        "trace",
    )  # fmt: skip

    def __init__(self, program: _Program, epoch: object, found: "_Found", forget: Any):
        self.program, self.jitted, self.epoch = program, program.jitted, epoch
        self.trace = current_trace()
        self.donated = [found.flat.leaves[n] for n in program.donated]
        self.kept = [found.flat.leaves[n] for n in program.kept]
        self.at = [(i, weakref.ref(x, forget)) for i, x in found.at]
        self.names = [(name, weakref.ref(x, forget)) for name, x in found.names]
        positions = [i for i, _ in found.at]
        at_front = positions == list(range(len(positions)))
        self.n_first = len(positions) if at_front else sys.maxsize

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is with the same objects at the same places."""
        return (
            self.epoch is EPOCH.now
            and all(i < len(args) and args[i] is ref() for i, ref in self.at)
            and all(name in kwargs and kwargs[name] is ref() for name, ref in self.names)
        )


class _Found(NamedTuple):
    """A call, taken apart.

    Attributes:
        flat: the graph of its objects.
        layout: of the objects, for the program.
        rest: what JAX is given of the arguments.
        named: likewise, by name.
        at: the objects that are arguments themselves, with their positions.
        names: likewise, those given by name.
    """

    flat: Flat
    layout: _Layout
    rest: Sequence[Any]
    named: dict[str, Any]
    at: Sequence[tuple[int, Any]]
    names: Sequence[tuple[str, Any]]

    @property
    def can_be_planned(self) -> bool:
        """Whether all that a plan has to know of is told when it changes."""
        here = current_trace()
        return (
            self.flat.is_sure
            and all(isinstance(x, Variable) for x in self.flat.leaves)
            and not any(isinstance(x, Variable) for _, x in (*self.at, *self.names))
            and all(trace_of(x) == here for x in self.flat.objects)
        )


def _objects_at_top(options: _Options, args: Any, kwargs: Any) -> tuple[list[Any], list[Any]]:
    """The arguments that are objects, with their positions, and those given by name."""
    at = [(i, x) for i, x in enumerate(args) if is_object(x) and i not in options.static_argnums]
    names = sorted(
        (name, x)
        for name, x in kwargs.items()
        if is_object(x) and name not in options.static_argnames
    )
    return at, names


def _found_at_top(options: _Options, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Found:
    """A call with objects that are arguments themselves."""
    at, names = _objects_at_top(options, args, kwargs)
    said = _per_argument(options.in_shardings, len(args))
    roles = [_roles(said[i]) for i, _ in at] + [_SHARED for _ in names]
    donated = [i in options.donate_argnums for i, _ in at]
    donated += [name in options.donate_argnames for name, _ in names]
    positions, of_names = tuple(i for i, _ in at), tuple(name for name, _ in names)
    rest = [x for i, x in enumerate(args) if i not in positions]
    named = {name: x for name, x in kwargs.items() if name not in of_names}
    objects = [x for _, x in (*at, *names)]
    flat, static, _ = options.kind.split(objects, [options.kind.wanted(r) for r in roles])
    layout = _Layout(
        positions, of_names, len(args), static, tuple(roles), tuple(donated), _made(flat)
    )
    return _Found(flat, layout, rest, named, at, names)


def _found_anywhere(options: _Options, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Found:
    """A call with objects that are also inside of containers: what is left of those has holes."""
    said = _per_argument(options.in_shardings, len(args))
    objects: list[Any] = []
    roles: list[Roles] = []
    donated: list[bool] = []

    def hollowed(arg: Any, prefix: Any, is_donated: bool) -> Any:
        leaves, tree = jax.tree.flatten(arg, is_leaf=is_object)
        of_leaves = broadcast_roles(prefix, arg, is_object, "in_shardings")
        for n, (x, role) in enumerate(zip(leaves, of_leaves, strict=True)):
            if is_object(x):
                leaves[n] = _Hole(len(objects))
                objects.append(x)
                roles.append(_roles(role))
                donated.append(is_donated)
        return tree.unflatten(leaves)

    rest = [
        x if i in options.static_argnums else hollowed(x, said[i], i in options.donate_argnums)
        for i, x in enumerate(args)
    ]
    named = {
        name: x
        if name in options.static_argnames
        else hollowed(x, None, name in options.donate_argnames)
        for name, x in sorted(kwargs.items())
    }
    flat, static, _ = options.kind.split(objects, [options.kind.wanted(r) for r in roles])
    layout = _Layout((), (), len(args), static, tuple(roles), tuple(donated), _made(flat))
    return _Found(flat, layout, rest, named, (), ())


_SHARED = Roles(((Everything(), None),))


def _roles(said: Any) -> Roles:
    if said is None:
        return _SHARED
    return said.roles if isinstance(said, StateSharding) else Roles(((Everything(), said),))


def _made(flat: Flat) -> tuple[Any, ...]:
    return tuple(
        (type(x), metadata_key(x)) if isinstance(x, Variable) else None for x in flat.leaves
    )


def _per_argument(shardings: Any, n: int) -> Sequence[Any]:
    return shardings if isinstance(shardings, tuple | list) else [shardings] * n


def _is_of_state(x: Any) -> bool:
    return isinstance(x, StateSharding)


def _without_state(shardings: Any) -> Any:
    """What is said of an argument, where objects in it are left out."""
    return jax.tree.map(lambda x: None if _is_of_state(x) else x, shardings, is_leaf=_is_of_state)


def _packed(shardings: Any) -> Any:
    return Parcel(shardings.shardings) if _is_of_state(shardings) else shardings


def _is_hole_or_object(x: Any) -> bool:
    return isinstance(x, _Hole) or is_object(x)


class JitWrapped:
    """A function of objects under `jax.jit`; made by `nnx.jit`."""

    # What each call reads is not among the attributes that are taken over from the function.
    __slots__ = ("__dict__", "__weakref__", "_last")

    def __init__(self, fn: Callable[..., Any], options: _Options):
        functools.update_wrapper(self, fn)
        self._fn, self._options = fn, options
        # Functions that are equal by value share their programs.
        self._programs: AtFirstCall[dict[Any, _Program]] = AtFirstCall((fn, options), dict)
        self._plans: dict[Any, _Plan] = {}
        self._last: _Plan | None = None
        self._has_hidden = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan = self._last
        # What follows is the price of a call.
        if (
            plan is None
            or plan.epoch is not EPOCH.now
            or kwargs
            or len(args) < plan.n_first
        ):
            return self._call_as_found(args, kwargs)
        for i, ref in plan.at:
            if args[i] is not ref():
                return self._call_as_found(args, kwargs)
        donated, kept = plan.donated, plan.kept
        result, of_donated, of_kept, more, written = plan.jitted(
            [variable._value for variable in donated],
            [variable._value for variable in kept],
            *args[plan.n_first :],
        )
        if more is not None or plan.trace is not current_trace():
            return self._finish_planned(plan, (result, of_donated, of_kept, more, written))
        if of_donated:
            deque(map(_set_value, donated, of_donated), 0)
        if of_kept:
            at = written.at
            changed = kept if len(at) == len(kept) else [kept[i] for i in at]
            deque(map(_set_value, changed, of_kept), 0)
        return result

    def _finish_planned(self, plan: _Plan, outputs: tuple[Any, ...]) -> Any:
        objects = tuple(ref() for _, ref in (*plan.at, *plan.names))
        return self._finish(plan.program, take_apart((objects, ()), with_metadata=False), outputs)

    def _call_as_found(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call for which the last plan does not hold."""
        if not self._has_hidden:
            try:
                at, names = _objects_at_top(self._options, args, kwargs)
                if (plan := self._plan(args, kwargs, at, names)) is None:
                    return self._call_found(_found_at_top(self._options, args, kwargs))
                positions, of_names = [i for i, _ in at], [name for name, _ in names]
                rest = [x for i, x in enumerate(args) if i not in positions]
                named = {k: x for k, x in kwargs.items() if k not in of_names}
                values = ([x._value for x in found] for found in (plan.donated, plan.kept))
                return self._finish_planned(plan, plan.jitted(*values, *rest, **named))
            except _HiddenObject:
                self._has_hidden = True
        return self._call_found(_found_anywhere(self._options, args, kwargs))

    def _plan(self, args: Any, kwargs: Any, at: list[Any], names: list[Any]) -> _Plan | None:
        """The plan of a call, made if there is none that holds; None if there cannot be one."""
        key = tuple((place, id(x)) for place, x in (*at, *names))
        plan = self._plans.get(key)
        if plan is None or not plan.fits(args, kwargs):
            while True:
                epoch = EPOCH.now
                found = _found_at_top(self._options, args, kwargs)
                if not found.can_be_planned:
                    return None
                if all(map(watched, found.flat.objects)):
                    break
            plan = _Plan(self._program(found.layout), epoch, found, self._forgetting(key))
            self._plans[key] = plan
            while len(self._plans) > _MAX_PLANS:
                self._plans.pop(next(iter(self._plans)), None)
        self._last = plan
        return plan

    def _forgetting(self, key: Hashable) -> Callable[[Any], None]:
        """What to do when an object of a plan is gone."""
        weak = weakref.ref(self)

        def forget(_: Any) -> None:
            if (me := weak()) is not None:
                plan = me._plans.pop(key, None)
                if me._last is plan:
                    me._last = None

        return forget

    def _program(self, layout: _Layout) -> _Program:
        programs = self._programs.value
        if layout not in programs:
            programs[layout] = _Program(self._fn, self._options, layout)
        return programs[layout]

    def _call_found(self, found: _Found) -> Any:
        program, values = self._program_and_values(found)
        outputs = program.jitted(*values, *found.rest, **found.named)
        return self._finish(program, found.flat, outputs)

    def _program_and_values(self, found: _Found) -> tuple[_Program, tuple[list[Any], list[Any]]]:
        program = self._program(found.layout)
        values = [x._value if isinstance(x, Variable) else x for x in found.flat.leaves]
        return program, ([values[n] for n in program.donated], [values[n] for n in program.kept])

    def _finish(self, program: _Program, flat: Flat, outputs: tuple[Any, ...]) -> Any:
        """Writes what a call has changed, whatever it is, and returns its result."""
        result, of_donated, of_kept, more, written = outputs
        if more is None:
            numbers = [*program.donated, *(program.kept[i] for i in written.at)]
            values = zip(numbers, (*of_donated, *of_kept), strict=True)
            group = {n: program.as_leaf(n, value) for n, value in values}
            more = Static(None), [Parcel((group,))]
        return commit(self._options.kind, flat, Results(*more, result))

    def _prepared(self, args: Any, kwargs: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        found = _found_anywhere(self._options, args, kwargs)
        program, values = self._program_and_values(found)
        return program.jitted, (*values, *found.rest), found.named

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """As `jax.jit(...).lower`; objects stay as they are."""
        jitted, args, kwargs = self._prepared(args, kwargs)
        return jitted.lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(...).trace`; objects stay as they are."""
        jitted, args, kwargs = self._prepared(args, kwargs)
        return jitted.trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """What a call would return, with shapes in place of arrays; objects stay as they are."""
        return eval_shape(self._fn, *args, **kwargs)

    def clear_cache(self) -> None:
        """Forgets what was compiled."""
        self._programs.value.clear()
        self._plans.clear()
        self._last = None

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)


def jit(
    fun: Callable[..., Any] = MISSING,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    device: Any = None,
    backend: str | None = None,
    inline: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """`jax.jit` of a function of objects, at the price of `jax.jit`.

    A call with objects that it has met before reads and writes the values of their variables, and
    nothing else. Where their structure has changed since, they are looked at once more.

    Args:
        fun: the function; without it, a decorator.
        in_shardings: for each argument a sharding, or a pytree prefix of such; for an object one
            for all its state, or `StateSharding`.
        out_shardings: for the results, likewise.
        static_argnums: arguments that are hashable values and no arrays.
        static_argnames: those among arguments given by name.
        donate_argnums: arguments whose arrays, also those of variables, may be used for results.
        donate_argnames: those among arguments given by name.
        keep_unused: as for `jax.jit`.
        device: as for `jax.jit`.
        backend: as for `jax.jit`.
        inline: as for `jax.jit`.
        graph: see `nnx.set_graph_mode`.
        graph_updates: see `nnx.set_graph_updates`.

    Returns:
        The function, with `lower`, `trace` and `eval_shape` as that of `jax.jit`.

    Raises:
        CapturedObjectError: if an object that is no argument is returned.
        TraceContextError: if it writes to an object that is no argument.

    Example:
        >>> import jax.numpy as jnp
        >>> from weft import nnx
        >>> model = nnx.Dict(w=nnx.Param(jnp.array(1.0)))
        >>> @nnx.jit
        ... def double(model):
        ...     model.w[...] *= 2
        >>> double(model)
        >>> model.w[...]
        Array(2., dtype=float32, weak_type=True)
    """
    options: dict[str, Any] = {"in_shardings": in_shardings, "out_shardings": out_shardings}
    options |= {"static_argnums": static_argnums, "static_argnames": static_argnames}
    options |= {"donate_argnums": donate_argnums, "donate_argnames": donate_argnames}
    others = {"keep_unused": keep_unused, "inline": inline, "device": device, "backend": backend}
    modes = {"graph": graph, "graph_updates": graph_updates}
    if fun is MISSING:
        return functools.partial(jit, **options, **others, **modes)
    kind = ObjectKind("jit", *references_and_structure(graph, graph_updates))
    static = _both_ways(fun, static_argnums, static_argnames)
    donated = _both_ways(fun, donate_argnums, donate_argnames)
    given = tuple((name, value) for name, value in others.items() if value)
    return JitWrapped(
        fun, _Options(kind, in_shardings, out_shardings, *static, *donated, given)
    )


def _both_ways(
    fun: Callable[..., Any], argnums: Any, argnames: Any
) -> tuple[frozenset[int], frozenset[str]]:
    """Arguments by position and by name, however they were given."""
    numbers = {argnums} if isinstance(argnums, int) else set(argnums or ())
    names = {argnames} if isinstance(argnames, str) else set(argnames or ())
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return frozenset(numbers), frozenset(names)
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    numbers = {i % len(by_position) if i < 0 and by_position else i for i in numbers}
    by_name = {p.name: i for i, p in enumerate(by_position) if p.kind is p.POSITIONAL_OR_KEYWORD}
    more = {name for name, i in by_name.items() if i in numbers}
    return frozenset(numbers | {by_name[n] for n in names if n in by_name}), frozenset(names | more)


def jit_partial(fun: Callable[..., Any], *partial_args: Any, **options: Any) -> Callable[..., Any]:
    """A jitted function whose first arguments are given.

    Args:
        fun: the function.
        *partial_args: its first arguments.
        **options: see `nnx.jit`; they speak of all arguments, also of those that are given.

    Example:
        >>> import jax.numpy as jnp
        >>> from weft import nnx
        >>> model = nnx.Dict(w=nnx.Param(jnp.array(2.0)))
        >>> float(nnx.jit_partial(lambda model, x: model.w * x, model)(3.0))
        6.0
    """
    return functools.partial(jit(fun, **options), *partial_args)


def cached_partial(
    f: Callable[..., Any],
    *cached_args: Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Callable[..., Any]:
    """A transformed function whose first arguments are given.

    What is known of objects is remembered for every call (see `nnx.jit`), so this is a
    `functools.partial`, for programs that use it; their objects may change in every way.

    Args:
        f: the transformed function.
        *cached_args: its first arguments.
        graph: how `f` was transformed says it.
        graph_updates: likewise.
    """
    return functools.partial(f, *cached_args)
