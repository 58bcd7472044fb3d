"""jit: a repeated call with unchanged objects costs as much as with `jax.jit`.

A call with known objects has a *plan*: the variables to read, the function of `jax.jit` to call,
and the variables to write. A plan is valid within its epoch (`weft.nnx.structure`), which ends when
an object of a plan changes by more than the value of a variable.

The *program* of a plan, the function that JAX compiles, is shared by all calls with objects of the
same structure, and by all functions that are equal by value.
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
    """Steps of a call with known objects, which it does not keep alive.

    `n_first` is the number of leading objects, or `sys.maxsize` if objects come later or by name.
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
        """Returns whether a call has the same objects in the same places."""
        return (
            self.epoch is EPOCH.now
            and all(i < len(args) and args[i] is ref() for i, ref in self.at)
            and all(name in kwargs and kwargs[name] is ref() for name, ref in self.names)
        )

    def write(self, of_donated: list[Any], of_kept: list[Any], more: None, written: Written):
        """Writes the values of a call that changed nothing but values."""
        changed = (*self.donated, *(self.kept[i] for i in written.at))
        any(map(_set_value, changed, (*of_donated, *of_kept)))

    def flat(self) -> Flat:
        graphdef = self.program.layout.static.graphdef
        return flat_of_variables(graphdef, [ref() for ref in self.objects])


class JitWrapped:
    """A jitted function of objects; the result of `nnx.jit`."""

    # Every call reads `_last`, so it is not in the `__dict__` that holds attributes of `fn`.
    __slots__ = ("__dict__", "__weakref__", "_last")

    def __init__(self, fn: Callable[..., Any], options: Options):
        taken_over = () if is_object(fn) else functools.WRAPPER_UPDATES
        functools.update_wrapper(self, fn, updated=taken_over)
        self._fn, self._options, self._place = fn, options, origin()
        # Functions that are equal by value share their programs.
        self._programs: AtFirstCall[dict[Any, Program]] = AtFirstCall((fn, options), dict)
        self._seen: Hashable = None
        # Plans; for objects of a trace without a plan, the trace of their last call.
        self._plans: dict[Any, _Plan | TraceState] = {}
        self._last: _Plan | None = None
        self._has_hidden = False

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            plan = self._last
            # The code from here on is the overhead of a call.
            if plan is None or plan.epoch is not EPOCH.now or kwargs or len(args) < plan.n_first:
                return self._call_as_found(args, kwargs)
            for i, ref in plan.at:
                if args[i] is not ref():
                    return self._call_as_found(args, kwargs)
            rest = args[plan.n_first :]
            for x in rest:
                # JAX exhausts the recursion limit on an object that contains itself.
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
                # The cause may be outside the plan: an object in a container, or a sharding.
                if plan.n_args == len(args) and not has_objects(rest):
                    raise
                plan = None
            if plan is None:
                return self._call_as_found(args, kwargs)
            if more is not None or plan.trace is not current_trace():
                outputs = result, of_donated, of_kept, more, written
                return plan.program.finish(plan.flat(), outputs)
            if of_donated:
                any(
                    map(_set_value, donated, of_donated)
                )  # `any` visits all, since each call returns None
            if of_kept:
                at = written.at
                changed = kept if len(at) == len(kept) else [kept[i] for i in at]
                any(map(_set_value, changed, of_kept))
            return result
        except Exception as error:
            hide_frames(error)
            raise

    def _call_as_found(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._or_anew(self._call_looked_at, args, kwargs)

    def _or_anew(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Makes a call, and repeats it with new programs if the function's own values changed."""
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
            # A call that only differs from the last one when traced costs more than a look.
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
        names = [*parameter_names(self._fn)[: len(args)]]
        names += [*(f"args[{i}]" for i in range(len(names), len(args))), *sorted(kwargs)]
        every = (*args, *(x for _, x in sorted(kwargs.items())))
        specs = "in_shardings", "out_shardings"
        with opened(OpenCall("jit", self._fn, every, specs, names=names, place=self._place)):
            return look(self._options, args, kwargs)

    def _plan(self, args: Any, kwargs: Any, at: list[Any], names: list[Any]) -> _Plan | None:
        """Returns a valid plan of a call, creating it if needed, or None if none is possible."""
        key = len(args), *((place, id(x)) for place, x in (*at, *names))
        plan = self._plans.get(key)
        if not isinstance(plan, _Plan) or not plan.fits(args, kwargs):
            here = current_trace()
            if is_tracing() and plan != here:
                # Most objects of a trace are called once, too rarely to pay for a plan.
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
        weak = weakref.ref(self)

        def forget(_: Any) -> None:
            if (me := weak()) is not None:
                me._plans.pop(key, None)
                # If it is the plan of another key, the next call finds that again.
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
        """Lowers a call as `jax.jit(...).lower`; objects keep their state."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, /, *args: Any, **kwargs: Any) -> Traced:
        """Traces a call as `jax.jit(...).trace`; objects keep their state."""
        return self._or_anew(self._traced, args, kwargs)

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        found = self._found(found_anywhere, args, kwargs)
        program = self._program(found.layout)
        values = program.values_of(found.flat)
        traced = program.jitted.trace(*values, *found.rest, **found.named)
        return Traced(traced, Call(program, self._options, args, kwargs).run)

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of a call with shapes in place of arrays; objects keep their state."""
        return eval_shape(self._fn, *args, **kwargs)

    def clear_cache(self) -> None:
        """Drops the compiled programs."""
        self._programs.value.clear()
        self.forget()

    def forget(self) -> None:
        """Drops the cached structure of objects."""
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
    """Applies `jax.jit` to a function of objects, at the cost of `jax.jit`.

    A call with known objects only reads and writes the values of their variables. Objects whose
    structure has changed are inspected once.

    Static values are compared by value. As for `jax.jit`, a hashable object stays equal after
    writes to it, and a function stays equal if the values that it reads change; assign another one
    to the attribute instead. Class attributes are read in the trace, like globals. Writes past an
    object (`vars(model)[...]`, `object.__setattr__`) are noticed at its next regular change.

    Args:
        fun: the function; without it, a decorator is returned.
        in_shardings: a sharding per argument, or a pytree prefix of shardings; for an object one
            for all its state, `StateSharding`, or the result of `nnx.prefix`.
        out_shardings: the same for the results.
        static_argnums: positions of static, hashable arguments; `static_argnames`: their names.
        donate_argnums: positions of arguments whose arrays and variables may be reused;
            `donate_argnames`: their names.
        keep_unused: as for `jax.jit`, like `device`, `backend` and `inline`.
        graph: see `nnx.set_graph_mode`; for `graph_updates`, `nnx.set_graph_updates`.

    Returns:
        The function, with `lower`, `trace` and `eval_shape` as in `jax.jit`.

    Raises:
        CapturedObjectError: if `fun` returns an object that was not passed as an argument.
        TraceContextError: if it writes to such an object.

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
    numbers = {argnums} if isinstance(argnums, int) else set(argnums or ())
    names = {argnames} if isinstance(argnames, str) else set(argnames or ())
    try:
        # Reading a signature is slow, and rarely needed.
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
    """Raises TransformArgumentError for names that `fun` does not have."""
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    there = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
    for unknown in names:
        if unknown not in there:
            raise TransformArgumentError(
                f"nnx.jit({getattr(fun, '__name__', type(fun).__name__)}): {what} has {unknown!r}, "
                f"but the function has the parameters {', '.join(there) or '(none)'}; use names "
                "of these."
            )


def jit_partial(fun: Callable[..., Any], *partial_args: Any, **options: Any) -> Callable[..., Any]:
    """Returns a jitted function with its first arguments bound.

    `options` are those of `nnx.jit`; they refer to all arguments, including bound ones.

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
    """Returns `functools.partial(f, *cached_args)` for a transformed `f`, for compatibility.

    `nnx.jit` caches the structure of objects for every call; bound objects may change in any way.
    """
    return functools.partial(f, *cached_args)
