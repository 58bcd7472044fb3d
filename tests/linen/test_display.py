import jax.numpy as jnp

from tests.linen.modules import KEY, Affine, X
from weft.linen.display import module_repr
from weft.linen.module import Module


class Model(Module):
    inner: Module
    sizes: tuple = (1, 2)
    act: object = jnp.tanh

    def setup(self):
        self.last = Affine(3)

    def __call__(self, x):
        return self.last(self.act(self.inner(x)))


FREE = """\
Model(
    # attributes
    inner = Affine(
        # attributes
        features = 2
        scale = 1.0
    )
    sizes = (1, 2)
    act = tanh
)"""

BOUND = """\
Model(
  # attributes
  sizes = (1, 2)
  act = tanh
  # children
  inner = Affine(
    # attributes
    features = 2
    scale = 1.0
  )
  last = Affine(
    # attributes
    features = 3
    scale = 1.0
  )
)"""


def test_modules_are_shown_with_their_fields():
    assert repr(Model(Affine())) == FREE
    assert repr(type("Empty", (Module,), {})()) == "Empty()"


def test_bound_modules_are_shown_with_their_submodules():
    bound = Model(Affine()).bind(Model(Affine()).init(KEY, X))
    bound(X)
    assert module_repr(bound, step="  ") == BOUND


def test_what_has_not_been_made_yet_is_not_shown():
    class Late(Module):
        a: int
        b: int = 2

        def __post_init__(self):
            shown.append(repr(self))
            super().__post_init__()

    shown = []
    Late(1)
    assert shown == ["Late(\n    # attributes\n    a = 1\n    b = 2\n)"]
