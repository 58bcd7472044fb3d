"""Low-rank maps of NNX: what they compute, how they are learned alone, and what they refuse."""

import pytest

from tests.keys import draw
from weft import nnx
from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.nnx.nn.lora import LoRA, LoRALinear

X = draw(0, 2, 4)


def test_shape_errors_name_the_layer():
    with pytest.raises(ArgumentValueError, match="LoRA was given base_module=3, which is not c"):
        LoRA(4, 2, 5, base_module=3, rngs=nnx.Rngs(0))  # pyright: ignore[reportArgumentType]
    message = r"LoRA with in_features=4 and out_features=5 was .* \(2, 3\); expected \(\.\.\., 4\)"
    with pytest.raises(ArgumentShapeError, match=message):
        LoRA(4, 2, 5, rngs=nnx.Rngs(0))(X[:, :3])
    with pytest.raises(ArgumentShapeError, match="LoRALinear with in_features=4"):
        LoRALinear(4, 5, lora_rank=2, rngs=nnx.Rngs(0))(X[:, :3])
