"""

While a trace runs, each module's call is in a scope with its name.
"""

import re

import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import GraphStructureError, ModuleAttributeNotFoundError
from weft.nnx.module import SownValues


class Layer(nnx.Module):
    def __init__(self, sub=None):
        self.w = nnx.Param(1.0)
        self.deterministic = False
        self.sub = sub

    def __call__(self, x):
        self.sow(nnx.Intermediate, "seen", x)
        return self.perturb("noise", x * self.w[...])


def test_layers_compare_by_identity_and_have_a_repr():
    exported = [getattr(nnx, name) for name in dir(nnx)]
    layers = [x for x in exported if getattr(x, "__module__", "").startswith("weft.nnx.nn.")]
    layers = [x for x in layers if isinstance(x, type) and issubclass(x, nnx.Module)]
    assert nnx.Linear in layers
    for layer in layers:
        assert layer.__eq__ is object.__eq__ and layer.__hash__ is object.__hash__
        assert layer.__repr__ is nnx.Module.__repr__


def test_copies_in_another_mode_share_variables():
    layer = Layer(Layer())
    new = nnx.with_attributes(layer, deterministic=True, only=nnx.PathContains("sub"))
    assert new.sub.deterministic and not new.deterministic and not layer.sub.deterministic
    assert new.w is layer.w and new.sub.w is layer.sub.w and new.sub is not layer.sub
    with pytest.raises(ModuleAttributeNotFoundError, match="no selected module in Layer has"):
        nnx.with_attributes(layer, foo=1)


def test_string_annotations_are_shown():
    class Quoted(nnx.Module):
        def set_view(self, causal: "bool | None" = None): ...

    class Unknown(nnx.Module):
        def set_view(self, mask: "Mask" = None): ...  # noqa: F821

    assert "set_view(causal: bool | None = None)" in nnx.view_info(Quoted())
    assert "set_view(mask: 'Mask' = None)" in nnx.view_info(Unknown())


def append(xs, x):
    return (*xs, x)


def test_existing_or_requested_perturbations():
    captured = SownValues((nnx.Perturbation,), None, {"p": nnx.Perturbation(3.0)})
    assert captured.perturbation(nnx.Perturbation, "p", 1.0) == 3
    assert captured.perturbation(nnx.Perturbation, "q", jnp.ones(2)).tolist() == [0, 0]
    assert captured.perturbation(nnx.Cache, "r", 1.0) is None


def test_name_is_of_one_kind():
    captured = SownValues((nnx.Intermediate, nnx.Cache), None, {})
    captured.sow(nnx.Cache, "h", 1, append, tuple)
    with pytest.raises(GraphStructureError, match="'h' was sown as a Cache, and now as a Intermed"):
        captured.sow(nnx.Intermediate, "h", 1, append, tuple)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


class Derived(Block):
    def __call__(self, x):
        return super().__call__(x)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = [Block(rngs), Derived(rngs)]
        self.heads = {"a": [nnx.Linear(3, 3, rngs=rngs)]}

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.heads["a"][0](x)


@pytest.mark.parametrize("compile_", [nnx.jit, jax.jit])
def test_each_operation_is_in_the_scopes_of_its_modules(compile_):
    def step(model, x):
        return model(x)

    model = Model(nnx.Rngs(0))
    text = compile_(step).lower(model, jnp.ones((2, 3))).as_text(debug_info=True)
    found = set(re.findall(r'"jit\(step\)/([^"]*)/dot_general"', text))
    assert found == {"Model/blocks_0/linear", "Model/blocks_1/linear", "Model/heads_a_0"}


def test_scopes_close_on_failure():
    class Failing(nnx.Module):
        def __call__(self, x):
            raise KeyError

    block = Block(nnx.Rngs(0))
    with pytest.raises(KeyError):
        jax.jit(Failing())(1.0)
    text = jax.jit(lambda x: block(x)).lower(jnp.ones((2, 3))).as_text(debug_info=True)
    assert "Block/linear/dot_general" in text and "Failing" not in text


def test_sow_stores_values():
    layer = Layer()
    layer.sow(nnx.Intermediate, "h", 1)
    assert layer.sow(nnx.Intermediate, "h", 2) is True
    layer.sow("own_values", "total", 3, reduce_fn=lambda a, b: a + b, init_fn=lambda: 10)
    layer.sow("own_values", "total", 4, reduce_fn=lambda a, b: a + b)
    assert layer.h[...] == (1, 2) and layer.total[...] == 17
    assert type(layer.total) is nnx.variable_type_from_name("own_values")
    assert nnx.pop(layer, nnx.Intermediate).h[...] == (1, 2) and not hasattr(layer, "h")
    with pytest.raises(
        GraphStructureError, match=r"Layer.w is a Param, and should be a Intermediate"
    ):
        layer.sow(nnx.Intermediate, "w", 1)
    with pytest.raises(
        GraphStructureError, match=r"Layer.deterministic is a bool, and should be a Pert"
    ):
        layer.perturb("deterministic", 1.0)


class Viewed(Layer):
    def set_view(self, deterministic: bool | None = None):
        if deterministic is not None:
            self.deterministic = deterministic


class Open(nnx.Module):
    def set_view(self, **kwargs):
        self.given = tuple(kwargs)


def test_views():
    layer = Viewed(Viewed(Open()))
    new = nnx.view(layer, deterministic=True, other=1)
    assert new.deterministic and new.sub.deterministic and not layer.deterministic
    assert new.w is layer.w and new.sub.sub.given == ("deterministic", "other")
    only = nnx.view(layer, only=nnx.PathContains("sub"), deterministic=True)
    assert only.sub.deterministic and not only.deterministic
    with pytest.raises(
        ModuleAttributeNotFoundError, match=r"`set_view` that takes foo; nnx.view_info"
    ):
        nnx.view(Viewed(), foo=1)
    assert not nnx.view(Viewed(), foo=1, raise_if_not_found=False).deterministic
    assert nnx.view_info(layer) == (
        "Open:\n  set_view(**kwargs)\n"
        "Viewed:\n  set_view(deterministic: bool | None = None)"
    )  # fmt: skip


def test_attributes_of_chosen_modules():
    layer = Layer(Layer())
    layer.set_attributes(nnx.PathContains("sub"), deterministic=True)
    assert layer.sub.deterministic and not layer.deterministic
    with pytest.raises(ModuleAttributeNotFoundError, match="has the attributes foo; give raise_if"):
        layer.set_attributes(foo=1, deterministic=True)
    assert not layer.deterministic
    layer.set_attributes(foo=1, raise_if_not_found=False)
    assert not hasattr(layer, "foo")
