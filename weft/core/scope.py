"""Scopes: access to a model's variables and PRNG streams while it runs.

A `Scope` is a node of a named tree. It contains collections of variables (`params`, `batch_stats`,
a cache ...); a filter selects the mutable ones, and keys are drawn from named streams. The tree
exists during one call: `apply` creates the root from a dict of collections, runs a function of the
scope, and returns changed variables; `init` is `apply` without variables. Outside, there are only
dicts of arrays and PRNG keys.
"""

import contextlib
import functools
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
from weft.typing import PyTree

T = TypeVar("T")
V = TypeVar("V")
MISSING: Any = object()


class Variable(Generic[V]):
    """Reference to a variable of a scope.

    Attributes:
        unbox: whether `value` is without axis metadata.
    """

    def __init__(
        self, scope: "Scope", collection: str, name: str, unbox: bool = True
    ):
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
            boxed_value = self.scope.get_variable(self.collection, self.name)
            leaves = jax.tree.leaves(boxed_value, is_leaf=meta.is_axis_metadata)
            # Without boxes, the new value may have another structure.
            if any(map(meta.is_axis_metadata, leaves)):
                value = meta.replace_boxed(boxed_value, value)
        self.scope.put_variable(self.collection, self.name, value)

    def is_mutable(self) -> bool:
        return self.scope.is_mutable_collection(self.collection)

    def __repr__(self) -> str:
        location = (
            f"{self.collection}:{self.scope.path_text.rstrip('/')}/{self.name}"
        )
        value = "ended"
        if not self.scope.invalid:
            value = self.scope.get_variable(self.collection, self.name)
        return f"Variable({location} = {value!r})"


def check_shape(
    scope: "Scope",
    name: str,
    value: PyTree,
    init_fn: Callable[..., PyTree],
    init_args: tuple[Any, ...],
    init_kwargs: dict[str, Any],
) -> None:
    """Raises ScopeParamShapeError if a parameter's shape differs from its initializer's."""
    # Initializers return the shape that they are given; evaluating one costs half a millisecond.
    shape_argument: Any = init_args[0] if init_args else None
    is_shape = isinstance(shape_argument, tuple | list)
    is_shape = is_shape and {int}.issuperset(map(type, shape_argument))
    if is_shape and getattr(meta.unbox(value), "shape", None) == tuple(
        shape_argument
    ):
        return
    expected = jax.eval_shape(
        lambda key: init_fn(key, *init_args, **init_kwargs), jax.random.key(0)
    )
    leaves = zip(
        jax.tree.leaves(value), jax.tree.leaves(expected), strict=False
    )
    for leaf, expected_leaf in leaves:
        shape = jax.numpy.shape(leaf)
        if shape != expected_leaf.shape:
            raise errors.ScopeParamShapeError(
                name, scope.path_text, shape, expected_leaf.shape
            )


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
        self._reserved: dict[
            str | None, set[str]
        ] = {}  # names by collection; None: scopes
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
        self.flags: FrozenDict[str, Any]
        if parent is None or flags:
            self.flags = FrozenDict(flags or {})
        else:
            self.flags = parent.flags
        self._rngs: dict[str, LazyRng] | None = None
        if rngs or parent is None:
            self._rngs = {}
            for stream, key in (rngs or {}).items():
                self._rngs[stream] = (
                    key if isinstance(key, LazyRng) else LazyRng(key)
                )

    # The tree.

    @property
    def rngs(self) -> Mapping[str, LazyRng]:
        """The PRNG streams of this scope."""
        if self._rngs is None:
            assert self.parent is not None, "a root has its own streams"
            self._rngs = {}
            for name, stream in self.parent.rngs.items():
                self._rngs[name] = stream.at(self._below[-1])
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
        for names_col, names in self._reserved.items():
            # The name of a child scope is taken in all collections.
            is_shared = col is None or names_col is None
            if name in names and (is_shared or names_col == col):
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
        return {
            col: frozenset(names)
            for col, names in self._reserved.items()
            if names
        }

    def take_names(self, names: Names) -> None:
        """Takes names, even if taken already, for values that cross a transformation with them."""
        for col, col_names in names.items():
            self._reserved.setdefault(col, set()).update(col_names)

    def free_names(self, names: Names) -> None:
        """Inverts `take_names`."""
        for col, col_names in names.items():
            self._reserved.get(col, set()).difference_update(col_names)

    def default_name(self, prefix: str) -> str:
        """Returns the first free name of `prefix0`, `prefix1` ..."""
        number = 0
        while self.name_reserved(f"{prefix}{number}"):
            number += 1
        return f"{prefix}{number}"

    def push(
        self, name: str | None = None, prefix: str = "", reuse: bool = False
    ) -> "Scope":
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
        **partial_kwargs: Any,
    ) -> Callable[..., Any]:
        """Binds a function `fn(scope, *args, **kwargs)` to a child of this scope.

        Further calls of the result use the same variables.

        Args:
            prefix: prefix of the default name; by default the function's name.
            named_call: whether operations carry the name in profiles.
        """
        if name is None:
            if prefix is None:
                prefix = f"{fn.__name__}_" if hasattr(fn, "__name__") else ""
            scope = self.push(prefix=prefix)
        else:
            scope = self.push(name)

        @functools.wraps(fn)
        def bound(*args: Any, **kwargs: Any) -> Any:
            kwargs = partial_kwargs | kwargs
            if not named_call:
                return fn(scope.rewound(), *args, **kwargs)
            with jax.named_scope(scope.name or ""):
                return fn(scope.rewound(), *args, **kwargs)

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
        return (
            col in self._store.collections
            or col in self._store.empty_collections
        )

    def is_collection_empty(self, col: str) -> bool:
        """Returns whether a collection has no variables in any scope."""
        return not self._store.collections.get(col)

    def variables(self) -> dict[str, Any]:
        """Returns the collections of this scope."""
        self._check_valid()
        variables: dict[str, Any] = {}
        for col in self._store.collections:
            entries = self._collection(col)
            # The root has also collections without variables.
            if entries or self.parent is None:
                variables[col] = dict(entries)
        return variables

    def mutable_variables(self) -> dict[str, Any]:
        """Returns the mutable collections, as new dicts."""
        variables: dict[str, Any] = {}
        for col, entries in self.variables().items():
            if in_filter(self.mutable, col):
                variables[col] = copy_dicts(entries)
        return variables

    def _collection(self, col: str) -> Mapping[str, Any]:
        self._check_valid()
        return self._store.entries(col, self._below)

    # Variables.

    def has_variable(self, col: str, name: str) -> bool:
        """Returns whether a variable exists."""
        return name in self._collection(col)

    def get_variable(
        self,
        col: str,
        name: str,
        default: PyTree = None,
        *,
        unbox: bool = False,
    ) -> PyTree:
        """Returns a variable's value, or `default`; with `unbox`, without its axis metadata."""
        value = self._collection(col).get(name, default)
        return meta.unbox(value) if unbox else value

    def put_variable(self, col: str, name: str, value: PyTree) -> None:
        """Sets a new or existing variable to a pytree.

        Raises:
            JaxTransformError: inside of a transformation that does not lift the scope.
            ModifyScopeVariableError: if the collection is not mutable.
        """
        self._check_valid()
        self._check_trace(f"{name!r} of the collection {col!r} is written to")
        if not self.is_mutable_collection(col):
            hint = self._hint(
                col,
                f"call apply(..., mutable=[{col!r}]), and let {{}} change it.",
            )
            raise errors.ModifyScopeVariableError(
                col, name, self.path_text, hint
            )
        self._store.put(col, self._below, name, value)

    def variable(
        self,
        col: str,
        name: str,
        init_fn: Callable[..., T] | None = None,
        *init_args: Any,
        unbox: bool = True,
        **init_kwargs: Any,
    ) -> Variable[T]:
        """Returns a reference to a variable, created if it does not exist; see `param`."""
        self.reserve(name, col)
        if not self.has_variable(col, name):
            if init_fn is None or not self.is_mutable_collection(col):
                if self.is_collection_empty(col):
                    hint = self._hint(col)
                    raise errors.ScopeCollectionNotFound(
                        col, name, self.path_text, hint
                    )
                listing = self._variable_listing(col)
                raise errors.ScopeVariableNotFoundError(
                    name, col, self.path_text, listing
                )
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
                    raise errors.ScopeCollectionNotFound(
                        "params", name, self.path_text, hint
                    )
                listing = self._variable_listing("params")
                raise errors.ScopeParamNotFoundError(
                    name, self.path_text, listing
                )
            value = self._make(
                "params",
                name,
                lambda: init_fn(
                    self.make_rng("params"), *init_args, **init_kwargs
                ),
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
        problem = (
            f"the first value of {name!r} of the collection {col!r} depends on "
            "what is transformed"
        )
        try:
            with traces.at_trace(trace):
                value = first_value()
                has_tracers = any(map(_is_tracer, jax.tree.leaves(value)))
                is_leaking = has_tracers and not traces.is_tracing()
                if not is_leaking:
                    self.put_variable(col, name, value)
        except jax.errors.UnexpectedTracerError as error:
            raise tracing.trace_error(problem, self.path_text) from error
        if is_leaking:
            raise tracing.trace_error(problem, self.path_text)
        return value

    # PRNG streams and flags.

    def has_rng(self, name: str) -> bool:
        """Returns whether a stream exists."""
        return name in self.rngs

    def make_rng(self, name: str = "params") -> jax.Array:
        """Returns a new key of a stream; `params` replaces a missing one.

        Raises InvalidRngError if there is no stream.
        """
        stream = name if self.has_rng(name) else "params"
        if not self.has_rng(stream):
            listing = ", ".join(map(repr, self.rngs)) or "none"
            advice = ", and lift the stream" if self._store.lifted_by else ""
            raise errors.InvalidRngError(
                f"the scope {self.path_text!r} needs a key of the PRNG stream {name!r}, and the "
                f"given streams are: {listing}. Give a key: rngs={{{name!r}: key}}{advice}."
            )
        self._check_valid()
        self._check_trace(
            f"a key of the PRNG stream {stream!r} is drawn",
            "every index or iteration would draw the same",
        )
        number = self._counts.draw((self._below, stream))
        return self.rngs[stream].at(number).as_jax_rng()

    def has_flag(self, key: str) -> bool:
        """Returns whether a flag was given."""
        return key in self.flags

    def get_flag(self, key: str, default: Any = MISSING) -> Any:
        """Returns a flag's value; raises ScopeFlagNotFoundError if there is none and no default."""
        if key not in self.flags and default is MISSING:
            raise errors.ScopeFlagNotFoundError(
                key, self.path_text, sorted(self.flags)
            )
        return self.flags.get(key, default)

    def _check_valid(self) -> None:
        if self.invalid:
            raise errors.InvalidScopeError(self.path_text)

    def _check_trace(self, problem: str, consequence: str = "") -> None:
        if self._store.trace != traces.current_trace():
            raise tracing.trace_error(problem, self.path_text, consequence)

    def _hint(self, col: str, hint_if_lifted: str = "") -> str:
        """Returns advice for a scope in a transformation, whose name replaces `{}` in the hint."""
        transformation = self._store.lifted_by
        if not transformation:
            return ""
        if in_filter(self._store.lifts, col):
            return hint_if_lifted.format(transformation)
        return (
            f"{transformation} does not lift the collection {col!r}: "
            "name it among those it lifts."
        )

    def _variable_listing(self, col: str) -> str:
        names = ", ".join(sorted(self._collection(col))) or "none"
        return f"; there are: {names}"


def _is_tracer(x: PyTree) -> bool:
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
    fn: Callable[..., Any],
    mutable: Filter = False,
    flags: Mapping[str, Any] | None = None,
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
        variables: VariableDict,
        *args: PyTree,
        rngs: RngKeys = None,
        **kwargs: PyTree,
    ) -> PyTree:
        if not isinstance(variables, Mapping):
            raise errors.ApplyScopeInvalidVariablesTypeError(variables)
        params = variables.get("params")
        if isinstance(params, Mapping) and "params" in params:
            raise errors.ApplyScopeInvalidVariablesStructureError(variables)
        with bind(
            variables, rngs=rngs, mutable=mutable, flags=flags
        ).temporary() as root:
            result = fn(root, *args, **kwargs)
            if mutable is False:
                return result
            mutable_variables = root.mutable_variables()
        if settings.return_frozendict:
            return result, FrozenDict(mutable_variables)
        return result, mutable_variables

    return applied


def init(
    fn: Callable[..., Any],
    mutable: Filter = True,
    flags: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Returns a function that computes the result of `fn` and the variables that it creates.

    The function `initialize(rngs, *args, **kwargs)` takes a key for the stream `params`, or keys by
    stream name. `fn` is a function `fn(scope, *args, **kwargs)`; the flag `initializing` is True.

    >>> def scale(scope, x):
    ...     return x * scope.param("factor", lambda key: 2.0)
    >>> init(scale)(jax.random.key(0), 3.0)
    (6.0, {'params': {'factor': 2.0}})
    """
    applied = apply(
        fn, mutable=mutable, flags={**(flags or {}), "initializing": True}
    )

    @tracing.entry_point
    @functools.wraps(fn)
    def initialize(rngs: RngKeys, *args: PyTree, **kwargs: PyTree) -> PyTree:
        keys = rngs if isinstance(rngs, Mapping) else {"params": rngs}
        return applied({}, *args, rngs=keys, **kwargs)

    return initialize


def lazy_init(
    fn: Callable[..., Any],
    mutable: Filter = True,
    flags: Mapping[str, Any] | None = None,
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
    init_fn = init(fn, mutable, flags)

    @functools.wraps(fn)
    def initialize(rngs: RngKeys, *args: PyTree, **kwargs: PyTree) -> PyTree:
        def variables(rngs: RngKeys, *args: PyTree, **kwargs: PyTree) -> PyTree:
            _, variables = init_fn(rngs, *args, **kwargs)
            return variables

        return partial_eval(variables, rngs, *args, **kwargs)

    return initialize
