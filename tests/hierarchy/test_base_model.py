import jax
import jax.numpy as jnp

from weft.hierarchy.base_layer import ParameterSpec
from weft.hierarchy.base_model import BaseModel
from weft.hierarchy.module import functional


class Line(BaseModel):
    def _create_layer_parameter_specs(self):
        return {"weight": ParameterSpec((1, 1))}

    def forward(self, input_batch):
        predictions = input_batch["x"] * self.parameters["weight"][0, 0]
        return jnp.mean((predictions - input_batch["y"]) ** 2), {"predictions": predictions}


def test_a_model_makes_a_loss_that_has_gradients():
    model = Line.default_config().set(name="line").instantiate(parent=None)
    batch = {"x": jnp.array([1.0, 2.0]), "y": jnp.array([2.0, 4.0])}

    def loss(state):
        return functional(model, None, state, (batch,), is_training=True)[0]

    (value, aux), grads = jax.value_and_grad(loss, has_aux=True)({"weight": jnp.array([[1.0]])})
    assert (float(value), aux["predictions"].tolist()) == (2.5, [1, 2])
    assert float(grads["weight"][0, 0]) == -5.0
