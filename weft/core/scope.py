"""Scopes: where a model's variables and PRNG streams live while it runs.

A `Scope` is a node of a named tree. Below it are collections of variables (`params`, `batch_stats`,
a cache ...), a filter says which of them can be changed, and keys are drawn from named streams. The
tree exists for one call: `apply` makes the root from a dict of collections, runs a function of the
scope, and returns what the function changed; `init` is `apply` from nothing. Outside there are only
dicts of arrays and PRNG keys.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.core

from weft.core import meta
from weft.core.filters import (
    DenyList,
    Filter,
    canonical,
    filter_to_set,
    group_collections,
    in_filter,
    intersect_filters,
    is_filter_empty,
    subtract_filters,
    union_filters,
)  # fmt: skip
from weft.core.frozen_dict import FrozenDict
from weft.core.known import known_part
from weft.core.raw_transformations import lifted_names, running_transformation
from weft.core.rngs import Counts, Path, Stream, check_keys
from weft.core.tracebacks import entry_point
from weft.core.tracing import at_trace, current_trace, is_tracing, with_room_in_trace
from weft.core.trunk import Trunk, VariableDict, copied
from weft.core.variable import MISSING, Variable, check_shape
from weft.errors import (
    ApplyScopeInvalidVariablesStructureError,
    ApplyScopeInvalidVariablesTypeError,
    InvalidRngError,
    InvalidScopeError,
    JaxTransformError,
    ModifyScopeVariableError,
    NameInUseError,
    ScopeCollectionNotFound,
    ScopeFlagNotFoundError,
    ScopeNameError,
    ScopeParamNotFoundError,
    ScopeVariableNotFoundError,
)

__all__ = [
    "Scope", "Variable", "apply", "bind", "init", "lazy_init",
    "DenyList", "filter_to_set", "group_collections", "in_filter",
    "intersect_filters", "is_filter_empty", "subtract_filters", "union_filters",
]  # fmt: skip

T = TypeVar("T")

Names = Mapping[str | None, frozenset[str]]
"""Names in a scope by collection; those of child scopes are at None."""


class Scope:
    """A node in the tree of scopes.

    Args:
        variables: the collections below this scope. Those that are not mutable are never written
            to; of the others, a copy of the dicts is.
        rngs: keys by the name of their stream; by default those of the parent.
        name: the scope's name.
        mutable: the collections that can be changed.
        parent: the scope above, None for a root.
        path: of a root that is not the outermost: where it is there.
        debug_path: the same for messages, with the names of transformations.
        flags: values that this scope and those below can ask for; by default those of the parent.

    Example:
        >>> scope = Scope({"params": {"dense": {"bias": 1.0}}})
        >>> scope.push("dense").get_variable("params", "bias")
        1.0
    """

    def __init__(
        self,
        variables: VariableDict,
        rngs: Mapping[str, Any] | None = None,
        name: str | None = None,
        mutable: Filter = False,
        parent: "Scope | None" = None,
        path: Path = (),
        debug_path: Path = (),
        flags: Mapping[str, Any] | None = None,
    ):
        self.name = name
        self.mutable = mutable
        self.parent = parent
        self._reserved: dict[str | None, set[str]] = {}  # names by collection; None: scopes
        self._ended = False
        if parent is None:
            self._above, self._debug_above = path, debug_path or path
            self._trunk = Trunk(variables, mutable, self._debug_above)
            self._below: Path = ()
            self._counts = Counts()
        else:
            self._above, self._debug_above = parent._above, parent._debug_above
            self._trunk = parent._trunk
            self._below = (*parent._below, name or "")
            self._counts = parent._counts
        self.flags: FrozenDict[str, Any] = (
            FrozenDict(flags or {}) if parent is None or flags else parent.flags
        )
        self._rngs: dict[str, Stream] | None = None
        if rngs or parent is None:
            self._rngs = {
                stream: key if isinstance(key, Stream) else Stream(key)
                for stream, key in (rngs or {}).items()
            }

    # The tree.

    @property
    def rngs(self) -> Mapping[str, Stream]:
        """The PRNG streams, as this scope sees them."""
        if self._rngs is None:
            above: Any = self.parent
            self._rngs = {name: s.at(self._below[-1]) for name, s in above.rngs.items()}
        return self._rngs

    @property
    def path(self) -> Path:
        """The names from the root to this scope."""
        return (*self._above, *self._below)

    @property
    def debug_path(self) -> Path:
        """The path for messages, with the names of transformations."""
        return (*self._debug_above, *self._below)

    @property
    def root(self) -> "Scope":
        """The scope at the top."""
        return self if self.parent is None else self.parent.root

    @property
    def path_text(self) -> str:
        """The path as text, for messages."""
        return "/" + "/".join(self.debug_path)

    @property
    def invalid(self) -> bool:
        """Whether the scope or one above has come to its end."""
        scope: Scope | None = self
        while scope is not None:
            if scope._ended:
                return True
            scope = scope.parent
        return False

    def invalidate(self) -> None:
        """Ends the scope and those below: whatever uses them from now on is an error."""
        self._ended = True

    @contextlib.contextmanager
    def temporary(self) -> Iterator["Scope"]:
        """A context that yields this scope and ends it."""
        try:
            yield self
        finally:
            self.invalidate()

    def name_reserved(self, name: str, col: str | None = None) -> bool:
        """Whether a name cannot be given any more.

        Args:
            name: of a child scope, or of a variable.
            col: the variable's collection; None asks for a child scope.
        """
        for of, names in self._reserved.items():
            if name in names and (col is None or of is None or of == col):
                return True
        return False

    def reserve(self, name: str, col: str | None = None) -> None:
        """Takes a name.

        Args:
            name: of a child scope, or of a variable.
            col: the variable's collection, None for a child scope. Variables of different
                collections may have one name.

        Raises:
            NameInUseError: if it is taken.
            ScopeNameError: if it is no string.
        """
        self._check_valid()
        if not isinstance(name, str):
            raise ScopeNameError(name, self.path_text)
        if self.name_reserved(name, col):
            raise NameInUseError(col or "scopes", name, self.path_text)
        self._reserved.setdefault(col, set()).add(name)

    def release(self, name: str, col: str | None = None) -> None:
        """Gives a name free again; see `reserve`."""
        self._reserved.get(col, set()).discard(name)

    def names(self) -> Names:
        """All names that are taken."""
        return {col: frozenset(names) for col, names in self._reserved.items() if names}

    def take_names(self, names: Names) -> None:
        """Takes names, which may be taken already; for what crosses a transformation with them."""
        for col, of_col in names.items():
            self._reserved.setdefault(col, set()).update(of_col)

    def free_names(self, names: Names) -> None:
        """The inverse of `take_names`."""
        for col, of_col in names.items():
            self._reserved.get(col, set()).difference_update(of_col)

    def default_name(self, prefix: str) -> str:
        """The first of `prefix0`, `prefix1` ... that is free."""
        names = (f"{prefix}{i}" for i in itertools.count())
        return next(name for name in names if not self.name_reserved(name))

    def push(self, name: str | None = None, prefix: str = "", reuse: bool = False) -> "Scope":
        """A child scope.

        Args:
            name: its name; by default one is made from `prefix`.
            prefix: see `default_name`.
            reuse: whether the name may be taken already, so that the child shares what it holds.

        Raises:
            NameInUseError: if the name is taken and `reuse` is False.
        """
        self._check_valid()
        name = self.default_name(prefix) if name is None else name
        if not (reuse and self.name_reserved(name)):
            self.reserve(name)
        return Scope({}, name=name, mutable=self.mutable, parent=self)

    def child(
        self,
        fn: Callable[..., Any],
        name: str | None = None,
        prefix: str | None = None,
        named_call: bool = True,
        **partial_kwargs: Any,
    ) -> Callable[..., Any]:
        """A function of scopes, with a child of this scope as its scope.

        Args:
            fn: `fn(scope, *args, **kwargs)`.
            name: the child's name.
            prefix: where there is no name, the prefix of one; the function's name by default.
            named_call: whether the operations carry the name in profiles.
            **partial_kwargs: further arguments of `fn`.

        Returns:
            `fn` without its first argument. Called twice, it uses the same variables.
        """
        if name is None:
            name_of_fn = f"{fn.__name__}_" if hasattr(fn, "__name__") else ""
            scope = self.push(prefix=name_of_fn if prefix is None else prefix)
        else:
            scope = self.push(name)

        @functools.wraps(fn)
        def bound(*args: Any, **kwargs: Any) -> Any:
            with jax.named_scope(scope.name or "") if named_call else contextlib.nullcontext():
                return fn(scope.rewound(), *args, **{**partial_kwargs, **kwargs})

        return bound

    def rewound(self, rewind_rngs: bool = False) -> "Scope":
        """This scope as if nothing had been named in it yet; what is then named shares its values.

        Args:
            rewind_rngs: whether streams begin anew too, and draw the same keys again.
        """
        self._check_valid()
        scope = Scope.__new__(Scope)
        scope.__dict__.update(self.__dict__)
        scope._reserved = {}
        if rewind_rngs:
            scope._counts = Counts()
        return scope

    # Collections.

    def is_mutable_collection(self, col: str) -> bool:
        """Whether the variables of a collection can be changed."""
        return in_filter(self.mutable, col)

    def has_collection(self, col: str) -> bool:
        """Whether a collection was given or has something in any scope."""
        return col in self._trunk.collections or col in self._trunk.given

    def is_collection_empty(self, col: str) -> bool:
        """Whether a collection has nothing in any scope."""
        return not self._trunk.collections.get(col)

    def variables(self) -> dict[str, Any]:
        """The collections of this scope."""
        self._check_valid()
        found = {col: self._collection(col) for col in self._trunk.collections}
        return {col: dict(x) for col, x in found.items() if x or self.parent is None}

    def mutable_variables(self) -> dict[str, Any]:
        """The collections that can be changed, as new dicts."""
        found = self.variables().items()
        return {col: copied(entries) for col, entries in found if in_filter(self.mutable, col)}

    def _collection(self, col: str) -> Mapping[str, Any]:
        self._check_valid()
        return self._trunk.entries(col, self._below)

    # Variables.

    def has_variable(self, col: str, name: str) -> bool:
        """Whether a variable is there."""
        return name in self._collection(col)

    def get_variable(self, col: str, name: str, default: Any = None, *, unbox: bool = False) -> Any:
        """A variable's value.

        Args:
            col: its collection.
            name: its name.
            default: what to return where there is no such variable.
            unbox: whether to leave out its axis metadata.
        """
        value = self._collection(col).get(name, default)
        return meta.unbox(value) if unbox else value

    def put_variable(self, col: str, name: str, value: Any) -> None:
        """Sets a variable, which may be new.

        Args:
            col: its collection.
            name: its name.
            value: a pytree.

        Raises:
            JaxTransformError: inside of a transformation that the scope does not cross.
            ModifyScopeVariableError: if the collection is not mutable.
        """
        self._check_valid()
        self._check_trace(f"{name!r} of the collection {col!r} is written to")
        if not self.is_mutable_collection(col):
            hint = self._hint(col, f"call apply(..., mutable=[{col!r}]), and let {{}} change it.")
            raise ModifyScopeVariableError(col, name, self.path_text, hint)
        self._trunk.put(col, self._below, name, value)

    def variable(
        self,
        col: str,
        name: str,
        init_fn: Callable[..., T] | None = None,
        *init_args: Any,
        unbox: bool = True,
        **init_kwargs: Any,
    ) -> Variable[T]:
        """A variable by reference; it is made where there is none.

        Args:
            col: its collection.
            name: its name.
            init_fn: makes the first value, from `init_args` and `init_kwargs`.
            *init_args: for `init_fn`.
            unbox: whether the reference shows the value without its axis metadata.
            **init_kwargs: for `init_fn`.

        Raises:
            NameInUseError: if the name is taken.
            ScopeCollectionNotFound: if the collection is empty here and cannot be changed.
            ScopeVariableNotFoundError: if there is no such variable and it cannot be made.
        """
        self.reserve(name, col)
        if not self.has_variable(col, name):
            if init_fn is None or not self.is_mutable_collection(col):
                if self.is_collection_empty(col):
                    raise ScopeCollectionNotFound(col, name, self.path_text, self._hint(col))
                raise ScopeVariableNotFoundError(name, col, self.path_text, self._near(col))
            self._make(col, name, lambda: init_fn(*init_args, **init_kwargs))
        return Variable(self, col, name, unbox)

    def param(
        self,
        name: str,
        init_fn: Callable[..., T],
        *init_args: Any,
        unbox: bool = True,
        **init_kwargs: Any,
    ) -> T:
        """A parameter's value; it is made where there is none.

        Args:
            name: its name.
            init_fn: makes the first value, from a key of the stream `params` and `init_args`.
            *init_args: for `init_fn`; a shape comes first, as in `jax.nn.initializers`.
            unbox: whether to return the value without its axis metadata.
            **init_kwargs: for `init_fn`.

        Raises:
            NameInUseError: if the name is taken.
            ScopeCollectionNotFound: if there are no parameters here and none can be made.
            ScopeParamNotFoundError: if there is no such parameter and none can be made.
            ScopeParamShapeError: if the parameter has another shape than `init_fn` makes.
        """
        self.reserve(name, "params")
        value = self._trunk.entries("params", self._below).get(name, MISSING)
        if value is MISSING:
            if not self.is_mutable_collection("params"):
                if self.is_collection_empty("params"):
                    hint = self._hint("params")
                    raise ScopeCollectionNotFound("params", name, self.path_text, hint)
                raise ScopeParamNotFoundError(name, self.path_text, self._near("params"))
            value = self._make(
                "params", name, lambda: init_fn(self.make_rng("params"), *init_args, **init_kwargs)
            )
        else:
            check_shape(self, name, value, init_fn, init_args, init_kwargs)
        return meta.unbox(value) if unbox else value

    def _make(self, col: str, name: str, first_value: Callable[[], T]) -> T:
        """Sets a variable to its first value, which is computed where the scope is.

        Inside of a JAX transformation that the scope does not cross, that is outside of it: so the
        variable is there once, as if it had been made before.

        Raises:
            JaxTransformError: if the value depends on what is transformed there.
        """
        trace = self._trunk.trace()
        if self._trunk.trace == current_trace() or trace is None:
            value = first_value()
            self.put_variable(col, name, value)
            return value
        what = (
            f"the first value of {name!r} of the collection {col!r} depends on what is transformed"
        )
        try:
            with at_trace(trace):
                value = first_value()
                leaks = not is_tracing() and any(map(_is_tracer, jax.tree.leaves(value)))
                if not leaks:
                    self.put_variable(col, name, value)
        except jax.errors.UnexpectedTracerError as error:
            raise self._refused_in_trace(what) from error
        if leaks:
            raise self._refused_in_trace(what)
        return value

    # PRNG streams and flags.

    def has_rng(self, name: str) -> bool:
        """Whether there is a stream of that name."""
        return name in self.rngs

    def make_rng(self, name: str = "params") -> Any:
        """A key that was not given before.

        Args:
            name: the stream; where there is none of that name, `params` is taken.

        Raises:
            InvalidRngError: if there is no stream.
            JaxTransformError: inside of a transformation that the scope does not cross.
        """
        stream = name if self.has_rng(name) else "params"
        if not self.has_rng(stream):
            there = ", ".join(map(repr, self.rngs)) or "none"
            raise InvalidRngError(
                f"the scope {self.path_text!r} needs a key of the PRNG stream {name!r}, and the "
                f"streams that are there are: {there}. Give a key: rngs={{{name!r}: key}}"
                + (", and lift the stream." if self._trunk.lifted_by else ".")
            )
        self._check_valid()
        self._check_trace(
            f"a key of the PRNG stream {stream!r} is drawn",
            "every index or iteration would draw the same",
        )
        return self.rngs[stream].at(self._counts.draw((self._below, stream))).as_key()

    def has_flag(self, key: str) -> bool:
        """Whether a flag was given."""
        return key in self.flags

    def get_flag(self, key: str, default: Any = MISSING) -> Any:
        """A flag's value.

        Raises:
            ScopeFlagNotFoundError: if it was not given and there is no default.
        """
        if key not in self.flags and default is MISSING:
            raise ScopeFlagNotFoundError(key, self.path_text, sorted(self.flags))
        return self.flags.get(key, default)

    def _check_valid(self) -> None:
        if self.invalid:
            raise InvalidScopeError(self.path_text)

    def _check_trace(self, what: str, why: str = "") -> None:
        if self._trunk.trace != current_trace():
            raise self._refused_in_trace(what, why)

    def _refused_in_trace(self, what: str, why: str = "") -> JaxTransformError:
        of_jax = running_transformation()
        return JaxTransformError(what, self.path_text, of_jax, lifted_names(of_jax), why)

    def _hint(self, col: str, if_lifted: str = "") -> str:
        if not (by := self._trunk.lifted_by) or in_filter(self._trunk.lifts, col):
            return if_lifted.format(by) if by else ""
        return f"{by} does not lift the collection {col!r}: name it among those it lifts."

    def _near(self, col: str) -> str:
        return "; there are: " + (", ".join(sorted(self._collection(col))) or "none")


def _is_tracer(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


# The ways in and out.


def bind(
    variables: VariableDict,
    rngs: Any = None,
    mutable: Filter = False,
    flags: Mapping[str, Any] | None = None,
) -> Scope:
    """A root scope that is used without `apply`; it never ends by itself.

    Args:
        variables: the collections.
        rngs: a key for the stream `params`, or keys by the name of their stream.
        mutable: the collections that can be changed.
        flags: see `Scope.get_flag`.

    Raises:
        ApplyScopeInvalidVariablesTypeError: if a collection is no mapping.
        InvalidRngError: if a key is no key.
    """
    for col, entries in variables.items():
        if not isinstance(entries, Mapping):
            raise ApplyScopeInvalidVariablesTypeError(entries, col)
    if rngs is not None and not isinstance(rngs, Mapping):
        rngs = {"params": rngs}
    check_keys(rngs or {})
    canonical(mutable)  # refuses what is no filter
    return Scope(variables, rngs, mutable=mutable, flags=flags)


def apply(
    fn: Callable[..., Any], mutable: Filter = False, flags: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """A pure function from a function of a scope.

    Args:
        fn: `fn(scope, *args, **kwargs)`.
        mutable: the collections that can be changed.
        flags: see `Scope.get_flag`.

    Returns:
        `applied(variables, *args, rngs=None, **kwargs)`. It returns what `fn` returns and, unless
        `mutable` is False, the collections that can be changed as they are afterwards.

    Raises:
        ApplyScopeInvalidVariablesStructureError: if the variables have `params` inside of `params`.
        ApplyScopeInvalidVariablesTypeError: if the variables are no mapping.
        InvalidRngError: if a key is no key.

    Example:
        >>> def count(scope):
        ...     calls = scope.variable("state", "calls", lambda: 0)
        ...     calls.value += 1
        ...     return calls.value
        >>> apply(count, mutable=["state"])({"state": {"calls": 2}})
        (3, {'state': {'calls': 3}})
    """

    @entry_point
    @functools.wraps(fn)
    def applied(variables: VariableDict, *args: Any, rngs: Any = None, **kwargs: Any) -> Any:
        if not isinstance(variables, Mapping):
            raise ApplyScopeInvalidVariablesTypeError(variables)
        params = variables.get("params")
        if isinstance(params, Mapping) and "params" in params:
            raise ApplyScopeInvalidVariablesStructureError(variables)
        with bind(variables, rngs=rngs, mutable=mutable, flags=flags).temporary() as root:
            result = with_room_in_trace(fn, root, *args, **kwargs)
            return (result, root.mutable_variables()) if mutable is not False else result

    return applied


def init(
    fn: Callable[..., Any], mutable: Filter = True, flags: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """`apply` from nothing: what the function returns, and the variables that it made.

    Args:
        fn: `fn(scope, *args, **kwargs)`.
        mutable: the collections that are made.
        flags: see `Scope.get_flag`; `initializing` is True.

    Returns:
        `initialize(rngs, *args, **kwargs)`, with a key for the stream `params`, or keys by the name
        of their stream.

    Example:
        >>> def scale(scope, x):
        ...     return x * scope.param("factor", lambda key: 2.0)
        >>> init(scale)(jax.random.key(0), 3.0)
        (6.0, {'params': {'factor': 2.0}})
    """

    @entry_point
    @functools.wraps(fn)
    def initialize(rngs: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(rngs, Mapping):
            rngs = {"params": rngs}
        all_flags = {**(flags or {}), "initializing": True}
        return apply(fn, mutable=mutable, flags=all_flags)({}, *args, rngs=rngs, **kwargs)

    return initialize


def lazy_init(
    fn: Callable[..., Any], mutable: Filter = True, flags: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The variables that a function makes, without computing anything else.

    Args:
        fn: `fn(scope, *args, **kwargs)`.
        mutable: the collections that are made.
        flags: see `Scope.get_flag`.

    Returns:
        `initialize(rngs, *args, **kwargs)`; arguments may be `jax.ShapeDtypeStruct`.

    Raises:
        LazyInitError: if an initial value depends on an input of which only the shape is given.

    Example:
        >>> def dense(scope, x):
        ...     kernel = scope.param("kernel", jax.nn.initializers.ones, (x.shape[-1], 2))
        ...     return x @ kernel
        >>> x = jax.ShapeDtypeStruct((100, 3), "float32")
        >>> jax.tree.map(lambda v: v.shape, lazy_init(dense)(jax.random.key(0), x))
        {'params': {'kernel': (3, 2)}}
    """

    @functools.wraps(fn)
    def initialize(rngs: Any, *args: Any, **kwargs: Any) -> Any:
        def make(rngs: Any, *args: Any, **kwargs: Any) -> Any:
            return init(fn, mutable, flags)(rngs, *args, **kwargs)[1]

        return known_part(make, rngs, *args, **kwargs)

    return initialize
