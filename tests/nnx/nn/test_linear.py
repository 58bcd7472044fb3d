"""Linear maps of NNX: what they compute, what they hold, and what they refuse.

Einsums of NNX: what they compute, and what they refuse.

Embeddings of NNX: what they compute, and what they refuse.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.keys import draw
from weft import nnx
from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.nnx.nn.linear import Einsum, Embed, Linear, LinearGeneral

X = draw(0, 2, 3, 4)


def test_custom_dot_general_gets_only_set_options():
    seen = []

    def product(*args, **kwargs):
        seen.append(sorted(kwargs))
        return jax.lax.dot_general(*args, **kwargs)

    options = {"dot_general": product, "rngs": nnx.Rngs(0)}
    Linear(4, 5, **options)(X)
    Linear(4, 5, preferred_element_type=jnp.float32, **options)(X)
    LinearGeneral(4, 5, dot_general_cls=lambda: product, rngs=nnx.Rngs(0))(X)
    assert seen == [["precision"], ["precision", "preferred_element_type"], ["precision"]]


@pytest.mark.parametrize("shape", [(2, 3), (3,), ()])
def test_linear_error_names_mismatched_sizes(shape):
    layer = Linear(4, 5, rngs=nnx.Rngs(0))
    with pytest.raises(ArgumentShapeError) as caught:
        layer(jnp.ones(shape))
    assert str(caught.value) == (
        f"Linear with in_features=4 and out_features=5 was given an input of shape {shape}; "
        "expected (..., 4). Its kernel has shape (4, 5)."
    )


@pytest.mark.parametrize("shape", [(3, 2, 4), (2, 4, 3), (3,)])
def test_linear_general_names_mismatched_axes(shape):
    layer = LinearGeneral((2, 4), 5, axis=(1, 2), rngs=nnx.Rngs(0))
    if shape == (3, 2, 4):
        assert layer(jnp.ones(shape)).shape == (3, 5)
        return
    message = rf"axis=\(1, 2\) and out_features=\(5,\) was given an input of shape .{shape[0]}.*"
    with pytest.raises(ArgumentShapeError, match=message + r"sizes \(2, 4\) of its axes \(1, 2\)"):
        layer(jnp.ones(shape))


def test_linear_general_names_batch_and_duplicate_axes():
    layer = LinearGeneral(4, 5, batch_axis={0: 2}, rngs=nnx.Rngs(0))
    with pytest.raises(ArgumentShapeError, match=r"batch_axis=\{0: 2\}.*\(2, 4\) of its axes"):
        layer(jnp.ones((3, 4)))
    twice = LinearGeneral((4, 4), 5, axis=(-1, 1), rngs=nnx.Rngs(0))
    with pytest.raises(ArgumentShapeError, match=r"of its axes \(1, 1\)"):
        twice(jnp.ones((4, 4)))


def test_invalid_sizes_are_rejected_at_creation():
    with pytest.raises(ArgumentShapeError, match=r"in_features=\(4,\) and axis=\(1, 2\)"):
        LinearGeneral(4, 5, axis=(1, 2), rngs=nnx.Rngs(0))
    with pytest.raises(ArgumentValueError, match=r"batch_axis=\{1: 3\}.*the first axes, \(0,\)"):
        LinearGeneral(4, 5, batch_axis={1: 3}, rngs=nnx.Rngs(0))


def test_custom_einsum_and_its_errors():
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
    ],
    ids=["subscripts", "kernel"],
)
def test_invalid_arguments_are_rejected_at_creation(args, error, message):
    with pytest.raises(error, match=message):
        Einsum(*args, rngs=nnx.Rngs(0))


def test_mismatched_input_is_shown_with_kernel_shape():
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


def test_results_have_out_sharding():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        layer = Embed(10, 4, rngs=nnx.Rngs(0))
        rows = layer(jax.device_put(jnp.arange(2), P("data")), out_sharding=P("data", "model"))
        logits = layer.attend(jnp.ones((2, 4)), out_sharding=P("data", None))
    assert rows.sharding.spec == P("data", "model")
    assert logits.sharding.spec == P("data", None)


def test_invalid_input_error_names_the_layer():
    layer = Embed(10, 4, rngs=nnx.Rngs(0))
    message = "Embed with num_embeddings=10 was given ids of dtype float32; expected integers"
    with pytest.raises(ArgumentValueError, match=message):
        layer(jnp.ones(2))
    message = r"Embed with features=4 was given queries of shape \(2, 3\); expected \(\.\.\., 4\)"
    with pytest.raises(ArgumentShapeError, match=message):
        layer.attend(jnp.ones((2, 3)))
