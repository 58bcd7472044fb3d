"""Einsums of NNX: the same programs on Flax and on Weft."""

import jax.numpy as jnp
import pytest

import weft.nnx
from tests.parity.objects import (
    COMMON,
    X,
    applied,
    named,
    normal,
    same_compiled,
    same_error,
    same_signature,
    tolerance,
    twice,
)
from weft.errors import ArgumentShapeError


@named([*COMMON, {"einsum_op": twice(jnp.einsum)}])
def test_einsum(kwargs):
    same_compiled(
        applied("Einsum", "abcd,dfe->abfce", (5, 3, 6), (3, 6), **kwargs), tolerance(kwargs)
    )


@pytest.mark.parametrize(
    ("subscripts", "kernel", "bias"),
    [
        ("abcd , dn -> abcn", (5, 6), (6,)),
        ("...d,dn->...n", (5, 6), (6,)),
        ("abcd,ndh->hnabc", (6, 5, 2), (2, 6)),
        ("abcd,cdn->abn", [4, 5, 6], [6]),
        ("abcd,cd->ab", (4, 5), ()),
        ("abcd,den->aben", (5, 2, 3), (6,)),
        ("abcd,d...->abc...", (5, 2), (2,)),
        ("abcd,de->abce", (5, 6), None),
    ],
)
def test_einsum_subscripts(subscripts, kernel, bias):
    same_compiled(applied("Einsum", subscripts, kernel, bias, bias_init=normal))


def test_call_subscripts():
    same_compiled(
        applied("Einsum", "abcd,de->abce", (5, 6), (6,), bias_init=normal, call=("abcd,de->eabc",))
    )


FAILURES = {
    "no result": ("ab,bc", (5, 3)),
    "no result of a call": ("ab,bc->ac", (5, 3), None, "abc"),
    "three operands": ("a,b,c->abc", (5,)),
    "axes of the kernel": ("ab,bcd->ac", (5, 3)),
    "sizes of the kernel": ("ab,bc->ac", (4, 3)),
}


@pytest.mark.parametrize("case", FAILURES.values(), ids=FAILURES)
def test_except_clauses_for_flax_catch_weft_errors(case):
    subscripts, kernel, bias, call = (*case, None, None)[:4]
    same_error(lambda nnx: nnx.Einsum(subscripts, kernel, bias, rngs=nnx.Rngs(0))(X[0, 0], call))


@pytest.mark.parametrize("method", ["__init__", "__call__"])
def test_signatures(method):
    same_signature("Einsum", method)


def test_bias_of_another_size_is_refused_in_the_call():
    def program(nnx):
        layer = nnx.Einsum("ik,kj->ij", (5, 4), 5, rngs=nnx.Rngs(0))
        return layer.bias[...], []

    same_compiled(program)
    layer = weft.nnx.Einsum("ik,kj->ij", (5, 4), 5, rngs=weft.nnx.Rngs(0))
    with pytest.raises(ArgumentShapeError, match=r"a bias of shape \(5,\); expected \(4,\)"):
        layer(jnp.ones((3, 5)))
