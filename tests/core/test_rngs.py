import hashlib

import jax
import jax.numpy as jnp
import pytest

from weft.core import apply, bind, init, lift
from weft.core.rngs import (
    Counts,
    FrozenCounts,
    LazyRng,
    Loop,
    LoopKeyNumber,
    counts_for_loop,
    is_key,
    max_counts,
)
from weft.errors import InvalidRngError

KEY = jax.random.key(0)


def data(key):
    return jax.random.key_data(key).tolist()


def test_key_folds_path_digest_into_root_key():
    digest = hashlib.sha1(b"dense" + (2).to_bytes(1, "big"), usedforsecurity=False).digest()
    expected = jax.random.fold_in(KEY, jnp.uint32(int.from_bytes(digest[:4], "big")))
    assert data(LazyRng(KEY).at("dense").at(2).as_jax_rng()) == data(expected)
    assert data(LazyRng(KEY).as_jax_rng()) == data(KEY)


def test_only_root_key_of_a_stream_is_an_array():
    stream = LazyRng(KEY, ("dense",))
    leaves, tree = jax.tree.flatten(stream)
    assert len(leaves) == 1 and leaves[0] is KEY
    assert tree == jax.tree.structure(LazyRng(jax.random.key(1), ("dense",)))
    assert tree != jax.tree.structure(LazyRng(KEY, ("other",)))


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


def test_typed_and_raw_keys_agree():
    def draw(scope):
        return jax.random.normal(scope.push("a").make_rng())

    assert init(draw)(jax.random.key(7))[0] == init(draw)(jax.random.PRNGKey(7))[0]


# Counting.

ROOT, BELOW = ((), "params"), (("a",), "params")


def test_draws_are_counted_by_scope_and_stream():
    counts = Counts()
    assert [counts.draw(ROOT), counts.draw(ROOT), counts.draw(BELOW)] == [1, 2, 1]
    assert counts.draw(((), "dropout")) == 1
    assert Counts(counts.freeze()).draw(ROOT) == 3


def test_frozen_counts_are_equal_by_value():
    a, b = Counts(), Counts()
    for key in (ROOT, BELOW):
        a.draw(key)
    for key in (BELOW, ROOT):
        b.draw(key)
    assert a.freeze() == b.freeze() and hash(a.freeze()) == hash(b.freeze())


def test_counts_of_a_nested_scope():
    counts = Counts()
    counts.draw(ROOT)
    counts.draw(BELOW)
    inner = Counts(counts.below(("a",)))
    assert inner.draw(ROOT) == 2
    assert inner.draw((("b",), "params")) == 1
    counts.update_below(("a",), inner.freeze())
    assert [counts.draw(ROOT), counts.draw(BELOW)] == [2, 3]
    assert counts.draw((("a", "b"), "params")) == 2


def numbers(draws):
    return [draw.number() if isinstance(draw, LoopKeyNumber) else draw for draw in draws]


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_loop_counts_as_one_body_run(n):
    outside = Counts()
    outside.draw(ROOT)
    inside = Counts(counts_for_loop(outside.freeze()))
    draws = [inside.draw(ROOT) for _ in range(n)]
    after = inside.end()
    assert numbers(draws) == list(range(2 + n, 2 + 2 * n))
    outside.update_below((), after)
    assert outside.draw(ROOT) == 2 + 2 * n


def test_nested_loops_skip_both_counts():
    outside = Counts()
    outer = Counts(counts_for_loop(outside.freeze()))
    draws = [outer.draw(BELOW)]
    inner = Counts(counts_for_loop(outer.below(("a",))))
    draws += [inner.draw(ROOT), inner.draw(ROOT), inner.draw(BELOW)]
    outer.update_below(("a",), inner.end())
    draws.append(outer.draw(BELOW))
    outside.update_below((), outer.end())
    # A run of the outer body draws 1 + 2 * 2 + 1 keys of `a`, and 2 of the scope below it.
    assert numbers(draws) == [7, 6 + 1 + 2 + 1, 6 + 1 + 2 + 2, 2 + 1 + 1, 12]
    assert outside.draw(BELOW) == 13


def test_loop_with_known_draws_gives_concrete_counts():
    outside = Counts()
    outside.draw(ROOT)
    before = outside.freeze()
    first = Counts(counts_for_loop(before))
    first.draw(ROOT)
    first.draw(ROOT)
    again = Counts(counts_for_loop(before, first.end()))
    assert numbers([again.draw(ROOT)]) == [4]


def test_key_number_is_unknown_until_loop_ends():
    inside = Counts(counts_for_loop(FrozenCounts()))
    stream = LazyRng(KEY).at("a", inside.draw(ROOT))
    message = "is drawn in jax.ensure_compile_time_eval.. in the body of a loop.*draw it outside"
    with pytest.raises(InvalidRngError, match=message):
        stream.as_jax_rng()
    assert repr(stream.suffix) == "('a', 1+)"
    inside.end()
    assert data(stream.as_jax_rng()) == data(LazyRng(KEY).at("a", 2).as_jax_rng())


def test_key_can_be_traced_before_its_number_is_known():
    inside = Counts(counts_for_loop(FrozenCounts()))
    traced = jax.jit(lambda key: LazyRng(key).at(inside.draw(ROOT)).as_jax_rng()).trace(KEY)
    inside.end()
    assert data(traced.lower().compile()(KEY)) == data(LazyRng(KEY).at(2).as_jax_rng())


def test_branches_keep_the_larger_count():
    a, b = Counts(), Counts()
    a.draw(ROOT)
    b.draw(ROOT)
    b.draw(ROOT)
    a.draw(BELOW)
    joined = Counts(max_counts(a.freeze(), b.freeze()))
    assert [joined.draw(ROOT), joined.draw(BELOW)] == [3, 2]
    assert max_counts(a.freeze(), b.freeze()) == max_counts(b.freeze(), a.freeze())


def test_counts_of_loops_differ():
    assert FrozenCounts() == Counts().freeze()
    a, b = (Counts(counts_for_loop(FrozenCounts())).freeze() for _ in range(2))
    assert a == a and a != b
    assert LoopKeyNumber(1, ((Loop({ROOT: 2}), ROOT),)).number() == 3


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
