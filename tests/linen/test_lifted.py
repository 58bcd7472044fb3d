import functools

import jax.numpy as jnp
import numpy as np
import pytest

from tests.linen.transformed import ALL, KEY, SPLIT, Codec, Linear, X, everywhere, model, shapes
from weft import linen as nn
from weft.errors import TransformTargetError


@everywhere
def test_what_is_no_module_class_or_function_is_refused(lift):
    with pytest.raises(
        TransformTargetError, match="3 cannot be transformed; expected a module class"
    ):
        lift(3)
    with pytest.raises(TransformTargetError, match=r"transform its class: nn.remat\(Dense\)"):
        lift(Linear())


WITH_METHODS = [n for n in ALL if n not in ("fold_rngs", "add_metadata_axis", "named_call")]


@pytest.mark.parametrize("name", WITH_METHODS)
@pytest.mark.parametrize(
    "methods",
    ["decode", ["encode", "decode"], ("__call__", "encode"), {"encode": {}, "__call__": {}}],
)
def test_every_method_works_in_any_order(name, methods):
    m = ALL[name](Codec, methods=methods)()
    variables = Codec().init(KEY, X)
    w = variables["params"]
    np.testing.assert_array_equal(m.init(KEY, X)["params"]["encoder"]["w"].shape, (3, 2))

    def all_methods(m, x):
        z = m.encode(x)
        return m.decode(z), m(x), m.encode(x), m.decode(m.encode(x))

    expected = X @ w["encoder"]["w"] @ w["decoder"]["w"]
    y, called, z, again = m.apply(variables, X, method=all_methods)
    for got in (y, called, again):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    np.testing.assert_allclose(z, X @ w["encoder"]["w"], rtol=1e-5)
    inside = model(lambda self, x: all_methods(ALL[name](Codec, methods=methods)(), x))
    y, *_ = inside.apply({"params": {f"{type(m).__name__}_0": w}}, X)
    np.testing.assert_allclose(y, expected, rtol=1e-5)


def test_each_method_has_its_own_options():
    options = {"encode": {"in_axes": 1, "out_axes": 1}, "decode": {}}
    m = nn.vmap(Codec, {"params": None}, {"params": False}, methods=options)()
    variables = Codec().init(KEY, X)
    xs = jnp.ones((4, 5, 3))
    assert m.apply(variables, xs, method="encode").shape == (4, 5, 2)
    options["encode"] = {"variable_axes": {"params": 0}, "axis_size": 7, "in_axes": None}
    m = nn.vmap(Codec, {"params": None}, SPLIT, methods=options)()
    assert shapes(m.init(KEY, X, method="encode")) == {"params": {"encoder": {"w": (7, 3, 2)}}}


def test_a_method_that_is_not_there_is_refused():
    with pytest.raises(TransformTargetError, match=r"'Linear.encode' cannot be transformed"):
        nn.remat(Linear, methods=["encode"])
    with pytest.raises(TransformTargetError, match=r"'Linear.features' cannot be transformed"):
        nn.vmap(Linear, methods={"features": {}})


def test_classes_are_named_by_their_transformation():
    named = [
        (nn.vmap, "VmapLinear"),
        (nn.scan, "ScanLinear"),
        (nn.remat, "CheckpointLinear"),
        (nn.jit, "JitLinear"),
        (functools.partial(nn.remat_scan, lengths=(2,)), "Remat_scanLinear"),
        (nn.map_variables, "Map_variablesLinear"),
        (nn.named_call, "Linear"),
    ]
    for lift, name in named:
        assert lift(Linear).__name__ == name
    assert nn.remat(nn.jit(Linear)).__name__ == "CheckpointJitLinear"
    m = model(lambda self, x: nn.remat(Linear)()(nn.remat(Linear)()(x)))
    assert list(m.init(KEY, X)["params"]) == ["CheckpointLinear_1", "CheckpointLinear_0"]


def test_a_class_that_is_transformed_again_is_the_same_class():
    axes = lambda: {"params": 0, "stats": [1][0]}  # noqa: E731
    assert nn.vmap(Linear, axes(), {"params": True}) is nn.vmap(Linear, axes(), {"params": True})
    assert nn.vmap(Linear, {"params": 0}) is not nn.vmap(Linear, {"params": 1})
    assert nn.vmap(Linear, {"params": 0}) is not nn.vmap(Linear, {"params": False})
    assert nn.remat(Linear, policy=lambda *_: True) is not nn.remat(Linear, policy=lambda *_: False)
