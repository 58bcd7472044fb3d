"""PRNG streams: a key, and where in the tree of scopes it is.

The n-th key that a scope draws from a stream is the stream's root key with one number folded in:
the first four bytes of the SHA-1 digest of the scope's path and n. So a key depends on the path and
the stream, not on what else the program draws. The root key alone is an array; the path is a part
of the structure, and so is the count of what each scope has drawn.
"""

import functools
import hashlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from weft import struct

Token = str | int


@functools.lru_cache(maxsize=4096)
def _digest(suffix: tuple[Token, ...]) -> int:
    data = b"".join(
        token.encode() if isinstance(token, str) else token.to_bytes((token.bit_length() + 7) // 8)
        for token in suffix
    )
    return int.from_bytes(hashlib.sha1(data, usedforsecurity=False).digest()[:4])


class Stream(struct.PyTreeNode):
    """A PRNG stream as one scope sees it.

    Attributes:
        key: the root key, typed or of two numbers.
        suffix: the names of the scopes from the root to this one.
    """

    key: Any
    suffix: tuple[Token, ...] = struct.field(pytree_node=False, default=())

    def at(self, *suffix: Token) -> "Stream":
        """The stream further down."""
        return Stream(self.key, (*self.suffix, *suffix))

    def as_key(self) -> Any:
        """The key that the stream stands for."""
        if not self.suffix:
            return self.key
        return jax.random.fold_in(self.key, jnp.uint32(_digest(self.suffix)))


def is_key(x: Any) -> bool:
    """Whether `x` is a PRNG key: a typed one, or an array of numbers as `PRNGKey` makes."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        return False
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x.shape == ()
    return len(x.shape) == 1 and x.dtype == jnp.uint32


Path = tuple[str, ...]
Key = tuple[Path, str]


class Count(NamedTuple):
    """How many keys one scope has drawn from one stream; the last was the `value`-th.

    Attributes:
        start: the count before the loops that are being traced.
        lead: what a loop skips; None as long as nothing was drawn in it. See `Counts`.
        outer_lead: what the loops around that loop skip.
        draws: drawn since.
        depth: how many loops there are around this one in which nothing was drawn yet, as
            2 ** loops - 1.
    """

    start: int = 0
    lead: int | None = None
    outer_lead: int = 0
    draws: int = 0
    depth: int = 0

    @property
    def value(self) -> int:
        return self.start + (self.lead or 0) + self.outer_lead + self.draws


class FrozenCounts(NamedTuple):
    """The hashable form of `Counts`, for a trip through a transformation."""

    table: frozenset[tuple[Key, Count]] = frozenset()
    depth: int = 0
    in_loop: bool = False
    seen: frozenset[tuple[Key, int]] = frozenset()


class Counts:
    """The keys drawn by all scopes below one root.

    A scan's body draws as if it had been run once before: where one run draws n keys, the loop's
    keys begin after the next n. That is what those who know Flax's numbers expect, which runs it
    twice. Here it runs once, so n is foreseen: one key for each scope and stream. A loop around
    another loop has twice the draws of that one, so what it skips is foreseen as well. Where the
    foresight was wrong, `is_wrong` says so, and the body is traced again from `advanced` counts.
    What was seen then is known when loops around it are traced again.
    """

    def __init__(self, frozen: FrozenCounts | None = None):
        frozen = frozen or FrozenCounts()
        self._table: dict[Key, Count] = dict(frozen.table)
        self._depth = frozen.depth
        self._in_loop = frozen.in_loop
        self._seen: dict[Key, int] = dict(frozen.seen)

    def draw(self, key: Key) -> int:
        """Counts one more key; which one it is, from 1."""
        count = self._table.get(key) or Count(depth=self._depth)
        if count.lead is None:
            lead = self._seen.get(key, 1) if self._in_loop else 0
            count = count._replace(lead=lead, outer_lead=2 * lead * count.depth)
        self._table[key] = count = count._replace(draws=count.draws + 1)
        return count.value

    def freeze(self) -> FrozenCounts:
        seen = frozenset(self._seen.items())
        return FrozenCounts(frozenset(self._table.items()), self._depth, self._in_loop, seen)

    def below(self, path: Path) -> FrozenCounts:
        """The counts of the scopes from `path` on, by their paths from there."""
        n = len(path)
        table = frozenset(
            ((p[n:], stream), count) for (p, stream), count in self._table.items() if p[:n] == path
        )
        seen = frozenset(((p[n:], s), lead) for (p, s), lead in self._seen.items() if p[:n] == path)
        return FrozenCounts(table, self._depth, self._in_loop, seen)

    def update_below(self, path: Path, after: FrozenCounts) -> None:
        """Takes over what was drawn in a transformation; the inverse of `below`."""
        self._table.update({((*path, *p), stream): count for (p, stream), count in after.table})
        self._see_below(path, after)

    def _see_below(self, path: Path, after: FrozenCounts) -> None:
        self._seen.update({((*path, *p), stream): lead for (p, stream), lead in after.seen})

    def update_from_loop(self, path: Path, after: FrozenCounts) -> None:
        """Takes over what a loop that began with `for_loop` has drawn."""
        self._see_below(path, after)
        for (p, stream), inner in after.table:
            if inner.lead is None:
                continue
            key = ((*path, *p), stream)
            count = self._table.get(key) or Count(depth=self._depth)
            if count.lead is None:
                lead = 2 * inner.draws if self._in_loop else 0
                count = count._replace(lead=lead, outer_lead=inner.outer_lead - lead)
            self._table[key] = count._replace(draws=count.draws + 2 * inner.draws)

    def is_wrong(self) -> bool:
        """Whether a loop's body drew another number of keys than was foreseen."""
        return self._in_loop and any(
            count.lead is not None and count.lead != count.draws for count in self._table.values()
        )


def for_loop(frozen: FrozenCounts) -> FrozenCounts:
    """The counts with which a loop's body begins, from those outside."""

    def around(depth: int) -> int:
        return 2 * depth + 1 if frozen.in_loop else 0

    table = frozenset(
        (key, Count(start=c.value, depth=0 if c.lead is not None else around(c.depth)))
        for key, c in frozen.table
    )
    return FrozenCounts(table, around(frozen.depth), True, frozen.seen)


def advanced(before: FrozenCounts, once: FrozenCounts) -> FrozenCounts:
    """The counts outside of a loop, as if its body had run once.

    Args:
        before: the counts outside.
        once: what `for_loop(before)` became in one run.
    """
    seen = dict(once.seen)
    for key, count in once.table:
        if count.draws and key not in seen:
            seen[key] = count.draws
    counts = Counts(before._replace(seen=frozenset(seen.items())))
    for key, count in once.table:
        for _ in range(count.draws):
            counts.draw(key)
    return counts.freeze()


def larger(a: FrozenCounts, b: FrozenCounts) -> FrozenCounts:
    """For each scope the larger count of two branches."""
    table = dict(a.table)
    for key, count in b.table:
        if key not in table or table[key].value < count.value:
            table[key] = count
    return a._replace(table=frozenset(table.items()))
