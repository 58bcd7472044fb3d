"""Random graphs of objects under random transformations equal the same by hand on arrays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from weft import nnx

SETTINGS = settings(deadline=None, max_examples=15)


class Node(nnx.Module):
    pass


class Stat(nnx.Variable):
    pass


@dataclasses.dataclass
class Case:
    """Objects that share variables and each other, and what a program does with them.

    Attributes:
        kinds: for each variable whether it is a parameter.
        holds: for each object its variables, by number.
        links: for each object the objects that are its attributes.
        lists: for each object the objects in a list that it has.
        steps: which variable is changed by which, and a factor.
    """

    kinds: list
    holds: list
    links: list
    lists: list
    steps: list
    args: tuple

    def build(self):
        variables = [
            (nnx.Param if is_param else Stat)(jnp.float32(1 + i))
            for i, is_param in enumerate(self.kinds)
        ]
        nodes = [Node() for _ in self.holds]
        for node, holds, links, items in zip(
            nodes, self.holds, self.links, self.lists, strict=True
        ):
            for n, i in enumerate(holds):
                setattr(node, f"v{n}", variables[i])
            for n, i in enumerate(links):
                setattr(node, f"o{n}", nodes[i])
            if items:
                node.items = [nodes[i] for i in items]
        return variables, nodes, [nodes[i] for i in self.args]

    def paths(self):
        """Returns for each variable all simple paths to it from the arguments."""
        found = {}

        def walk(node, path, seen):
            if node in seen:
                return
            for n, i in enumerate(self.holds[node]):
                found.setdefault(i, []).append((*path, f"v{n}"))
            for n, i in enumerate(self.links[node]):
                walk(i, (*path, f"o{n}"), seen | {node})
            for n, i in enumerate(self.lists[node]):
                walk(i, (*path, "items", n), seen | {node})

        for n, node in enumerate(self.args):
            walk(node, (n,), frozenset())
        return found


def follow(args, path):
    for key in path:
        args = getattr(args, key) if isinstance(key, str) else args[key]
    return args


@st.composite
def cases(draw):
    n_variables, n_nodes = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    some_nodes = st.lists(st.integers(0, n_nodes - 1), max_size=2)
    case = Case(
        kinds=draw(st.lists(st.booleans(), min_size=n_variables, max_size=n_variables)),
        holds=[draw(st.lists(st.integers(0, n_variables - 1), max_size=2)) for _ in range(n_nodes)],
        links=[draw(some_nodes) for _ in range(n_nodes)],
        lists=[draw(some_nodes) for _ in range(n_nodes)],
        steps=[],
        args=tuple(draw(st.integers(0, n_nodes - 1)) for _ in range(2)),
    )
    paths = case.paths()
    if paths:
        of_one = st.sampled_from(sorted(paths))
        pairs = draw(st.lists(st.tuples(of_one, of_one), max_size=3))
        case.steps = [
            (i, draw(st.sampled_from(paths[i])), j, draw(st.sampled_from(paths[j])))
            for i, j in pairs
        ]
    return case


def on_objects(case):
    """Returns the program: it changes variables where it finds them, and returns a number."""

    def run(a, b, x):
        for _, target, _, source in case.steps:
            variable = follow((a, b), target)
            variable[...] = 0.5 * variable[...] + jnp.sin(follow((a, b), source)[...]) * x
        found = {i: follow((a, b), paths[-1])[...] for i, paths in case.paths().items()}
        return x + sum(found[i] * (i + 1) for i in sorted(found))

    return run


def on_arrays(case):
    """Returns the same on a dict of the arrays, by the number of the variable."""

    def run(state, x):
        state = dict(state)
        for i, _, j, _ in case.steps:
            state[i] = 0.5 * state[i] + jnp.sin(state[j]) * x
        return x + sum(state[i] * (i + 1) for i in sorted(state)), state

    return run


# Each transformation of both programs: (a, b, x) -> y with objects, (state, x) -> (y, state) with
# arrays.


def jit(case, f, g):
    return nnx.jit(f), g


def remat(case, f, g):
    return nnx.remat(f), g


def cond(case, f, g):
    def rest(a, b, x):
        return 2 * x

    def reference(state, x):
        return g(state, x) if x > 0.6 else (2 * x, state)

    def traced(state, x):
        return jax.lax.cond(x > 0.6, g, lambda state, x: (2 * x, state), state, x)

    return (lambda a, b, x: nnx.cond(x > 0.6, f, rest, a, b, x)), (
        lambda state, x: (traced if isinstance(x, jax.core.Tracer) else reference)(state, x)
    )


def scan(case, f, g):
    def of_objects(a, b, x):
        def body(carry, x):
            return carry, f(*carry, x)

        return nnx.scan(body)((a, b), x + jnp.arange(2.0))[1].sum()

    def of_arrays(state, x):
        first, state = g(state, x)
        second, state = g(state, x + 1)
        return first + second, state

    return of_objects, of_arrays


def for_loop(case, f, g):
    def of_objects(a, b, x):
        def body(i, carry):
            total, (a, b) = carry
            return total + f(a, b, x + i), (a, b)

        return nnx.fori_loop(0, 2, body, (jnp.float32(0), (a, b)))[0]

    return of_objects, scan(case, f, g)[1]


def while_loop(case, f, g):
    def of_objects(a, b, x):
        def body(carry):
            i, total, d = carry
            return i + 1, total + f(d["a"], d["b"], x + i), d

        carry = jnp.float32(0), jnp.float32(0), {"a": a, "b": b}
        return nnx.while_loop(lambda c: c[0] < 2, body, carry)[1]

    return of_objects, scan(case, f, g)[1]


def vmap(case, f, g):
    def of_objects(a, b, x):
        variables = {id(v): v for _, v in nnx.iter_graph((a, b)) if isinstance(v, nnx.Variable)}
        for v in variables.values():
            v.set_value(jnp.stack([v[...], v[...] + 1], axis=-1))
        y = nnx.vmap(f, in_axes=(-1, -1, 0))(a, b, x + jnp.arange(2.0)).sum()
        for v in variables.values():
            v.set_value(v[...].sum(-1))
        return y

    def of_arrays(state, x):
        first, one = g(state, x)
        second, two = g({i: v + 1 for i, v in state.items()}, x + 1)
        return first + second, {i: one[i] + two[i] for i in state}

    return of_objects, of_arrays


def gradients(case, f, g):
    def of_objects(a, b, x):
        y, grads = nnx.value_and_grad(f, argnums=(0, 1, 2))(a, b, x)
        return y + sum((jnp.asarray(v) ** 2).sum() for v in jax.tree.leaves(grads))

    def of_arrays(state, x):
        params = {i: v for i, v in state.items() if case.kinds[i]}
        loss = lambda params, x: g({**state, **params}, x)  # noqa: E731
        (y, state), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
        return y + sum((v**2).sum() for v in jax.tree.leaves(grads)), state

    return of_objects, of_arrays


TRANSFORMATIONS = [jit, remat, cond, scan, for_loop, vmap, gradients]


def check(case, transformations):
    f, g = on_objects(case), on_arrays(case)
    for transformation in transformations:
        f, g = transformation(case, f, g)
    variables, nodes, args = case.build()
    before = nnx.graphdef(nodes)
    state = {i: variables[i][...] for i in case.paths()}
    for x in (jnp.float32(0.5), jnp.float32(0.7)):
        y = f(*args, x)
        expected, state = g(state, x)
        np.testing.assert_allclose(y, expected, rtol=1e-4)
        for i, value in state.items():
            np.testing.assert_allclose(variables[i][...], value, rtol=1e-4)
    assert nnx.graphdef(nodes) == before
    assert all(
        getattr(node, f"v{n}") is variables[i]
        for node, holds in zip(nodes, case.holds, strict=True)
        for n, i in enumerate(holds)
    )


@SETTINGS
@given(cases(), st.lists(st.sampled_from(TRANSFORMATIONS), min_size=1, max_size=2))
def test_nested_transformations_match_reference(case, transformations):
    check(case, transformations)


@SETTINGS
@given(cases(), st.sampled_from([jit, cond, scan, remat, vmap]))
def test_while_loops_match_reference(case, transformation):
    check(case, [transformation, while_loop])


@settings(deadline=None, max_examples=8)
@given(cases(), st.lists(st.sampled_from(TRANSFORMATIONS), min_size=3, max_size=3))
def test_three_nested_transformations(case, transformations):
    check(case, transformations)


@SETTINGS
@given(
    cases(),
    st.lists(st.sampled_from([jit, remat, gradients]), min_size=1, max_size=2),
    st.lists(st.sampled_from(["link", "drop", "make", "replace", "static"]), max_size=4),
)
def test_reference_writes_match_plain_function(case, transformations, changes):
    def change(a, b, x):
        for name in changes:
            if name == "link":
                a.linked = b
            elif name == "make":
                b.made = [nnx.Param(x), a]
            elif name == "replace":
                a.v0 = Stat(2 * x)
            elif name == "static":
                b.kind = f"{getattr(b, 'kind', '')}+"
            elif hasattr(a, "o0"):
                del a.o0
        return x * 2

    f = change
    for transformation in transformations:
        f, _ = transformation(case, f, None)
    results = []
    for program in (change, f):
        _, nodes, args = case.build()
        objects = list(nnx.iter_graph(nodes))
        for _ in range(2):
            program(*args, jnp.float32(0.5))
        known = {id(x): i for i, (_, x) in enumerate(objects)}
        after = [(path, known.get(id(x))) for path, x in nnx.iter_graph(nodes)]
        of_objects = [(p, i) for (p, i) in after if i is not None]
        results.append((nnx.graphdef(nodes), nnx.to_pure_dict(nnx.state(nodes)), of_objects))
    assert results[0][0] == results[1][0]
    assert results[0][2] == results[1][2]
    jax.tree.map(np.testing.assert_allclose, results[0][1], results[1][1])
