"""Reference results of programs: Python loops over dicts of arrays, without Weft.

The rules that this writes out:

- A loop is the Python loop. What is sliced or mapped is taken apart and stacked again, what is
  carried is one dict, what is shared is what the first iteration made.
- A variable that only a branch that is not taken makes, or a loop of no iterations, has its first
  value afterwards.
- The n-th key of a stream in a scope is the stream's key with the first four bytes of the SHA-1
  digest of the path and n folded in. The keys of a scan's body begin after as many as one run of
  it draws. Branches begin with the same counts; afterwards the larger one counts. In `jit` streams
  begin again, from a key that is drawn outside.
"""

import copy
import hashlib
from collections.abc import Callable, Container
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tests.fuzz.programs.ir import STREAMS, Block, Draw, Level, Program, Role, Use

Path = tuple[str, ...]
Counts = dict[tuple[Path, str], int]
UNKNOWN = float("nan")


class Entry(NamedTuple):
    """A variable: its value, what it was made with, and the names of its axes in a box."""

    value: Any
    first: Any
    names: tuple[str | None, ...] | None


class Stream(NamedTuple):
    """A PRNG stream: its key, and how many names of a path come before it."""

    key: Any
    base: int = 0


Variables = dict[tuple[str, Path, str], Entry]


class State:
    """All variables and the keys drawn, in one place of a program.

    Attributes:
        variables: by collection, scope and name.
        streams: by name.
        counts: the keys drawn, by scope and stream.
        wrt: the collections that `vjp` differentiates with respect to.
    """

    def __init__(self, variables: Variables, streams: dict[str, Stream]):
        self.variables = dict(variables)
        self.streams = dict(streams)
        self.counts: Counts = {}
        self.wrt: tuple[str, ...] = ()

    def copy(self) -> "State":
        new = copy.copy(self)
        new.variables, new.streams = dict(self.variables), dict(self.streams)
        new.counts = dict(self.counts)
        return new

    def draw(self, path: Path, stream: str) -> Any:
        """Returns the next key."""
        n = self.counts.get((path, stream), 0) + 1
        self.counts[path, stream] = n
        key, base = self.streams[stream]
        return folded(key, (*path[base:], n))


def folded(key: Any, tokens: tuple[str | int, ...]) -> Any:
    data = b"".join(
        t.encode() if isinstance(t, str) else t.to_bytes((t.bit_length() + 7) // 8) for t in tokens
    )
    return jax.random.fold_in(key, int.from_bytes(hashlib.sha1(data).digest()[:4]))


def number(key: Any) -> Any:
    return jax.random.bits(key) / 2.0**32


class Result(NamedTuple):
    """Result of a program: its value, and its variables by collection and path."""

    y: Any
    variables: Variables


def run(
    program: Program, given: Variables, keys: dict[str, Any], x: Any, mutable: Container[str]
) -> Result:
    """Interprets a program.

    Args:
        program: which.
        given: the variables that are there before.
        keys: of the streams.
        x: the argument.
        mutable: the collections that can be changed.
    """
    state = State(given, {name: Stream(key) for name, key in keys.items()})
    state.wrt = () if "params" in mutable else ("params",)
    y = block(program.block, state, (), jnp.float32(x), 0)
    # How many keys were drawn shows in those that follow.
    for stream in STREAMS:
        y = y + number(state.draw((), stream))
    return Result(y, state.variables)


def block(of: Block, state: State, path: Path, x: Any, i: int) -> Any:
    for statement in of.statements:
        if isinstance(statement, Use):
            x = use(statement, state, path, x)
        elif isinstance(statement, Draw):
            x = jnp.sin(x + number(state.draw(path, statement.stream)))
        else:
            inside = (*path, statement.scope) if statement.scope else path
            x = LEVELS[statement.kind](statement, state, inside, x, i)
    return x


def use(of: Use, state: State, path: Path, x: Any) -> Any:
    at = (of.col, path, of.name)
    if at not in state.variables:
        first = jnp.float32(0.5)
        if of.first == "x":
            first = x
        elif of.first == "key":
            first = number(state.draw(path, "params"))
        if of.wide:
            first = jnp.stack([first, first + 1])
        names = (None,) * first.ndim if of.boxed else None
        state.variables[at] = Entry(first, first, names)
    entry = state.variables[at]
    if of.write:
        value = entry.value + 1 if of.write == "count" else 0.5 * entry.value + x
        entry = state.variables[at] = entry._replace(value=value)
    return jnp.sin(x + entry.value.sum())


def plain(of: Level, state: State, path: Path, x: Any, i: int) -> Any:
    return block(of.body, state, path, x, i)


def jit(of: Level, state: State, path: Path, x: Any, i: int) -> Any:
    before = dict(state.streams)
    for stream in STREAMS:
        state.streams[stream] = Stream(state.draw(path, stream), len(path))
    y = block(of.body, state, path, x, i)
    state.streams = before
    return y


def value_and_grad(of: Level, state: State, path: Path, x: Any, i: int) -> Any:
    def f(x: Any) -> tuple[Any, State]:
        inside = state.copy()
        return block(of.body, inside, path, x, i), inside

    y, pullback, inside = _with_state(f, x)
    state.variables, state.counts = inside.variables, inside.counts
    return jnp.sin(y + pullback)


def vjp(of: Level, state: State, path: Path, x: Any, i: int) -> Any:
    n = len(path)
    wrt = {
        at: entry.value
        for at, entry in state.variables.items()
        if at[0] in state.wrt and at[1][:n] == path
    }

    def f(params_and_x: tuple[dict[Any, Any], Any]) -> tuple[Any, State]:
        inside = state.copy()
        for at, value in params_and_x[0].items():
            inside.variables[at] = inside.variables[at]._replace(value=value)
        return block(of.body, inside, path, params_and_x[1], i), inside

    y, (of_params, of_x), inside = _with_state(f, (wrt, x))
    state.variables, state.counts = inside.variables, inside.counts
    for at, value in wrt.items():
        state.variables[at] = state.variables[at]._replace(value=value)
    return jnp.sin(y + of_x + sum((jnp.sum(g) for g in of_params.values()), jnp.float32(0)))


def _with_state(f: Callable[[Any], tuple[Any, State]], x: Any) -> tuple[Any, Any, State]:
    """Returns the value, the gradient, and the state after it."""
    static: list[State] = []

    def pure(x: Any) -> tuple[Any, Any]:
        y, state = f(x)
        static.append(state)
        arrays = {at: (e.value, e.first) for at, e in state.variables.items()}
        return y, arrays

    (y, arrays), grads = jax.value_and_grad(pure, has_aux=True)(x)
    state = static[-1]
    state.variables = {
        at: e._replace(value=arrays[at][0], first=arrays[at][1])
        for at, e in state.variables.items()
    }
    return y, grads, state


def _arrays(variables: Variables) -> dict[Any, tuple[Any, Any]]:
    return {at: (e.value, e.first) for at, e in variables.items()}


def _replaced(variables: Variables, arrays: dict[Any, tuple[Any, Any]]) -> Variables:
    return {
        at: variables[at]._replace(value=value, first=first)
        for at, (value, first) in arrays.items()
    }


class Differentiable:
    """A level as a function of the parameters below it and of `x`.

    Attributes:
        wrt: the parameters.
        rest: what it is a function of as well.
    """

    def __init__(self, of: Level, state: State, path: Path, i: int):
        below = {at: e for at, e in state.variables.items() if is_inside(at, path)}
        self.of, self.state, self.path, self.i = of, state, path, i
        self.wrt = {at: e.value for at, e in below.items() if at[0] == "params"}
        self.rest = _arrays({at: e for at, e in below.items() if at[0] != "params"})
        self.after = state

    def __call__(self, wrt: dict[Any, Any], x: Any, rest: dict[Any, Any]) -> tuple[Any, Any]:
        """Returns the result, and the variables that are changed or made."""
        inside = self.state.copy()
        inside.variables.update(_replaced(inside.variables, rest))
        for at, value in wrt.items():
            inside.variables[at] = inside.variables[at]._replace(value=value)
        y = block(self.of.body, inside, self.path, x, self.i)
        self.after, written = inside, changed(self.of, self.path)
        new = set(inside.variables) - set(self.state.variables)
        return y, _arrays({at: inside.variables[at] for at in new | (written & {*rest})})

    def commit(self, arrays: dict[Any, Any]) -> None:
        self.state.variables.update(_replaced(self.after.variables, arrays))
        self.state.counts = self.after.counts


def changed(of: Level, path: Path) -> set[tuple[str, Path, str]]:
    """Returns the variables that a level writes in some branch."""
    found = set()
    for b in (of.body, *of.others):
        for s in b.statements:
            if isinstance(s, Use) and s.write:
                found.add((s.col, path, s.name))
            elif isinstance(s, Level):
                found |= changed(s, (*path, s.scope) if s.scope else path)
    return found


def jvp(of: Level, state: State, path: Path, x: Any, i: int) -> Any:
    f = Differentiable(of, state, path, i)
    ones = {at: jnp.full_like(v, bool(state.wrt)) for at, v in f.wrt.items()}
    pure = lambda wrt, x: f(wrt, x, f.rest)  # noqa: E731
    y, of_y, arrays = jax.jvp(pure, (f.wrt, x), (ones, jnp.ones_like(x)), has_aux=True)
    f.commit(arrays)
    return jnp.sin(y + of_y)


def custom_vjp(of: Level, state: State, path: Path, x: Any, i: int) -> Any:
    f = Differentiable(of, state, path, i)

    def forward(wrt: Any, x: Any, rest: Any) -> Any:
        y, pullback, arrays = jax.vjp(lambda wrt, x: f(wrt, x, rest), wrt, x, has_aux=True)
        return (y, arrays), pullback

    with_rule = jax.custom_vjp(f.__call__)
    with_rule.defvjp(forward, lambda pullback, cts: (*pullback(cts[0]), None))
    y, arrays = with_rule(f.wrt, x, f.rest)
    f.commit(arrays)
    return y


def custom_jvp(of: Level, state: State, path: Path, x: Any, i: int) -> Any:
    f = Differentiable(of, state, path, i)

    def rule(primals: Any, tangents: Any) -> Any:
        pure = lambda wrt, x: f(wrt, x, primals[2])  # noqa: E731
        y, of_y, arrays = jax.jvp(pure, primals[:2], tangents[:2], has_aux=True)
        return (y, arrays), (of_y, jax.tree.map(jnp.zeros_like, arrays))

    with_rule = jax.custom_jvp(f.__call__)
    with_rule.defjvp(rule)
    y, arrays = with_rule(f.wrt, x, f.rest)
    f.commit(arrays)
    return y


def shard_map(of: Level, state: State, path: Path, x: Any, i: int) -> Any:
    before = dict(state.streams)
    for name in of.split:
        key, base = before[name]
        state.streams[name] = Stream(jax.random.split(key, 1)[0], base)
    y = block(of.body, state, path, x, i)
    state.streams = before
    return y


def branch(of: Level, state: State, path: Path, x: Any, i: int) -> Any:
    branches = (of.body, *of.others)
    taken = of.taken if of.taken is not None else i % len(branches)
    after = []
    for b in branches:
        inside = state.copy()
        after.append((block(b, inside, path, x, i), inside))
    y, result = after[taken]
    for _, other in after:
        for at, entry in other.variables.items():
            if at not in result.variables:
                result.variables[at] = entry._replace(value=entry.first)
        for at, count in other.counts.items():
            result.counts[at] = max(count, result.counts.get(at, 0))
    state.variables, state.counts = result.variables, result.counts
    return y


def loop(of: Level, state: State, path: Path, x: Any, i: int) -> Any:
    """Returns a scan, or a loop by `while`, whose variables are all carried or shared."""
    roles = dict(of.roles)
    is_scan = of.kind == "scan"
    before = dict(state.counts)
    number = of.size - 1 if of.reverse and of.size else 0

    def first(skipped: Counts) -> tuple[State, Counts]:
        """Returns the first iteration, as it finds the variables, and how many keys it draws."""
        inside = iteration(of, state, path, roles, number)
        begin = added(before, skipped)
        inside.counts = dict(begin)
        block(of.body, inside, path, x + 0.1 * number if is_scan else x, number)
        return inside, {at: d for at, n in inside.counts.items() if (d := n - begin.get(at, 0))}

    made, drawn = first({})
    skipped = drawn if is_scan else {}
    to_make = {
        at: roles[at[0]]
        for at in made.variables.keys() - state.variables.keys()
        if is_inside(at, path) and not isinstance(roles[at[0]], int)
    }
    if to_make:
        before_making = keys_of_first(drawn, to_make) if is_scan else {}
        if before_making:
            made, _ = first(before_making)
        for at in to_make:
            entry = made.variables[at]
            state.variables[at] = entry._replace(value=entry.first)
        # The keys with which variables are made are drawn by that run alone.
        _, again = first(skipped)
        of_making = {at: n for at, n in drawn.items() if again.get(at, 0) < n}
        if is_scan:
            of_making = {at: n for at, n in of_making.items() if at in before_making}
        skipped, drawn = added(skipped, of_making), again
    begin = added(before, skipped)
    ys, slices = [], {}
    order = range(of.size)
    for k in reversed(order) if of.reverse else order:
        inside = iteration(of, state, path, roles, k)
        inside.counts = dict(begin)
        x = block(of.body, inside, path, x + 0.1 * k if is_scan else x, k)
        ys.append(x)
        slices[k] = inside
        carry_over(state, inside, path, roles)
    if not of.size:
        add_empty_loop_state(of, state, made, path, roles)
    state.counts = added(begin, drawn)
    stack(of, state, [slices[k] for k in sorted(slices)], path, roles)
    return jnp.sin(x + sum(ys)) if is_scan else x


def added(a: Counts, b: Counts) -> Counts:
    return {at: a.get(at, 0) + b.get(at, 0) for at in {**a, **b}}


def keys_of_first(drawn: Counts, to_make: dict[Any, Role]) -> Counts:
    """Returns how many keys come before those of the first iteration, with which a scan makes
    variables.

    In scopes where all that is made is shared there are none before.
    """
    scopes: dict[Role, set[Path | None]] = {"carry": set(), None: set()}
    for (_, scope, _), role in to_make.items():
        above = [scope[:n] for n in range(len(scope), -1, -1)]
        drawing = [p for p in above if any(p == other for other, _ in drawn)]
        scopes[role].add(drawing[0] if drawing else None)
    only_shared = scopes[None] - scopes["carry"]
    return {at: n for at, n in drawn.items() if at[0] not in only_shared}


def vmap(of: Level, state: State, path: Path, x: Any, i: int) -> Any:
    roles = dict(of.roles)
    ys, slices = [], []
    counts = state.counts
    for k in range(of.size):
        inside = iteration(of, state, path, roles, k)
        ys.append(block(of.body, inside, path, x + 0.1 * k, k))
        slices.append(inside)
        counts = inside.counts
        carry_over(state, inside, path, roles)
    state.counts = counts
    stack(of, state, slices, path, roles)
    return jnp.sin(sum(ys))


def is_inside(at: tuple[str, Path, str], path: Path) -> bool:
    return at[1][: len(path)] == path


def iteration(of: Level, state: State, path: Path, roles: dict[str, Any], k: int) -> State:
    """Returns the state at the start of one iteration."""
    inside = state.copy()
    for at, entry in state.variables.items():
        role = roles.get(at[0])
        if is_inside(at, path) and isinstance(role, int):
            if of.size:
                take = lambda v, role=role: jnp.take(v, k, axis=role)  # noqa: E731
            else:
                take = lambda v, role=role: jnp.zeros_like(v.sum(axis=role))  # noqa: E731
            names = entry.names
            if names is not None:
                names = list(names)
                del names[role]
                names = tuple(names)
            inside.variables[at] = Entry(take(entry.value), take(entry.first), names)
    for name in of.split:
        key, base = state.streams[name]
        if of.kind == "while":
            inside.streams[name] = Stream(jax.random.fold_in(key, k), base)
        else:
            # A loop of no iterations makes variables nevertheless.
            inside.streams[name] = Stream(jax.random.split(key, max(of.size, 1))[k], base)
    return inside


def carry_over(state: State, inside: State, path: Path, roles: dict[str, Any]) -> None:
    """Passes the state of an iteration to the next one."""
    for at, entry in inside.variables.items():
        role = roles.get(at[0])
        stays = role == "carry" or at not in state.variables
        if is_inside(at, path) and not isinstance(role, int) and stays:
            state.variables[at] = entry


def add_empty_loop_state(
    of: Level, state: State, first: State, path: Path, roles: dict[str, Any]
) -> None:
    """Adds the initial values, or empty slices, of variables created in a loop that never runs."""
    for at, entry in first.variables.items():
        if at in state.variables or not is_inside(at, path):
            continue
        role = roles.get(at[0])
        value = entry.first
        if isinstance(role, int):
            value = jnp.stack([value], axis=role).take(jnp.arange(0), axis=role)
        state.variables[at] = Entry(value, value, with_axis(of, entry.names, role))


def with_axis(of: Level, names: Any, role: Any) -> Any:
    if names is None or not isinstance(role, int):
        return names
    names = list(names)
    names.insert(role if role >= 0 else len(names) + 1 + role, of.scope)
    return tuple(names)


def stack(of: Level, state: State, slices: list[State], path: Path, roles: dict[str, Any]) -> None:
    if not slices:
        return
    for at, entry in slices[0].variables.items():
        role = roles.get(at[0])
        if is_inside(at, path) and isinstance(role, int):
            entries = [s.variables[at] for s in slices]
            state.variables[at] = Entry(
                jnp.stack([e.value for e in entries], axis=role),
                jnp.stack([e.first for e in entries], axis=role),
                with_axis(of, entry.names, role),
            )


LEVELS = {
    "child": plain,
    "remat": plain,
    "jit": jit,
    "scan": loop,
    "fori": loop,
    "while": loop,
    "vmap": vmap,
    "cond": branch,
    "switch": branch,
    "value_and_grad": value_and_grad,
    "vjp": vjp,
    "jvp": jvp,
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
    "checkify": plain,
    "shard_map": shard_map,
}
