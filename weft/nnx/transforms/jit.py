"""jit: a call whose objects look as they did costs what `jax.jit` costs.

A call with objects that were met before has a *plan*: which variables to read, which function of
`jax.jit` to call with the list of their values, and which variables to write. It holds as long as
the epoch does (`weft.nnx.structure`), which ends when an object that a plan knows changes otherwise
than by the value of a variable. Then the objects are looked at again, once.

The *program* of a plan, the function that JAX compiles, is shared by all calls with objects that
look alike, and by all functions that are the same by value.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from weft.core.tracebacks import hide_frames
from weft.core.tracing import TraceState, current_trace, is_tracing
from weft.errors import TransformArgumentError
from weft.lifting.argnums import check_argnums
from weft.lifting.functions import AtFirstCall, by_value
from weft.lifting.stages import Lowered, Traced
from weft.nnx.graph import Flat, flat_of_variables
from weft.nnx.naming import origin
from weft.nnx.structure import EPOCH
from weft.nnx.transforms.abstract import eval_shape
from weft.nnx.transforms.calls import MISSING, check_unbound, opened, parameter_names
from weft.nnx.transforms.calls import Call as OpenCall
from weft.nnx.transforms.jit_aot import Call
from weft.nnx.transforms.jit_program import (
    MAY_HOLD_OBJECTS,
    Found,
    FunctionChanged,
    HiddenObject,
    Layout,
    Options,
    Program,
    Written,
    found_anywhere,
    found_at_top,
    has_objects,
    holds_objects,
    objects_at_top,
)
from weft.nnx.transforms.kind import ObjectKind, is_object, watched
from weft.nnx.transforms.modes import references_and_structure
from weft.nnx.transforms.symbols import as_roles
from weft.nnx.variables import Variable

_set_value = Variable._value.__set__  # pyright: ignore[reportAttributeAccessIssue]
_MAX_PLANS = 64
_MAX_PROGRAMS = 512
_LOCK = threading.RLock()


class _Plan:
    """What a call with objects that were met before has to do. It does not keep them alive.

    Attributes:
        epoch: in which it holds.
        trace: in which the objects can be written to.
        at: positions of the objects, and weak references to them.
        names: likewise for those given by name.
        objects: weak references to all of them, and to what they are made of.
        n_first: how many arguments come before those that JAX is given; more than there can be
            where objects come later or by name.
        n_args: how many there were.
        program: what is called.
        donated: the variables whose values are given away.
        kept: the other variables.
    """

    __slots__ = (
        "at", "donated", "epoch", "jitted", "kept", "n_args", "n_first", "names", "objects",
        "program", "trace",
    )  # fmt: skip

    def __init__(self, program: Program, epoch: object, found: Found, forget: Any):
        self.program, self.jitted, self.epoch = program, program.jitted, epoch
        self.trace = current_trace()
        self.donated = [found.flat.leaves[n] for n in program.donated]
        self.kept = [found.flat.leaves[n] for n in program.kept]
        self.at = [(i, weakref.ref(x, forget)) for i, x in found.at]
        self.names = [(name, weakref.ref(x, forget)) for name, x in found.names]
        self.objects = [weakref.ref(x) for x in found.flat.objects]
        positions = [i for i, _ in found.at]
        at_front = positions == list(range(len(positions))) and not found.names
        self.n_first = len(positions) if at_front else sys.maxsize
        self.n_args = found.layout.n_args

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is with the same objects at the same places."""
        return (
            self.epoch is EPOCH.now
            and all(i < len(args) and args[i] is ref() for i, ref in self.at)
            and all(name in kwargs and kwargs[name] is ref() for name, ref in self.names)
        )

    def write(self, of_donated: list[Any], of_kept: list[Any], more: None, written: Written):
        """Writes the values that a call gave, where nothing but values has changed."""
        changed = (*self.donated, *(self.kept[i] for i in written.at))
        any(map(_set_value, changed, (*of_donated, *of_kept)))

    def flat(self) -> Flat:
        """The graph of the objects, as it was found."""
        graphdef = self.program.layout.static.graphdef
        return flat_of_variables(graphdef, [ref() for ref in self.objects])


class JitWrapped:
    """A function of objects under `jax.jit`; made by `nnx.jit`."""

    # What each call reads is not among the attributes that are taken over from the function.
    __slots__ = ("__dict__", "__weakref__", "_last")

    def __init__(self, fn: Callable[..., Any], options: Options):
        taken_over = () if is_object(fn) else functools.WRAPPER_UPDATES
        functools.update_wrapper(self, fn, updated=taken_over)
        self._fn, self._options, self._place = fn, options, origin()
        # Functions that are equal by value share their programs.
        self._programs: AtFirstCall[dict[Any, Program]] = AtFirstCall((fn, options), dict)
        self._seen: Hashable = None
        # Plans; and in which trace objects of a trace were met that have none.
        self._plans: dict[Any, _Plan | TraceState] = {}
        self._last: _Plan | None = None
        self._has_hidden = False

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            plan = self._last
            # What follows is the price of a call.
            if plan is None or plan.epoch is not EPOCH.now or kwargs or len(args) < plan.n_first:
                return self._call_as_found(args, kwargs)
            for i, ref in plan.at:
                if args[i] is not ref():
                    return self._call_as_found(args, kwargs)
            rest = args[plan.n_first :]
            for x in rest:
                # JAX uses up the recursion limit for good on an object that holds itself.
                if isinstance(x, MAY_HOLD_OBJECTS) and holds_objects(x):
                    return self._call_as_found(args, kwargs)
            donated, kept = plan.donated, plan.kept
            try:
                result, of_donated, of_kept, more, written = plan.jitted(
                    [variable._value for variable in donated] if donated else donated,
                    [variable._value for variable in kept] if kept else kept,
                    *rest,
                )
            except (HiddenObject, FunctionChanged):
                plan = None
            except (TypeError, ValueError):
                # It may be about what the plan is not for: an object in a container, or a sharding.
                if plan.n_args == len(args) and not has_objects(rest):
                    raise
                plan = None
            if plan is None:
                return self._call_as_found(args, kwargs)
            if more is not None or plan.trace is not current_trace():
                outputs = result, of_donated, of_kept, more, written
                return plan.program.finish(plan.flat(), outputs)
            if of_donated:
                any(map(_set_value, donated, of_donated))  # all of them: each gives None
            if of_kept:
                at = written.at
                changed = kept if len(at) == len(kept) else [kept[i] for i in at]
                any(map(_set_value, changed, of_kept))
            return result
        except Exception as error:
            hide_frames(error)
            raise

    def _call_as_found(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call for which the last plan does not hold."""
        return self._or_anew(self._call_looked_at, args, kwargs)

    def _or_anew(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call, again with programs of its own if the function sees other values by now."""
        try:
            return call(args, kwargs)
        except FunctionChanged:
            self._programs, self._seen = AtFirstCall(object(), dict), None
            self.forget()
        return call(args, kwargs)

    def _call_looked_at(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        at, names = objects_at_top(self._options, args, kwargs)
        positions, of_names = [i for i, _ in at], [name for name, _ in names]
        rest = [x for i, x in enumerate(args) if i not in positions]
        named = {k: x for k, x in kwargs.items() if k not in of_names}
        if has_objects((rest, named)):
            # A call that looks like the last one until it is traced costs more than a look.
            self._has_hidden, self._last = True, None
            return self._call_found(self._found(found_anywhere, args, kwargs))
        if (plan := self._plan(args, kwargs, at, names)) is None:
            return self._call_found(self._found(found_at_top, args, kwargs))
        values = ([x._value for x in found] for found in (plan.donated, plan.kept))
        outputs = plan.jitted(*values, *rest, **named)
        if outputs[3] is None and plan.trace is current_trace():
            plan.write(*outputs[1:])
            return outputs[0]
        return plan.program.finish(plan.flat(), outputs)

    def _found(self, look: Callable[..., Found], args: Any, kwargs: Any) -> Found:
        """A call taken apart, with the arguments' names in errors."""
        names = [*parameter_names(self._fn)[: len(args)]]
        names += [*(f"args[{i}]" for i in range(len(names), len(args))), *sorted(kwargs)]
        every = (*args, *(x for _, x in sorted(kwargs.items())))
        specs = "in_shardings", "out_shardings"
        with opened(OpenCall("jit", self._fn, every, specs, names=names, place=self._place)):
            return look(self._options, args, kwargs)

    def _plan(self, args: Any, kwargs: Any, at: list[Any], names: list[Any]) -> _Plan | None:
        """The plan of a call, made if there is none that holds; None if there cannot be one."""
        key = len(args), *((place, id(x)) for place, x in (*at, *names))
        plan = self._plans.get(key)
        if not isinstance(plan, _Plan) or not plan.fits(args, kwargs):
            here = current_trace()
            if is_tracing() and plan != here:
                # Most objects of a trace are called once, which is not worth the price of a plan.
                self._keep(key, here)
                return None
            while True:
                epoch = EPOCH.now
                found = self._found(found_at_top, args, kwargs)
                if not found.can_be_planned:
                    return None
                before = [watched(x) for x in found.flat.objects]
                if all(before):
                    break
            plan = _Plan(self._program(found.layout), epoch, found, self._forgetting(key))
            self._keep(key, plan)
            EPOCH.remembering[id(self)] = self
        self._last = None if self._has_hidden else plan
        return plan

    def _keep(self, key: Hashable, plan: _Plan | TraceState) -> None:
        self._plans[key] = plan
        for old in list(self._plans)[:-_MAX_PLANS]:
            self._plans.pop(old, None)

    def _forgetting(self, key: Hashable) -> Callable[[Any], None]:
        """What to do when an object of a plan is gone."""
        weak = weakref.ref(self)

        def forget(_: Any) -> None:
            if (me := weak()) is not None:
                me._plans.pop(key, None)
                # It may be another one's plan, which is then found again.
                me._last = None

        return forget

    def _program(self, layout: Layout) -> Program:
        if self._seen is None:
            self._seen = by_value(self._fn)
        programs, made = self._programs.value, (self._fn, self._options, layout, self._seen)
        with _LOCK:
            program = programs.pop(layout, None) or Program(*made)
            programs[layout] = program  # the latest comes last
            while len(programs) > _MAX_PROGRAMS:
                del programs[next(iter(programs))]
        return program

    def _call_found(self, found: Found) -> Any:
        program = self._program(found.layout)
        outputs = program.jitted(*program.values_of(found.flat), *found.rest, **found.named)
        return program.finish(found.flat, outputs)

    def lower(self, /, *args: Any, **kwargs: Any) -> Lowered:
        """As `jax.jit(...).lower`; objects stay as they are."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, /, *args: Any, **kwargs: Any) -> Traced:
        """As `jax.jit(...).trace`; objects stay as they are."""
        return self._or_anew(self._traced, args, kwargs)

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        found = self._found(found_anywhere, args, kwargs)
        program = self._program(found.layout)
        values = program.values_of(found.flat)
        traced = program.jitted.trace(*values, *found.rest, **found.named)
        return Traced(traced, Call(program, self._options, args, kwargs).run)

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """What a call would return, with shapes in place of arrays; objects stay as they are."""
        return eval_shape(self._fn, *args, **kwargs)

    def clear_cache(self) -> None:
        """Forgets what was compiled."""
        self._programs.value.clear()
        self.forget()

    def forget(self) -> None:
        """Forgets how objects look that it was called with."""
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

    Static values are compared by value. An object that has a hash stays equal whatever is written
    to it, as for `jax.jit`, and a function stays equal whatever it reads: set the attribute to
    another one. An attribute of a class is read in the trace, like a global. A write past
    an object (`vars(model)[...]`, `object.__setattr__`) is noticed when something else changes.

    Args:
        fun: the function; without it, a decorator.
        in_shardings: for each argument a sharding, or a pytree prefix of such; for an object one
            for all its state, `StateSharding`, or what `nnx.prefix` returns.
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
        >>> float(model.w[...])
        2.0
    """
    options: dict[str, Any] = {"in_shardings": in_shardings, "out_shardings": out_shardings}
    options |= {"static_argnums": static_argnums, "static_argnames": static_argnames}
    options |= {"donate_argnums": donate_argnums, "donate_argnames": donate_argnames}
    others = {"keep_unused": keep_unused, "inline": inline, "device": device, "backend": backend}
    modes = {"graph": graph, "graph_updates": graph_updates}
    if fun is MISSING:
        return functools.partial(jit, **options, **others, **modes)
    check_unbound("jit", fun)
    kind = ObjectKind("jit", *references_and_structure(graph, graph_updates))
    static = _both_ways(fun, "static", static_argnums, static_argnames)
    donated = _both_ways(fun, "donate", donate_argnums, donate_argnames)
    given = tuple((name, value) for name, value in others.items() if value)
    shardings = as_roles(in_shardings), as_roles(out_shardings)
    return JitWrapped(fun, Options(kind, *shardings, *static, *donated, given))


def _both_ways(
    fun: Callable[..., Any], name: str, argnums: Any, argnames: Any
) -> tuple[frozenset[int], frozenset[str]]:
    """Arguments by position and by name, however they were given."""
    numbers = {argnums} if isinstance(argnums, int) else set(argnums or ())
    names = {argnames} if isinstance(argnames, str) else set(argnames or ())
    try:
        # To read a signature takes long, and most often there is nothing to look up in it.
        parameters = [*inspect.signature(fun).parameters.values()] if numbers or names else []
    except (TypeError, ValueError):
        return frozenset(numbers), frozenset(names)
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    check_argnums("nnx.jit", f"{name}_argnums", fun, numbers)
    _check_argnames(f"{name}_argnames", fun, parameters, names)
    numbers = {i % len(by_position) if i < 0 and by_position else i for i in numbers}
    by_name = {p.name: i for i, p in enumerate(by_position) if p.kind is p.POSITIONAL_OR_KEYWORD}
    more = {name for name, i in by_name.items() if i in numbers}
    return frozenset(numbers | {by_name[n] for n in names if n in by_name}), frozenset(names | more)


def _check_argnames(
    what: str,
    fun: Callable[..., Any],
    parameters: Sequence[inspect.Parameter],
    names: Iterable[str],
) -> None:
    """Raises TransformArgumentError for names of arguments that the function does not have."""
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    there = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
    for unknown in names:
        if unknown not in there:
            raise TransformArgumentError(
                f"nnx.jit({getattr(fun, '__name__', type(fun).__name__)}): {what} has {unknown!r}, "
                f"and the function has the arguments {', '.join(there) or '(none)'}; give names "
                "that it has."
            )


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
