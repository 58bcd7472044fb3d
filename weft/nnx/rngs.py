"""PRNG streams as objects: a key, and a count that increases with each draw.

The n-th key of a stream is its key with n folded in. Streams consist of variables, so they pass
through transformations like other state; `split_rngs` gives each index of an axis its own stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import (
    Any,
    Concatenate,
    NamedTuple,
    ParamSpec,
    TypeAlias,
    TypeVar,
)

import jax
import jax.numpy as jnp
import numpy as np

from weft.errors import InvalidRngError, RngStreamNotFoundError, warn_deprecated
from weft.nnx.filters import Filter, Path, to_predicate
from weft.nnx.pytree import Pytree, iter_graph
from weft.nnx.settings import resolve_graph_options
from weft.nnx.split_merge import clone
from weft.nnx.variables import Variable
from weft.typing import MISSING, PyTree

A = TypeVar("A")
P = ParamSpec("P")
StreamSizes = int | tuple[int, ...] | None
Sizes = int | tuple[int, ...] | Mapping[Any, StreamSizes]


class RngState(Variable[Any]):
    """Part of a PRNG stream."""

    __slots__ = ()


class RngKey(RngState):
    """Key of a PRNG stream."""

    __slots__ = ()


class RngCount(RngState):
    """Number of keys that a PRNG stream has returned."""

    __slots__ = ()


Seed: TypeAlias = (
    "int | jax.Array | np.ndarray | np.generic | RngState | RngStream"
)


def _as_key(seed: Seed, name: str) -> jax.Array:
    if isinstance(seed, RngStream):
        return seed.key.get_value()
    if isinstance(seed, Variable):
        seed = seed.get_value()
    if isinstance(seed, jax.Array | np.ndarray | np.generic):
        if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
            return jnp.asarray(seed)
        if seed.dtype == jnp.uint32 and seed.ndim == 1:
            return jax.random.wrap_key_data(jnp.asarray(seed))
        if seed.ndim == 0 and jnp.issubdtype(seed.dtype, jnp.integer):
            return jax.random.key(jnp.asarray(seed))
    if isinstance(seed, int):
        return jax.random.key(seed)
    raise InvalidRngError(
        f"the PRNG stream {name!r} was given {seed!r}; expected a number, a key such as "
        "jax.random.key(0), or another stream."
    )


def _method_of(
    draw: Callable[Concatenate[Any, P], A],
) -> Callable[Concatenate[Callable[[], jax.Array], P], A]:
    @functools.wraps(draw)
    def method(
        self: Callable[[], jax.Array], *args: P.args, **kwargs: P.kwargs
    ) -> A:
        return draw(self(), *args, **kwargs)

    return method


def _initializer_of(
    factory: Callable[P, Callable[..., A]],
) -> Callable[Concatenate[Callable[[], jax.Array], P], Callable[..., A]]:
    @functools.wraps(factory)
    def method(
        self: Callable[[], jax.Array], *args: P.args, **kwargs: P.kwargs
    ) -> Callable[..., A]:
        initialize = factory(*args, **kwargs)
        return lambda *args, **kwargs: initialize(self(), *args, **kwargs)

    return method


class Draws(Pytree):
    """Base class with `jax.random`'s functions as methods that draw their own key.

    Initializers of `jax.nn.initializers` are methods that return a keyless initializer.
    """

    ball = _method_of(jax.random.ball)
    bernoulli = _method_of(jax.random.bernoulli)
    beta = _method_of(jax.random.beta)
    binomial = _method_of(jax.random.binomial)
    bits = _method_of(jax.random.bits)
    categorical = _method_of(jax.random.categorical)
    cauchy = _method_of(jax.random.cauchy)
    chisquare = _method_of(jax.random.chisquare)
    choice = _method_of(jax.random.choice)
    dirichlet = _method_of(jax.random.dirichlet)
    double_sided_maxwell = _method_of(jax.random.double_sided_maxwell)
    exponential = _method_of(jax.random.exponential)
    f = _method_of(jax.random.f)
    gamma = _method_of(jax.random.gamma)
    generalized_normal = _method_of(jax.random.generalized_normal)
    geometric = _method_of(jax.random.geometric)
    gumbel = _method_of(jax.random.gumbel)
    laplace = _method_of(jax.random.laplace)
    loggamma = _method_of(jax.random.loggamma)
    logistic = _method_of(jax.random.logistic)
    lognormal = _method_of(jax.random.lognormal)
    maxwell = _method_of(jax.random.maxwell)
    multinomial = _method_of(jax.random.multinomial)
    multivariate_normal = _method_of(jax.random.multivariate_normal)
    normal = _method_of(jax.random.normal)
    orthogonal = _method_of(jax.random.orthogonal)
    pareto = _method_of(jax.random.pareto)
    permutation = _method_of(jax.random.permutation)
    poisson = _method_of(jax.random.poisson)
    rademacher = _method_of(jax.random.rademacher)
    randint = _method_of(jax.random.randint)
    rayleigh = _method_of(jax.random.rayleigh)
    t = _method_of(jax.random.t)
    triangular = _method_of(jax.random.triangular)
    truncated_normal = _method_of(jax.random.truncated_normal)
    uniform = _method_of(jax.random.uniform)
    wald = _method_of(jax.random.wald)
    weibull_min = _method_of(jax.random.weibull_min)

    delta_orthogonal = _initializer_of(jax.nn.initializers.delta_orthogonal)
    glorot_normal = _initializer_of(jax.nn.initializers.glorot_normal)
    glorot_uniform = _initializer_of(jax.nn.initializers.glorot_uniform)
    he_normal = _initializer_of(jax.nn.initializers.he_normal)
    he_uniform = _initializer_of(jax.nn.initializers.he_uniform)
    kaiming_normal = _initializer_of(jax.nn.initializers.kaiming_normal)
    kaiming_uniform = _initializer_of(jax.nn.initializers.kaiming_uniform)
    lecun_normal = _initializer_of(jax.nn.initializers.lecun_normal)
    lecun_uniform = _initializer_of(jax.nn.initializers.lecun_uniform)
    variance_scaling = _initializer_of(jax.nn.initializers.variance_scaling)
    xavier_normal = _initializer_of(jax.nn.initializers.xavier_normal)
    xavier_uniform = _initializer_of(jax.nn.initializers.xavier_uniform)


class RngStream(Draws):
    """PRNG stream.

    Args:
        key: a key, a seed, or a stream to take the key of.
        tag: name of the stream, and tag of its variables.

    Raises InvalidRngError if the key is none of these.

    >>> stream = RngStream(0, tag="dropout")
    >>> stream.uniform((2,)).shape, int(stream.count[...])
    ((2,), 1)
    """

    def __init__(self, key: Seed, *, tag: str = "default"):
        key = _as_key(key, tag)
        self.tag = tag
        self.key = RngKey(key, tag=tag)
        self.count = RngCount(jnp.zeros(key.shape, jnp.uint32), tag=tag)

    def __call__(self) -> jax.Array:
        key = self.key.get_value()
        count = self.count.get_value()
        self.count.set_value(count + 1)
        return jax.random.fold_in(key, count)

    def split(self, k: int | tuple[int, ...]) -> "RngStream":
        """Returns a stream per index of new leading axes, from one key of this stream."""
        return RngStream(jax.random.split(self(), k), tag=self.tag)

    def broadcast(self, k: int | tuple[int, ...]) -> "RngStream":
        """Returns one stream for all indices of new leading axes, from one key of this stream."""
        new_axes = (k,) if isinstance(k, int) else k
        key = self()
        keys = jnp.broadcast_to(key, (*new_axes, *key.shape))
        return RngStream(keys, tag=self.tag)

    def fork(
        self, *, split: int | tuple[int, ...] | None = None
    ) -> "RngStream":
        """Returns an independent stream, from one key; `split=` is deprecated, call `split()`."""
        if split is None:
            return RngStream(self(), tag=self.tag)
        warn_deprecated("fork(split=sizes)", "call split(sizes)")
        return self.split(split)


class Rngs(Draws):
    """PRNG streams by name.

    Args:
        default: seed or key of the stream `default`, which replaces missing names; or a mapping
            from names to seeds or keys.
        **rngs: seeds or keys of the other streams.

    Raises RngStreamNotFoundError on access to a missing stream without a default.

    >>> rngs = Rngs(0, dropout=1)
    >>> rngs.params.normal((2,)).shape, rngs.dropout().shape
    ((2,), ())
    """

    def __init__(
        self, default: Seed | Mapping[str, Seed] | None = None, **rngs: Seed
    ):
        if isinstance(default, Mapping):
            seeds = {**default, **rngs}
        elif default is not None:
            seeds = {**rngs, "default": default}
        else:
            seeds = rngs
        for name, seed in seeds.items():
            setattr(self, name, RngStream(seed, tag=name))

    def _stream(self, name: str) -> RngStream:
        attributes = vars(self)
        for stream_name in (name, "default"):
            stream = attributes.get(stream_name)
            if isinstance(stream, RngStream):
                return stream
        names = ", ".join(map(repr, self)) or "none"
        raise RngStreamNotFoundError(
            f"unknown PRNG stream {name!r}, and no default stream; streams: {names}. Create one: "
            f"nnx.Rngs({name}=0)."
        )

    def __getattr__(self, name: str) -> RngStream:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._stream(name)

    def __getitem__(self, name: str) -> RngStream:
        return self._stream(name)

    def __call__(self) -> jax.Array:
        """Returns a key of the stream `default`."""
        return self._stream("default")()

    def __contains__(self, name: object) -> bool:
        return isinstance(vars(self).get(name), RngStream)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def __iter__(self) -> Iterator[str]:
        for name, value in vars(self).items():
            if isinstance(value, RngStream):
                yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def items(self) -> list[tuple[str, RngStream]]:
        """Returns the streams by name."""
        return [(name, self._stream(name)) for name in self]

    def keys(self) -> list[str]:
        """Returns the names of the streams."""
        return list(self)

    def split(self, k: Sizes, /) -> "Rngs":
        """Returns streams per index of new leading axes, from one key of each stream.

        `k` has the sizes, or sizes by filter; unmatched streams keep keys and restart counts.
        """
        return self._each(split=k)

    def broadcast(self, k: Sizes, /) -> "Rngs":
        """Returns the same streams for each index of new leading axes; `k` as for `split`."""
        return self._each(broadcast=k)

    def fork(self, *, split: Sizes | None = None) -> "Rngs":
        """Returns independent streams, from one key of each.

        The argument `split` is deprecated; call the method `split` instead.
        """
        if split is not None:
            warn_deprecated("fork(split=sizes)", "call split(sizes)")
        return self._each(split=split, fork=...)

    def _each(
        self,
        split: Sizes | None = None,
        broadcast: Sizes | None = None,
        fork: Filter = None,
    ) -> "Rngs":
        rngs = Rngs()
        for name, stream in self.items():
            new_stream = _new_stream(stream, (name,), split, broadcast, fork)
            if new_stream is None:
                new_stream = RngStream(stream, tag=stream.tag)
            setattr(rngs, name, new_stream)
        return rngs


def _sizes_of_stream(
    sizes: Sizes | None,
    path: Path,
    stream: RngStream,
    unmatched: StreamSizes = None,
) -> StreamSizes:
    """Returns sizes, or those of the first filter that matches a stream, or else `unmatched`."""
    if not isinstance(sizes, Mapping):
        return sizes
    for stream_filter, stream_sizes in sizes.items():
        if to_predicate(stream_filter)(path, stream.key):
            return stream_sizes
    return unmatched


def _new_stream(
    stream: RngStream,
    path: Path,
    split: Sizes | None,
    broadcast: Sizes | None,
    fork: Filter,
) -> RngStream | None:
    """Returns a stream from a key of another one, or None for a stream that stays as it is."""
    split_sizes = _sizes_of_stream(split, path, stream)
    if split_sizes is not None:
        return stream.split(split_sizes)
    broadcast_sizes = _sizes_of_stream(broadcast, path, stream)
    if broadcast_sizes is not None:
        return stream.broadcast(broadcast_sizes)
    if to_predicate(fork)(path, stream.key):
        return stream.fork()
    return None


def _streams(node: PyTree, only: Filter) -> list[tuple[Path, RngStream]]:
    matches = to_predicate(only)
    streams: list[tuple[Path, RngStream]] = []
    for path, x in iter_graph(node):
        if not isinstance(x, RngStream):
            continue
        # A filter of variables, such as `RngKey`, selects by the key.
        if matches(path, x) or matches((*path, "key"), x.key):
            streams.append((path, x))
    return streams


class Backup(NamedTuple):
    """Key and count of a stream before a split or fork."""

    stream: RngStream
    key: jax.Array
    count: jax.Array


class Backups(tuple[Backup, ...]):
    """Backups of streams before a split or fork; as a context, restores them."""

    __slots__ = ()

    def __enter__(self) -> "Backups":
        return self

    def __exit__(self, *error: object) -> None:
        restore_rngs(self)


def restore_rngs(
    backups: Sequence[tuple[RngStream, jax.Array, jax.Array]], /
) -> None:
    """Restores the keys and counts of streams from a result of `split_rngs` or `fork_rngs`."""
    for stream, key, count in backups:
        stream.key.set_value(key)
        stream.count.set_value(count)


NewKey = Callable[[Path, RngStream], jax.Array | None]
"""Function of a stream that returns its next key; None for a stream that stays as it is."""


def _change_streams(node: PyTree, only: Filter, new_key: NewKey) -> Backups:
    """Gives streams new keys and restarts their counts, in place."""
    backups: list[Backup] = []
    for path, stream in _streams(node, only):
        key = new_key(path, stream)
        if key is None:
            continue
        old_key = stream.key.get_value()
        backups.append(Backup(stream, old_key, stream.count.get_value()))
        _restart(stream, key)
    return Backups(backups)


def _with_changed_streams(node: A, only: Filter, new_key: NewKey) -> A:
    """Returns a copy with other streams, which shares everything else."""
    node_copy = clone(node, variables=False)
    for path, stream in _streams(node_copy, only):
        key = new_key(path, stream)
        if key is None:
            continue
        count = jnp.zeros(key.shape, jnp.uint32)
        stream.key = stream.key.copy(key)
        stream.count = stream.count.copy(count)
    return node_copy


def _restart(stream: RngStream, key: jax.Array) -> None:
    stream.key.set_value(key)
    stream.count.set_value(jnp.zeros(key.shape, jnp.uint32))


def _change_or_decorate(
    node: PyTree | None, in_place: bool, only: Filter, new_key: NewKey
) -> Any:
    """Changes streams in place or in a copy; without an object, those of the arguments of calls."""
    if node is not None and in_place:
        return _change_streams(node, only, new_key)
    if node is not None:
        return _with_changed_streams(node, only, new_key)

    def decorator(f: Callable[..., A]) -> Callable[..., A]:
        @functools.wraps(f)
        def call(*args: Any, **kwargs: Any) -> A:
            arguments = (args, kwargs)
            if in_place:
                with _change_streams(arguments, only, new_key):
                    return f(*args, **kwargs)
            args, kwargs = _with_changed_streams(arguments, only, new_key)
            return f(*args, **kwargs)

        return call

    return decorator


def split_rngs(
    node: PyTree | None = None,
    /,
    *,
    splits: int | tuple[int, ...],
    only: Filter = ...,
    squeeze: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Splits the PRNG streams of an object along new leading axes, in place.

    Args:
        node: object; if omitted, returns a decorator that splits streams of arguments in calls.
        only: filter of the streams, such as their name.
        squeeze: whether to drop the axis, of size 1.
        graph, graph_updates: see `nnx.set_graph_mode` and `nnx.set_graph_updates`; without updates,
            a copy is changed, which shares everything but these streams.

    Returns backups for `restore_rngs`, which as a context manager restore them on exit; or the
    copy. Raises InvalidRngError if `squeeze` is set and the size is not 1.

    >>> rngs = Rngs(0)
    >>> with split_rngs(rngs, splits=5):
    ...     rngs.default.key.shape
    (5,)
    >>> rngs.default.key.shape
    ()
    """
    if squeeze and splits != 1:
        raise InvalidRngError(
            f"squeeze=True needs an axis of size 1, and splits={splits!r}."
        )
    _, in_place = resolve_graph_options(graph, graph_updates)

    def new_key(_: Path, stream: RngStream) -> jax.Array:
        key = jax.random.split(stream(), splits)
        return key[0] if squeeze else key

    return _change_or_decorate(node, in_place, only, new_key)


def fork_rngs(
    node: PyTree | None = None,
    /,
    *,
    split: Sizes | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Forks the PRNG streams of an object like `split_rngs`, optionally along new leading axes.

    `split` has the sizes, or by filter sizes or None for no axes; unmatched streams are unchanged.
    """
    _, in_place = resolve_graph_options(graph, graph_updates)

    def new_key(path: Path, stream: RngStream) -> jax.Array | None:
        sizes = _sizes_of_stream(split, path, stream, unmatched=MISSING)
        if sizes is MISSING:
            return None
        new_stream = stream.fork() if sizes is None else stream.split(sizes)
        return new_stream.key.get_value()

    return _change_or_decorate(node, in_place, ..., new_key)


def reseed(
    node: PyTree,
    /,
    *,
    graph: bool | None = None,
    policy: str
    | Callable[[Path, jax.Array, tuple[int, ...]], jax.Array] = "scalars_only",
    **stream_keys: Seed,
) -> None:
    """Sets new keys of PRNG streams in an object, and restarts their counts.

    Args:
        policy: for split streams "scalars_only" raises, "match_shape" splits the new key to their
            shape; or a function of path, new key and old key's shape that returns the key.
        **stream_keys: seeds, keys or streams by stream name; each stream receives its own key.

    Raises InvalidRngError for a split stream under "scalars_only", or an unknown policy.

    >>> rngs = Rngs(0, dropout=1)
    >>> reseed(rngs, dropout=2)
    >>> bool(rngs.dropout.key[...] == RngStream(2)())
    True
    """
    if isinstance(policy, str) and policy not in (
        "scalars_only",
        "match_shape",
    ):
        raise InvalidRngError(
            f'policy={policy!r} is none; give "scalars_only", "match_shape" or a function.'
        )
    sources: dict[str, RngStream] = {}
    for name, seed in stream_keys.items():
        sources[name] = RngStream(seed, tag=name)
    streams = [(path, x) for path, x in _streams(node, ...) if x.tag in sources]
    if policy == "scalars_only":
        for path, stream in streams:
            if stream.key.shape:
                raise InvalidRngError(
                    f"the PRNG stream at {'/'.join(map(str, path))!r} was split to the shape "
                    f'{stream.key.shape}; give policy="match_shape", or restore it first.'
                )
    for path, stream in streams:
        key = sources[stream.tag]()
        shape = stream.key.shape
        if callable(policy):
            key = policy(path, key, shape)
        elif shape:
            key = jax.random.split(key, shape)
        _restart(stream, key)


def with_rngs(
    node: PyTree | None = None,
    /,
    *,
    split: Sizes | None = None,
    fork: Filter = None,
    broadcast: Sizes | None = None,
    only: Filter = True,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Returns a copy of an object with other PRNG streams, which shares all other parts.

    Args:
        node: object, whose streams each draw one key for the copy's. If omitted, returns a
            decorator that copies the arguments.
        split: sizes of new leading axes to split streams along, or sizes by filter.
        broadcast: sizes of new leading axes to repeat streams along, or sizes by filter.

    >>> rngs = Rngs(0, dropout=1)
    >>> with_rngs(rngs, split={"dropout": 3}).dropout.key.shape, rngs.dropout.key.shape
    ((3,), ())
    """

    def new_key(path: Path, stream: RngStream) -> jax.Array | None:
        new_stream = _new_stream(stream, path, split, broadcast, fork)
        return None if new_stream is None else new_stream.key.get_value()

    return _change_or_decorate(node, False, only, new_key)
