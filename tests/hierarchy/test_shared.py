import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.config import config_class
from weft.errors import InvalidDescendantError
from weft.hierarchy.base_layer import BaseLayer
from weft.hierarchy.embedding import Embedding
from weft.hierarchy.module import functional as F
from weft.hierarchy.shared import RedirectToSharedModule

KEY = jax.random.key(0)


class Inner(BaseLayer):
    @config_class
    class Config(BaseLayer.Config):
        head: RedirectToSharedModule.Config = RedirectToSharedModule.default_config()

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("head", cfg.head)

    def forward(self, x):
        return self.head(x)


class Tied(BaseLayer):
    @config_class
    class Config(BaseLayer.Config):
        inner: Inner.Config = Inner.default_config()

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("emb", Embedding.default_config().set(num_embeddings=5, dim=3))
        self._share_with_descendants(self.emb, shared_module_name="shared_emb")
        self._add_child("inner", cfg.inner)

    def forward(self, ids):
        return self.inner(self.emb(ids))

    def through(self, x):
        return self.inner.head(x)


def make(shared="shared_emb", **method_map):
    cfg = Tied.default_config().set(name="tied")
    cfg.inner.head.set(shared_module=shared, method_map=method_map)
    layer = cfg.instantiate(parent=None)
    return layer, layer.initialize_parameters_recursively(KEY)


def test_an_output_layer_with_the_weights_of_the_embedding():
    layer, params = make(forward="attend")
    assert jax.tree.map(jnp.shape, params["emb"]) == {"weight": (5, 3)}
    assert not jax.tree.leaves(params["inner"])
    ids = jnp.array([[1, 4]])
    weight = params["emb"]["weight"]
    logits = jax.jit(lambda params: F(layer, None, params, (ids,), is_training=True)[0])(params)
    np.testing.assert_allclose(logits, weight[ids] @ weight.T, rtol=1e-4, atol=1e-6)


def test_without_a_map_forward_is_forward():
    layer, params = make()
    ids = jnp.array([[1, 4]])
    y, _ = F(layer, None, params, (ids,), is_training=True, method="through")
    np.testing.assert_array_equal(y, params["emb"]["weight"][ids])


def test_a_module_that_is_not_shared_is_named():
    layer, params = make(shared="emb")
    with pytest.raises(InvalidDescendantError, match=r"'emb' is not shared with tied\.inner\.head"):
        F(layer, None, params, (jnp.array([1]),), is_training=True, method="through")
