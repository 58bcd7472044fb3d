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
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import (
    Any,
    Concatenate,
    Generic,
    NamedTuple,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    Unpack,
    overload,
)

import jax

from weft import lifting
from weft.core import tracing
from weft.errors import CompiledCallError, TransformArgumentError
from weft.lifting import traces
from weft.lifting.jit import Lowered, Traced
from weft.lifting.kind import PureArgs, call_pure, split_args
from weft.lifting.signature import as_tuple, check_argnums
from weft.nnx import settings, split_merge, spmd, versions
from weft.nnx.graph import flat_graph_of_variables
from weft.nnx.transforms import calls, jit_program, state_roles
from weft.nnx.transforms.calls import (
    MISSING,
    Args,
    Kwargs,
    P,
    R,
    optional_function,
)
from weft.nnx.transforms.jit_program import JitOptions, Place, Program
from weft.nnx.transforms.kind import ObjectKind, is_object, mark_watched
from weft.nnx.transforms.object_state import Object
from weft.nnx.variables import Variable
from weft.typing import PyTree, as_grad

_set_value = Variable._value.__set__  # pyright: ignore[reportAttributeAccessIssue]
T = TypeVar("T")
Q = ParamSpec("Q")
Options = ParamSpec("Options")
Split = Callable[[JitOptions, Args, Kwargs], jit_program.SplitCall]
_MAX_CACHED_CALLS = 64
_MAX_PROGRAMS = 512
_LOCK = threading.RLock()


class _CachedCall:
    """Steps of a call with known objects, which it does not keep alive.

    Attributes:
        version: the version of all structures in which it is valid.
        trace: the trace in which it was created.
        arguments: positions or names of the arguments that are objects, and references to these.
        n_leading: number of these arguments if they come first, or `sys.maxsize` if objects come
            later or by name.
        donated, retained: the variables whose values the program takes.
        objects: references to all objects and variables, in the order of the description.
    """

    __slots__ = (
        "arguments", "donated", "jitted", "n_args", "n_leading", "objects", "program", "retained",
        "trace", "version",
    )  # fmt: skip

    def __init__(
        self,
        program: Program,
        version: object,
        call: jit_program.SplitCall,
        forget: Callable[[object], None],
    ):
        self.program = program
        self.jitted = program.jitted
        self.version = version
        self.trace = traces.current_trace()
        leaves = call.flat.leaves
        self.donated: list[Variable[Any]] = [leaves[n] for n in program.donated]
        self.retained: list[Variable[Any]] = [
            leaves[n] for n in program.retained
        ]
        self.arguments: list[tuple[Any, weakref.ref[Any]]] = []
        for place, x in call.objects.items():
            self.arguments.append((place, weakref.ref(x, forget)))
        self.objects = [weakref.ref(x) for x in call.flat.objects]
        places = list(call.objects)
        self.n_leading = sys.maxsize
        if places == list(range(len(places))):
            self.n_leading = len(places)
        self.n_args = call.layout.n_args

    def fits(self, args: Args, kwargs: Kwargs) -> bool:
        """Returns whether a call has the same objects in the same places."""
        if self.version is not versions.STRUCTURE_VERSION.now:
            return False
        arguments: dict[Place, Any] = {**dict(enumerate(args)), **kwargs}
        for place, ref in self.arguments:
            if place not in arguments or arguments[place] is not ref():
                return False
        return True

    def values(self) -> tuple[list[PyTree], list[PyTree]]:
        """Returns the donated values and the others."""
        donated = [variable._value for variable in self.donated]
        retained = [variable._value for variable in self.retained]
        return donated, retained

    def finish(self, outputs: jit_program.Outputs) -> PyTree:
        """Writes the changes of a call, and returns its result."""
        result, new_donated, new_retained, changes, written = outputs
        has_notes = written.passed and traces.is_tracing()
        is_here = self.trace is traces.current_trace()
        if changes is None and is_here and not has_notes:
            changed = [self.retained[i] for i in written.retained_indices]
            _write_values(self.donated, new_donated)
            _write_values(changed, new_retained)
            return result
        graphdef = self.program.layout.static.graphdef
        objects = [ref() for ref in self.objects]
        flat = flat_graph_of_variables(graphdef, objects)
        return self.program.finish(flat, outputs)


def _write_values(
    variables: Sequence[Variable[Any]], values: Sequence[PyTree]
) -> None:
    # `any` visits all without a loop in Python, since each call returns None.
    any(map(_set_value, variables, values))


class _PreparedCall(NamedTuple):
    """A call that is ready to run: its program, and all that `jax.jit` takes.

    Attributes:
        finish: writes the changes, and returns the result.
    """

    program: Program
    args: Sequence[Any]
    kwargs: Kwargs
    finish: Callable[[jit_program.Outputs], PyTree]


class JitWrapped(Generic[P, R]):
    """A jitted function of objects; the result of `nnx.jit`."""

    # Every call reads `_last`, so it is not in the `__dict__` that holds attributes of `fn`.
    __slots__ = ("__dict__", "__weakref__", "_last")

    def __init__(self, fn: Callable[P, R], options: JitOptions):
        copied = () if is_object(fn) else functools.WRAPPER_UPDATES
        functools.update_wrapper(self, fn, updated=copied)
        self._fn = fn
        self._options = options
        self._origin = versions.origin()
        self._programs: dict[jit_program.CallLayout, Program] = {}
        # For objects of a trace without a cached call, the trace of their last call.
        self._cached_calls: dict[Hashable, _CachedCall | traces.TraceState] = {}
        self._last: _CachedCall | None = None
        self._has_nested_objects = False

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            cached = self._last
            # From here on, this is the overhead of a call, so it calls few functions.
            if (
                cached is None
                or cached.version is not versions.STRUCTURE_VERSION.now
                or kwargs
                or len(args) < cached.n_leading
            ):
                return self._call_uncached(args, kwargs)
            for place, ref in cached.arguments:
                if args[place] is not ref():
                    return self._call_uncached(args, kwargs)
            other_args = args[cached.n_leading :]
            for x in other_args:
                # JAX exhausts the recursion limit on an object that contains itself.
                if isinstance(
                    x, jit_program.MAY_HOLD_OBJECTS
                ) and jit_program.contains_objects(x):
                    return self._call_uncached(args, kwargs)
            donated = cached.donated
            retained = cached.retained
            try:
                # One of the lists is usually empty, and passed as it is.
                donated_values = donated and [x._value for x in donated]
                retained_values = retained and [x._value for x in retained]
                result, new_donated, new_retained, changes, written = (
                    cached.jitted(donated_values, retained_values, *other_args)
                )
            except jit_program.NestedObject:
                cached = None
            except (TypeError, ValueError):
                # The cause may be outside the program: an object in a container, or a sharding.
                if cached.n_args == len(args) and not jit_program.has_objects(
                    other_args
                ):
                    raise
                cached = None
            if cached is None:
                # Not in the handlers, whose error would become the context of others.
                return self._call_uncached(args, kwargs)
            if (
                changes is not None
                or written.passed
                or cached.trace is not traces.current_trace()
            ):
                outputs = (result, new_donated, new_retained, changes, written)
                return cached.finish(outputs)
            # As in `_write_values`.
            if new_donated:
                any(map(_set_value, donated, new_donated))
            if new_retained:
                if len(new_retained) < len(retained):
                    retained = [retained[i] for i in written.retained_indices]
                any(map(_set_value, retained, new_retained))
            return result  # pyright: ignore[reportReturnType]
        except Exception as error:
            tracing.hide_frames(error)
            raise

    def _call_uncached(self, args: Args, kwargs: Kwargs) -> PyTree:
        """Inspects the arguments, calls the program for their structure, and writes the changes."""
        call = self._prepare(args, kwargs)
        outputs = call.program.jitted(*call.args, **call.kwargs)
        return call.finish(outputs)

    def _prepare(self, args: Args, kwargs: Kwargs) -> _PreparedCall:
        """Finds the program of a call, if possible by a cached call of the same objects."""
        arguments = jit_program.object_arguments(self._options, args, kwargs)
        other_args, other_kwargs = arguments.other_args, arguments.other_kwargs
        if jit_program.has_objects((other_args, other_kwargs)):
            # A call that only differs from the last one when traced costs more than a look.
            self._has_nested_objects = True
            self._last = None
            split = jit_program.split_nested_objects
            return self._prepare_uncached(split, args, kwargs)
        cached = self._cached_call(args, kwargs, arguments.objects)
        if cached is None:
            split = jit_program.split_object_arguments
            return self._prepare_uncached(split, args, kwargs)
        all_args = (*cached.values(), *other_args)
        return _PreparedCall(
            cached.program, all_args, other_kwargs, cached.finish
        )

    def _prepare_uncached(
        self, split: Split, args: Args, kwargs: Kwargs
    ) -> _PreparedCall:
        call = self._split_call(split, args, kwargs)
        program = self._program(call.layout)
        all_args = (*program.values_of(call.flat), *call.other_args)
        finish = functools.partial(program.finish, call.flat)
        return _PreparedCall(program, all_args, call.other_kwargs, finish)

    def _split_call(
        self, split: Split, args: Args, kwargs: Kwargs
    ) -> jit_program.SplitCall:
        """Inspects a call; errors name its arguments."""
        names = calls.parameter_names(self._fn)[: len(args)]
        for i in range(len(names), len(args)):
            names.append(f"args[{i}]")
        all_args = list(args)
        for name, arg in sorted(kwargs.items()):
            names.append(name)
            all_args.append(arg)
        specs = ("in_shardings", "out_shardings")
        with versions.TransformCall(
            "jit", self._fn, all_args, specs, names=names, place=self._origin
        ):
            return split(self._options, args, kwargs)

    def _cached_call(
        self, args: Args, kwargs: Kwargs, objects: Mapping[Place, Object]
    ) -> _CachedCall | None:
        """Returns the valid cached call, creating it if needed, or None if none is possible."""
        object_ids = [(place, id(x)) for place, x in objects.items()]
        key = (len(args), *object_ids)
        cached = self._cached_calls.get(key)
        if not isinstance(cached, _CachedCall) or not cached.fits(args, kwargs):
            trace = traces.current_trace()
            if traces.is_tracing() and cached != trace:
                # Most objects of a trace are called once, too rarely for a cached call.
                self._store_cached_call(key, trace)
                return None
            cached = self._new_cached_call(key, args, kwargs)
            if cached is None:
                return None
        self._last = None if self._has_nested_objects else cached
        return cached

    def _new_cached_call(
        self, key: Hashable, args: Args, kwargs: Kwargs
    ) -> _CachedCall | None:
        split = jit_program.split_object_arguments
        # Other threads may change an object before it is watched, so it is inspected once more
        # when all are.
        all_watched = False
        while not all_watched:
            version = versions.STRUCTURE_VERSION.now
            call = self._split_call(split, args, kwargs)
            if not call.is_cacheable:
                return None
            all_watched = True
            for x in call.flat.objects:
                all_watched &= mark_watched(x)
        program = self._program(call.layout)
        forget = self._forget_callback(key)
        cached = _CachedCall(program, version, call, forget)
        self._store_cached_call(key, cached)
        versions.STRUCTURE_VERSION.dependents[id(self)] = self
        return cached

    def _store_cached_call(
        self, key: Hashable, call: _CachedCall | traces.TraceState
    ) -> None:
        self._cached_calls[key] = call
        for old_key in list(self._cached_calls)[:-_MAX_CACHED_CALLS]:
            self._cached_calls.pop(old_key, None)

    def _forget_callback(self, key: Hashable) -> Callable[[object], None]:
        """Returns a function that drops the cached call `key` when one of its objects dies."""
        self_ref = weakref.ref(self)

        def forget(dead_ref: object) -> None:
            wrapped = self_ref()
            if wrapped is not None:
                wrapped._cached_calls.pop(key, None)
                # If it is the cached call of another key, the next call finds that again.
                wrapped._last = None

        return forget

    def _program(self, layout: jit_program.CallLayout) -> Program:
        programs = self._programs
        with _LOCK:
            program = programs.pop(layout, None)
            if program is None:
                program = Program(self._fn, self._options, layout)
            programs[layout] = program  # the latest comes last
            while len(programs) > _MAX_PROGRAMS:
                oldest_layout = next(iter(programs))
                del programs[oldest_layout]
        return program

    def lower(self, /, *args: P.args, **kwargs: P.kwargs) -> Lowered:
        """Lowers a call as `jax.jit(...).lower`; objects keep their state."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, /, *args: P.args, **kwargs: P.kwargs) -> Traced:
        """Traces a call as `jax.jit(...).trace`; objects keep their state."""
        return self._trace(args, kwargs)

    def _trace(self, args: Args, kwargs: Kwargs, n_bound: int = 0) -> Traced:
        """Traces a call whose first arguments are bound; its result takes the others."""
        split = jit_program.split_nested_objects
        call = self._prepare_uncached(split, args, kwargs)
        traced = call.program.jitted.trace(*call.args, **call.kwargs)
        compiled_call = _compiled_call(
            call.program, self._options, args, kwargs, n_bound
        )
        return Traced(traced, compiled_call)

    def eval_shape(self, /, *args: P.args, **kwargs: P.kwargs) -> PyTree:
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
        self: JitWrapped[Concatenate[T, Q], R],
        instance: T,
        owner: type | None = None,
    ) -> Callable[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else JitPartial(self, instance)


class JitPartial(functools.partial[R]):
    """A jitted function with its first arguments bound, which `lower` and `trace` do not take."""

    @property
    def jitted_fn(self) -> JitWrapped[..., R]:
        """The jitted function of all arguments."""
        return self.func  # pyright: ignore[reportReturnType]

    def lower(self, /, *args: PyTree, **kwargs: PyTree) -> Lowered:
        """Lowers a call as `jax.jit(...).lower`; objects keep their state."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, /, *args: PyTree, **kwargs: PyTree) -> Traced:
        """Traces a call as `jax.jit(...).trace`; objects keep their state."""
        return self.jitted_fn._trace(
            (*self.args, *args), kwargs, len(self.args)
        )

    def eval_shape(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Returns the result of a call with shapes in place of arrays; objects keep their state."""
        return self.jitted_fn.eval_shape(*self.args, *args, **kwargs)


class _Jit(Protocol[Options]):
    @overload
    def __call__(
        self,
        fun: Callable[P, R],
        /,
        *args: Options.args,
        **options: Options.kwargs,
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
    in_shardings: PyTree = None,
    out_shardings: PyTree = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    device: Any = None,
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
    calls.check_unbound("jit", fun)
    kind = ObjectKind("jit", *settings.resolve_graph_options(**options))
    static = _places(fun, "static", static_argnums, static_argnames)
    donated = _places(fun, "donate", donate_argnums, donate_argnames)
    input_shardings = state_roles.as_shardings(in_shardings, "in_shardings")
    result_shardings = state_roles.as_shardings(out_shardings, "out_shardings")
    options_for_jax = (
        ("keep_unused", keep_unused),
        ("inline", inline),
        ("device", device),
        ("backend", backend),
    )
    jit_options = JitOptions(
        kind,
        input_shardings,
        result_shardings,
        static,
        donated,
        options_for_jax,
    )
    return JitWrapped(fun, jit_options)


def _places(
    fun: Callable[..., Any],
    name: str,
    argnums: int | Iterable[int] | None,
    argnames: str | Iterable[str] | None,
) -> frozenset[Place]:
    """Returns the positions and names of the arguments that either of the options has."""
    argnums = () if argnums is None else as_tuple(argnums)
    argnames = () if argnames is None else as_tuple(argnames)
    check_argnums("nnx.jit", f"{name}_argnums", fun, argnums)
    places: set[Place] = {*argnums, *argnames}
    if not places:
        return frozenset()  # reading a signature is slow
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return frozenset(places)
    _check_argnames(fun, f"{name}_argnames", argnames, parameters)

    # An argument that may be passed in both ways is meant in both.
    positional: list[inspect.Parameter] = []
    for p in parameters:
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            positional.append(p)
    for i in argnums:
        if i < 0 and positional:
            places.discard(i)
            places.add(i % len(positional))
    for i, p in enumerate(positional):
        both_places = (i, p.name)
        if p.kind is p.POSITIONAL_ONLY or places.isdisjoint(both_places):
            continue
        places.update(both_places)
    return frozenset(places)


def _check_argnames(
    fun: Callable[..., Any],
    option: str,
    argnames: Iterable[str],
    parameters: Iterable[inspect.Parameter],
) -> None:
    """Raises TransformArgumentError for names that a function does not take."""
    names: list[str] = []
    for p in parameters:
        if p.kind is p.VAR_KEYWORD:
            return
        if p.kind is not p.VAR_POSITIONAL:
            names.append(p.name)
    for argname in argnames:
        if argname not in names:
            fun_name = getattr(fun, "__name__", type(fun).__name__)
            raise TransformArgumentError(
                f"nnx.jit({fun_name}): {option} has {argname!r}, but the function has the "
                f"parameters {', '.join(names) or '(none)'}; use names of these."
            )


def jit_partial(
    fun: Callable[..., R], *partial_args: PyTree, **options: Any
) -> JitPartial[R]:
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
    *cached_args: PyTree,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Callable[..., R]:
    """Returns `functools.partial(f, *cached_args)` for a transformed `f`, for compatibility.

    `nnx.jit` caches the structure of objects for every call; bound objects may change in any way.
    """
    return functools.partial(f, *cached_args)


def _compiled_call(
    program: Program,
    options: JitOptions,
    args: Args,
    kwargs: Kwargs,
    n_bound: int,
) -> Callable[[jax.stages.Compiled, Args, Kwargs], Any]:
    """Returns the function that calls a compiled program, for calls like the given one.

    It writes the changed values and returns the result. It raises CompiledCallError if the
    structure of an object or the number of arguments differs.
    """
    # Bound and static arguments stay as they were; a call has the others.
    fixed_args: dict[int, Any] = {}
    for i, arg in enumerate(args):
        if i < n_bound or i in options.static:
            fixed_args[i] = arg
    fixed_kwargs: Kwargs = {}
    for name, arg in kwargs.items():
        if name in options.static:
            fixed_kwargs[name] = arg
    n_args = len(args)
    n_passed = n_args - len(fixed_args)
    names = sorted(kwargs.keys() - fixed_kwargs.keys())

    def run(
        compiled: jax.stages.Compiled, args: Args, kwargs: Kwargs
    ) -> PyTree:
        if len(args) != n_passed or sorted(kwargs) != names:
            raise CompiledCallError(
                f"a function compiled for {n_passed} positional arguments and {names} "
                f"by name is called with {len(args)} and {sorted(kwargs)}; pass them as to lower, "
                "without the static ones."
            )
        passed_args = iter(args)
        all_args: list[Any] = []
        for i in range(n_args):
            if i in fixed_args:
                all_args.append(fixed_args[i])
            else:
                all_args.append(next(passed_args))
        call = jit_program.split_nested_objects(
            options, tuple(all_args), {**kwargs, **fixed_kwargs}
        )
        if call.layout != program.layout:
            raise _structure_error(program.layout, call.layout)
        compiled_args: list[Any] = []
        for i, arg in enumerate(call.other_args):
            if i not in options.static:
                compiled_args.append(arg)
        compiled_kwargs: Kwargs = {}
        for name in names:
            compiled_kwargs[name] = call.other_kwargs[name]
        values = program.values_of(call.flat)
        outputs = compiled(*values, *compiled_args, **compiled_kwargs)
        return program.finish(call.flat, outputs)

    return run


def _structure_error(
    compiled: jit_program.CallLayout, called: jit_program.CallLayout
) -> CompiledCallError:
    """Returns the error for objects unlike those that a function was compiled for."""
    compiled_graph = compiled.static.described()
    called_graph = called.static.described()
    difference = compiled_graph.first_difference(called_graph)
    where = "has other variables or other metadata"
    if difference is not None and len(difference.path) > 1:
        _, i, *path = difference.path
        where = f"differs at object {i}{calls.path_suffix(path)}"
    return CompiledCallError(
        f"a compiled function is called with objects unlike those it was compiled for: the new "
        f"argument {where}; pass objects of the same structure, or lower and compile it for these."
    )


@tracing.entry_point
def eval_shape(
    f: Callable[..., R],
    *args: PyTree,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    **kwargs: PyTree,
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
    kind = ObjectKind(
        "eval_shape", *settings.resolve_graph_options(graph, graph_updates)
    )
    abstract_args, abstract_kwargs = split_merge.as_abstract((args, kwargs))
    shape_of = lifting.eval_shape(kind, calls.with_kwargs_first(f))
    specs = ("args", "the result")
    with versions.TransformCall(
        "eval_shape", f, abstract_args, specs, named=abstract_kwargs
    ):
        result = shape_of(abstract_kwargs, *abstract_args)
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
    static = calls.StaticArguments(
        "make_jaxpr", "static_argnums", f, static_argnums
    )
    fn = calls.with_kwargs_first(static.fn)

    def pure(pure_args: PureArgs) -> PyTree:
        return call_pure(kind, fn, pure_args).packed

    def call(kwargs: Kwargs, *args: PyTree) -> Any:
        _, pure_args = split_args(kind, (kwargs, *static.wrapped(args)), None)
        return jax.make_jaxpr(pure)(pure_args)

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
    kind = ObjectKind(
        "checkify", *settings.resolve_graph_options(graph, graph_updates)
    )
    checked = lifting.checkify(kind, calls.with_kwargs_first(f), errors=errors)
    return calls.wrap_transformed("checkify", f, checked)
