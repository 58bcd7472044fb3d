import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import GraphStructureError, ObjectArgumentError
from weft.nnx.capture import capture


class Layer(nnx.Module):
    """Layer that sows its input and counts its calls."""

    def __init__(self):
        self.w, self.calls = nnx.Param(jnp.full(2, 2.0)), nnx.BatchStat(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        self.sow(nnx.Intermediate, "x", x)
        return x * self.w

    def twice(self, x):
        return self(self(x))


def names(module):
    return [name for name, _ in module._items()]


def test_errors_and_copies_are_cleaned_up():
    layer = Layer()

    def fails(layer):
        layer(jnp.ones(2))
        raise KeyError

    with pytest.raises(KeyError):
        capture(fails, nnx.Intermediate, method_outputs=nnx.Intermediate)(layer)
    clone, _ = capture(nnx.clone, nnx.Intermediate, method_outputs=nnx.Intermediate)(layer)
    for x in (layer, clone):
        assert names(x) == ["calls", "w"] and type(x) is Layer


def test_invalid_targets():
    layer, x = Layer(), jnp.ones(2)
    with pytest.raises(ObjectArgumentError, match="capture was given 3; give kinds of variables"):
        capture(layer, 3)
    with pytest.raises(ObjectArgumentError, match="was given a int, which is not callable"):
        capture(3, nnx.Intermediate)
    with pytest.raises(GraphStructureError, match="init has a Cache at 'a/x', but no module is th"):
        capture(layer, nnx.Cache, init=nnx.State({"a": {"x": nnx.Cache(1)}}))(x)
    with pytest.raises(
        GraphStructureError, match="init has a int at 'x', but it is not a variable"
    ):
        capture(layer, nnx.Cache, init={"x": 1})(x)
    with pytest.raises(GraphStructureError, match="two modules among the arguments sow at 'x'"):
        capture(lambda a, b: a(b(x)), nnx.Intermediate)(layer, Layer())
    assert names(layer) == ["calls", "w"]


SOWN = nnx.StateAxes({(nnx.Param, nnx.Intermediate): 0, ...: None})
MAPPED = nnx.StateAxes({nnx.Intermediate: 0, ...: None})
MODES = [{"graph": False}, {"graph_updates": False}, {}]


class Sower(nnx.Module):
    """Sows what it returns, and has something that is not mapped."""

    def __init__(self, *shape):
        self.w, self.calls = nnx.Param(jnp.full(shape, 2.0)), nnx.BatchStat(jnp.array(3.0))

    def __call__(self, x):
        y = x * jnp.broadcast_to(self.w[...], x.shape) * self.calls
        self.sow(nnx.Intermediate, "y", y)
        return y


def called(model, x):
    return model(x)


def differentiated(**modes):
    return lambda model, x: nnx.grad(lambda m: m(x).sum(), **modes)(model)


def branched(**modes):
    return lambda model, x: nnx.cond(True, called, called, model, x, **modes)


TRANSFORMED = {
    "jit": lambda **modes: nnx.jit(called, **modes),
    "remat": lambda **modes: nnx.remat(called, **modes),
    "grad": differentiated,
    "cond": branched,
    "vmap": lambda **modes: nnx.vmap(called, in_axes=(MAPPED, 0), **modes),
    "remat in jit": lambda **modes: nnx.jit(nnx.remat(called, **modes), **modes),
    "vmap in grad": lambda **modes: (
        lambda model, x: nnx.grad(
            lambda m: nnx.vmap(called, in_axes=(MAPPED, 0), **modes)(m, x).sum(), **modes
        )(model)
    ),
}


@pytest.mark.parametrize("modes", MODES, ids=str)
@pytest.mark.parametrize("transformation", TRANSFORMED)
def test_sown_values_escape_transformations(transformation, modes):
    model, x = nnx.Dict(a=Sower(2)), jnp.arange(6.0).reshape(3, 2)
    run = TRANSFORMED[transformation](**modes)
    _, seen = capture(lambda model: run(model.a, x), nnx.Intermediate)(model)
    assert nnx.to_pure_dict(seen)["a"]["y"][0].tolist() == (x * 6).tolist()
    assert names(model.a) == ["calls", "w"]


@pytest.mark.parametrize("modes", MODES, ids=str)
@pytest.mark.parametrize("transformed", [lambda f: f, nnx.jit], ids=["scan", "scan in jit"])
def test_sown_values_in_loops_are_stacked(transformed, modes):
    model, x = Sower(3, 2), jnp.ones(2)
    run = transformed(
        nnx.scan(
            lambda x, m: m(x), in_axes=(nnx.Carry, SOWN), out_axes=nnx.Carry, length=3, **modes
        )
    )
    _, seen = capture(run, nnx.Intermediate)(x, model)
    assert seen.y[0].tolist() == [[6, 6], [36, 36], [216, 216]]
    if not modes:
        run(x, model)
        assert model.y[0].tolist() == seen.y[0].tolist()


def test_modules_merged_under_vmap_sow():
    model, x = Sower(2), jnp.arange(6.0).reshape(3, 2)

    @capture(nnx.Intermediate)
    def run(model, x):
        graphdef, sown, rest = nnx.split(model, nnx.Intermediate, ...)

        def each(sown, x):
            model = nnx.merge(graphdef, sown, rest)
            return model(x), nnx.state(model, nnx.Intermediate)

        y, sown = jax.vmap(each)(sown, x)
        nnx.update(model, sown)
        return y

    y, seen = run(model, x)
    assert seen.y[0].tolist() == y.tolist() == (x * 6).tolist()


def split_and_merged(transformation, returned, calls=1):
    """Returns a function that merges a module inside a raw transformation and calls it."""

    def run(model, x):
        graphdef, state = nnx.split(model)

        def each(x):
            inner = nnx.merge(graphdef, state)
            y = inner(x)
            return y, nnx.state(inner, nnx.Intermediate) if returned else None

        for _ in range(calls):
            y, sown = transformation(each)(x)
        if returned:
            nnx.update(model, sown)
        return y

    return run


RAW = {
    "vmap": jax.vmap,
    "vmap in vmap": lambda f: lambda x: jax.vmap(jax.vmap(f))(x[None]),
    "jit": jax.jit,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, x: (c, f(x)), None, x)[1],
}


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("outer", [lambda f: f, nnx.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("transformation", RAW)
def test_merged_module_state_returns_sown_values(transformation, outer, calls):
    model, x = nnx.Sequential(Sower(2), Sower(2)), jnp.arange(6.0).reshape(3, 2)
    run = split_and_merged(RAW[transformation], returned=True, calls=calls)
    y, seen = capture(outer(run), nnx.Intermediate)(model, x)
    first, second = seen["layers"][0].y, seen["layers"][1].y
    assert len(first[...]) == len(second[...]) == 1
    assert first[0].reshape(3, 2).tolist() == (x * 6).tolist()
    assert second[0].tolist() == y.tolist() and y.reshape(3, 2).tolist() == (x * 36).tolist()


@pytest.mark.parametrize("outer", [lambda f: f, nnx.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("transformation", RAW)
def test_unreturned_sown_values_of_merged_module_fail(transformation, outer):
    run = outer(split_and_merged(RAW[transformation], returned=False))
    model, x = nnx.Dict(a=Sower(2)), jnp.arange(6.0).reshape(3, 2)
    with pytest.raises(
        GraphStructureError, match=r"sown or perturbed at 'a/y' is lost.*nnx\.update"
    ):
        capture(lambda model: run(model.a, x), nnx.Intermediate)(model)
    assert names(model.a) == ["calls", "w"]


def test_earlier_sown_values_precede_those_of_a_merged_module():
    model, x = Sower(2), jnp.ones((3, 2))
    run = split_and_merged(jax.vmap, returned=True, calls=2)
    _, seen = capture(lambda m: (m(x[0]), run(m, x)), nnx.Intermediate)(model)
    # The trace holds the whole state, so existing values are mapped, too.
    assert [jnp.shape(y) for y in seen.y[...]] == [(3, 2), (3, 2)]
