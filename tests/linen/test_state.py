import contextvars
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.linen.modules import KEY, Affine, X
from weft import linen as nn
from weft.errors import (
    NameInUseError,
    PerturbationNotFoundError,
    ScopeParamShapeError,
)
from weft.linen.methods import compact
from weft.linen.module import Module
from weft.linen.state import (
    SetupProgress,
    disable_named_call,
    enable_named_call,
    intercept_methods,
    override_named_call,
)


def test_duplicate_name():
    class Model(Module):
        @compact
        def __call__(self, x):
            return Affine()(Affine(name="Affine_0")(x))

    class Outer(Module):
        @compact
        def __call__(self, x):
            return Model(name="inner")(x)

    with pytest.raises(
        NameInUseError, match=r"'Affine_0' is used twice in 'Model inner'.*'submodule Affine'; cho"
    ):
        Outer().init(KEY, X)


def test_submodule_variable_name_conflict():
    class Model(Module):
        first: bool

        @compact
        def __call__(self, x):
            if self.first:
                self.param("a", lambda key: 1.0)
            y = Affine(name="a")(x)
            self.variable("state", "a", lambda: 1.0)
            return y

    for first, where in ((True, "submodule Affine"), (False, "state")):
        with pytest.raises(
            NameInUseError, match=f"'a' is used twice in.*the second time for '{where}'"
        ):
            Model(first).init(KEY, X)


def test_bound_module_is_called_repeatedly():
    class Model(Module):
        @compact
        def __call__(self, x):
            return self.param("b", lambda key: 1.0) + Affine()(x)

    bound = Model().bind(Model().init(KEY, X))
    assert (bound(X) == bound(X)).all()
    assert list(bound._state.children) == ["Affine_0"]


def test_failed_setup_is_retried():
    fails = [True]

    class Model(Module):
        def setup(self):
            if fails:
                raise KeyError("not yet")
            self.layer = Affine()

        def __call__(self, x):
            return self.layer(x)

    bound = Model().bind({"params": {"layer": Affine().init(KEY, X)["params"]}})
    with pytest.raises(KeyError, match="not yet"):
        bound(X)
    assert bound._state.setup is SetupProgress.DUE
    fails.clear()
    assert bound(X).shape == (3, 2)


class Model(Module):
    @compact
    def __call__(self, x):
        return self.twice(Affine(name="layer")(x))

    def twice(self, x):
        return 2 * x


def test_failed_interceptor_is_removed():
    def fail(*_):
        raise KeyError("interceptor")

    with pytest.raises(KeyError, match="interceptor"), intercept_methods(fail):
        Model().init(KEY, X)
    assert list(Model().init(KEY, X)["params"]) == ["layer"]


def names():
    """Returns the names that the operations of a model carry."""
    variables = Model().init(KEY, X)
    jaxpr = jax.make_jaxpr(Model().apply)(variables, X)
    return [str(eqn.source_info.name_stack) for eqn in jaxpr.eqns]


def test_operations_carry_the_names_of_modules():
    assert "Model/layer" in names() and "Model/Model.twice" in names()
    with override_named_call(False):
        assert set(names()) == {""}
        with override_named_call(True):
            assert "Model/layer" in names()
    contextvars.copy_context().run(check_switch)


def check_switch():
    disable_named_call()
    assert set(names()) == {""}
    enable_named_call()
    assert "Model/layer" in names()


def test_interceptors_are_thread_local():
    calls = []

    def watch(next_fun, args, kwargs, context):
        calls.append(context.method_name)
        return next_fun(*args, **kwargs)

    with intercept_methods(watch), ThreadPoolExecutor(1) as pool:
        pool.submit(Model().init, KEY, X).result()
    assert calls == []


ones = jax.nn.initializers.ones


def model(fn, plain=False):
    """Returns a module with one method."""
    return type("Model", (Module,), {"__call__": fn if plain else compact(fn)})()


def test_duplicate_names():
    def twice(self):
        return self.param("a", ones, ()) + self.param("a", ones, ())

    with pytest.raises(NameInUseError, match=r"'a' is used twice in '/', the second time for 'par"):
        model(twice).init(KEY)

    def sown(self):
        self.sow("state", "a", 1)
        self.variable("state", "a", lambda: 1)

    with pytest.raises(NameInUseError, match=r"'a' is used twice in '/', the second time for 'sta"):
        model(sown).apply({}, mutable="state")

    def both(self):
        self.variable("state", "a", lambda: 1)
        return self.param("a", ones, ())

    assert sorted(model(both).init(KEY)) == ["params", "state"]


def test_mismatched_parameters():
    variables = Affine().init(KEY, X)
    with pytest.raises(ScopeParamShapeError, match=r"'kernel' .*'/' has shape \(2, 2\).*\(2, 3\)"):
        Affine(3).apply(variables, X)


@pytest.mark.parametrize("given", [{}, {"other": X}, {"h": X}])
def test_perturbations_without_an_entry_are_rejected(given):
    fn = model(lambda self, x: self.perturb("k", self.perturb("h", x)))
    with pytest.raises(PerturbationNotFoundError, match=r"given without '[hk]' in the scope '/'"):
        fn.apply({"perturbations": given}, X)
    np.testing.assert_array_equal(fn.apply({}, X), X)  # without the collection nothing is added
    _, changed = fn.apply({"perturbations": given}, X, mutable="perturbations")
    assert {"h", "k"} <= set(changed["perturbations"])


class Perturbed(nn.Module):
    @nn.compact
    def __call__(self, c, _=None):
        return self.perturb("h", c), None


LIFTED = {
    "jit": nn.jit,
    "remat": nn.remat,
    "vmap": lambda cls: nn.vmap(cls, variable_axes={"perturbations": 0}, in_axes=(0, None)),
    "scan": lambda cls: nn.scan(cls, variable_axes={"perturbations": 0}, length=2),
    "scan of jit": lambda cls: LIFTED["scan"](nn.jit(cls)),
}


@pytest.mark.parametrize("way", LIFTED)
def test_missing_perturbation_in_a_lifted_module_is_an_error(way):
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            x, _ = Perturbed(name="plain")(x)
            return LIFTED[way](Perturbed)(name="lifted")(x, None)[0]

    x = jnp.ones((3, 2))
    given = Two().init(jax.random.key(0), x)["perturbations"]
    assert set(given) == {"plain", "lifted"}
    np.testing.assert_array_equal(Two().apply({"perturbations": given}, x), x)
    np.testing.assert_array_equal(Two().apply({}, x), x)
    with pytest.raises(
        PerturbationNotFoundError, match=r"given without 'h' in the scope '/.*lifted"
    ):
        Two().apply({"perturbations": {"plain": given["plain"]}}, x)
