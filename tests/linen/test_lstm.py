import jax
import jax.numpy as jnp
import numpy as np

from tests.keys import draw
from weft.linen.lstm import ConvLSTMCell, LSTMCell, OptimizedLSTMCell

KEY = jax.random.key(0)
X = draw(0, 2, 3)


def test_maps_put_together_are_the_same_maps():
    plain, together = LSTMCell(4), OptimizedLSTMCell(4)
    carry = (jnp.ones((2, 4)), -jnp.ones((2, 4)))
    variables = plain.init(KEY, carry, X)
    ours = together.init(KEY, carry, X)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, variables, ours))
    ((c, h), y), ((other_c, other_h), z) = (
        cell.apply(variables, carry, X) for cell in (plain, together)
    )
    np.testing.assert_allclose(c, other_c, atol=1e-6)
    np.testing.assert_allclose(h, other_h, atol=1e-6)
    assert y.tolist() == h.tolist()
    assert z.tolist() == other_h.tolist()


def test_memory_and_output_begin_with_keys_of_their_own():
    normal = jax.nn.initializers.normal()
    for cell in (LSTMCell(4, carry_init=normal), ConvLSTMCell(4, (3,), carry_init=normal)):
        c, h = cell.initialize_carry(KEY, (2, 5, 3))
        assert c.shape == h.shape == (2, 5, 4)
        assert not jnp.array_equal(c, h)


def test_images_keep_their_size():
    cell = ConvLSTMCell(4, (3, 3))
    assert cell.num_feature_axes == 3
    images = jnp.ones((2, 6, 7, 3))
    carry = cell.initialize_carry(KEY, images.shape)
    ((c, h), _), variables = cell.init_with_output(KEY, carry, images)
    assert c.shape == h.shape == (2, 6, 7, 4)
    assert variables["params"]["hh"]["kernel"].shape == (3, 3, 4, 16)
