"""Scopes: access to a model's variables and PRNG streams while it runs.

A `Scope` is a node of a named tree. It contains collections of variables (`params`, `batch_stats`,
a cache ...); a filter selects the mutable ones, and keys are drawn from named streams. The tree
exists during one call: `apply` creates the root from a dict of collections, runs a function of the
scope, and returns changed variables; `init` is `apply` without variables. Outside, there are only
dicts of arrays and PRNG keys.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import jax.core

from weft import errors
from weft.core import meta, tracing
from weft.core.filters import Filter, canonical, in_filter
from weft.core.frozen_dict import FrozenDict
from weft.core.partial_eval import partial_eval
from weft.core.rngs import Counts, LazyRng, Path, RngKeys, check_keys
from weft.core.settings import settings
from weft.core.variable_store import VariableDict, VariableStore, copy_dicts
from weft.lifting import traces

V = TypeVar("V")
MISSING: Any = object()


class Variable(Generic[V]):
    """Reference to a variable of a scope.

    Attributes:
        unbox: whether `value` is without axis metadata.
    """

    def __init__(self, scope: "Scope", collection: str, name: str, unbox: bool = True):
        self.scope = scope
        self.collection = collection
        self.name = name
        self.unbox = unbox

    @property
    def value(self) -> V:
        """The value; assignments keep existing axis metadata."""
        value = self.scope.get_variable(self.collection, self.name)
        return meta.unbox(value) if self.unbox else value

    @value.setter
    def value(self, value: V) -> None:
        if self.unbox:
            before = self.scope.get_variable(self.collection, self.name)
            # Without boxes, the new value may have another structure.
            is_box = meta.is_axis_metadata
            if any(map(is_box, jax.tree.leaves(before, is_leaf=is_box))):
                value = meta.replace_boxed(before, value)
        self.scope.put_variable(self.collection, self.name, value)

    def is_mutable(self) -> bool:
        return self.scope.is_mutable_collection(self.collection)

    def __repr__(self) -> str:
        where = f"{self.collection}:{self.scope.path_text.rstrip('/')}/{self.name}"
        scope = self.scope
        value = "ended" if scope.invalid else scope.get_variable(self.collection, self.name)
        return f"Variable({where} = {value!r})"


def check_shape(
    scope: "Scope",
    name: str,
    value: object,
    init_fn: Callable[..., Any],
    init_args: tuple[Any, ...],
    init_kwargs: dict[str, Any],
) -> None:
    """Raises ScopeParamShapeError if a parameter's shape differs from its initializer's."""
    # Initializers return the shape that they are given; evaluating one costs half a millisecond.
    shape: Any = init_args[0] if init_args else None
    is_shape = isinstance(shape, tuple | list) and {int}.issuperset(map(type, shape))
    if is_shape and getattr(meta.unbox(value), "shape", None) == tuple(shape):
        return
    expected = jax.eval_shape(
        lambda key: init_fn(key, *init_args, **init_kwargs), jax.random.key(0)
    )
    for found, wanted in zip(jax.tree.leaves(value), jax.tree.leaves(expected), strict=False):
        if jax.numpy.shape(found) != wanted.shape:
            found = jax.numpy.shape(found)
            raise errors.ScopeParamShapeError(name, scope.path_text, found, wanted.shape)


T = TypeVar("T")

Names = Mapping[str | None, frozenset[str]]
"""Names in a scope by collection; None is for child scopes."""


class Scope:
    """Node in the tree of scopes.

    Args:
        variables: the collections below this scope. The dicts of mutable collections are cloned;
            the others are never changed.
        rngs: keys by stream name; by default those of the parent.
        mutable: collections that can be changed.
        path: for a root inside of a transformation, its path in the outermost tree.
        debug_path: `path` with the names of transformations, for messages.
        flags: values available to this scope and those below; by default those of the parent.

    Raises ScopeParentError if the parent is not a scope.

    Attributes:
        left_counts: numbers by key that a lifted function leaves for its caller's scope; of
            branches, the largest of each.
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
        self.left_counts: frozenset[tuple[tuple[int, str], int]] = frozenset()
        if parent is None:
            self._above, self._debug_above = path, debug_path or path
            self._store = VariableStore(variables, mutable, self._debug_above)
            self._below: Path = ()
            self._counts = Counts()
        elif not isinstance(parent, Scope):
            raise errors.ScopeParentError(type(parent).__name__)
        else:
            self._above, self._debug_above = parent._above, parent._debug_above
            self._store = parent._store
            self._below = (*parent._below, name or "")
            self._counts = parent._counts
        self.flags: FrozenDict[str, Any] = (
            FrozenDict(flags or {}) if parent is None or flags else parent.flags
        )
        self._rngs: dict[str, LazyRng] | None = None
        if rngs or parent is None:
            self._rngs = {
                stream: key if isinstance(key, LazyRng) else LazyRng(key)
                for stream, key in (rngs or {}).items()
            }

    # The tree.

    @property
    def rngs(self) -> Mapping[str, LazyRng]:
        """The PRNG streams of this scope."""
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
        """The path with the names of transformations, for messages."""
        return (*self._debug_above, *self._below)

    @property
    def root(self) -> "Scope":
        """The root of the tree."""
        return self if self.parent is None else self.parent.root

    @property
    def path_text(self) -> str:
        """The path as text, for messages."""
        return "/" + "/".join(self.debug_path)

    @property
    def invalid(self) -> bool:
        """True if the scope or one above has ended."""
        scope: Scope | None = self
        while scope is not None:
            if scope._ended:
                return True
            scope = scope.parent
        return False

    def invalidate(self) -> None:
        """Ends the scope and those below; later uses raise an error."""
        self._ended = True

    @contextlib.contextmanager
    def temporary(self) -> Iterator["Scope"]:
        """Yields this scope in a context, then ends it."""
        try:
            yield self
        finally:
            self.invalidate()

    def name_reserved(self, name: str, col: str | None = None) -> bool:
        """Returns whether a name is taken, in a collection or, for None, among child scopes."""
        for of, names in self._reserved.items():
            if name in names and (col is None or of is None or of == col):
                return True
        return False

    def reserve(self, name: str, col: str | None = None) -> None:
        """Takes a name in a collection or, for None, among child scopes; raises if it is taken."""
        self._check_valid()
        if not isinstance(name, str):
            raise errors.ScopeNameError(name, self.path_text)
        if self.name_reserved(name, col):
            raise errors.NameInUseError(col or "scopes", name, self.path_text)
        self._reserved.setdefault(col, set()).add(name)

    def release(self, name: str, col: str | None = None) -> None:
        """Releases a name; see `reserve`."""
        self._reserved.get(col, set()).discard(name)

    def names(self) -> Names:
        """Returns all taken names."""
        return {col: frozenset(names) for col, names in self._reserved.items() if names}

    def take_names(self, names: Names) -> None:
        """Takes names, even if taken already, for values that cross a transformation with them."""
        for col, of_col in names.items():
            self._reserved.setdefault(col, set()).update(of_col)

    def free_names(self, names: Names) -> None:
        """Inverts `take_names`."""
        for col, of_col in names.items():
            self._reserved.get(col, set()).difference_update(of_col)

    def default_name(self, prefix: str) -> str:
        """Returns the first free name of `prefix0`, `prefix1` ..."""
        names = (f"{prefix}{i}" for i in itertools.count())
        return next(name for name in names if not self.name_reserved(name))

    def push(self, name: str | None = None, prefix: str = "", reuse: bool = False) -> "Scope":
        """Returns a child scope, by default with a new name from `prefix`.

        Raises NameInUseError for a taken name, unless `reuse` allows it, to share the variables.
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
        **partial_kwargs: object,
    ) -> Callable[..., Any]:
        """Binds a function `fn(scope, *args, **kwargs)` to a child of this scope.

        Further calls of the result use the same variables.

        Args:
            prefix: prefix of the default name; by default the function's name.
            named_call: whether operations carry the name in profiles.
        """
        if name is None:
            name_of_fn = f"{fn.__name__}_" if hasattr(fn, "__name__") else ""
            scope = self.push(prefix=name_of_fn if prefix is None else prefix)
        else:
            scope = self.push(name)

        @functools.wraps(fn)
        def bound(*args: object, **kwargs: object) -> Any:
            with jax.named_scope(scope.name or "") if named_call else contextlib.nullcontext():
                return fn(scope.rewound(), *args, **{**partial_kwargs, **kwargs})

        return bound

    def rewound(self, rewind_rngs: bool = False) -> "Scope":
        """Returns this scope without taken names; with `rewind_rngs`, keys are drawn again."""
        self._check_valid()
        scope = Scope.__new__(Scope)
        scope.__dict__.update(self.__dict__)
        scope._reserved = {}
        if rewind_rngs:
            scope._counts = Counts()
        return scope

    def copy(self, store: VariableStore, counts: Counts) -> "Scope":
        """Returns this scope without taken names, with other variables and counts of keys."""
        scope = self.rewound()
        scope._store, scope._counts = store, counts
        return scope

    # Collections.

    def is_mutable_collection(self, col: str) -> bool:
        """Returns whether the variables of a collection can be changed."""
        return in_filter(self.mutable, col)

    def has_collection(self, col: str) -> bool:
        """Returns whether a collection was given or has variables in any scope."""
        return col in self._store.collections or col in self._store.empty_collections

    def is_collection_empty(self, col: str) -> bool:
        """Returns whether a collection has no variables in any scope."""
        return not self._store.collections.get(col)

    def variables(self) -> dict[str, Any]:
        """Returns the collections of this scope."""
        self._check_valid()
        found = {col: self._collection(col) for col in self._store.collections}
        return {col: dict(x) for col, x in found.items() if x or self.parent is None}

    def mutable_variables(self) -> dict[str, Any]:
        """Returns the mutable collections, as new dicts."""
        found = self.variables().items()
        return {col: copy_dicts(entries) for col, entries in found if in_filter(self.mutable, col)}

    def _collection(self, col: str) -> Mapping[str, Any]:
        self._check_valid()
        return self._store.entries(col, self._below)

    # Variables.

    def has_variable(self, col: str, name: str) -> bool:
        """Returns whether a variable exists."""
        return name in self._collection(col)

    def get_variable(
        self, col: str, name: str, default: object = None, *, unbox: bool = False
    ) -> Any:
        """Returns a variable's value, or `default`; with `unbox`, without its axis metadata."""
        value = self._collection(col).get(name, default)
        return meta.unbox(value) if unbox else value

    def put_variable(self, col: str, name: str, value: object) -> None:
        """Sets a new or existing variable to a pytree.

        Raises:
            JaxTransformError: inside of a transformation that does not lift the scope.
            ModifyScopeVariableError: if the collection is not mutable.
        """
        self._check_valid()
        self._check_trace(f"{name!r} of the collection {col!r} is written to")
        if not self.is_mutable_collection(col):
            hint = self._hint(col, f"call apply(..., mutable=[{col!r}]), and let {{}} change it.")
            raise errors.ModifyScopeVariableError(col, name, self.path_text, hint)
        self._store.put(col, self._below, name, value)

    def variable(
        self,
        col: str,
        name: str,
        init_fn: Callable[..., T] | None = None,
        *init_args: object,
        unbox: bool = True,
        **init_kwargs: object,
    ) -> Variable[T]:
        """Returns a reference to a variable, created if it does not exist; see `param`."""
        self.reserve(name, col)
        if not self.has_variable(col, name):
            if init_fn is None or not self.is_mutable_collection(col):
                if self.is_collection_empty(col):
                    raise errors.ScopeCollectionNotFound(col, name, self.path_text, self._hint(col))
                raise errors.ScopeVariableNotFoundError(name, col, self.path_text, self._near(col))
            self._make(col, name, lambda: init_fn(*init_args, **init_kwargs))
        return Variable(self, col, name, unbox)

    def param(
        self,
        name: str,
        init_fn: Callable[..., T],
        *init_args: object,
        unbox: bool = True,
        **init_kwargs: object,
    ) -> T:
        """Returns a parameter's value, created if it does not exist.

        Args:
            init_fn: computes the first value from a key of the stream `params` and `init_args`, as
                `jax.nn.initializers`; the first of them is a shape.
            unbox: whether to return the value without its axis metadata.

        Raises:
            NameInUseError: if the name is taken.
            ScopeCollectionNotFound: if there are no parameters here and none can be created.
            ScopeParamNotFoundError: if the parameter does not exist and cannot be created.
            ScopeParamShapeError: if the parameter does not have the shape of `init_fn`.
        """
        self.reserve(name, "params")
        value = self._store.entries("params", self._below).get(name, MISSING)
        if value is MISSING:
            if not self.is_mutable_collection("params"):
                if self.is_collection_empty("params"):
                    hint = self._hint("params")
                    raise errors.ScopeCollectionNotFound("params", name, self.path_text, hint)
                raise errors.ScopeParamNotFoundError(name, self.path_text, self._near("params"))
            value = self._make(
                "params", name, lambda: init_fn(self.make_rng("params"), *init_args, **init_kwargs)
            )
        else:
            check_shape(self, name, value, init_fn, init_args, init_kwargs)
        return meta.unbox(value) if unbox else value

    def _make(self, col: str, name: str, first_value: Callable[[], T]) -> T:
        """Sets a variable to its first value, computed in the scope's trace.

        Inside of a JAX transformation that does not lift the scope, that is outside, so that the
        variable exists once; raises JaxTransformError if the value depends on transformed ones.
        """
        trace = self._store.trace()
        if self._store.trace == traces.current_trace() or trace is None:
            value = first_value()
            self.put_variable(col, name, value)
            return value
        what = (
            f"the first value of {name!r} of the collection {col!r} depends on what is transformed"
        )
        try:
            with traces.at_trace(trace):
                value = first_value()
                leaks = not traces.is_tracing() and any(map(_is_tracer, jax.tree.leaves(value)))
                if not leaks:
                    self.put_variable(col, name, value)
        except jax.errors.UnexpectedTracerError as error:
            raise tracing.trace_error(what, self.path_text) from error
        if leaks:
            raise tracing.trace_error(what, self.path_text)
        return value

    # PRNG streams and flags.

    def has_rng(self, name: str) -> bool:
        """Returns whether a stream exists."""
        return name in self.rngs

    def make_rng(self, name: str = "params") -> Any:
        """Returns a new key of a stream; `params` replaces a missing one.

        Raises InvalidRngError if there is no stream.
        """
        stream = name if self.has_rng(name) else "params"
        if not self.has_rng(stream):
            there = ", ".join(map(repr, self.rngs)) or "none"
            raise errors.InvalidRngError(
                f"the scope {self.path_text!r} needs a key of the PRNG stream {name!r}, and the "
                f"given streams are: {there}. Give a key: rngs={{{name!r}: key}}"
                + (", and lift the stream." if self._store.lifted_by else ".")
            )
        self._check_valid()
        self._check_trace(
            f"a key of the PRNG stream {stream!r} is drawn",
            "every index or iteration would draw the same",
        )
        return self.rngs[stream].at(self._counts.draw((self._below, stream))).as_jax_rng()

    def has_flag(self, key: str) -> bool:
        """Returns whether a flag was given."""
        return key in self.flags

    def get_flag(self, key: str, default: object = MISSING) -> Any:
        """Returns a flag's value; raises ScopeFlagNotFoundError if there is none and no default."""
        if key not in self.flags and default is MISSING:
            raise errors.ScopeFlagNotFoundError(key, self.path_text, sorted(self.flags))
        return self.flags.get(key, default)

    def _check_valid(self) -> None:
        if self.invalid:
            raise errors.InvalidScopeError(self.path_text)

    def _check_trace(self, what: str, why: str = "") -> None:
        if self._store.trace != traces.current_trace():
            raise tracing.trace_error(what, self.path_text, why)

    def _hint(self, col: str, if_lifted: str = "") -> str:
        if not (by := self._store.lifted_by) or in_filter(self._store.lifts, col):
            return if_lifted.format(by) if by else ""
        return f"{by} does not lift the collection {col!r}: name it among those it lifts."

    def _near(self, col: str) -> str:
        return "; there are: " + (", ".join(sorted(self._collection(col))) or "none")


def _is_tracer(x: object) -> bool:
    return isinstance(x, jax.core.Tracer)


# Entry points.


def bind(
    variables: VariableDict,
    rngs: RngKeys = None,
    mutable: Filter = False,
    flags: Mapping[str, Any] | None = None,
) -> Scope:
    """Returns a root scope for use without `apply`, which is never ended automatically.

    See `apply` for the arguments and errors; `rngs` as for `init`.
    """
    for col, entries in variables.items():
        if not isinstance(entries, Mapping):
            raise errors.ApplyScopeInvalidVariablesTypeError(entries, col)
    if rngs is not None and not isinstance(rngs, Mapping):
        rngs = {"params": rngs}
    check_keys(rngs or {})
    canonical(mutable)  # raises for an invalid filter
    return Scope(variables, rngs, mutable=mutable, flags=flags)


def apply(
    fn: Callable[..., Any], mutable: Filter = False, flags: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Returns a pure function for a function of a scope.

    Args:
        fn: `fn(scope, *args, **kwargs)`.
        flags: see `Scope.get_flag`.

    Returns `applied(variables, *args, rngs=None, **kwargs)`, which returns the result of `fn` and,
    unless `mutable` is False, the mutable collections.

    Raises:
        ApplyScopeInvalidVariablesStructureError: if the variables have `params` inside of `params`.
        ApplyScopeInvalidVariablesTypeError: if the variables are not a mapping.
        InvalidRngError: if a given key is not a key.

    >>> def count(scope):
    ...     calls = scope.variable("state", "calls", lambda: 0)
    ...     calls.value += 1
    ...     return calls.value
    >>> apply(count, mutable=["state"])({"state": {"calls": 2}})
    (3, {'state': {'calls': 3}})
    """

    @tracing.entry_point
    @functools.wraps(fn)
    def applied(
        variables: VariableDict, *args: object, rngs: RngKeys = None, **kwargs: object
    ) -> Any:
        if not isinstance(variables, Mapping):
            raise errors.ApplyScopeInvalidVariablesTypeError(variables)
        params = variables.get("params")
        if isinstance(params, Mapping) and "params" in params:
            raise errors.ApplyScopeInvalidVariablesStructureError(variables)
        with bind(variables, rngs=rngs, mutable=mutable, flags=flags).temporary() as root:
            result = fn(root, *args, **kwargs)
            if mutable is False:
                return result
            changed = root.mutable_variables()
            return result, FrozenDict(changed) if settings.return_frozendict else changed

    return applied


def init(
    fn: Callable[..., Any], mutable: Filter = True, flags: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Returns a function that computes the result of `fn` and the variables that it creates.

    The function `initialize(rngs, *args, **kwargs)` takes a key for the stream `params`, or keys by
    stream name. `fn` is a function `fn(scope, *args, **kwargs)`; the flag `initializing` is True.

    >>> def scale(scope, x):
    ...     return x * scope.param("factor", lambda key: 2.0)
    >>> init(scale)(jax.random.key(0), 3.0)
    (6.0, {'params': {'factor': 2.0}})
    """

    @tracing.entry_point
    @functools.wraps(fn)
    def initialize(rngs: RngKeys, *args: object, **kwargs: object) -> Any:
        keys = rngs if isinstance(rngs, Mapping) else {"params": rngs}
        all_flags = {**(flags or {}), "initializing": True}
        return apply(fn, mutable=mutable, flags=all_flags)({}, *args, rngs=keys, **kwargs)

    return initialize


def lazy_init(
    fn: Callable[..., Any], mutable: Filter = True, flags: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Returns a function that computes only the variables of `init`, for arrays or their shapes.

    Raises LazyInitError if an initial value depends on an input given only as a shape.

    >>> def dense(scope, x):
    ...     kernel = scope.param("kernel", jax.nn.initializers.ones, (x.shape[-1], 2))
    ...     return x @ kernel
    >>> x = jax.ShapeDtypeStruct((100, 3), "float32")
    >>> jax.tree.map(lambda v: v.shape, lazy_init(dense)(jax.random.key(0), x))
    {'params': {'kernel': (3, 2)}}
    """

    @functools.wraps(fn)
    def initialize(rngs: RngKeys, *args: object, **kwargs: object) -> Any:
        def make(rngs: RngKeys, *args: object, **kwargs: object) -> Any:
            return init(fn, mutable, flags)(rngs, *args, **kwargs)[1]

        return partial_eval(make, rngs, *args, **kwargs)

    return initialize
