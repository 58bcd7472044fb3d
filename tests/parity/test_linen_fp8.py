"""Products of 8 bits: the same programs, and bits, on Flax and on Weft."""

import importlib

import flax.linen.fp8_ops
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import weft.linen.fp8_ops
from tests.keys import draw
from tests.parity.linen import KEY, same_tree

pytestmark = pytest.mark.filterwarnings("ignore:.*Fp8DotGeneralOp is:DeprecationWarning")

HALF = jnp.bfloat16
SCALE, HISTORY = jnp.array([2.0]), jnp.array([1.0, 2.0, 3.0, 4.0])
CLASSES = ["Fp8DotGeneralOp", "Fp8DirectDotGeneralOp", "NANOOFp8DotGeneralOp", "Fp8DotGeneral"]
EINSUM = {
    "bqhd,bkhd->bhqk": [(2, 3, 4, 5), (2, 6, 4, 5)],
    "bhqk,bkhd->bqhd": [(2, 4, 3, 6), (2, 6, 4, 5)],
    "bc,ab->ac": [(4, 2), (3, 4)],
}


def same_bits(program):
    """Runs `program(nn)` on both, compiled together."""
    results = jax.jit(lambda: [program(nn) for nn in (flax.linen, weft.linen)])()
    same_tree(*results)


def with_meta(variables):
    """Returns variables whose scales and histories are those of a run."""
    meta = variables["_overwrite_with_gradient"]
    meta = jax.tree.map(lambda x: x + 0.3 + (jnp.arange(x.size) % 3).reshape(x.shape), meta)
    return {**variables, "_overwrite_with_gradient": meta}


def gradients(module, variables, *args, **kwargs):
    """Returns a result, and its gradients with respect to variables and arrays."""
    arrays = [x for x in args if isinstance(x, jax.Array)]

    def run(variables, *arrays):
        rest = iter(arrays)
        given = [next(rest) if isinstance(x, jax.Array) else x for x in args]
        return module.apply(variables, *given, **kwargs)

    y, backward = jax.vjp(run, with_meta(variables), *arrays)
    cotangent = jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype)
    return y, backward(cotangent), variables


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("dtypes", [(None, None), (HALF, HALF), (HALF, None), (None, HALF)])
def test_products(name, dtypes):
    x, kernel = (jnp.asarray(5 * draw(i, 2, 3, 4), dtypes[i]) for i in range(2))
    numbers = ((2,), (2,)), ((0,), (0,))

    def program(nn):
        op = getattr(nn, name)(amax_history_length=4)
        return gradients(op, op.init(KEY, x, kernel, numbers), x, kernel, numbers)

    same_bits(program)


@pytest.mark.parametrize("subscripts", EINSUM)
@pytest.mark.parametrize("dtype", [None, HALF])
def test_einsum(subscripts, dtype):
    shapes = EINSUM[subscripts]
    operands = [draw(i, *shape) for i, shape in enumerate(shapes)]

    def program(nn):
        op, kwargs = nn.Fp8Einsum(amax_history_length=4), {"preferred_element_type": dtype}
        return gradients(op, op.init(KEY, subscripts, *operands), subscripts, *operands, **kwargs)

    same_bits(program)


LAYERS = {
    "Dense": lambda nn, op: nn.Dense(3, dtype=HALF, dot_general_cls=op),
    "DenseGeneral": lambda nn, op: nn.DenseGeneral((3, 2), (-1,), (0,), dot_general_cls=op),
    "attention": lambda nn, op: nn.MultiHeadDotProductAttention(
        2,
        qkv_dot_general_cls=op,
        out_dot_general_cls=op,
        qk_attn_weights_einsum_cls=lambda: nn.Fp8Einsum(4, name="qk"),
        attn_weights_value_einsum_cls=lambda: nn.Fp8Einsum(4, name="av"),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    x = draw(1, 2, 6, 4)

    def program(nn):
        layer = LAYERS[name](nn, lambda: nn.Fp8DotGeneralOp(amax_history_length=4))
        return gradients(layer, layer.init(KEY, x), x)

    same_bits(program)


def test_layers_in_a_loop():
    def program(nn):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                op = lambda: nn.Fp8DotGeneralOp(amax_history_length=4)  # noqa: E731
                return nn.Dense(4, dot_general_cls=op)(x), None

        class Stack(nn.Module):
            @nn.compact
            def __call__(self, x):
                axes = {"params": 0, "_overwrite_with_gradient": 0}
                split = {"params": True}
                return nn.scan(Block, axes, split_rngs=split, length=3)()(x, None)[0]

        x = draw(1, 2, 4)
        return gradients(Stack(), Stack().init(KEY, x), x)

    same_bits(program)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e4m3fnuz])
@pytest.mark.parametrize("compute", [jnp.float32, HALF])
def test_functions(dtype, compute):
    x = jnp.asarray(900 * draw(1, 3, 4), compute)

    def program(nn):
        ops = importlib.import_module(nn.__name__ + ".fp8_ops")
        q = ops.quantize(x, dtype, SCALE, compute)
        in_qdq, backward = jax.vjp(
            lambda *args: ops.in_qdq(compute, dtype, *args), x, SCALE, HISTORY
        )
        out_qdq = jax.vjp(lambda *args: ops.out_qdq(compute, dtype, *args), x, SCALE, HISTORY)
        return (
            q.astype(jnp.float32),
            ops.dequantize(q, compute, SCALE),
            ops.qdq(x, dtype, SCALE, compute),
            (in_qdq, backward(in_qdq), out_qdq[0], out_qdq[1](x)),
            ops.update_fp8_meta(x, dtype, SCALE, HISTORY),
            [ops.compute_scale(a, SCALE, 448.0, 1) for a in map(jnp.float32, (0, 2, np.inf))],
            ops.get_fp8_max(dtype, compute),
        )

    same_bits(program)


def test_gradients_of_products_with_several_axes():
    x, y, g = draw(1, 2, 3, 4, 6), draw(2, 6, 5, 4), draw(3, 2, 3, 5)
    options = {"precision": None, "preferred_element_type": None}
    options["dimension_numbers"] = ((3, 2), (0, 2)), ((), ())

    def program(nn):
        ops = importlib.import_module(nn.__name__ + ".fp8_ops")
        swapped = ops.dot_general_transpose_lhs(
            jnp.moveaxis(g, -1, 0), x, y, swap_ans=True, **options
        )
        lhs = ops.dot_general_transpose_lhs(g, x, y, **options)
        return lhs, swapped, ops.dot_general_transpose_rhs(g, x, y, **options)

    same_bits(program)


@pytest.mark.parametrize("nn", [flax.linen, weft.linen])
def test_deprecation(nn):
    with pytest.warns(DeprecationWarning, match="Fp8DirectDotGeneralOp") as warned:
        nn.Fp8DotGeneralOp()
    assert warned[0].filename == __file__ or nn is flax.linen
    nn.NANOOFp8DotGeneralOp()
