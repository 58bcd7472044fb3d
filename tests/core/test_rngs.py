import jax
import jax.numpy as jnp
import pytest

from weft.core import apply, bind, init, lift
from weft.core.rngs import (
    Counts,
    FrozenCounts,
    LazyRng,
    counts_for_loop,
    is_key,
)
from weft.errors import InvalidRngError

KEY = jax.random.key(0)


def data(key):
    return jax.random.key_data(key).tolist()


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (jax.random.key(0), True),
        (jax.random.PRNGKey(0), True),
        (jax.random.split(jax.random.key(0)), False),
        (jax.random.split(jax.random.PRNGKey(0)), False),
        (jnp.ones(2), False),
        (0, False),
        (None, False),
    ],
)
def test_is_key(x, expected):
    assert is_key(x) is expected


def test_key_depends_on_path_and_stream_only():
    def few(scope):
        return scope.push("dense").make_rng("dropout")

    def many(scope):
        scope.make_rng("dropout")
        scope.make_rng("params")
        scope.push("other").make_rng("dropout")
        dense = scope.push("dense")
        dense.make_rng("params")
        return dense.make_rng("dropout")

    rngs = {"params": KEY, "dropout": jax.random.key(1)}
    assert data(init(few)(rngs)[0]) == data(init(many)(rngs)[0])


# Counting.

ROOT, BELOW = ((), "params"), (("a",), "params")


def test_key_number_is_unknown_until_loop_ends():
    inside = Counts(counts_for_loop(FrozenCounts()))
    stream = LazyRng(KEY).at("a", inside.draw(ROOT))
    message = "is drawn in jax.ensure_compile_time_eval.. in the body of a loop.*draw it outside"
    with pytest.raises(InvalidRngError, match=message):
        stream.as_jax_rng()
    assert repr(stream.suffix) == "('a', 1+)"
    inside.end()
    assert data(stream.as_jax_rng()) == data(LazyRng(KEY).at("a", 2).as_jax_rng())


def test_scan_iterations_draw_distinct_keys_and_advance_counts():
    def body(scope, carry, _):
        return carry, jax.random.normal(scope.make_rng("noise"))

    def program(scope):
        before = scope.make_rng("noise")
        ys = lift.scan(body, split_rngs={"noise": True}, length=4)(scope, 0.0, None)[1]
        return ys, data(before), data(scope.make_rng("noise"))

    ys, before, after = apply(program)({}, rngs={"noise": KEY})
    assert len(set(ys.tolist())) == 4
    assert before != after


def test_lifting_a_scope_does_not_change_its_keys():
    def draw(scope):
        return jax.random.normal(scope.push("a").make_rng()), jax.random.normal(scope.make_rng())

    scope = bind({}, rngs=KEY)
    plain, crossed = draw(scope), lift.remat(draw)(bind({}, rngs=KEY))
    assert plain == crossed
