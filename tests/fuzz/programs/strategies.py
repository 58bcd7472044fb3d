"""Random programs."""

import dataclasses

from hypothesis import strategies as st

from tests.fuzz.programs.ir import (
    COLLECTIONS,
    CUSTOM,
    LOOPS,
    STREAMS,
    Block,
    Draw,
    Level,
    Program,
    Use,
)

KINDS = (
    "child",
    "jit",
    "remat",
    "cond",
    "switch",
    "scan",
    "fori",
    "vmap",
    "value_and_grad",
    "vjp",
    "while",
    "checkify",
    "jvp",
    "custom_jvp",
    "custom_vjp",
    "shard_map",
)
# Not differentiable in JAX, or not shardable twice.
NOT_INSIDE = {
    "value_and_grad": {"while"},
    "vjp": {"while"},
    "jvp": {"custom_vjp"},
    "custom_jvp": {"custom_vjp", "while"},
    "custom_vjp": {"while"},
    "shard_map": {"shard_map"},
}


@dataclasses.dataclass(frozen=True)
class Place:
    """Constraints on a block.

    Attributes:
        depth: how many more levels fit.
        prefix: of the names of scopes below.
        fixed: the collections that cannot be changed here.
        constant: those whose first values cannot depend on `x` or on keys that differ.
        without: the kinds that cannot be here.
        in_loop: whether a loop is around.
        still: whether first values cannot depend on `x`: where a loop begins with them, a gradient
            that is taken inside finds constants, and so does a rule of one's own.
    """

    depth: int
    prefix: str = ""
    fixed: frozenset[str] = frozenset({"params"})
    constant: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    in_loop: bool = False
    still: bool = False


@st.composite
def uses(draw, place: Place):
    col = draw(st.sampled_from(("st", "cache", "params")))
    firsts = ["const"]
    if col not in place.constant:
        if not place.still:
            firsts.append("x")
        if col == "params":
            firsts.append("key")
    # A name says how the variable is made, so that all uses of one agree.
    wide, boxed, first = draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from(firsts))
    name = f"{first[0]}{'w' if wide else ''}{'b' if boxed else ''}"
    writes = [""] if col in place.fixed else ["", "count", "mix"]
    return Use(col, name, first, draw(st.sampled_from(writes)), wide, boxed)


@st.composite
def levels(draw, place: Place, number: int):
    kind = draw(st.sampled_from([k for k in KINDS if k not in place.without]))
    name = f"{place.prefix}{'abcd'[number]}"
    scope = ""
    if kind in ("scan", "vmap", "child") or (kind in ("jit", "remat") and draw(st.booleans())):
        scope = name
    inside = dataclasses.replace(
        place,
        depth=place.depth - 1,
        prefix=f"{name}_",
        without=place.without | NOT_INSIDE.get(kind, set()),
        in_loop=place.in_loop or kind in LOOPS,
        still=place.still
        or kind in CUSTOM
        or (place.in_loop and kind in ("value_and_grad", "vjp", "jvp")),
    )
    roles, split, size, reverse = (), (), 2, False
    if kind in (*LOOPS, "vmap"):
        size = draw(st.sampled_from([2, 1, 3] if kind == "vmap" else [2, 1, 3, 0]))
        of = {
            "scan": [0, "carry", None, -1],
            "vmap": [0, None, -1],
        }.get(kind, ["carry", None])
        roles = tuple(
            (
                col,
                None
                if kind in ("fori", "while") and col == "params"
                else draw(st.sampled_from(of)),
            )
            for col in COLLECTIONS
        )
        split = tuple(s for s in STREAMS if draw(st.booleans()))
        reverse = kind == "scan" and draw(st.booleans())
        shared = frozenset(c for c, r in roles if r is None)
        inside = dataclasses.replace(
            inside,
            fixed=place.fixed | shared,
            constant=place.constant | (shared if kind == "vmap" else frozenset()),
        )
        if kind == "scan" and all(not isinstance(r, int) for _, r in roles) and draw(st.booleans()):
            scope = ""
    if kind == "shard_map":
        split = tuple(s for s in STREAMS if draw(st.booleans()))
    others, taken = (), 0
    if kind in ("cond", "switch"):
        n = 1 if kind == "cond" else draw(st.sampled_from([2, 1]))
        others = tuple(
            draw(
                blocks(
                    dataclasses.replace(inside, depth=min(inside.depth, 1), prefix=f"{name}{k}_")
                )
            )
            for k in range(n)
        )
        taken = draw(st.sampled_from([*range(n + 1), None]))
    return Level(kind, draw(blocks(inside)), scope, size, roles, split, taken, others, reverse)


@st.composite
def blocks(draw, place: Place):
    kinds = ["use", "draw"] + ["level"] * (2 if place.depth else 0)
    statements = []
    deep = 0
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(kinds))
        if kind == "use":
            statements.append(draw(uses(place)))
        elif kind == "draw":
            statements.append(Draw(draw(st.sampled_from(STREAMS[::-1]))))
        elif deep < 2:
            here = place if not deep else dataclasses.replace(place, depth=min(place.depth, 1))
            statements.append(draw(levels(here, deep)))
            deep += 1
    return Block(tuple(statements))


@st.composite
def programs(draw, ways: tuple[str, ...]):
    depth = draw(st.sampled_from([1, 2, 3, 4, 5]))
    block = draw(blocks(Place(depth)))
    dropped = tuple(c for c in ("st", "cache", "params") if draw(st.booleans()))
    how = draw(st.sampled_from(["traced"] * 14 + ["eager", "jit"]))
    return Program(draw(st.sampled_from(ways)), block, dropped, how)
