"""Compiled operations carry the path of their module, so that a profile shows which is slow."""

import re

import jax
import jax.numpy as jnp
import pytest

from weft import linen
from weft.config import config_class
from weft.hierarchy import transforms
from weft.hierarchy.attention import (
    RepeatedTransformerLayer,
    StackedTransformerLayer,
    TransformerLayer,
)
from weft.hierarchy.base_layer import BaseLayer, RematSpec
from weft.hierarchy.causal_lm import Model
from weft.hierarchy.decoder import Decoder
from weft.hierarchy.layers import Linear
from weft.hierarchy.module import child_context, functional
from weft.interop import as_hierarchy

JAX_PARTS = re.compile(r"(jit|jvp|transpose|vmap|rematted_computation)\(([^()]*)\)")


def op_names(fn, *args):
    """Returns the paths in the compiled program, without what JAX writes between the modules'
    names.
    """
    text = jax.jit(fn).lower(*args).compile().as_text()
    found = set(re.findall(r'op_name="([^"]*)"', text))
    for _ in range(3):
        found = {JAX_PARTS.sub(r"\2", name) for name in found}
    of_jax = {"while", "body", "closed_call", "eval_jaxpr", "checkpoint", "pjit", ""}
    of_jax |= {"rematted_computation"}
    return {"/".join(p for p in name.split("/") if p not in of_jax) for name in found}


def assert_found(names, *paths):
    for path in paths:
        assert any(f"/{path}/" in name for name in names), (path, sorted(names))


def language_model(stack, remat):
    layer = TransformerLayer.default_config()
    layer.self_attention.attention.num_heads = 1
    layer.feed_forward.hidden_dim = 4
    layer.remat_spec = RematSpec() if remat else None
    transformer = stack.default_config().set(num_layers=2, layer=layer)
    decoder = Decoder.default_config().set(vocab_size=8, dim=4, transformer=transformer)
    model = Model.default_config().set(name="model", decoder=decoder)
    return model.instantiate(parent=None)


@pytest.mark.parametrize(
    ("stack", "layer", "remat"),
    [(StackedTransformerLayer, "layer0", False), (RepeatedTransformerLayer, "repeat/layer", True)],
)
def test_language_model(stack, layer, remat, filled):
    model = language_model(stack, remat)
    batch = {
        "input_ids": jnp.ones((1, 3), jnp.int32),
        "target_labels": jnp.ones((1, 3), jnp.int32),
    }

    def loss(params):
        (loss, _), _ = functional(
            model, jax.random.key(0), params, {"input_batch": batch}, is_training=True
        )
        return loss

    names = op_names(jax.grad(loss), filled(model))
    assert_found(
        names,
        f"model/decoder/transformer/{layer}/self_attention/attention",
        f"model/decoder/transformer/{layer}/feed_forward/linear1",
        "model/decoder/output_norm",
    )


class Root(BaseLayer):
    @config_class
    class Config(BaseLayer.Config):
        child: object = Linear.default_config().set(input_dim=2, output_dim=2)

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("child", cfg.child)

    def forward(self, body):
        return body(self.child)


def names_of(body, child=None):
    root = Root.default_config().set(name="root", **({"child": child} if child else {}))
    root = root.instantiate(parent=None)
    params = root.initialize_parameters_recursively(jax.random.key(0))
    return op_names(
        lambda params: functional(
            root, prng_key=None, state=params, inputs=[body], is_training=False
        )[0],
        params,
    )


X = jnp.ones((3, 2))


def again(child):
    with child_context("again", module=child):
        return child(X)


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (lambda child: child(X), "root/child"),
        (again, "root/again"),
        (lambda child: transforms.remat(child)(X), "root/child"),
        (lambda child: transforms.vmap(child, state_axis=None)(X), "root/child"),
        (
            lambda child: transforms.scan_in_context(lambda c, x: (c, child(x)), carry=None, xs=X),
            "root/child",
        ),
    ],
    ids=["call", "child_context", "remat", "vmap", "scan"],
)
def test_scope_is_open_once(body, path):
    names = names_of(body)
    assert_found(names, path)
    assert not any("child/child" in name or "root/root" in name for name in names)


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(2, name="dense")(x)


def test_modules_of_linen_inside():
    names = names_of(lambda child: child(X), as_hierarchy(LinenBlock(), inputs=(X,)))
    assert any(re.search("/root/child/(.*/)?dense/", name) for name in names), names
