"""PRNG streams: a key and the path of a scope.

The n-th key that a scope draws from a stream is the stream's root key with one number folded in:
the first four bytes of the SHA-1 digest of the scope's path and n. A key thus depends on the path
and the stream, not on other draws of the program. Only the root key is an array; the path and the
counts of draws are part of the structure.

For compatibility with Flax, a scan's body draws as if it had run once before: if one run draws n
keys, the loop's keys begin after the next n. Since n is unknown while the body is traced, and it is
traced once, the folded number is the result of an operation without operands, `digest`. It becomes
a constant when the program is compiled or evaluated, after the loop's trace has ended.

A body that creates state which a scan carries or shares runs once more before the loop, to create
it. That run draws m keys of a stream in a scope; each run with existing state draws n. Carried
state uses the keys of the first iteration, m + 1 to 2m, as in a body whose every iteration creates
it; shared state uses the keys 1 to m of the run before, as in Flax. All iterations draw the keys m
+ 1 to m + n. If n is less than m, iterations draw the keys after the last one used to create state,
so that no later key equals it.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import jax.core
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from weft import errors, struct
from weft.core.settings import settings
from weft.typing import PyTree

Path = tuple[str, ...]
Key = tuple[Path, str]
K = TypeVar("K")

RngKeys = jax.Array | Mapping[str, jax.Array] | None
"""A key for the stream `params`, or keys by stream name."""


class Loop:
    """Traced loop; `draws` is the number of keys of one run by scope and stream, once known."""

    def __init__(self, draws: dict[Key, int] | None = None):
        self.draws = draws


@dataclasses.dataclass(frozen=True)
class LoopKeyNumber:
    """Number of a key drawn in a loop.

    Attributes:
        counted: the number without keys that loops skip.
        loops: the surrounding loops, with the keys of the same counts there.
    """

    counted: int
    loops: tuple[tuple[Loop, Key], ...]

    def number(self) -> int:
        """Returns the number, which is known after the trace of the outermost loop."""
        skipped = 0
        for loop, key in self.loops:
            if loop.draws is None:
                raise errors.InvalidRngError(
                    "a PRNG key is drawn in jax.ensure_compile_time_eval() in the body of a loop, "
                    "whose keys are known only after it was traced; draw it outside of that."
                )
            skipped += loop.draws.get(key, 0)
        return self.counted + skipped

    def __repr__(self) -> str:
        return f"{self.counted}+"


SuffixPart = str | int | LoopKeyNumber


@functools.lru_cache(maxsize=4096)
def _digest(suffix: tuple[str | int, ...], separator: bytes) -> int:
    data = b""
    for part in suffix:
        data += separator
        if isinstance(part, str):
            data += part.encode()
        else:
            n_bytes = (part.bit_length() + 7) // 8
            data += part.to_bytes(n_bytes)
    digest = hashlib.sha1(data, usedforsecurity=False).digest()
    return int.from_bytes(digest[:4])


def _suffix_digest(suffix: tuple[SuffixPart, ...]) -> np.uint32:
    """Returns the number that is folded into a stream's key."""
    parts: list[str | int] = []
    for part in suffix:
        parts.append(part.number() if isinstance(part, LoopKeyNumber) else part)
    separator = b"\0" if settings.fix_rng_separator else b""
    return np.uint32(_digest(tuple(parts), separator))


@functools.cache
def _digest_p() -> Any:
    """Returns the operation without operands whose value is a digest, see above."""
    from jax.extend.core import Primitive  # as in `weft.core.tracing`

    def evaluate(*, suffix: tuple[SuffixPart, ...]) -> jax.Array:
        return jnp.asarray(_suffix_digest(suffix))

    def lower(
        context: mlir.LoweringRuleContext, *, suffix: tuple[SuffixPart, ...]
    ) -> list[Any]:
        return [mlir.ir_constant(_suffix_digest(suffix))]

    digest_p = Primitive("digest")
    digest_p.def_impl(evaluate)
    digest_p.def_abstract_eval(
        lambda *, suffix: jax.core.ShapedArray((), np.dtype("uint32"))
    )
    mlir.register_lowering(digest_p, lower)
    return digest_p


class LazyRng(struct.PyTreeNode):
    """PRNG stream as seen by one scope; `suffix` has the names from the root to the scope."""

    rng: jax.Array
    suffix: tuple[SuffixPart, ...] = struct.field(pytree_node=False, default=())

    @staticmethod
    def create(rng: "LazyRng | jax.Array", *suffix: SuffixPart) -> "LazyRng":
        """Returns the stream of a key, or of a scope below that of another stream."""
        return (
            rng.at(*suffix)
            if isinstance(rng, LazyRng)
            else LazyRng(rng, suffix)
        )

    def clear_suffix(self) -> "LazyRng":
        """Returns the stream of the root."""
        return LazyRng(self.rng)

    def at(self, *suffix: SuffixPart) -> "LazyRng":
        """Returns the stream of a scope further down."""
        return LazyRng(self.rng, (*self.suffix, *suffix))

    def as_jax_rng(self) -> jax.Array:
        """Returns the stream's key."""
        if not self.suffix:
            return self.rng
        # In a loop the number is known only after the loop's trace, so an operation computes it.
        is_in_loop = any(
            isinstance(part, LoopKeyNumber) for part in self.suffix
        )
        if is_in_loop:
            number = _digest_p().bind(suffix=self.suffix)
        else:
            number = jnp.uint32(_suffix_digest(self.suffix))
        return jax.random.fold_in(self.rng, number)


def is_key(x: PyTree) -> bool:
    """Returns whether `x` is a PRNG key: typed, or an array as returned by `PRNGKey`."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        return False
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x.shape == ()
    return len(x.shape) == 1 and x.dtype == jnp.uint32


def check_keys(rngs: Mapping[str, Any]) -> None:
    """Raises InvalidRngError if a stream's value is not a key."""
    for stream, key in rngs.items():
        if not is_key(key):
            shown = (
                f"{key.dtype}{key.shape}"
                if hasattr(key, "shape")
                else repr(key)
            )
            raise errors.InvalidRngError(
                f"the PRNG stream {stream!r} was given {shown}; expected a key, such as "
                "jax.random.key(0), or a dict of keys by the name of their stream."
            )


Draws = frozenset[tuple[Key, int]]
"""Numbers of drawn keys by scope and stream."""


@dataclasses.dataclass(frozen=True)
class FrozenCounts:
    """Hashable form of `Counts`, which crosses transformations.

    Attributes:
        loops: the surrounding loops, each with the path from its scope to this one.
        begins: whether a loop begins here.
        creation_draws: number of keys, on top of the table, drawn by the run that created a loop's
            state.
        draws: number of keys that the loop skips, if known, or skipped if it has ended.
    """

    table: Draws = frozenset()
    loops: tuple[tuple[Loop, Path], ...] = ()
    begins: bool = False
    creation_draws: Draws = frozenset()
    draws: Draws | None = None


class Counts:
    """Numbers of keys drawn by all scopes below one root, without keys that loops skip."""

    def __init__(self, frozen: FrozenCounts | None = None):
        if frozen is None:
            frozen = FrozenCounts()
        self._initial = frozen
        self._table = dict(frozen.table)
        self._loops = frozen.loops
        if frozen.begins or frozen.creation_draws:
            loop = Loop(None if frozen.draws is None else dict(frozen.draws))
            self._loops = (*frozen.loops, (loop, ()))

    def draw(self, key: Key) -> int | LoopKeyNumber:
        """Counts one more key and returns its number, from 1."""
        n = self._table.get(key, 0) + 1
        self._table[key] = n
        if not self._loops:
            return n
        path, stream = key
        keys_in_loops: list[tuple[Loop, Key]] = []
        for loop, loop_path in self._loops:
            keys_in_loops.append((loop, ((*loop_path, *path), stream)))
        return LoopKeyNumber(n, tuple(keys_in_loops))

    def freeze(self) -> FrozenCounts:
        return FrozenCounts(frozenset(self._table.items()), self._loops)

    def below(self, path: Path) -> FrozenCounts:
        """Returns the counts of the scopes from `path` on, by relative path."""
        depth = len(path)
        table: dict[Key, int] = {}
        for (scope_path, stream), count in self._table.items():
            if scope_path[:depth] == path:
                table[scope_path[depth:], stream] = count
        loops = tuple(
            (loop, (*loop_path, *path)) for loop, loop_path in self._loops
        )
        return FrozenCounts(frozenset(table.items()), loops)

    def update_below(self, path: Path, counts: FrozenCounts) -> None:
        """Updates the counts with the draws of a transformation; inverts `below`."""
        for (relative_path, stream), count in counts.table:
            self._table[(*path, *relative_path), stream] = count

    def end(self, created: "CreatedScopes | None" = None) -> FrozenCounts:
        """Returns the counts after the transformation, which ends a loop that began here.

        `created` are the scopes in which the body has created state that the loop carries or
        shares, in a run before the loop. The loop then continues the counts of that run.
        """
        initial = self._initial
        if not (initial.begins or initial.creation_draws):
            return self.freeze()
        counts_before = dict(initial.table)
        draws: dict[Key, int] = {}
        for key, count in self._table.items():
            n_drawn = count - counts_before.get(key, 0)
            if n_drawn:
                draws[key] = n_drawn

        # Each iteration's keys begin after the skipped ones.
        skipped = draws
        creation_draws: Draws = frozenset()
        if initial.creation_draws:
            # The run that created the state has drawn additional keys.
            skipped = {
                key: n
                for key, n in initial.creation_draws
                if draws.get(key, 0) < n
            }
        elif created is not None:
            skipped = created.skipped(draws)
            creation_draws = frozenset(skipped.items())
        self._loops[-1][0].draws = skipped

        counts_after = dict(counts_before)
        for key, n_drawn in draws.items():
            counts_after[key] = counts_after.get(key, 0) + n_drawn
        if created is None:
            # The run that creates the state precedes the loop and skips the keys that it draws.
            for key, n_skipped in skipped.items():
                counts_after[key] = counts_after.get(key, 0) + n_skipped
        return FrozenCounts(
            frozenset(counts_after.items()),
            initial.loops,
            creation_draws=creation_draws,
            draws=frozenset(skipped.items()),
        )


class CreatedScopes(NamedTuple):
    """Scopes in which a scan's body has created carried or shared state, as paths."""

    carried: frozenset[Path]
    shared: frozenset[Path]

    def skipped(self, draws: Mapping[Key, int]) -> dict[Key, int]:
        """Returns which of one run's keys the loop skips before the state is created."""
        nearest_first = sorted(
            {path for path, _ in draws}, key=len, reverse=True
        )

        def drawing_scope(created: Path) -> Path | None:
            """Returns the nearest scope that has drawn keys, with which the state was created."""
            for path in nearest_first:
                if created[: len(path)] == path:
                    return path
            return None

        drew_for_carried = set(map(drawing_scope, self.carried))
        drew_for_shared = set(map(drawing_scope, self.shared))
        skipped: dict[Key, int] = {}
        for (path, stream), n in draws.items():
            if path in drew_for_carried or path not in drew_for_shared:
                skipped[path, stream] = n
        return skipped


def counts_for_loop(
    counts: FrozenCounts, final_counts: FrozenCounts | None = None
) -> FrozenCounts:
    """Returns a loop body's initial counts from those before and, if known, after the loop."""
    draws = None if final_counts is None else final_counts.draws
    return dataclasses.replace(counts, begins=True, draws=draws)


def counts_after_creation(
    counts: FrozenCounts, creation_counts: FrozenCounts
) -> FrozenCounts:
    """Returns the initial counts of a loop without a run before.

    `creation_counts` are those after the run that has created its state.
    """
    counts_before = dict(counts.table)
    creation_draws: set[tuple[Key, int]] = set()
    for key, count in creation_counts.table:
        creation_draws.add((key, count - counts_before.get(key, 0)))
    return dataclasses.replace(counts, creation_draws=frozenset(creation_draws))


def max_counts(a: FrozenCounts, b: FrozenCounts) -> FrozenCounts:
    """Returns the counts after one of two branches has run."""
    return dataclasses.replace(a, table=max_by_key(a.table, b.table))


def max_by_key(
    a: frozenset[tuple[K, int]], b: frozenset[tuple[K, int]]
) -> frozenset[tuple[K, int]]:
    """Returns the larger number for each key of two tables."""
    table = dict(a)
    for key, n in b:
        table[key] = max(n, table.get(key, 0))
    return frozenset(table.items())
