import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lifting.counting import BOXES, Box, BoxKind
from weft.lifting import Roles, scan, vmap
from weft.lifting.roles import CARRY


class Labelled(BoxKind):
    """Records calls about axes."""

    def __init__(self):
        self.told = []

    def axis(self, static, carrier, sign, group, axis, metadata):
        if group:
            self.told.append((sign, tuple(group), axis, dict(metadata)))
        return group


def test_a_kind_is_told_of_the_axis_when_it_goes_and_when_it_comes():
    kind = Labelled()
    box = Box(w=jnp.ones((2, 3)), b=jnp.ones(3))
    roles = Roles((("w", 1), (True, None)))
    vmap(kind, lambda box: None, in_axes=(roles,), metadata={"name": "heads"})(box)
    assert kind.told == [(-1, ("w",), 1, {"name": "heads"}), (1, ("w",), 1, {"name": "heads"})]


@settings(deadline=None, max_examples=15)
@given(axis=st.integers(-3, 2), out=st.integers(-3, 2))
def test_vmap_and_scan_move_any_axis_to_any_other(axis, out):
    x = jnp.arange(24.0).reshape(2, 3, 4)
    expected = np.moveaxis(np.moveaxis(x, axis, 0) * 2, 0, out)
    np.testing.assert_array_equal(
        vmap(BOXES, lambda x: x * 2, in_axes=axis, out_axes=out)(x), expected
    )
    _, ys = scan(BOXES, lambda c, x: (c, x * 2), in_axes=(CARRY, axis), out_axes=(CARRY, out))(
        0.0, x
    )
    np.testing.assert_array_equal(ys, expected)
