import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw
from weft.core import apply, init, lift, nn

KEY = jax.random.key(0)
X = draw(0, 2, 3)


def transposed(variables):
    return jax.tree.map(lambda v: v.T, variables)


def dense(scope, x, features):
    return nn.dense(scope, x, features, bias=False)


def test_a_tied_autoencoder():
    decode = lift.map_variables(dense, "params", transposed)

    def f(scope, x):
        return decode(scope.rewound(), dense(scope, x, 2), 3)

    y, variables = init(f)(KEY, X)
    kernel = variables["params"]["kernel"]
    np.testing.assert_allclose(y, X @ kernel @ kernel.T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{"init": True}, {"mutable": True}])
def test_what_is_made_inside_is_kept_as_the_map_gives_it(options):
    f = lift.map_variables(dense, "params", transposed, transposed, **options)
    y, variables = init(f)(KEY, X, 4)
    kernel = variables["params"]["kernel"]
    assert kernel.shape == (4, 3)
    np.testing.assert_allclose(y, X @ kernel.T, rtol=1e-5, atol=1e-6)
    kept = lift.map_variables(dense, "params", transposed, transposed)
    np.testing.assert_allclose(apply(kept)(variables, X, 4), y, rtol=1e-6)


def test_a_mask_on_the_parameters():
    def mask(variables):
        return jax.tree.map(jnp.triu, variables)

    f = lift.map_variables(dense, "params", mask, init=True)
    y, variables = init(f)(KEY, X, 3)
    np.testing.assert_allclose(y, X @ jnp.triu(variables["params"]["kernel"]), rtol=1e-5, atol=1e-6)


def halves(options):
    """A layer whose weights are kept as halves, and how often it ran."""
    runs = []

    def layer(scope, x):
        runs.append(1)
        return dense(scope, x, 3)

    double, half = (lambda v, f=f: jax.tree.map(lambda x: f * x, v) for f in (2.0, 0.5))
    return lambda f: lift.map_variables(f, "params", double, half, **options), layer, runs


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("loop", [False, True])
def test_variables_are_initialized_once_through_nested_maps(depth, loop):
    mapped, layer, runs = halves({"init": True})
    f = layer
    for _ in range(depth):
        f = mapped(f)
    if loop:
        shared = {"variable_broadcast": "params", "split_rngs": {"params": False}}
        body = lift.scan(lambda scope, x, _, f=f: (f(scope, x), None), length=1, **shared)
        f = lambda scope, x: body(scope, x, None)[0]  # noqa: E731
    y, variables = init(f)(KEY, X)
    assert len(runs) == depth + 1 + loop
    plain = init(layer)(KEY, X)[1]["params"]["kernel"]
    np.testing.assert_allclose(variables["params"]["kernel"], plain / 2**depth, rtol=1e-6)
    runs.clear()
    np.testing.assert_array_equal(apply(f)(variables, X), y)
    assert len(runs) == 1
    np.testing.assert_allclose(y, X @ plain, rtol=1e-5)


def test_what_can_be_changed_is_initialized_through_the_map_also_outside_of_init():
    mapped, layer, runs = halves({"init": True})
    y, variables = apply(mapped(layer), mutable="params")({}, X, rngs=KEY)
    assert len(runs) == 2
    np.testing.assert_allclose(y, X @ (2 * variables["params"]["kernel"]), rtol=1e-5)


def test_collections_in_each_others_place():
    def f(scope):
        scope.put_variable("a", "x", scope.get_variable("a", "x") + 1)
        return scope.get_variable("b", "y")

    variables = {"a": {"y": 1}, "b": {"x": 10}}
    y, changed = apply(lift.swap_collection(f, "a", "b"), mutable=["a", "b"])(variables)
    assert (y, changed) == (1, {"a": {"y": 1}, "b": {"x": 11}})


def test_streams_begin_anew():
    def draw(scope):
        return jax.random.key_data(scope.make_rng("params"))

    def f(scope):
        folded = lift.fold_rngs(draw)
        return draw(scope), folded(scope.push("a")), folded(scope.push("b")), draw(scope)

    keys, _ = init(f)(KEY)
    assert len({tuple(k.tolist()) for k in keys}) == 4
    again, _ = init(f)(KEY)
    np.testing.assert_array_equal(jnp.stack(keys), jnp.stack(again))


def test_the_keys_of_streams_are_mapped():
    def split(scope_fn, repack_fn, variable_groups, rng_groups):
        rng_groups = lift.tree_map_rngs(lambda key: jax.random.split(key, 2)[1], rng_groups)
        scope = scope_fn(variable_groups, rng_groups)
        return jax.random.uniform(scope.make_rng("noise")), repack_fn(scope)

    packed = apply(lift.pack(split, (), (), (True,)))
    plain = apply(lambda scope: jax.random.uniform(scope.make_rng("noise")))
    second = jax.random.split(KEY, 2)[1]
    assert packed({}, rngs={"noise": KEY}) == plain({}, rngs={"noise": second})
    key = jax.random.key(3)
    assert lift.tree_map_rngs(lambda k: jax.random.fold_in(k, 1), key) == jax.random.fold_in(key, 1)
