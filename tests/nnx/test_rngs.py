import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import InvalidRngError, RngStreamNotFoundError


def same(a, b):
    return jax.random.key_data(a).tolist() == jax.random.key_data(b).tolist()


def shapes(node):
    return {p[-2]: x.shape for p, x in nnx.to_flat_state(nnx.state(node, nnx.RngKey))}


def test_forks_splits_and_broadcasts():
    rngs = nnx.Rngs(0, params=1)
    key = jax.random.fold_in(jax.random.key(1), 0)
    assert same(rngs.fork().params.key[...], key) and rngs.params.count[...] == 1
    rngs = nnx.Rngs(0, params=1)
    assert same(rngs.split({"params": 3}).params.key[...], jax.random.split(key, 3))
    assert shapes(rngs.split((2, 3))) == {"default": (2, 3), "params": (2, 3)}
    assert shapes(rngs.split({"params": 4})) == {"default": (), "params": (4,)}
    kept = rngs.split({"params": 4}).default
    assert same(kept.key[...], jax.random.key(0)) and kept.count[...] == 0
    assert rngs.default.count[...] == 1
    repeated = rngs.broadcast(2).params.key[...]
    assert repeated.shape == (2,) and same(repeated[0], repeated[1])


def test_split_rngs_is_undone():
    class Model(nnx.Module):
        def __init__(self):
            self.rngs = nnx.Rngs(0, dropout=1)

    model = Model()
    backups = nnx.split_rngs(model, splits=3, only="dropout")
    assert shapes(model) == {"default": (), "dropout": (3,)} and len(backups) == 1
    assert model.rngs.dropout.count.shape == (3,) and backups[0][0] is model.rngs.dropout
    nnx.restore_rngs(backups)
    assert shapes(model) == {"default": (), "dropout": ()} and model.rngs.dropout.count[...] == 1

    @nnx.split_rngs(splits=2)
    def f(model, *, other):
        return shapes((model, other))

    assert set(f(model, other=nnx.Rngs(5)).values()) == {(2,)}
    with pytest.raises(ZeroDivisionError), nnx.split_rngs(model, splits=1, squeeze=True):
        assert shapes(model) == {"default": (), "dropout": ()}
        raise ZeroDivisionError
    assert shapes(model) == {"default": (), "dropout": ()}
    with pytest.raises(InvalidRngError, match=r"needs an axis of size 1, and splits=2"):
        nnx.split_rngs(model, splits=2, squeeze=True)


def test_fork_rngs_is_undone():
    rngs = nnx.Rngs(0, dropout=1)
    with nnx.fork_rngs(rngs, split={"dropout": 3}):
        assert shapes([rngs]) == {"default": (), "dropout": (3,)} and rngs.default.count[...] == 0
        assert same(rngs.default.key[...], jax.random.key(0))

    @nnx.fork_rngs(split=None)
    def f(rngs):
        return rngs.dropout.key[...]

    key = jax.random.fold_in(jax.random.key(1), 1)
    assert same(f(rngs), key) and same(rngs.dropout.key[...], jax.random.key(1))


def test_streams_by_name():
    rngs = nnx.Rngs(0, b=1, a=2)
    assert list(rngs) == rngs.keys() == ["b", "a", "default"] and len(rngs) == 3
    assert "a" in rngs and "c" not in rngs and [k for k, _ in rngs.items()] == list(rngs)
    with pytest.raises(
        RngStreamNotFoundError, match=r"^unknown PRNG stream 'c', and no default stream"
    ):
        nnx.Rngs(a=1).c()
    with pytest.raises(KeyError, match=r"streams: 'a'. Create one: nnx.Rngs\(default=0\)"):
        nnx.Rngs(a=1)()
    for seed in ("a", 1.5, nnx.Rngs(0), jnp.ones(2)):
        with pytest.raises(
            InvalidRngError, match=r"stream 'default' was given (?s:.*); expected a num"
        ):
            nnx.Rngs(seed)


def test_reseeding():
    rngs = nnx.List([nnx.Rngs(0, dropout=1), nnx.Rngs(5)])
    rngs[0]()
    nnx.reseed(rngs, default=7)
    stream = nnx.RngStream(7)
    assert same(rngs[0].default.key[...], stream()) and same(rngs[1].default.key[...], stream())
    assert rngs[0].default.count[...] == 0 and same(rngs[0].dropout.key[...], jax.random.key(1))
    nnx.split_rngs(rngs, splits=2)
    with pytest.raises(
        InvalidRngError, match=r"stream at '0/dropout' was split to the shape \(2,\)"
    ):
        nnx.reseed(rngs, dropout=1)
    nnx.reseed(rngs, dropout=1, policy="match_shape")
    assert same(rngs[0].dropout.key[...], jax.random.split(nnx.RngStream(1)(), 2))
    seen = []
    nnx.reseed(rngs, dropout=1, policy=lambda path, key, shape: seen.append((path, shape)) or key)
    assert seen == [((0, "dropout"), (2,))] and rngs[0].dropout.count.shape == ()
    with pytest.raises(InvalidRngError, match=r"policy='q' is none; give"):
        nnx.reseed(rngs, dropout=1, policy="q")
