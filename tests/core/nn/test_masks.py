import jax.numpy as jnp
import pytest

from weft.core.nn.masks import attended_axes, causal, pairwise
from weft.errors import ArgumentShapeError, ArgumentValueError

HEADS = jnp.zeros((1, 3, 2, 4))
GRID = jnp.zeros((1, 2, 3, 2, 4))
IDS = jnp.array([[1, 1, 2]])


def same(query=HEADS, key=HEADS, axes=(1,), **named):
    return pairwise(jnp.equal, named, query, key, axes)


def test_attended_axes():
    assert attended_axes(5, None) == (1, 2)
    assert attended_axes(5, 2) == (2,)
    assert attended_axes(5, (2, 1)) == (2, 1)
    with pytest.raises(ArgumentValueError, match=r"axis=3: .* which are 1 to 2 here"):
        attended_axes(5, 3)


def test_causal_is_in_the_order_of_the_flattened_axes():
    mask = causal(GRID, GRID, (1, 2))
    assert mask.shape == (1, 1, 2, 3, 2, 3)
    assert (mask.reshape(6, 6) == jnp.tri(6, dtype=bool)).all()
    assert causal(GRID, GRID, (2,)).shape == (1, 1, 1, 3, 3)


def test_pairs_of_positions():
    expected = [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    for ids in (IDS, IDS[..., None]):
        mask = same(ids=ids, key_ids=None)
        assert mask.shape == (1, 1, 3, 3)
        assert mask[0, 0].astype(int).tolist() == expected
    other = same(ids=IDS, key_ids=jnp.array([[2, 1]]), key=HEADS[:, :2])
    assert other[0, 0].astype(int).tolist() == [[0, 1], [0, 1], [1, 0]]
    assert same(ids=None, key_ids=None) is None


def test_axes_that_are_not_attended_over_come_first():
    ids = jnp.arange(6).reshape(1, 2, 3) // 2
    mask = same(GRID, GRID, (2,), ids=ids, key_ids=None)
    assert mask.shape == (1, 2, 1, 3, 3)
    assert mask[0, 1, 0].astype(int).tolist() == [[1, 0, 0], [0, 1, 1], [0, 1, 1]]


def test_what_is_known_has_the_shape_of_the_positions():
    with pytest.raises(ArgumentShapeError, match=r"^ids has shape \(1, 2\); expected \(1, 3\)"):
        same(ids=IDS[:, :2], key_ids=None)
    with pytest.raises(ArgumentShapeError, match=r"as there is no key_ids, .* expected \(1, 2\)"):
        same(ids=IDS, key_ids=None, key=HEADS[:, :2])
    with pytest.raises(ArgumentValueError, match="key_ids was given without ids: give both"):
        same(ids=None, key_ids=IDS)
