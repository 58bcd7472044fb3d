"""jit: a repeated call with unchanged objects costs as much as with `jax.jit`.

A *cached call* with known objects has the variables to read, the function of `jax.jit` to call, and
the variables to write. It is valid until the end of its version (`weft.nnx.versions`), when one of
its objects changes by more than the value of a variable.

The *program* of a call, the function that JAX compiles, is shared by all calls of a function with
objects of the same structure.

Calls of functions compiled ahead of time take no static arguments, as in JAX. eval_shape,
make_jaxpr and checkify return the shapes, the program and the errors of a call.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, Unpack, overload

import jax

from weft import lifting
from weft.core import tracing
from weft.errors import CompiledCallError, TransformArgumentError
from weft.lifting import traces
from weft.lifting.jit import Lowered, Traced
from weft.lifting.kind import call_pure, split_args
from weft.lifting.signature import check_argnums
from weft.nnx import settings, split_merge, spmd, versions
from weft.nnx.graph import FlatGraph, flat_graph_of_variables
from weft.nnx.transforms import calls, graph_diff, jit_program, state_roles
from weft.nnx.transforms.calls import MISSING, Args, Kwargs, P, R, optional_function
from weft.nnx.transforms.jit_program import JitOptions, Program
from weft.nnx.transforms.kind import ObjectKind, is_object, mark_watched
from weft.nnx.variables import Variable
from weft.typing import as_grad

_set_value = Variable._value.__set__  # pyright: ignore[reportAttributeAccessIssue]
T = TypeVar("T")
Q = ParamSpec("Q")
Options = ParamSpec("Options")
_MAX_CACHED_CALLS = 64
_MAX_PROGRAMS = 512
_LOCK = threading.RLock()


class _CachedCall:
    """Steps of a call with known objects, which it does not keep alive.

    `n_first` is the number of leading objects, or `sys.maxsize` if objects come later or by name.
    """

    __slots__ = (
        "at", "donated", "jitted", "kept", "n_args", "n_first", "objects", "program", "trace",
        "version",
    )  # fmt: skip

    def __init__(
        self,
        program: Program,
        version: object,
        call: jit_program.SplitCall,
        forget: Callable[[object], None],
    ):
        self.program, self.jitted, self.version = program, program.jitted, version
        self.trace = traces.current_trace()
        self.donated = [call.flat.leaves[n] for n in program.donated]
        self.kept = [call.flat.leaves[n] for n in program.kept]
        self.at: list[tuple[Any, Any]] = [(i, weakref.ref(x, forget)) for i, x in call.at]
        self.objects = [weakref.ref(x) for x in call.flat.objects]
        positions = [i for i, _ in call.at]
        at_front = positions == list(range(len(positions)))
        self.n_first = len(positions) if at_front else sys.maxsize
        self.n_args = call.layout.n_args

    def fits(self, args: Args, kwargs: Kwargs) -> bool:
        """Returns whether a call has the same objects in the same places."""
        given: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
        return self.version is versions.STRUCTURE_VERSION.now and all(
            i in given and given[i] is ref() for i, ref in self.at
        )

    def flat(self) -> FlatGraph:
        graphdef = self.program.layout.static.graphdef
        return flat_graph_of_variables(graphdef, [ref() for ref in self.objects])


class JitWrapped(Generic[P, R]):
    """A jitted function of objects; the result of `nnx.jit`."""

    # Every call reads `_last`, so it is not in the `__dict__` that holds attributes of `fn`.
    __slots__ = ("__dict__", "__weakref__", "_last")

    def __init__(self, fn: Callable[P, R], options: JitOptions):
        copied = () if is_object(fn) else functools.WRAPPER_UPDATES
        functools.update_wrapper(self, fn, updated=copied)
        self._fn, self._options, self._place = fn, options, versions.origin()
        self._programs: dict[jit_program.CallLayout, Program] = {}
        # For objects of a trace without a cached call, the trace of their last call.
        self._cached_calls: dict[Hashable, _CachedCall | traces.TraceState] = {}
        self._last: _CachedCall | None = None
        self._has_nested_objects = False

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            cached = self._last
            # The code from here on is the overhead of a call.
            if (
                cached is None
                or cached.version is not versions.STRUCTURE_VERSION.now
                or kwargs
                or len(args) < cached.n_first
            ):
                return self._call_uncached(args, kwargs)
            for i, ref in cached.at:
                if args[i] is not ref():
                    return self._call_uncached(args, kwargs)
            rest = args[cached.n_first :]
            for x in rest:
                # JAX exhausts the recursion limit on an object that contains itself.
                if isinstance(x, jit_program.MAY_HOLD_OBJECTS) and jit_program.contains_objects(x):
                    return self._call_uncached(args, kwargs)
            donated, kept = cached.donated, cached.kept
            try:
                result, of_donated, of_kept, more, written = cached.jitted(
                    [variable._value for variable in donated] if donated else donated,
                    [variable._value for variable in kept] if kept else kept,
                    *rest,
                )
            except jit_program.NestedObject:
                cached = None
            except (TypeError, ValueError):
                # The cause may be outside the program: an object in a container, or a sharding.
                if cached.n_args == len(args) and not jit_program.has_objects(rest):
                    raise
                cached = None
            if cached is None:
                return self._call_uncached(args, kwargs)
            is_here = cached.trace is traces.current_trace()
            if more is not None or not is_here or (written.passed and traces.is_tracing()):
                outputs = result, of_donated, of_kept, more, written
                return cached.program.finish(cached.flat(), outputs)
            # `any` visits all, since each call returns None.
            if of_donated:
                any(map(_set_value, donated, of_donated))
            if of_kept:
                at = written.at
                changed = kept if len(at) == len(kept) else [kept[i] for i in at]
                any(map(_set_value, changed, of_kept))
            return result  # pyright: ignore[reportReturnType]
        except Exception as error:
            tracing.hide_frames(error)
            raise

    def _call_uncached(self, args: Args, kwargs: Kwargs) -> Any:
        program, call, inputs, named = self._inspect(args, kwargs)
        outputs = program.jitted(*inputs, **named)
        if isinstance(call, FlatGraph):
            return program.finish(call, outputs)
        result, of_donated, of_kept, more, written = outputs
        is_noted = written.passed and traces.is_tracing()
        if more is not None or is_noted or call.trace is not traces.current_trace():
            return program.finish(call.flat(), outputs)
        changed = (*call.donated, *(call.kept[i] for i in written.at))
        any(map(_set_value, changed, (*of_donated, *of_kept)))
        return result

    def _inspect(
        self, args: Args, kwargs: Kwargs
    ) -> tuple[Program, "_CachedCall | FlatGraph", Sequence[Any], dict[str, Any]]:
        at, rest, named = jit_program.object_arguments(self._options, args, kwargs)
        if jit_program.has_objects((rest, named)):
            # A call that only differs from the last one when traced costs more than a look.
            self._has_nested_objects, self._last = True, None
            return self._inspect_uncached(jit_program.split_nested_objects, args, kwargs)
        if (cached := self._cached_call(args, kwargs, at)) is None:
            return self._inspect_uncached(jit_program.split_object_arguments, args, kwargs)
        values = ([x._value for x in variables] for variables in (cached.donated, cached.kept))
        return cached.program, cached, (*values, *rest), named

    def _inspect_uncached(
        self, split: Callable[..., jit_program.SplitCall], args: Args, kwargs: Kwargs
    ) -> tuple[Program, FlatGraph, Sequence[Any], dict[str, Any]]:
        call = self._split_call(split, args, kwargs)
        program = self._program(call.layout)
        return program, call.flat, (*program.values_of(call.flat), *call.rest), call.named

    def _split_call(
        self, split: Callable[..., jit_program.SplitCall], args: Args, kwargs: Kwargs
    ) -> jit_program.SplitCall:
        names = [*calls.parameter_names(self._fn)[: len(args)]]
        names += [*(f"args[{i}]" for i in range(len(names), len(args))), *sorted(kwargs)]
        every = (*args, *(x for _, x in sorted(kwargs.items())))
        specs = "in_shardings", "out_shardings"
        with versions.TransformCall("jit", self._fn, every, specs, names=names, place=self._place):
            return split(self._options, args, kwargs)

    def _cached_call(
        self, args: Args, kwargs: Kwargs, at: list[tuple[int | str, Any]]
    ) -> _CachedCall | None:
        """Returns the valid cached call, creating it if needed, or None if none is possible."""
        key = len(args), *((place, id(x)) for place, x in at)
        cached = self._cached_calls.get(key)
        if not isinstance(cached, _CachedCall) or not cached.fits(args, kwargs):
            here = traces.current_trace()
            if traces.is_tracing() and cached != here:
                # Most objects of a trace are called once, too rarely for a cached call.
                self._store_cached_call(key, here)
                return None
            while True:
                version = versions.STRUCTURE_VERSION.now
                split = self._split_call(jit_program.split_object_arguments, args, kwargs)
                if not split.is_cacheable:
                    return None
                were_watched = [mark_watched(x) for x in split.flat.objects]
                if all(were_watched):
                    break
            program, forget = self._program(split.layout), self._forget_callback(key)
            cached = _CachedCall(program, version, split, forget)
            self._store_cached_call(key, cached)
            versions.STRUCTURE_VERSION.dependents[id(self)] = self
        self._last = None if self._has_nested_objects else cached
        return cached

    def _store_cached_call(self, key: Hashable, call: _CachedCall | traces.TraceState) -> None:
        self._cached_calls[key] = call
        for old in list(self._cached_calls)[:-_MAX_CACHED_CALLS]:
            self._cached_calls.pop(old, None)

    def _forget_callback(self, key: Hashable) -> Callable[[object], None]:
        weak = weakref.ref(self)

        def forget(_: object) -> None:
            if (me := weak()) is not None:
                me._cached_calls.pop(key, None)
                # If it is the cached call of another key, the next call finds that again.
                me._last = None

        return forget

    def _program(self, layout: jit_program.CallLayout) -> Program:
        programs = self._programs
        with _LOCK:
            program = programs.pop(layout, None)
            if program is None:
                program = Program(self._fn, self._options, layout)
            programs[layout] = program  # the latest comes last
            while len(programs) > _MAX_PROGRAMS:
                del programs[next(iter(programs))]
        return program

    def lower(self, /, *args: P.args, **kwargs: P.kwargs) -> Lowered:
        """Lowers a call as `jax.jit(...).lower`; objects keep their state."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, /, *args: P.args, **kwargs: P.kwargs) -> Traced:
        """Traces a call as `jax.jit(...).trace`; objects keep their state."""
        return self._trace(args, kwargs)

    def _trace(self, args: Args, kwargs: Kwargs, n_bound: int = 0) -> Traced:
        split = jit_program.split_nested_objects
        program, _, inputs, named = self._inspect_uncached(split, args, kwargs)
        traced = program.jitted.trace(*inputs, **named)
        return Traced(traced, _compiled_call(program, self._options, args, kwargs, n_bound))

    def eval_shape(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Returns the result of a call with shapes in place of arrays; objects keep their state."""
        return eval_shape(self._fn, *args, **kwargs)

    @property
    def jitted_fn(self) -> Self:
        """The function itself, which counts and drops its programs as functions of JAX do."""
        return self

    def _cache_size(self) -> int:
        return sum(program.n_traces for program in self._programs.values())

    def clear_cache(self) -> None:
        """Drops the compiled programs."""
        self._programs.clear()
        self.forget()

    def forget(self) -> None:
        """Drops the cached structure of objects."""
        self._cached_calls.clear()
        self._last = None

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(
        self: JitWrapped[Concatenate[T, Q], R], instance: T, owner: type | None = None
    ) -> Callable[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else JitPartial(self, instance)


class JitPartial(functools.partial[R]):
    """A jitted function with its first arguments bound, which `lower` and `trace` do not take."""

    @property
    def jitted_fn(self) -> JitWrapped[..., R]:
        """The jitted function of all arguments."""
        return self.func  # pyright: ignore[reportReturnType]

    def lower(self, /, *args: object, **kwargs: object) -> Lowered:
        """Lowers a call as `jax.jit(...).lower`; objects keep their state."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, /, *args: object, **kwargs: object) -> Traced:
        """Traces a call as `jax.jit(...).trace`; objects keep their state."""
        return self.jitted_fn._trace((*self.args, *args), kwargs, len(self.args))

    def eval_shape(self, /, *args: object, **kwargs: object) -> Any:
        """Returns the result of a call with shapes in place of arrays; objects keep their state."""
        return self.jitted_fn.eval_shape(*self.args, *args, **kwargs)


class _Jit(Protocol[Options]):
    @overload
    def __call__(
        self, fun: Callable[P, R], /, *args: Options.args, **options: Options.kwargs
    ) -> JitWrapped[P, R]: ...
    @overload
    def __call__(
        self, *args: Options.args, **options: Options.kwargs
    ) -> Callable[[Callable[P, R]], JitWrapped[P, R]]: ...


def _as_jit(
    transformation: Callable[Concatenate[Callable[..., Any], Options], Any],
) -> _Jit[Options]:
    return transformation  # pyright: ignore[reportReturnType]


@_as_jit
@optional_function
def jit(
    fun: Callable[P, R] = MISSING,
    *,
    in_shardings: object = None,
    out_shardings: object = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    device: object = None,
    backend: str | None = None,
    inline: bool = False,
    **options: Unpack[settings.GraphOptions],
) -> JitWrapped[P, R]:
    """Applies `jax.jit` to a function of objects, at the cost of `jax.jit`.

    A call with known objects only reads and writes the values of their variables. Objects whose
    structure has changed are inspected once.

    Static values are compared by value. As for `jax.jit`, a hashable object stays equal after
    writes to it, and a function stays equal if the values that it reads change; assign another one
    to the attribute instead. Class attributes are read in the trace, like globals. Writes past an
    object (`vars(model)[...]`, `object.__setattr__`) are noticed at its next regular change.

    Args:
        fun: the function; without it, a decorator is returned.
        in_shardings: a sharding per argument that is not static, or a pytree prefix of shardings;
            for an object one for all its state, `StateSharding`, or the result of `nnx.prefix`.
        out_shardings: the same for the results.
        static_argnums, static_argnames: static, hashable arguments.
        donate_argnums, donate_argnames: arguments whose arrays and variables may be reused.

    Returns the function, with `lower`, `trace` and `eval_shape` as in `jax.jit`.

    Raises:
        CapturedObjectError: if `fun` returns an object that was not passed as an argument.
        TraceContextError: if it writes to such an object.

    >>> model = nnx.Dict(w=nnx.Param(jnp.array(1.0)))
    >>> @nnx.jit
    ... def double(model):
    ...     model.w[...] *= 2
    >>> double(model)
    >>> float(model.w[...])
    2.0
    """
    others = {"keep_unused": keep_unused, "inline": inline, "device": device, "backend": backend}
    calls.check_unbound("jit", fun)
    kind = ObjectKind("jit", *settings.resolve_graph_options(**options))
    static = _places(fun, "static", static_argnums, static_argnames)
    donated = _places(fun, "donate", donate_argnums, donate_argnames)
    given = tuple((name, value) for name, value in others.items() if value)
    inputs = state_roles.as_shardings(in_shardings, "in_shardings")
    outputs = state_roles.as_shardings(out_shardings, "out_shardings")
    return JitWrapped(fun, JitOptions(kind, inputs, outputs, static, donated, given))


def _places(
    fun: Callable[..., Any],
    name: str,
    argnums: int | Iterable[int] | None,
    argnames: str | Iterable[str] | None,
) -> frozenset[int | str]:
    """Returns the positions and names of the arguments that either of the options has."""
    numbers = {argnums} if isinstance(argnums, int) else set(argnums or ())
    names = {argnames} if isinstance(argnames, str) else set(argnames or ())
    try:
        # Reading a signature is slow, and rarely needed.
        parameters = [*inspect.signature(fun).parameters.values()] if numbers or names else []
    except (TypeError, ValueError):
        return frozenset((*numbers, *names))
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    check_argnums("nnx.jit", f"{name}_argnums", fun, numbers)
    there = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for unknown in () if takes_any else names.difference(there):
        raise TransformArgumentError(
            f"nnx.jit({getattr(fun, '__name__', type(fun).__name__)}): {name}_argnames has "
            f"{unknown!r}, but the function has the parameters {', '.join(there) or '(none)'}; use "
            "names of these."
        )
    numbers = {i % len(by_position) if i < 0 and by_position else i for i in numbers}
    by_name = {p.name: i for i, p in enumerate(by_position) if p.kind is p.POSITIONAL_OR_KEYWORD}
    both = (item for item in by_name.items() if item[0] in names or item[1] in numbers)
    return frozenset((*numbers, *names, *itertools.chain(*both)))


def jit_partial(fun: Callable[..., R], *partial_args: Any, **options: Any) -> JitPartial[R]:
    """Returns a jitted function with its first arguments bound.

    `options` are those of `nnx.jit`; they refer to all arguments, including bound ones. `lower` and
    `trace` take the other arguments, as the compiled function does.

    >>> model = nnx.Dict(w=nnx.Param(jnp.array(2.0)))
    >>> float(nnx.jit_partial(lambda model, x: model.w * x, model)(3.0))
    6.0
    """
    return JitPartial(jit(fun, **options), *partial_args)


def cached_partial(
    f: Callable[..., R],
    *cached_args: object,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Callable[..., R]:
    """Returns `functools.partial(f, *cached_args)` for a transformed `f`, for compatibility.

    `nnx.jit` caches the structure of objects for every call; bound objects may change in any way.
    """
    return functools.partial(f, *cached_args)


def _compiled_call(
    program: Program, options: JitOptions, args: Args, kwargs: Kwargs, n_bound: int
) -> Callable[[jax.stages.Compiled, Args, Kwargs], Any]:
    """Returns the function that calls a compiled program, for calls like the given one.

    It writes the changed values and returns the result. It raises CompiledCallError if the
    structure of an object or the number of arguments differs.
    """
    n_args, static = len(args), options.static
    fixed = {i: x for i, x in enumerate(args) if i < n_bound or i in static}
    fixed_names = {k: x for k, x in kwargs.items() if k in static}
    names = sorted(kwargs.keys() - fixed_names.keys())

    def run(compiled: jax.stages.Compiled, args: Args, kwargs: Kwargs) -> Any:
        if len(args) != n_args - len(fixed) or sorted(kwargs) != names:
            raise CompiledCallError(
                f"a function compiled for {n_args - len(fixed)} positional arguments and {names} "
                f"by name is called with {len(args)} and {sorted(kwargs)}; pass them as to lower, "
                "without the static ones."
            )
        rest = iter(args)
        every = (fixed[i] if i in fixed else next(rest) for i in range(n_args))
        call = jit_program.split_nested_objects(options, tuple(every), {**kwargs, **fixed_names})
        if call.layout != program.layout:
            raise _structure_error(program.layout, call.layout)
        given = [x for i, x in enumerate(call.rest) if i not in static]
        named = {k: x for k, x in call.named.items() if k not in fixed_names}
        outputs = compiled(*program.values_of(call.flat), *given, **named)
        return program.finish(call.flat, outputs)

    return run


def _structure_error(
    before: jit_program.CallLayout, now: jit_program.CallLayout
) -> CompiledCallError:
    every = range(sys.maxsize)
    roots = before.static.graphdef.root, now.static.graphdef.root
    difference = next(graph_diff.differences(roots, (every, every)), None)
    where = "has other variables or other metadata"
    if difference is not None and len(difference.path) > 1:
        _, first, *below = difference.path
        where = f"differs at object {first}{calls.path_suffix(below)}"
    return CompiledCallError(
        f"a compiled function is called with objects unlike those it was compiled for: the new "
        f"argument {where}; pass objects of the same structure, or lower and compile it for these."
    )


@tracing.entry_point
def eval_shape(
    f: Callable[..., R],
    *args: object,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    **kwargs: object,
) -> R:
    """Returns the result of `f` with shapes in place of arrays, without computing it.

    The shapes in variables carry the `NamedSharding` that their values would have over the mesh in
    their metadata, or else over that of `jax.set_mesh`.

    `f` gets copies of the objects, and objects that it creates hold shapes. For `graph` and
    `graph_updates`, see `nnx.set_graph_mode` and `nnx.set_graph_updates`.

    >>> nnx.eval_shape(lambda: nnx.Dict(w=nnx.Param(jax.numpy.ones(3)))).w[...]
    ShapeDtypeStruct(shape=(3,), dtype=float32)
    """
    calls.check_unbound("eval_shape", f)
    kind = ObjectKind("eval_shape", *settings.resolve_graph_options(graph, graph_updates))
    abstract_args, abstract_kwargs = split_merge.as_abstract((args, kwargs))
    call = calls.with_kwargs_first(f)
    specs = ("args", "the result")
    with versions.TransformCall("eval_shape", f, abstract_args, specs, named=abstract_kwargs):
        result = lifting.eval_shape(kind, call)(abstract_kwargs, *abstract_args)
    spmd.shard_shapes(result)
    return result


@as_grad
@optional_function
def make_jaxpr(
    f: Callable[P, Any] = MISSING,
    *,
    static_argnums: int | Sequence[int] = (),
    **options: Unpack[settings.GraphOptions],
) -> Callable[P, Any]:
    """Applies `jax.make_jaxpr` to a function of objects, which keep their state.

    Args:
        f: the function; without it, a decorator is returned.
        static_argnums: positions of static, hashable arguments.

    Returns a function that returns the jaxpr of a call. Its inputs are the arrays among the
    arguments and the values of objects, ordered by attribute name; its outputs those of `f`.

    >>> w = nnx.Param(jax.numpy.float32(1.0))
    >>> print(nnx.make_jaxpr(lambda w, x: w + x)(w, jax.numpy.float32(2.0)))
    { lambda ; a:f32[] b:f32[]. let c:f32[] = add a b in (c,) }
    """
    kind = ObjectKind("make_jaxpr", *settings.resolve_graph_options(**options))
    static = calls.StaticArguments("make_jaxpr", "static_argnums", f, static_argnums)
    fn = calls.with_kwargs_first(static.fn)

    def call(kwargs: dict[str, Any], *args: object) -> Any:
        _, pure_args = split_args(kind, (kwargs, *static.wrapped(args)), None)
        return jax.make_jaxpr(lambda pure_args: call_pure(kind, fn, pure_args).packed)(pure_args)

    return calls.wrap_transformed("make_jaxpr", f, call)


def checkify(
    f: Callable[P, R],
    errors: object = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Callable[P, tuple[Any, R]]:
    """Applies `jax.experimental.checkify.checkify` to a function of objects.

    The result returns a `checkify.Error` and the result of `f`. `errors` are the enabled checks, by
    default `checkify.user_checks`. For `graph` and `graph_updates` see `nnx.eval_shape`.

    >>> from jax.experimental import checkify
    >>> def positive(m):
    ...     checkify.check(m.n > 0, "not positive")
    >>> error, _ = nnx.checkify(positive)(nnx.Dict(n=nnx.Variable(jax.numpy.array(-1))))
    >>> error.get().split(" (")[0]
    'not positive'
    """
    kind = ObjectKind("checkify", *settings.resolve_graph_options(graph, graph_updates))
    return calls.wrap_transformed(
        "checkify", f, lifting.checkify(kind, calls.with_kwargs_first(f), errors=errors)
    )
