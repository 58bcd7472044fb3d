"""Random graphs of NNX objects under nested transformations, against the same on dicts of arrays.

Objects share variables and each other, and are met at several places; the program and both of its
interpretations are those of `tests/nnx/transforms/test_properties.py`. Here it also draws from a
stream that one of the objects holds, and makes objects of its own.
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
    """What a program does as well.

    Attributes:
        draws: how many numbers from a stream of its first argument.
        makes: whether it makes an object with a variable, and changes that.
    """

    draws: int = 0
    makes: bool = False


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


OF_NONE = (fori_of_none, scan_of_none)
WHILE = (properties.while_loop, while_of_none)
BY_NAME = {f.__name__: f for f in (*properties.TRANSFORMATIONS, *OF_NONE, *WHILE)}
# What a gradient goes through has no loop of unknown length.
inner = st.lists(
    st.sampled_from([f.__name__ for f in (*properties.TRANSFORMATIONS, *OF_NONE)]), max_size=3
)
AROUND_WHILE = ("jit", "cond", "scan", "remat", "vmap", "fori_of_none")
with_while = st.tuples(
    st.sampled_from([f.__name__ for f in WHILE]), st.lists(st.sampled_from(AROUND_WHILE))
).map(lambda case: [case[0], *case[1][:2]])
more = st.builds(More, st.sampled_from([0, 1, 2]), st.booleans())
CASES = st.tuples(properties.cases(), inner | with_while, more)
SHORT = 4


def check(case: tuple[Case, list[str], More]) -> None:
    graph, names, more = case
    # vmap here maps all variables, which a stream's key is not meant for.
    draws = 0 if "vmap" in names else more.draws
    count = len(graph.kinds)
    graph = dataclasses.replace(graph, kinds=[*graph.kinds, False])
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
        return y

    def g(state: Any, x: Any) -> Any:
        n = state[count]
        y, state = by_hand({i: v for i, v in state.items() if i != count}, x)
        for k in range(draws):
            y += jax.random.bits(jax.random.fold_in(KEY, n + k)) / 2.0**32
        return y + 2 * x * more.makes, {**state, count: n + draws}

    for name in names:
        f, g = BY_NAME[name](graph, f, g)
    variables, nodes, args = graph.build()
    state = {i: variables[i][...] for i in graph.paths()} | {count: jnp.uint32(0)}
    if draws:
        args[0].rngs = nnx.Rngs(noise=KEY)
    before = nnx.graphdef(nodes)
    for n, x in enumerate((jnp.float32(0.5), jnp.float32(0.7))):
        y = f(*args, x)
        assert len(traces) <= n + 1, f"traced {len(traces)} times in {n + 1} calls"
        expected, state = g(state, x)
        np.testing.assert_allclose(y, expected, rtol=1e-4)
        for i in graph.paths():
            np.testing.assert_allclose(variables[i][...], state[i], rtol=1e-4)
        if draws:
            assert args[0].rngs.noise.count[...] == state[count], "the count of the stream"
    assert nnx.graphdef(nodes) == before


KEY = quick_key(0)


def source(case: tuple[Case, list[str], More]) -> str:
    return (
        "from tests.fuzz.fuzz_nnx import More, check\n"
        "from tests.nnx.transforms.test_properties import Case\n\n"
        f"check({case!r})\n"
    )
