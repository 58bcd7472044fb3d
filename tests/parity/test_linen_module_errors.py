"""Programs of modules that fail: the error classes of Flax and of Weft."""

import jax
import jax.numpy as jnp
import pytest

from tests.parity.linen import KEY, same_error
from tests.parity.test_linen_module import RNGS, X, affine, normal
from tests.parity.test_linen_module_state import method

PROGRAMS = []


def program(fn):
    PROGRAMS.append(fn)
    return fn


@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: case.__name__)
def test_both_refuse(case):
    assert len(same_error(case)) > 30


def run(module, *args, **kwargs):
    return module.init(RNGS, *(args or (X,)), **kwargs)


@program
def a_call_without_variables(nn):
    affine(nn)()(X)


@program
def setup_by_hand(nn):
    class Model(nn.Module):
        def setup(self):
            self.a = 1

    Model().setup()


@program
def an_attribute_of_setup_without_variables(nn):
    class Model(nn.Module):
        def setup(self):
            self.a = 1

    _ = Model().a


@program
def an_attribute_that_is_not_there(nn):
    run(method(nn, lambda self, x: self.missing))


@program
def a_property_of_what_is_not_there(nn):
    class Model(nn.Module):
        @property
        def width(self):
            return self.missing

        def __call__(self, x):
            return self.width

    run(Model())


@program
def unbind_of_what_is_not_bound(nn):
    affine(nn)().unbind()


@program
def a_scope_for_two_that_are_not_bound(nn):
    nn.share_scope(affine(nn)(), affine(nn)())


@program
def a_submodule_in_a_plain_method(nn):
    run(method(nn, lambda self, x: affine(nn)()(x), compact=False))


@program
def a_parameter_in_a_plain_method(nn):
    run(method(nn, lambda self, x: self.param("a", normal, (2,)), compact=False))


@program
def a_variable_in_a_plain_method(nn):
    run(method(nn, lambda self, x: self.variable("c", "a", jnp.ones, 2), compact=False))


@pytest.mark.parametrize("name", ["parent", "name"])
def test_reserved_field(name):
    fields = {"__annotations__": {name: int}}
    assert name in same_error(lambda nn: type("Model", (nn.Module,), fields))


@program
def an_attribute_set_in_a_method(nn):
    def call(self, x):
        self.seen = x

    run(method(nn, call))


@program
def a_field_set_from_outside(nn):
    bound = affine(nn)().bind({})
    bound.features = 3


@program
def a_field_set_in_setup(nn):
    class Model(nn.Module):
        features: int = 2

        def setup(self):
            self.features = 3

        def __call__(self, x):
            return x

    run(Model())


@program
def post_init_without_the_one_above(nn):
    class Model(nn.Module):
        def __post_init__(self):
            pass

        @nn.compact
        def __call__(self, x):
            return x

    run(Model())


@pytest.mark.parametrize("name", ["init", "init_with_output", "apply", "bind", "lazy_init"])
def test_class_in_place_of_a_module(name):
    assert len(same_error(lambda nn: getattr(affine(nn), name)(KEY, X))) > 30


@pytest.mark.parametrize("wrong", [3, "missing", "features", lambda: 3])
def test_invalid_method(wrong):
    assert repr(wrong) in same_error(lambda nn: affine(nn)().apply({}, X, method=wrong))


@program
def two_submodules_of_one_name(nn):
    def call(self, x):
        return affine(nn)(name="a")(affine(nn)(name="a")(x))

    run(method(nn, call))


@program
def a_given_name_that_is_made_as_well(nn):
    def call(self, x):
        return affine(nn)()(affine(nn)(name="Affine_0")(x))

    run(method(nn, call))


@program
def a_parameter_named_as_a_submodule(nn):
    def call(self, x):
        affine(nn)(name="a")(x)
        return self.param("a", normal, (2,))

    run(method(nn, call))


@program
def a_submodule_named_as_a_parameter(nn):
    def call(self, x):
        self.param("a", normal, (2,))
        return affine(nn)(name="a")(x)

    run(method(nn, call))


@program
def a_submodule_named_as_a_variable(nn):
    def call(self, x):
        self.variable("state", "a", jnp.ones, (2,))
        return affine(nn)(name="a")(x)

    run(method(nn, call))


@program
def two_parameters_of_one_name(nn):
    def call(self, x):
        return self.param("a", normal, (2,)) + self.param("a", normal, (2,))

    run(method(nn, call))


@program
def two_variables_of_one_name(nn):
    def call(self, x):
        self.variable("state", "a", jnp.ones, (2,))
        return self.variable("state", "a", jnp.ones, (2,))

    run(method(nn, call))


@program
def a_parameter_named_as_an_attribute_of_setup(nn):
    class Model(nn.Module):
        def setup(self):
            self.a = affine(nn)()

        @nn.compact
        def __call__(self, x):
            return self.a(x) + self.param("a", normal, (2,))

    run(Model())


@program
def a_submodule_named_as_a_field(nn):
    class Model(nn.Module):
        a: nn.Module

        @nn.compact
        def __call__(self, x):
            return affine(nn)(name="a")(self.a(x))

    run(Model(affine(nn)()))


@program
def a_name_scope_named_as_a_submodule(nn):
    class Model(nn.Module):
        @nn.compact_name_scope
        def f(self, x):
            return affine(nn)()(x)

        @nn.compact
        def __call__(self, x):
            return affine(nn)(name="f")(x) + self.f(x)

    run(Model())


@program
def a_submodule_named_as_a_name_scope(nn):
    class Model(nn.Module):
        @nn.compact_name_scope
        def f(self, x):
            return affine(nn)()(x)

        @nn.compact
        def __call__(self, x):
            return self.f(x) + self.f(x) + affine(nn)(name="f")(x)

    run(Model())


@program
def a_parameter_in_a_method_with_a_name_scope(nn):
    class Model(nn.Module):
        @nn.compact_name_scope
        def __call__(self, x):
            return self.param("b", normal, (2,))

    run(Model())


@program
def parameters_of_another_shape(nn):
    variables = run(affine(nn)())
    affine(nn)(3).apply(variables, X)


@program
def a_parameter_that_is_not_given(nn):
    variables = run(affine(nn)())
    del variables["params"]["bias"]
    affine(nn)().apply(variables, X)


@program
def a_submodule_whose_parameters_are_not_given(nn):
    def call(self, x):
        return affine(nn)()(x)

    method(nn, call).apply({"params": {"other": {}}}, X)


@program
def no_parameters(nn):
    affine(nn)().apply({}, X)


@program
def a_variable_that_is_not_given(nn):
    model = method(nn, lambda self, x: self.variable("state", "a", jnp.ones, (2,)).value)
    model.apply({"state": {"b": 1}}, X)


@program
def state_that_cannot_be_changed(nn):
    def call(self, x):
        a = self.variable("state", "a", jnp.ones, (2,))
        a.value = x

    model = method(nn, call)
    model.apply(run(model), X)


@program
def a_variable_put_that_cannot_be_changed(nn):
    method(nn, lambda self, x: self.put_variable("state", "a", x)).apply({}, X)


@program
def a_stream_that_is_not_given(nn):
    method(nn, lambda self, x: self.make_rng("dropout")).apply({}, X, rngs={"noise": KEY})


@program
def no_key_at_all(nn):
    method(nn, lambda self, x: self.make_rng()).apply({}, X)


@program
def a_key_that_is_none(nn):
    affine(nn)().init(jnp.ones(3), X)


@program
def variables_that_are_an_array(nn):
    affine(nn)().apply(X, X)


@program
def variables_of_variables(nn):
    affine(nn)().apply({"params": run(affine(nn)())}, X)


@program
def a_parameter_given_at_both_times(nn):
    nn.merge_param("deterministic", True, False)


@program
def a_parameter_given_at_no_time(nn):
    nn.merge_param("deterministic", None, None)


@program
def a_lazy_init_that_needs_a_value(nn):
    model = method(nn, lambda self, x: self.param("a", lambda key: x * 2))
    model.lazy_init(KEY, jax.ShapeDtypeStruct((2,), jnp.float32))


@program
def a_module_with_a_parent_of_no_kind(nn):
    affine(nn)(parent="x")


@program
def a_field_of_a_wrong_name(nn):
    affine(nn)(feature=3)


@program
def a_clone_with_a_field_of_a_wrong_name(nn):
    affine(nn)().clone(feature=3)


@program
def perturbations_without_an_entry(nn):
    fn = method(nn, lambda self, x: self.perturb("k", self.perturb("h", x)))
    fn.apply({"perturbations": {"h": X}}, X)


@program
def perturbations_without_a_module(nn):
    fn = method(nn, lambda self, x: self.perturb("h", x))
    outer = method(nn, lambda self, x: fn.clone()(fn.clone()(x)))
    outer.apply({"perturbations": {f"{type(fn).__name__}_0": {"h": X}}}, X)


@program
def a_name_that_is_no_text(nn):
    run(method(nn, lambda self, x: affine(nn)(name=3)(x)))


@program
def a_field_that_has_no_hash(nn):
    class Model(nn.Module):
        sizes: list

    hash(Model([1]))


@program
def no_call(nn):
    class Model(nn.Module):
        pass

    run(Model())


@program
def a_filter_that_is_none(nn):
    affine(nn)().init(KEY, X, mutable=3)
