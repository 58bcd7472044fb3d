"""Low-rank maps of NNX: what they compute, how they are learned alone, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw
from weft import nnx
from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.nnx.nn.linear import Linear
from weft.nnx.nn.lora import LoRA, LoRALinear, LoRAParam

X = draw(0, 2, 4)


def test_starts_as_the_base_layer():
    rngs = nnx.Rngs(0)
    base = Linear(4, 5, rngs=rngs)
    layer = LoRA(4, 2, 5, base_module=base, rngs=rngs)
    np.testing.assert_array_equal(layer(X), base(X))
    assert not LoRA(4, 2, 5, rngs=rngs)(X).any()
    linear = LoRALinear(4, 5, lora_rank=2, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(linear(X), X @ linear.kernel[...])


def test_adds_low_rank_product():
    layer = LoRA(4, 2, 5, b_initializer=jax.nn.initializers.normal(), rngs=nnx.Rngs(0))
    expected = X @ layer.lora_a[...] @ layer.lora_b[...]
    np.testing.assert_allclose(layer(X), expected, rtol=1e-5, atol=1e-6)
    added = LoRA(4, 2, 5, base_module=lambda x, scale: scale * x[:, :1], rngs=nnx.Rngs(0))
    np.testing.assert_allclose(added(X, scale=2.0), 2 * X[:, :1] * np.ones((1, 5)), rtol=1e-6)


def test_only_low_rank_parameters_are_trained():
    layer = LoRALinear(4, 5, lora_rank=2, rngs=nnx.Rngs(0))
    graphdef, low_rank, rest = nnx.split(layer, LoRAParam, ...)
    loss = lambda low_rank: jnp.sum(nnx.merge(graphdef, low_rank, rest)(X) ** 2)  # noqa: E731
    grads = jax.grad(loss)(low_rank)
    assert nnx.to_flat_state(grads).paths == (("lora", "lora_a"), ("lora", "lora_b"))
    assert nnx.to_flat_state(rest).paths == (("bias",), ("kernel",))


def test_param_type_is_configurable():
    layer = LoRA(4, 2, 5, lora_param_type=nnx.Cache, a_metadata={"tag": "a"}, rngs=nnx.Rngs(0))
    assert type(layer.lora_a) is type(layer.lora_b) is nnx.Cache
    assert layer.lora_a.tag == "a"


def test_shape_errors_name_the_layer():
    with pytest.raises(ArgumentValueError, match="LoRA was given base_module=3, which is not c"):
        LoRA(4, 2, 5, base_module=3, rngs=nnx.Rngs(0))  # pyright: ignore[reportArgumentType]
    message = r"LoRA with in_features=4 and out_features=5 was .* \(2, 3\); expected \(\.\.\., 4\)"
    with pytest.raises(ArgumentShapeError, match=message):
        LoRA(4, 2, 5, rngs=nnx.Rngs(0))(X[:, :3])
    with pytest.raises(ArgumentShapeError, match="LoRALinear with in_features=4"):
        LoRALinear(4, 5, lora_rank=2, rngs=nnx.Rngs(0))(X[:, :3])
