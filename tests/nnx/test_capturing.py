import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import GraphStructureError, ObjectArgumentError
from weft.nnx.capturing import capture
from weft.nnx.transforms.jit import jit


class Layer(nnx.Module):
    """Sows what goes in, and counts its calls."""

    def __init__(self):
        self.w, self.calls = nnx.Param(jnp.full(2, 2.0)), nnx.BatchStat(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        self.sow(nnx.Intermediate, "x", x)
        return x * self.w

    def twice(self, x):
        return self(self(x))


class Model(nnx.Module):
    """Two layers, what is between them, and something of another kind."""

    def __init__(self):
        self.layers = nnx.List([Layer(), Layer()])

    def __call__(self, x):
        x = self.perturb("between", self.layers[0](x))
        self.sow(nnx.Cache, "kept", 1)
        return self.layers[1](x)


def names(module):
    return [name for name, _ in module._items()]


def test_what_is_sown_is_a_result_and_not_left():
    model, x = Model(), jnp.ones(2)
    y, seen = capture(model, nnx.Intermediate)(x)
    assert y.tolist() == [4, 4] and isinstance(seen, nnx.State)
    assert jax.tree.map(jnp.sum, seen.to_pure_dict()) == {
        "layers": {0: {"x": (2,)}, 1: {"x": (4,)}}
    }
    assert names(model) == ["layers"] and names(model.layers[0]) == ["calls", "w"]
    assert model.layers[0].calls[...] == 1 and type(model) is Model
    y, kept, between = capture(model, nnx.Cache, nnx.Perturbation)(x)
    assert kept.to_pure_dict() == {"kept": (1,)} and between.between[...].tolist() == [0, 0]
    assert capture(model)(x).tolist() == [4, 4] and names(model) == ["layers"]


def test_functions_methods_and_decorators():
    model, x = Model(), jnp.ones(2)

    @capture(nnx.Intermediate)
    def run(x, *, modules):
        """Two models in a row."""
        return modules[0](modules[1](x))

    assert run.__name__ == "run" and run.__doc__ == "Two models in a row."
    _, seen = run(x, modules=[model, Model()])
    assert seen[1]["layers"][0].x[0].tolist() == [1, 1] and seen[0]["layers"][1].x[0][0] == 8
    _, seen = capture(model.layers[0].twice, nnx.Intermediate)(x)
    assert [v[0].item() for v in seen.x.get_value()] == [1, 2]
    _, seen = capture(lambda x: model.layers[0](x), nnx.Intermediate)(x)
    assert len(seen) == 0 and names(model.layers[0]) == ["calls", "w", "x"]


def test_results_of_methods():
    layer = Layer()
    y, seen = capture(layer, nnx.Intermediate, method_outputs=nnx.Intermediate)(jnp.ones(2))
    assert list(seen) == ["__call__", "x"] and seen["__call__"][0].tolist() == y.tolist()
    _, seen = capture(
        lambda m: m.twice(jnp.ones(2)), nnx.Cache, nnx.Intermediate, method_outputs=nnx.Cache
    )(layer)[:2]
    assert {name: len(v.get_value()) for name, v in seen.items()} == {"__call__": 2, "twice": 1}
    assert type(layer) is Layer


def test_what_is_there_first_and_gradients_of_what_is_between():
    model, x = Model(), jnp.ones(2)
    _, first = capture(model, nnx.Intermediate)(x)
    _, both = capture(model, nnx.Intermediate, init=first)(x)
    assert len(both["layers"][0].x.get_value()) == 2
    assert len(first["layers"][0].x.get_value()) == 1
    _, zeros = capture(model, nnx.Perturbation)(x)

    def loss(between):
        y, _ = capture(nnx.clone(model), nnx.Perturbation, init=between)(x)
        return y.sum()

    assert jax.grad(loss)(zeros).between[...].tolist() == [2, 2]
    shifted = jax.tree.map(lambda v: v + 1, zeros)
    assert capture(model, init=shifted)(x).tolist() == [6, 6]


def test_inside_of_and_around_compiled_functions():
    model, x = Model(), jnp.ones(2)
    run = jit(lambda model, x: capture(model, nnx.Intermediate)(x))
    for _ in range(2):
        y, seen = run(model, x)
    assert seen["layers"][1].x[0][0] == 2 and names(model) == ["layers"]
    inner = jit(lambda model, x: model(x))
    for _ in range(2):
        y, seen = capture(inner, nnx.Intermediate)(model, x)
    assert seen["layers"][1].x[0][0] == 2 and y[0] == 4 and names(model) == ["layers"]
    assert model.layers[0].calls[...] == 4


def test_modules_that_a_traced_function_closes_over_sow():
    class Plain(nnx.Module):
        """Changes nothing."""

        def __call__(self, x):
            self.sow(nnx.Intermediate, "x", 2 * x)
            return x

    plain = Plain()
    _, seen = jax.jit(capture(plain, nnx.Intermediate))(3)
    assert seen.to_pure_dict() == {"x": (6,)} and names(plain) == []


def test_captures_in_captures_and_modules_that_are_there_twice():
    layer = Layer()
    inner = capture(lambda m: m(jnp.ones(2)), nnx.Intermediate)
    (_, seen), rest = capture(lambda m: inner(m), nnx.Intermediate)(layer)
    assert list(seen) == ["x"] and len(rest) == 0 and names(layer) == ["calls", "w"]
    _, seen = capture(lambda ms: ms[0](ms[1](jnp.ones(2))), nnx.Intermediate)([layer, layer])
    assert list(seen) == [0] and len(seen[0].x.get_value()) == 2


def test_errors_and_copies_leave_nothing_behind():
    layer = Layer()

    def fails(layer):
        layer(jnp.ones(2))
        raise KeyError

    with pytest.raises(KeyError):
        capture(fails, nnx.Intermediate, method_outputs=nnx.Intermediate)(layer)
    clone, _ = capture(nnx.clone, nnx.Intermediate, method_outputs=nnx.Intermediate)(layer)
    for x in (layer, clone):
        assert names(x) == ["calls", "w"] and type(x) is Layer


def test_what_cannot_be_captured():
    layer, x = Layer(), jnp.ones(2)
    with pytest.raises(ObjectArgumentError, match="capture was given 3; give kinds of variables"):
        capture(layer, 3)
    with pytest.raises(ObjectArgumentError, match="was given a int, which cannot be called"):
        capture(3, nnx.Intermediate)
    with pytest.raises(GraphStructureError, match="init has a Cache at 'a/x', and no module is th"):
        capture(layer, nnx.Cache, init=nnx.State({"a": {"x": nnx.Cache(1)}}))(x)
    with pytest.raises(GraphStructureError, match="init has a int at 'x', and that is no variable"):
        capture(layer, nnx.Cache, init={"x": 1})(x)
    with pytest.raises(GraphStructureError, match="two modules among the arguments sow at 'x'"):
        capture(lambda a, b: a(b(x)), nnx.Intermediate)(layer, Layer())
    assert names(layer) == ["calls", "w"]
