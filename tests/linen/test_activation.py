import jax
import jax.numpy as jnp
import numpy as np

from weft.linen import activation

X = jnp.array([-2.0, 3.0])


def test_they_are_those_of_jax():
    names = [name for name in activation.__all__ if name not in ("PReLU", "normalize")]
    assert all(getattr(activation, name) is getattr(jax.nn, name) for name in names)
    x = jnp.array([1.0, 3.0])
    np.testing.assert_allclose(activation.normalize(x), [-1, 1], rtol=1e-4)


def test_the_slope_of_prelu_is_learned():
    layer = activation.PReLU(negative_slope_init=0.5)
    variables = layer.init(jax.random.key(0), X)
    assert layer.apply(variables, X).tolist() == [-1, 3]
    grads = jax.grad(lambda v: layer.apply(v, X).sum())(variables)
    assert grads["params"]["negative_slope"] == -2


def test_prelu_keeps_the_dtype_of_its_input():
    y, _ = activation.PReLU().init_with_output(jax.random.key(0), X.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
