"""Random graphs of NNX objects under nested transformations, against the same on dicts of arrays.

Objects share variables and each other, and are met at several places; the program and both of its
interpretations are those of `tests/nnx/transforms/test_properties.py`. Here it also draws from a
stream that one of the objects holds, makes objects of its own, and adds structure to an argument.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from tests.keys import quick_key
from tests.nnx.transforms import test_properties as properties
from weft import nnx

Case = properties.Case


@dataclasses.dataclass(frozen=True)
class More:
    """Additional actions of a program.

    Attributes:
        draws: how many numbers from a stream of its first argument.
        makes: whether it makes an object with a variable, and changes that.
        adds: which functions of `ADDING` it calls with its first argument.
    """

    draws: int = 0
    makes: bool = False
    adds: tuple[str, ...] = ()


# Each adds something to an object and returns a number: 2 x + 1, or if it counts, the sum of 1 and
# all its x.


def add_variable(m: Any, x: Any) -> Any:
    m.added_variable = properties.Stat(2 * x)
    m.added_variable[...] += 1
    return m.added_variable[...]


def add_array(m: Any, x: Any) -> Any:
    m.added_array = 2 * x + 1
    return m.added_array


def add_static(m: Any, x: Any) -> Any:
    m.added_static, m.added_shape = "name", (1, 2)
    return 2 * x + 1


def add_module(m: Any, x: Any) -> Any:
    m.added_module = node = properties.Node()
    node.kind, node.w, node.items = "a", 2 * x, [properties.Stat(x)]
    node.me = node.items[0]
    node.me[...] += x + 1
    return node.items[0][...]


def add_items(m: Any, x: Any) -> Any:
    m.added_items = [properties.Stat(2 * x), 2 * x]
    m.added_dict = {"b": 2 * x, 1: properties.Stat(x), "a": "static"}
    return m.added_items[1] + 1


def count_variable(m: Any, x: Any) -> Any:
    if not hasattr(m, "counted_variable"):
        m.counted_variable = properties.Stat(jnp.float32(1))
    m.counted_variable[...] += x
    return m.counted_variable[...]


def count_array(m: Any, x: Any) -> Any:
    if not hasattr(m, "counted_array"):
        m.counted_array = jnp.zeros((), jnp.float32) + 1
    m.counted_array = m.counted_array + x
    return m.counted_array


def count_item(m: Any, x: Any) -> Any:
    if not hasattr(m, "counted_items"):
        m.counted_items = []
    if not m.counted_items:
        m.counted_items.append(properties.Stat(jnp.float32(1)))
        m.counted_items.append(jnp.float32(1))
    m.counted_items[0][...] += x
    m.counted_items[1] = m.counted_items[1] + x
    return m.counted_items[1] + 0 * m.counted_items[0][...]


COUNTING = {f.__name__: f for f in (count_variable, count_array, count_item)}
COUNTED = {"count_variable": "counted_variable", "count_array": "counted_array"}
COUNTED["count_item"] = "counted_items"
ADDING = {f.__name__: f for f in (add_variable, add_array, add_static, add_module, add_items)}
ADDING |= COUNTING
LOOPS = ("scan", "for_loop", "while_loop", "fori_of_none", "scan_of_none", "while_of_none")
# A loop keeps the structure of what it carries, and so does one branch of two.
KEEP_STRUCTURE = {*LOOPS, "cond"}


def fori_of_none(case: Case, f: Any, g: Any) -> Any:
    def of_objects(a: Any, b: Any, x: Any) -> Any:
        def body(i: Any, carry: Any) -> Any:
            total, (a, b) = carry
            return total + f(a, b, x + i), (a, b)

        return x + nnx.fori_loop(0, 0, body, (jnp.float32(0), (a, b)))[0]

    return of_objects, lambda state, x: (x, state)


def scan_of_none(case: Case, f: Any, g: Any) -> Any:
    def of_objects(a: Any, b: Any, x: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            return carry, f(*carry, x)

        return x + nnx.scan(body)((a, b), x + jnp.arange(0.0))[1].sum()

    return of_objects, lambda state, x: (x, state)


def while_of_none(case: Case, f: Any, g: Any) -> Any:
    def of_objects(a: Any, b: Any, x: Any) -> Any:
        def body(carry: Any) -> Any:
            i, total, (a, b) = carry
            return i + 1, total + f(a, b, x + i), (a, b)

        carry = jnp.float32(0), jnp.float32(0), (a, b)
        return x + nnx.while_loop(lambda c: c[0] < 0, body, carry)[1]

    return of_objects, lambda state, x: (x, state)


MORE = (fori_of_none, scan_of_none)
WHILE = (properties.while_loop, while_of_none)
BY_NAME = {f.__name__: f for f in (*properties.TRANSFORMATIONS, *MORE, *WHILE)}
# Loops of unknown length have no gradient.
inner = st.lists(
    st.sampled_from([f.__name__ for f in (*properties.TRANSFORMATIONS, *MORE)]), max_size=3
)
AROUND_WHILE = ("jit", "cond", "scan", "remat", "vmap", "fori_of_none")
with_while = st.tuples(
    st.sampled_from([f.__name__ for f in WHILE]), st.lists(st.sampled_from(AROUND_WHILE))
).map(lambda case: [case[0], *case[1][:2]])
some = st.lists(st.sampled_from([*ADDING]), max_size=3, unique=True).map(tuple)
more = st.builds(More, st.sampled_from([0, 1, 2]), st.booleans(), some)
CASES = st.tuples(properties.cases(), inner | with_while, more)
SHORT = 2


def check(case: tuple[Case, list[str], More]) -> None:
    graph, names, more = case
    # vmap here maps all variables, which a stream's key is not meant for.
    draws = 0 if "vmap" in names else more.draws
    keeps_structure = "vmap" in names or not KEEP_STRUCTURE.isdisjoint(names)
    possible = () if keeps_structure else ADDING
    adds = {i: name for i, name in enumerate(more.adds, len(graph.kinds) + 1) if name in possible}
    count = len(graph.kinds)
    graph = dataclasses.replace(graph, kinds=[*graph.kinds, *[False] * (1 + len(more.adds))])
    plain, by_hand, traces = properties.on_objects(graph), properties.on_arrays(graph), []

    def f(a: Any, b: Any, x: Any) -> Any:
        traces.append(1)
        y = plain(a, b, x)
        for _ in range(draws):
            y += jax.random.bits(a.rngs.noise()) / 2.0**32
        if more.makes:
            node = properties.Node()
            node.made = properties.Stat(x)
            node.made[...] *= 2
            y += node.made[...]
        for name in adds.values():
            y += ADDING[name](a, x)
        return y

    def g(state: Any, x: Any) -> Any:
        n, added = state[count], {i: state[i] for i in adds}
        y, state = by_hand({i: v for i, v in state.items() if i < count}, x)
        for i, name in adds.items():
            added[i] = added[i] + x if name in COUNTING else 2 * x + 1
            y += added[i]
        for k in range(draws):
            y += jax.random.bits(jax.random.fold_in(KEY, n + k)) / 2.0**32
        return y + 2 * x * more.makes, {**state, **added, count: n + draws}

    for name in names:
        f, g = BY_NAME[name](graph, f, g)
    variables, nodes, args = graph.build()
    state = {i: variables[i][...] for i in graph.paths()} | {count: jnp.uint32(0)}
    state |= {i: jnp.float32(1) for i in adds}
    if draws:
        args[0].rngs = nnx.Rngs(noise=KEY)
    before = nnx.graphdef(nodes)
    for n, x in enumerate((jnp.float32(0.5), jnp.float32(0.7))):
        y = f(*args, x)
        # The second call finds the attributes that the first one has added.
        assert len(traces) <= n + 1, f"traced {len(traces)} times in {n + 1} calls"
        expected, state = g(state, x)
        np.testing.assert_allclose(y, expected, rtol=1e-4)
        for i in graph.paths():
            np.testing.assert_allclose(variables[i][...], state[i], rtol=1e-4)
        if draws:
            assert args[0].rngs.noise.count[...] == state[count], "the count of the stream"
        for i, name in adds.items():
            if name in COUNTING:  # the values of others without iterations differ
                found = jax.tree.leaves(getattr(args[0], COUNTED[name]))
                np.testing.assert_allclose(found, [state[i]] * len(found), rtol=1e-4, err_msg=name)
    if adds:
        plain_args = graph.build()[2]
        for name in adds.values():
            ADDING[name](plain_args[0], jnp.float32(0.5))
        assert added_structure(args[0]) == added_structure(plain_args[0])
    else:
        assert nnx.graphdef(nodes) == before


def added_structure(m: Any) -> Any:
    return nnx.graphdef({k: v for k, v in vars(m).items() if k.startswith(("added", "counted"))})


KEY = quick_key(0)


def source(case: tuple[Case, list[str], More]) -> str:
    return (
        "from tests.fuzz.fuzz_nnx import More, check\n"
        "from tests.nnx.transforms.test_properties import Case\n\n"
        f"check({case!r})\n"
    )
