"""State of modules while they run: the running methods, a bound module's names, and its variables.

A module created in another module's method belongs to that module, so each thread has a stack of
modules whose methods run. A bound module knows its submodules and the names that it has used;
`ModuleVariables` gives its methods access to variables and PRNG keys.
"""

import contextlib
import contextvars
import dataclasses
import enum
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import jax
import jax.numpy as jnp

from weft import errors
from weft.core.filters import DenyList
from weft.core.scope import Names, Scope, Variable
from weft.core.settings import settings
from weft.typing import PyTree, T


@dataclasses.dataclass(frozen=True)
class InterceptorContext:
    """Call seen by an interceptor; `orig_method` is the method without further interceptors."""

    module: "ModuleVariables"
    method_name: str
    orig_method: Callable[..., Any]


class Interceptor(Protocol):
    """Function called in place of each method; `next_fun` is the next interceptor or the method."""

    def __call__(
        self,
        next_fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        context: InterceptorContext,
    ) -> PyTree: ...


class _Running(threading.local):
    def __init__(self) -> None:
        self.module_stack: "list[ModuleVariables | None]" = [None]
        self.interceptors: tuple[Interceptor, ...] = ()
        self.lifted = 0  # number of transformed functions being traced

    def __reduce__(self) -> str:
        return (
            "RUNNING"  # classes pickled by value refer to it in their methods
        )


RUNNING = _Running()
_named_call: contextvars.ContextVar[bool | None]
_named_call = contextvars.ContextVar("named_call", default=None)


# The classes whose modules read their path inside of a transformation. A trace of such a module is
# valid only at that path, while all other modules share traces.
PATH_READERS: "weakref.WeakSet[type[ModuleVariables]]" = weakref.WeakSet()


def record_path_read(module: "ModuleVariables") -> None:
    """Records that a module reads its name or path."""
    if RUNNING.lifted:
        for reader in (module, *RUNNING.module_stack):
            if reader is not None:
                PATH_READERS.add(type(reader))


def name_of(module: "ModuleVariables") -> str | None:
    """Returns a module's name, without recording the read."""
    return vars(module).get("name")


class NameField:
    """Field `name` of modules."""

    def __get__(self, module: "ModuleVariables | None", cls: type) -> Any:
        if module is None:
            return None
        record_path_read(module)
        return name_of(module)

    def __set__(self, module: "ModuleVariables", name: str | None) -> None:
        vars(module)["name"] = name


def current_module() -> "ModuleVariables | None":
    """Returns the module whose method runs, or None."""
    return RUNNING.module_stack[-1]


@contextlib.contextmanager
def without_parent() -> Iterator[None]:
    """Enters a context in which new modules have no parent."""
    RUNNING.module_stack.append(None)
    try:
        yield
    finally:
        RUNNING.module_stack.pop()


@contextlib.contextmanager
def intercept_methods(interceptor: Interceptor) -> Iterator[None]:
    """Enters a context in which an interceptor replaces each method call of each module.

    Args:
        interceptor: `interceptor(next_fun, args, kwargs, context)` returns the result of the call.
            Of several interceptors, the outermost is called first.

    >>> def doubled(next_fun, args, kwargs, context):
    ...     result = next_fun(*args, **kwargs)
    ...     return 2 * result if context.method_name == "__call__" else result
    >>> class Identity(nn.Module):
    ...     def __call__(self, x):
    ...         return x
    >>> with nn.intercept_methods(doubled):
    ...     print(Identity().apply({}, 3))
    6
    """
    outer_interceptors = RUNNING.interceptors
    RUNNING.interceptors = (*outer_interceptors, interceptor)
    try:
        yield
    finally:
        RUNNING.interceptors = outer_interceptors


def call_interceptors(
    fn: Callable[..., T],
    module: "ModuleVariables",
    args: tuple[PyTree, ...],
    kwargs: Mapping[str, PyTree],
) -> T:
    """Calls a method through the interceptors."""
    interceptors = RUNNING.interceptors
    context = InterceptorContext(module, fn.__name__, fn.__get__(module))

    def call(depth: int, *args: PyTree, **kwargs: PyTree) -> T:
        if depth == len(interceptors):
            return fn(module, *args, **kwargs)
        next_fun = functools.partial(call, depth + 1)
        return interceptors[depth](next_fun, args, kwargs, context)

    return call(0, *args, **kwargs)


def named_call_enabled() -> bool:
    """Returns whether operations are named after their modules."""
    enabled = _named_call.get()
    return settings.profile if enabled is None else enabled


def enable_named_call() -> None:
    """Names operations after their modules, the default, in this thread."""
    _named_call.set(True)


def disable_named_call() -> None:
    """Stops naming operations after their modules, in this thread."""
    _named_call.set(False)


@contextlib.contextmanager
def override_named_call(enable: bool = True) -> Iterator[None]:
    """Enters a context in which operations are named after their modules, or not."""
    token = _named_call.set(enable)
    try:
        yield
    finally:
        _named_call.reset(token)


class SetupProgress(enum.Enum):
    """Progress of the method `setup`."""

    DUE = enum.auto()
    RUNS = enum.auto()
    DONE = enum.auto()


_NOTHING: Any = MappingProxyType({})


class State:
    """Part of a module that is not its fields.

    Most modules have no submodules and few names, and the garbage collector runs several times per
    trace. Instances therefore hold only values that differ from the class's.

    Attributes:
        original_fields: original values of fields that hold modules.
        transform_tokens: transformations of the module's class.
        own_names: names used by `setup` and the fields. They cross transformations with the module,
            so that a transformed function cannot reuse a name.
        adopted: by identity, modules given to this module or one above, and their bound copies.
            Keeping the originals prevents reuse of an identity.
    """

    setup = SetupProgress.DUE
    in_compact = False
    children: "dict[str, ModuleVariables]" = _NOTHING
    original_fields: dict[str, Any] = _NOTHING
    transform_tokens: frozenset[Any] = frozenset()
    own_names: "Names" = _NOTHING
    adopted: dict[int, tuple[Any, Any]]
    _names_in_compact: dict[str | None, list[str]] = _NOTHING
    _method = ""
    _named_by: "dict[str, tuple[str, ModuleVariables]]" = _NOTHING
    _name_scopes: frozenset[str] = frozenset()
    _places: "list[tuple[Scope | None, dict[str, int]]]" = _NOTHING

    @property
    def setup_is_due(self) -> bool:
        return self.setup is SetupProgress.DUE

    @property
    def in_setup(self) -> bool:
        return self.setup is SetupProgress.RUNS

    @property
    def place(self) -> "Scope | None":
        """The scope for submodules, if it is below a scope with the name of a method."""
        return self._places[-1][0] if self._places else None

    @property
    def counters(self) -> dict[str, int]:
        """The number of automatically named submodules at this place, by class name."""
        return self._places[-1][1] if self._places else _NOTHING

    @property
    def names_submodules(self) -> bool:
        """True if a method runs that can create submodules without an attribute."""
        return self.in_compact or self.place is not None

    def begin_compact(self, module: "ModuleVariables", method: str) -> None:
        """Releases the names used by a previous call of a compact method."""
        scope: Any = module.scope
        for collection, names in self._names_in_compact.items():
            for name in names:
                scope.release(name, collection)
                if collection is None and (
                    child := self.children.pop(name, None)
                ):
                    # Another compact method must not use the name for another module.
                    if not self._named_by:
                        self._named_by = {}
                    self._named_by[name] = self._method, child
        self._names_in_compact = _NOTHING
        if self._places:
            self._places[0][1].clear()  # automatic names count from 0 again
        self.in_compact = True
        self._method = method

    def add_child(
        self,
        scope: "Scope",
        name: str,
        module: "ModuleVariables",
        child: "ModuleVariables",
    ) -> None:
        """Records the name of a new submodule; raises an error if the name is taken."""
        if scope.name_reserved(name):
            raise errors.NameInUseError(
                f"submodule {type(child).__name__}",
                name,
                module._name_in_errors,
            )
        if self.place is not None:
            return  # each call of the method creates it again
        if self.in_compact and name in self._named_by:
            method, previous_child = self._named_by[name]
            if method != self._method and previous_child != child.clone(
                name=name
            ):
                raise errors.MultipleMethodsCompactError(
                    type(module).__name__, name, (method, self._method)
                )
        if not self.children:
            self.children = {}
        self.children[name] = child
        self.record_name(name, None)

    def record_name(self, name: str, collection: str | None) -> None:
        """Records a name that the next call of a compact method may use again."""
        if self.in_compact:
            if not self._names_in_compact:
                self._names_in_compact = {}
            self._names_in_compact.setdefault(collection, []).append(name)

    def next_name(self, class_name: str) -> str:
        """Returns a name for a submodule without one."""
        counters = self._all_places()[-1][1]
        number = counters.get(class_name, 0)
        counters[class_name] = number + 1
        return f"{class_name}_{number}"

    def update_counters(self, counters: Mapping[str, int]) -> None:
        """Updates the numbers of named submodules with those of another copy of the module."""
        if counters and self.names_submodules:
            self._all_places()[-1][1].update(counters)

    def _all_places(self) -> "list[tuple[Scope | None, dict[str, int]]]":
        if not self._places:
            self._places = [(None, {})]
        return self._places

    @contextlib.contextmanager
    def creating_at(self, place: "Scope | None" = None) -> Iterator[None]:
        """Enters a context that creates submodules at a place, by default the module's scope."""
        places = self._all_places()
        places.append(places[0] if place is None else (place, {}))
        try:
            yield
        finally:
            places.pop()

    def name_scope(
        self, module: "ModuleVariables", name: str
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a context that creates submodules in a scope with the name of a method."""
        scope: Any = module.scope
        if scope.name_reserved(name) and name not in self._name_scopes:
            raise errors.NameInUseError(
                "compact_name_scope", name, module._name_in_errors
            )
        self._name_scopes |= {name}
        return self.creating_at(scope.push(name, reuse=True))

    def resume(self, module: "ModuleVariables", spec: Any) -> None:
        """Takes over the state of another copy of the module, a `module_kind._Spec`."""
        scope: Any = module.scope
        if spec.own_names:
            self.own_names = spec.own_names
            scope.take_names(spec.own_names)
        self.in_compact = spec.in_compact
        self.transform_tokens = spec.transform_tokens
        if spec.place is not None:
            # The copy outside runs a `compact_name_scope`, so submodules belong below its scope.
            self._name_scopes |= {spec.place}
            place = scope.push(spec.place, reuse=True)
            self._all_places().append((place, dict(spec.counters)))
        elif spec.counters:
            self._places = [(None, dict(spec.counters))]


def untransformed(cls: type["ModuleVariables"]) -> Any:
    """Returns the class that was transformed to make a class, or the class itself."""
    return vars(cls).get("_transforms", cls)


ALL_BUT_INTERMEDIATES = DenyList("intermediates")
"""The default of `mutable` in `init`."""


def _append(values: tuple[PyTree, ...], value: PyTree) -> tuple[PyTree, ...]:
    return (*values, value)


class ModuleVariables:
    """Base class of `Module`: access to variables; `scope` is None if not bound."""

    scope: Scope | None
    _state: State

    if TYPE_CHECKING:  # defined by `Module`
        parent: Any
        _field_names: ClassVar[tuple[str, ...]]

        def clone(self, **updates: Any) -> "Self": ...
        def init(self, *args: PyTree, **kwargs: PyTree) -> dict[str, Any]: ...
        def apply(self, *args: PyTree, **kwargs: PyTree) -> PyTree: ...
        def _run_setup(self) -> None: ...
        def _rebind(self, scope: Any) -> None: ...
        def _end_scope(self) -> None: ...

    @property
    def _name_in_errors(self) -> str:
        if self.scope is None:
            return type(self).__name__
        return f"{type(self).__name__} {'/'.join(self.scope.path) or '(the outermost module)'}"

    def _bound_scope(self, use: str) -> Scope:
        if self.scope is None:
            raise errors.UnboundModuleError(use, type(self).__name__)
        return self.scope

    def _scope_for_creation(self, variable: str) -> Scope:
        """Returns the scope in which a variable can be created."""
        if self.scope is None:
            raise errors.UnboundModuleError(
                f"{variable} was requested", type(self).__name__
            )
        if not (self._state.in_compact or self._state.in_setup):
            raise errors.CompactMethodError(variable, self._name_in_errors)
        return self.scope

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of this module and its submodules, by collection."""
        return self._bound_scope("the variables were requested").variables()

    @property
    def path(self) -> tuple[str, ...]:
        """The names of the modules from the root to this one."""
        scope = self._bound_scope("the path was requested")
        record_path_read(self)  # pyright: ignore[reportArgumentType]
        return scope.path

    def param(
        self,
        name: str,
        init_fn: Callable[..., T],
        *init_args: PyTree,
        unbox: bool = True,
        **init_kwargs: PyTree,
    ) -> T:
        """Returns a parameter, which `init` creates.

        Args:
            init_fn: computes the first value from a key and `init_args`.
            unbox: whether to return the value without its axis metadata.

        Raises:
            CompactMethodError: if called in a method that is neither `setup` nor compact.
            NameInUseError: if the name is taken in the module.
            ScopeParamShapeError: if the given parameter has another shape.

        >>> class Bias(nn.Module):
        ...     @nn.compact
        ...     def __call__(self, x):
        ...         return x + self.param("bias", nn.initializers.ones, x.shape[-1:])[None]
        >>> Bias().init(jax.random.key(0), jax.numpy.zeros((4, 2)))
        {'params': {'bias': Array([1., 1.], dtype=float32)}}
        """
        scope = self._scope_for_creation(f"the parameter {name!r}")
        value = scope.param(
            name, init_fn, *init_args, unbox=unbox, **init_kwargs
        )
        self._state.record_name(name, "params")
        return value

    def variable(
        self,
        col: str,
        name: str,
        init_fn: Callable[..., T] | None = None,
        *init_args: PyTree,
        unbox: bool = True,
        **init_kwargs: PyTree,
    ) -> Variable[T]:
        """Returns a reference to a variable, whose `value` can be read, and set if mutable.

        Args:
            init_fn: computes the first value from `init_args`.
            unbox: whether the value is shown without its axis metadata.

        For errors see `param`, and ScopeVariableNotFoundError if it cannot be created.

        >>> class Counter(nn.Module):
        ...     @nn.compact
        ...     def __call__(self):
        ...         calls = self.variable("state", "calls", lambda: 0)
        ...         calls.value += 1
        ...         return calls.value
        >>> Counter().apply({"state": {"calls": 4}}, mutable=["state"])
        (5, {'state': {'calls': 5}})
        """
        scope = self._scope_for_creation(f"the variable {name!r} of {col!r}")
        ref = scope.variable(
            col, name, init_fn, *init_args, unbox=unbox, **init_kwargs
        )
        self._state.record_name(name, col)
        return ref

    def has_variable(self, col: str, name: str) -> bool:
        """Returns whether this module has a variable."""
        return self._bound_scope(
            f"the variable {name!r} was requested"
        ).has_variable(col, name)

    def get_variable(
        self,
        col: str,
        name: str,
        default: PyTree = None,
        *,
        unbox: bool = False,
    ) -> PyTree:
        """Returns a variable's value, or `default`; with `unbox`, without its axis metadata."""
        scope = self._bound_scope(f"the variable {name!r} was requested")
        return scope.get_variable(col, name, default, unbox=unbox)

    def put_variable(self, col: str, name: str, value: PyTree) -> None:
        """Sets a new or existing variable of this module, in a mutable collection."""
        self._bound_scope(f"the variable {name!r} was set").put_variable(
            col, name, value
        )

    def make_rng(self, name: str = "params") -> jax.Array:
        """Returns a new PRNG key of a stream; `params` replaces a missing one.

        Raises InvalidRngError if there is no stream.
        """
        return self._bound_scope(
            f"a key of the PRNG stream {name!r} was requested"
        ).make_rng(name)

    def has_rng(self, name: str) -> bool:
        """Returns whether `init` or `apply` was given a PRNG stream."""
        return self._bound_scope(
            f"the PRNG stream {name!r} was requested"
        ).has_rng(name)

    def is_initializing(self) -> bool:
        """Returns whether the call is by `init`, not `apply`."""
        return self._bound_scope("`is_initializing` was called").get_flag(
            "initializing", False
        )

    def is_mutable_collection(self, col: str) -> bool:
        """Returns whether the variables of a collection can be changed."""
        return self._bound_scope(
            f"the collection {col!r} was requested"
        ).is_mutable_collection(col)

    def sow(
        self,
        col: str,
        name: str,
        value: PyTree,
        reduce_fn: Callable[[Any, Any], Any] = _append,
        init_fn: Callable[[], Any] = tuple,
    ) -> bool:
        """Stores a value in a collection, for use outside; returns whether it is mutable.

        A trainer reports the collection "summaries". Over the batches of an evaluation, a plain
        number is averaged as it is, each batch with equal weight; a `WeightedScalar` of
        `weft.hierarchy` by its weight; and a metric of `weft.metrics`, such as F1, adds up.

        Args:
            col: the collection; if it is not mutable, nothing is stored.
            reduce_fn: combines the previously stored value and the new one.

        >>> class Twice(nn.Module):
        ...     def __call__(self, x):
        ...         self.sow("intermediates", "input", x)
        ...         return 2 * x
        >>> Twice().apply({}, 3, mutable=["intermediates"])
        (6, {'intermediates': {'input': (3,)}})
        """
        scope = self._bound_scope(f"{name!r} was sown")
        if not scope.is_mutable_collection(col):
            return False
        if not scope.has_variable(col, name):
            if not scope.name_reserved(name, col):
                scope.reserve(name, col)
                self._state.record_name(name, col)
            # A branch or a loop that sows then begins with the previous value.
            scope.put_variable(col, name, init_fn())
        previous_value = scope.get_variable(col, name)
        scope.put_variable(col, name, reduce_fn(previous_value, value))
        return True

    def perturb(
        self, name: str, value: T, collection: str = "perturbations"
    ) -> T:
        """Adds a variable of zeros to a value, so that the variable's gradient is the value's.

        Args:
            value: an array; use the result in its place.
            collection: collection of the zeros, created by `init`. If it is not given to `apply`,
                the value is returned unchanged.

        Raises PerturbationNotFoundError if the collection lacks this variable.

        >>> class Square(nn.Module):
        ...     def __call__(self, x):
        ...         return jnp.sum(self.perturb("x", x) ** 2)
        >>> x = jnp.array([1.0, 3.0])
        >>> variables = Square().init(jax.random.key(0), x)
        >>> jax.grad(lambda v: Square().apply(v, x))(variables)
        {'perturbations': {'x': Array([2., 6.], dtype=float32)}}
        """
        scope = self._bound_scope(f"{name!r} was perturbed")
        exists = scope.has_variable(collection, name)
        if not exists and scope.is_mutable_collection(collection):
            scope.variable(
                collection, name, lambda: jax.tree.map(jnp.zeros_like, value)
            )
            self._state.record_name(name, collection)
            exists = True
        if exists:
            return jax.tree.map(
                jnp.add, value, scope.get_variable(collection, name)
            )
        if scope.has_collection(collection):
            raise errors.PerturbationNotFoundError(
                name, collection, scope.path_text
            )
        return value
