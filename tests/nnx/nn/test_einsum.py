"""Einsums of NNX: what they compute, and what they refuse."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw
from weft import nnx
from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.nnx.nn.einsum import Einsum

X = draw(0, 2, 3, 4)


def test_the_bias_goes_to_the_axes_of_the_kernel():
    layer = Einsum("b td,ndh->hbnt", (5, 4, 6), (6, 5), rngs=nnx.Rngs(0))
    layer.bias[...] = jnp.arange(30.0).reshape(6, 5)
    expected = jnp.einsum("btd,ndh->hbnt", X, layer.kernel[...])
    expected += layer.bias[...][:, None, :, None]
    np.testing.assert_allclose(layer(X), expected, rtol=1e-5, atol=1e-5)
    assert layer.einsum_str == "btd,ndh->hbnt"


def test_a_number_is_a_shape_of_one_axis():
    layer = Einsum("ti,io->to", (4, 5), 5, rngs=nnx.Rngs(0))
    same = Einsum("ti,io->to", (4, 5), (5,), rngs=nnx.Rngs(0))
    assert layer.bias_shape == layer.bias.shape == (5,)
    np.testing.assert_array_equal(layer(X[0]), same(X[0]))
    assert Einsum(
        "ti,i->t", 4, rngs=nnx.Rngs(0), kernel_init=nnx.initializers.ones
    ).kernel_shape == (4,)
    with pytest.raises(ArgumentShapeError, match=r"given bias_shape=\(4,\); expected \(5,\)"):
        Einsum("ti,io->to", (4, 5), 4, rngs=nnx.Rngs(0))


def test_a_call_can_have_other_subscripts():
    layer = Einsum("btd,do->bto", (4, 5), rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer(X, "btd,do->otb"), layer(X).T)


def test_another_einsum_multiplies_and_its_errors_are_its_own():
    def strict(*args, **kwargs):
        raise ValueError("as it is")

    twice = Einsum(
        "btd,do->bto",
        (4, 5),
        einsum_op=lambda *args, **kwargs: 2 * jnp.einsum(*args, **kwargs),
        rngs=nnx.Rngs(0),
    )
    np.testing.assert_allclose(twice(X), 2 * X @ twice.kernel[...], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"^as it is$"):
        Einsum("btd,do->bto", (4, 5), einsum_op=strict, rngs=nnx.Rngs(0))(X)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (("btd,do", (4, 5)), ArgumentValueError, "'btd,do' must name the axes of an input, a"),
        (
            ("btd,do->bto", (4,)),
            ArgumentShapeError,
            "'do' of .* names 2 axes, of an array that has",
        ),
        (
            ("btd,do->bto", (4, 5), (4,)),
            ArgumentShapeError,
            r"kernel_shape=\(4, 5\) was given bias_shape=\(4,\); expected \(5,\)",
        ),
    ],
    ids=["subscripts", "kernel", "bias"],
)
def test_what_does_not_fit_is_refused_when_the_layer_is_made(args, error, message):
    with pytest.raises(error, match=message):
        Einsum(*args, rngs=nnx.Rngs(0))


def test_an_input_that_does_not_fit_is_shown_beside_the_kernel():
    layer = Einsum("btd,do->bto", (4, 5), rngs=nnx.Rngs(0))
    message = r"Einsum 'btd,do->bto' with a kernel of shape \(4, 5\) was given an input of"
    with pytest.raises(ArgumentShapeError, match=message + r" shape \(2, 3, 3\)"):
        layer(X[..., :3])
    with pytest.raises(
        ArgumentShapeError, match=r"'btd' of .* names 3 axes, of an array that has 2"
    ):
        layer(X[0])
    biased = Einsum("btd,do->bto", (4, 5), (5,), rngs=nnx.Rngs(0))
    with pytest.raises(ArgumentShapeError, match="Einsum 'btd,do->btdo' with a kernel"):
        biased(X, "btd,do->btdo")
