import pytest

from tests.linen.modules import KEY, Affine, X
from weft.errors import NameInUseError
from weft.linen.methods import compact
from weft.linen.module import Module
from weft.linen.state import Setup


def test_a_name_is_given_once():
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


def test_given_names_do_not_count():
    class Model(Module):
        @compact
        def __call__(self, x):
            return Affine()(Affine(name="a")(Affine()(x)))

    assert sorted(Model().init(KEY, X)["params"]) == ["Affine_0", "Affine_1", "a"]


def test_a_submodule_and_a_variable_of_one_name():
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


def test_a_bound_module_is_called_again_and_again():
    class Model(Module):
        @compact
        def __call__(self, x):
            return self.param("b", lambda key: 1.0) + Affine()(x)

    bound = Model().bind(Model().init(KEY, X))
    assert (bound(X) == bound(X)).all()
    assert list(bound._state.children) == ["Affine_0"]


def test_setup_that_failed_is_due_again():
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
    assert bound._state.setup is Setup.DUE
    fails.clear()
    assert bound(X).shape == (3, 2)
