"""Linear maps of Linen: the same programs on Flax and on Weft."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw
from tests.parity.linen import KEY, named, same, same_compiled, same_error

X = draw(1, 2, 3, 4, 5)
normal = jax.nn.initializers.normal(1.0)


def initialized(name, *args, x=X, **kwargs):
    return lambda nn: getattr(nn, name)(*args, **kwargs).init_with_output(KEY, x)


def counted(calls):
    """Records the arguments of `dot_general` with the result."""

    def dot_general(*args, **kwargs):
        calls.append((args[2], *sorted(kwargs)))
        return 2 * jax.lax.dot_general(*args, **kwargs)

    return dot_general


def in_half(*args, **kwargs):
    assert kwargs == {"dtype": None}
    return [None if x is None else jnp.asarray(x, jnp.bfloat16) for x in args]


COMMON = [
    {},
    {"use_bias": False, "precision": "highest"},
    {"dtype": "float16"},
    {"param_dtype": jnp.bfloat16},
    {"param_dtype": jnp.bfloat16, "dtype": jnp.float32},
    {"param_dtype": jnp.complex64},
    {"kernel_init": jax.nn.initializers.ones, "bias_init": normal},
    {"promote_dtype": in_half},
]


def tolerance(kwargs):
    return 2e-2 if len(kwargs.keys() & {"dtype", "param_dtype", "promote_dtype"}) else 1e-5


@named(COMMON)
def test_dense(kwargs):
    same_compiled(initialized("Dense", 3, **kwargs), tolerance(kwargs))


@named(COMMON)
def test_dense_general(kwargs):
    same_compiled(initialized("DenseGeneral", (3, 2), (-1, 1), (0,), **kwargs), tolerance(kwargs))


@named([*COMMON, {"preferred_element_type": jnp.bfloat16}])
def test_einsum(kwargs):
    same_compiled(initialized("Einsum", (5, 6), "abcd,de->abce", **kwargs), 2e-2)


@pytest.mark.parametrize(
    "x",
    [X[0, 0, 0], X.astype(jnp.bfloat16), jnp.arange(6).reshape(2, 3), X[:0]],
    ids=["vector", "half", "integers", "empty"],
)
def test_dense_inputs(x):
    same_compiled(initialized("Dense", 3, x=x), 2e-2)
    same_compiled(initialized("Dense", 3, False, jnp.bfloat16, x=x), 2e-2)


@pytest.mark.parametrize(
    ("features", "axis", "batch_dims"),
    [
        ((3, 2), -1, ()),
        (3, (-1, 1), ()),
        (3, (1, -1), ()),
        (3, (), ()),
        ((3, 2), -1, (0,)),
        ((3, 2), (-1,), (0, 1)),
        ((3, 2), (-1,), (1, 0)),
        ((3, 2), -1, 0),
        ([3, 2], [-1, -2], [0]),
        ((2, 3, 2), (0, 1, 2, 3), ()),
        (np.array([3, 2]), np.arange(2), ()),
    ],
)
def test_dense_general_of_axes(features, axis, batch_dims):
    same_compiled(initialized("DenseGeneral", features, axis, batch_dims, bias_init=normal))


def test_dense_general_of_axes_in_an_array():
    # Flax needs their values.
    same(initialized("DenseGeneral", np.int32(3), jnp.arange(1, 3), np.array([0])))


@pytest.mark.parametrize("batch_dims", [(1,), (-1,), (0, 2), (0, -3)])
def test_dense_general_has_the_first_axes_as_its_batch(batch_dims):
    same_error(initialized("DenseGeneral", 3, -1, batch_dims))


@named([{"dot_general": True}, {"dot_general": True, "dot_general_cls": True}])
@pytest.mark.parametrize("name", ["Dense", "DenseGeneral"])
def test_custom_products(name, kwargs):
    def program(nn):
        calls, of_cls = [], []
        hooks = {"dot_general": counted(calls), "dot_general_cls": lambda: counted(of_cls)}
        hooks = {hook: hooks[hook] for hook in kwargs}
        y, variables = getattr(nn, name)(3, **hooks).init_with_output(KEY, X)
        return (y, str(calls), str(of_cls)), variables

    same(program)


@pytest.mark.parametrize(
    ("shape", "subscripts"),
    [
        ((5, 2), "abc,cd->abd"),
        ([5, 2], " abc , cd -> abd "),
        ((5, 2, 3), "abc,cde->abde"),
        ((5, 2, 3), "abc,cde->adbe"),
        ((5, 2, 3), "abc,cde->abed"),
        ((2, 5, 3), "abc,dce->adbe"),
        ((4, 5, 2), "abc,bcd->adb"),
        ((4, 5, 2), "abc,bcd->ad"),
        ((4, 5), "abc,bc->a"),
        ((5, 2), "abc,cd->"),
        ((5, 2), "...c,cd->...d"),
        ((5, 2), "...c,cd->d..."),
        ((5, 2), "...c,cd->d"),
        ((4, 5, 2), "a...c,...cd->a...d"),
        ((1, 5, 2), "...c,...cd->...d"),
        ((7, 3, 1, 5, 2), "...c,...cd->...d"),
    ],
)
def test_einsum_of_subscripts(shape, subscripts):
    same_compiled(initialized("Einsum", shape, subscripts, x=X[0], bias_init=normal))


def test_einsum_with_subscripts_when_called():
    same_compiled(lambda nn: nn.Einsum((5, 2)).init_with_output(KEY, X, "...i,io->...o"))
    same_compiled(lambda nn: nn.Einsum((5, 2)).init_with_output(KEY, X, einsum_str="...i,io->...o"))


@pytest.mark.parametrize(
    ("shape", "subscripts"),
    [
        ((5, 2), None),
        ((5, 2), "abcd,de"),
        ((5, 2), "abcd,de,ef->abcf"),
        ((5, 2), "abcd->abc"),
        ((5, 2), "ab,bc->ac"),
        ((5, 2), "abcd,de->abcx"),
    ],
)
def test_einsum_rejects(shape, subscripts):
    same_error(initialized("Einsum", shape, subscripts))


def test_einsum_subscripts_given_twice():
    once = "...i,io->...o"
    same_error(lambda nn: nn.Einsum((5, 2), once).init(KEY, X, once))


def test_axis_metadata():
    def program(nn):
        names = {
            "kernel_init": nn.with_partitioning(normal, ("in", None, "out")),
            "bias_init": nn.with_partitioning(normal, (None, "out")),
        }
        general = nn.DenseGeneral((3, 2), **names).init_with_output(KEY, X)
        kernel = nn.with_partitioning(normal, ("in", "out"))
        dense = nn.Dense(3, kernel_init=kernel).init_with_output(KEY, X)
        einsum = nn.Einsum((5, 2), "...i,io->...o", kernel_init=kernel).init_with_output(KEY, X)
        ys, variables = zip(dense, general, einsum, strict=True)
        return ys, list(variables)

    same_compiled(program)


@pytest.mark.parametrize(
    "params",
    [
        {"kernel": jnp.ones((5, 4)), "bias": jnp.ones(3)},
        {"kernel": jnp.ones((5, 3)), "bias": jnp.ones(4)},
        {"kernel": jnp.ones((5, 3))},
        {},
    ],
    ids=["kernel", "bias", "no bias", "nothing"],
)
def test_wrong_parameter_shapes(params):
    for name in ("Dense", "DenseGeneral"):
        same_error(lambda nn, name=name: getattr(nn, name)(3).apply({"params": params}, X))


def test_dtype_without_fractions():
    assert "int32" in same_error(initialized("Dense", 3, dtype=jnp.int32))


def test_gradients():
    def program(nn):
        model = nn.DenseGeneral((3, 2), axis=(1, -1))
        variables = model.init(KEY, X)
        return jax.grad(lambda v: (model.apply(v, X) ** 2).sum())(variables), variables

    same_compiled(program, 1e-4)
