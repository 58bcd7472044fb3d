from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from tests.linen.modules import KEY, Affine, X
from weft.linen.methods import compact
from weft.linen.module import Module
from weft.linen.running import (
    alone,
    current_module,
    disable_named_call,
    enable_named_call,
    intercept_methods,
    override_named_call,
)


class Model(Module):
    @compact
    def __call__(self, x):
        return self.twice(Affine(name="layer")(x))

    def twice(self, x):
        return 2 * x


def test_the_module_that_runs():
    seen = []

    class Watch(Module):
        @compact
        def __call__(self):
            with alone():
                inside = current_module()
                made = Affine()
            seen.append((current_module() is self, inside, made.parent))

    Watch().init(KEY)
    assert seen == [(True, None, None)]
    assert current_module() is None


def test_the_outermost_interceptor_is_called_first():
    seen = []

    def watch(label):
        def interceptor(next_fun, args, kwargs, context):
            seen.append((label, type(context.module).__name__, context.method_name))
            return next_fun(*args, **kwargs)

        return interceptor

    with intercept_methods(watch("a")), intercept_methods(watch("b")):
        Model().init(KEY, X)
    assert seen == [
        ("a", "Model", "__call__"),
        ("b", "Model", "__call__"),
        ("a", "Affine", "__call__"),
        ("b", "Affine", "__call__"),
        ("a", "Model", "twice"),
        ("b", "Model", "twice"),
    ]
    Model().init(KEY, X)
    assert len(seen) == 6


def test_an_interceptor_changes_arguments_and_results():
    variables = Model().init(KEY, X)

    def skip(next_fun, args, kwargs, context):
        return args[0] if context.method_name == "twice" else next_fun(*args, **kwargs)

    def around(next_fun, args, kwargs, context):
        return 3 * context.orig_method(*args, **kwargs)

    plain = Model().apply(variables, X)
    with intercept_methods(skip):
        assert Model().apply(variables, X)[0, 0] == plain[0, 0] / 2
    with intercept_methods(around), intercept_methods(skip):
        # `orig_method` is the method without the interceptors that come after.
        assert Model().apply(variables, X, method="twice")[0, 0] == pytest.approx(6 * X[0, 0])


def test_an_interceptor_that_fails_leaves_nothing_behind():
    def fail(*_):
        raise KeyError("interceptor")

    with pytest.raises(KeyError, match="interceptor"), intercept_methods(fail):
        Model().init(KEY, X)
    assert list(Model().init(KEY, X)["params"]) == ["layer"]


def names():
    """The names that the operations of a model carry."""
    variables = Model().init(KEY, X)
    jaxpr = jax.make_jaxpr(Model().apply)(variables, X)
    return [str(eqn.source_info.name_stack) for eqn in jaxpr.eqns]


def test_operations_carry_the_names_of_modules():
    assert "Model/layer" in names() and "Model/Model.twice" in names()
    with override_named_call(False):
        assert set(names()) == {""}
        with override_named_call(True):
            assert "Model/layer" in names()
    disable_named_call()
    try:
        assert set(names()) == {""}
    finally:
        enable_named_call()
    assert "Model/layer" in names()


def test_names_reach_what_xla_is_given():
    variables = Model().init(KEY, X)
    lowered = jax.jit(Model().apply).lower(variables, X)
    assert "Model/layer/dot_general" in lowered.as_text(debug_info=True)


def test_a_thread_has_interceptors_of_its_own():
    calls = []

    def watch(next_fun, args, kwargs, context):
        calls.append(context.method_name)
        return next_fun(*args, **kwargs)

    with intercept_methods(watch), ThreadPoolExecutor(1) as pool:
        pool.submit(Model().init, KEY, X).result()
    assert calls == []
