"""Random programs of nested transformations, against Python loops over dicts of arrays."""

from collections import Counter

import jax.numpy as jnp
import numpy as np

from tests.fuzz.programs import reference
from tests.fuzz.programs.ir import COLLECTIONS, CUSTOM, START, STREAMS, Level, Program
from tests.fuzz.programs.scopes import Writer
from tests.fuzz.programs.strategies import programs
from tests.keys import quick_key
from weft.core import meta

WAYS = ("core", "linen")
CASES = programs(WAYS)
SHORT = 5


def keys():
    return {stream: quick_key(n) for n, stream in enumerate(STREAMS)}


def check(case: Program) -> None:
    text = Writer(case).source()
    module = {}
    exec(compile(text, "<program>", "exec"), module)
    module["NOTES"].traces.clear()
    y, variables = module["initialize"](keys(), jnp.float32(START))
    right = reference.run(case, {}, keys(), jnp.float32(START), COLLECTIONS)
    same("init", y, variables, right)
    traced("init", module["NOTES"].traces, case, there=frozenset())
    given = {at: entry for at, entry in right.variables.items() if at[0] not in case.dropped}
    module["NOTES"].traces.clear()
    y, variables = module["run"](nested(given), keys(), jnp.float32(START))
    mutable = {*COLLECTIONS[1:], *case.dropped}
    right = reference.run(case, given, keys(), jnp.float32(START), mutable)
    changed = {at: entry for at, entry in right.variables.items() if at[0] in mutable}
    same("apply", y, variables, reference.Result(right.y, changed))
    missing = {col for col, *_ in right.variables.keys() - given.keys()}
    traced("apply", module["NOTES"].traces, case, there=frozenset(COLLECTIONS) - missing)


def traced(what: str, traces: list[str], case: Program, there: frozenset[str]) -> None:
    loops = Writer(case).loops_around()
    for name, n in Counter(traces).items():
        most = most_traces(loops[name], there)
        assert n <= most, f"{what}: {name} was traced {n} times, right is at most {most}"


def most_traces(loops: tuple[Level, ...], there: frozenset[str]) -> int:
    """Returns how often the innermost of loops and rules around each other may trace its body.

    A loop traces its body a second time if it carries or shares state that is missing and that the
    body makes. Then that state is there for the loops inside of it. What has a derivative of one's
    own is a part of the rule as well.
    """
    if not loops:
        return 1
    outer, *inner = loops
    if outer.kind in CUSTOM:
        return 2 * most_traces(tuple(inner), there)
    once = most_traces(tuple(inner), there)
    made = {col for col, role in outer.roles if not isinstance(role, int)} - there
    return once + most_traces(tuple(inner), there | made) if made else once


def same(what, y, variables, right):
    found = dict(flat(variables))
    wrong = [f"{what}: variables {sorted(found)}, right are {sorted(right.variables)}"]
    assert sorted(found) == sorted(right.variables), wrong
    for at, entry in right.variables.items():
        value = meta.unbox(found[at])
        names = getattr(found[at], "names", None)
        assert names == entry.names, f"{what}: {at} has the names {names}, right are {entry.names}"
        close(f"{what}: {at}", value, entry.value)
    close(f"{what}: the result", y, right.y)


def close(what, found, right):
    found, right = np.asarray(found), np.asarray(right)
    assert found.shape == right.shape, f"{what} has the shape {found.shape}, right is {right.shape}"
    unknown = np.isnan(right)
    ok = np.allclose(np.where(unknown, 0, found), np.where(unknown, 0, right), rtol=1e-3, atol=1e-4)
    assert ok, f"{what} is {found}, right is {right}"


def flat(variables, col=None, path=()):
    for name, value in variables.items():
        if type(value) is dict:
            yield from flat(value, name, ()) if col is None else flat(value, col, (*path, name))
        else:
            yield (col, path, name), value


def nested(variables):
    result = {}
    for (col, path, name), entry in variables.items():
        value = entry.value
        if entry.names is not None:
            value = meta.Partitioned(value, entry.names)
        below = result.setdefault(col, {})
        for part in path:
            below = below.setdefault(part, {})
        below[name] = value
    return result


def source(case: Program) -> str:
    return Writer(case).source() + f"\n\n# {case!r}\n"
