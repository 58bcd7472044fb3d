import jax
import numpy as np
import pytest

from tests.linen.modules import KEY, Affine, Counter, X
from weft.errors import CallShareScopeOnUnboundModuleError, ParameterGivenTwiceError
from weft.linen.apply import apply, init, init_with_output, merge_param, share_scope
from weft.linen.methods import compact
from weft.linen.module import Module


class Model(Module):
    def setup(self):
        self.layer, self.counter = Affine(), Counter()

    def __call__(self, x):
        return self.counter(self.layer(x))


def only_layer(model, x, factor=1):
    return factor * model.layer(x)


def test_functions_of_modules():
    variables = init(only_layer, Model())(KEY, X)
    y, same = init_with_output(only_layer, Model())(KEY, X, factor=2)
    assert list(variables) == ["params"] == list(same)
    np.testing.assert_allclose(y, apply(only_layer, Model())(variables, X, 2), rtol=1e-6)


def test_stateful_and_random_functions():
    def noisy(model, x):
        return model(x) + jax.random.normal(model.make_rng("noise"), x.shape)

    variables = init(noisy, Model(), mutable=["params", "state"])({"params": KEY, "noise": KEY}, X)
    applied = apply(noisy, Model(), mutable=["state"], capture_intermediates=True)
    _, changed = applied(variables, X, rngs={"noise": KEY})
    assert changed["state"]["counter"]["calls"] == 2
    assert sorted(changed["intermediates"]) == ["__call__", "counter", "layer"]


class Wrapper(Module):
    inner: Module

    def setup(self):
        share_scope(self, self.inner)

    @compact
    def __call__(self, x):
        return self.inner(x) + self.param("bias", jax.nn.initializers.ones, (1, 2))


def test_wrapper_is_transparent():
    variables = Wrapper(Affine()).init(KEY, X)
    assert sorted(variables["params"]) == ["bias", "kernel"]
    np.testing.assert_allclose(
        Wrapper(Affine()).apply(variables, X), X @ variables["params"]["kernel"] + 1, rtol=1e-6
    )


def test_second_of_two_siblings_owns_the_scope():
    class Outer(Module):
        @compact
        def __call__(self, x):
            return Wrapper(Affine(name="layer"))(x)

    assert sorted(Outer().init(KEY, X)["params"]["layer"]) == ["bias", "kernel"]


def test_submodules_share_the_scope():
    assert sorted(Wrapper(Model()).init(KEY, X)["params"]) == ["bias", "layer"]


def test_scope_of_two_unbound_modules():
    with pytest.raises(CallShareScopeOnUnboundModuleError, match=r"`share_scope` .*Affine is not"):
        share_scope(Affine().bind({}), Affine())


def test_merge_param():
    assert merge_param("x", False, None) is False
    assert merge_param("x", None, 0) == 0
    with pytest.raises(ParameterGivenTwiceError, match="'x' was given twice, as 1 and as 2; pass"):
        merge_param("x", 1, 2)
    with pytest.raises(ParameterGivenTwiceError, match="'x' was given not at all; pass it once"):
        merge_param("x", None, None)
