import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.linen.modules import KEY, Affine, X
from weft.errors import (
    AssignSubModuleError,
    CallCompactUnboundModuleError,
    CallSetupUnboundModuleError,
    CompactMethodError,
    MultipleMethodsCompactError,
    NameInUseError,
)
from weft.linen.methods import compact, compact_name_scope
from weft.linen.module import Module
from weft.linen.transforms import jit


def test_packages_find_the_running_module_and_replace_methods_by_theirs():
    from weft.linen import module as as_in_flax

    class Model(Module):
        @compact
        def __call__(self, x):
            seen.append(as_in_flax._context.module_stack[-1])
            return Affine()(x)

    def twice(*args):
        return 2 * inner(*args)

    seen, inner = [], Model.__call__.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
    assert Model.__call__.method_handler_wrapped  # pyright: ignore[reportFunctionMemberAccess]
    call = as_in_flax.wrap_method_once(compact(twice))
    doubled = type("Model", (Model,), {"__call__": call})()
    variables = Model().init(KEY, X)
    np.testing.assert_allclose(doubled.apply(variables, X), 2 * Model().apply(variables, X))
    assert [type(module).__name__ for module in seen] == ["Model"] * 3
    assert as_in_flax._context.module_stack == [None]


def test_compact_method_needs_variables():
    with pytest.raises(
        CallCompactUnboundModuleError, match=r"the compact method __call__.*Affine is not bound.*i"
    ):
        Affine()(X)


def test_setup_call_is_rejected():
    class Model(Module):
        def setup(self):
            self.layer = Affine()

    with pytest.raises(CallSetupUnboundModuleError, match=r"`setup` was called by hand, but Model"):
        Model().setup()


def test_submodules_need_compact():
    class Model(Module):
        def layer(self, x):
            return Affine()(x)

        def bias(self, x):
            return self.param("bias", jax.nn.initializers.zeros, (2,))

        @compact
        def __call__(self, x):
            return self.layer(x) + self.bias(x)[None]

    class Outer(Module):
        @compact
        def __call__(self, x):
            return Model(name="inner").layer(x)

    with pytest.raises(
        AssignSubModuleError,
        match=r"submodule Affine was created in a method of Model inner that.*@c",
    ):
        Outer().init(KEY, X)
    with pytest.raises(CompactMethodError, match=r"'bias' was requested.*outermost.*@compact"):
        Model().init(KEY, X, method="bias")
    assert sorted(Model().init(KEY, X)["params"]) == ["Affine_0", "bias"]


def test_two_compact_methods_that_make_different_submodules():
    class Model(Module):
        features: int = 2

        @compact
        def one(self, x):
            return Affine(3)(x)

        @compact
        def two(self, x):
            return Affine(self.features)(x)

        def __call__(self, x):
            return self.one(x).sum() + self.two(x).sum()

    with pytest.raises(MultipleMethodsCompactError, match=r"one.*two.*Model.*Affine_0.*_scope"):
        Model().init(KEY, X)
    assert list(Model(features=3).init(KEY, X)["params"]) == ["Affine_0"]
    # One of them in each call is unambiguous.
    assert Model().init(KEY, X, method="two")["params"]["Affine_0"]["kernel"].shape == (2, 2)


def test_name_scopes_in_transformed_methods():
    class Model(Module):
        @compact_name_scope
        def part(self, x):
            return jit(lambda module, x: Affine()(x))(self, x)

        @jit
        def twice(self, x):
            return self.part(self.part(x))

        def __call__(self, x):
            return self.part(self.twice(x))

    y, variables = Model().init_with_output(KEY, X)
    assert list(variables["params"]) == ["part"]
    kernel = variables["params"]["part"]["Affine_0"]["kernel"]
    np.testing.assert_allclose(y, X @ kernel @ kernel @ kernel, rtol=1e-4, atol=1e-5)


def test_name_scope_conflict():
    class Model(Module):
        @compact_name_scope
        def part(self, x):
            return Affine()(x)

        @compact
        def __call__(self, x):
            return self.part(Affine(name="part")(x))

    with pytest.raises(NameInUseError, match=r"'part' is used twice.*compact_name_scope"):
        Model().init(KEY, X)


def test_methods_keep_name_and_docstring():
    class Model(Module):
        @compact
        def __call__(self, x: jax.Array) -> jax.Array:
            """Calls."""
            return x

        @staticmethod
        def static(x):
            return x + 1

        @classmethod
        def small(cls):
            return cls()

    assert (Model.__call__.__doc__, Model.__call__.__name__) == ("Calls.", "__call__")
    assert (Model.static(1), type(Model.small())) == (2, Model)


def test_exception_restores_state():
    fails = [True]

    class Inner(Module):
        def setup(self):
            self.layer = Affine()
            if fails[0]:
                raise KeyError("setup")

        @compact
        def __call__(self, x):
            return self.layer(x)

    class Model(Module):
        @compact
        def __call__(self, x):
            x = Affine()(Inner()(x))
            if len(fails) > 1:
                raise KeyError("compact")
            return x

    for reason in ("setup", "compact"):
        with pytest.raises(KeyError, match=reason):
            Model().init(KEY, X)
        Affine()  # without a parent
        fails[0] = False
        fails.append(True)
    del fails[1:]
    variables = Model().init(KEY, X)
    assert sorted(variables["params"]) == ["Affine_0", "Inner_0"]

    bound = Model().bind(variables)
    fails.append(True)
    with pytest.raises(KeyError, match="compact"):
        bound(X)
    fails.pop()
    assert jnp.isfinite(bound(X)).all()


def test_methods_with_name_scopes():
    class Model(Module):
        @compact_name_scope
        def encode(self, x):
            return Affine()(Affine(3)(x))

        @compact_name_scope
        def wrong(self, x):
            return self.param("bias", jax.nn.initializers.zeros, (2,))

        @compact
        def __call__(self, x):
            return Affine()(self.encode(self.encode(x)))

    params = Model().init(KEY, X)["params"]
    assert sorted(params) == ["Affine_0", "encode"]
    assert sorted(params["encode"]) == ["Affine_0", "Affine_1"]
    only = Model().init(KEY, X, method="encode")
    np.testing.assert_array_equal(
        only["params"]["encode"]["Affine_0"]["kernel"], params["encode"]["Affine_0"]["kernel"]
    )
    with pytest.raises(CompactMethodError, match="neither `setup` nor compact"):
        Model().init(KEY, X, method="wrong")
    with pytest.raises(CallCompactUnboundModuleError, match="the compact method encode"):
        Model().encode(X)
