"""Low-rank maps of NNX: the same programs on Flax and on Weft."""

import jax
import jax.numpy as jnp
import pytest

from tests.parity.objects import (
    X,
    applied,
    in_half,
    named,
    normal,
    same,
    same_error,
    same_signature,
    tolerance,
)

LORA = [
    {},
    {"dtype": jnp.bfloat16},
    {"param_dtype": jnp.bfloat16},
    {"a_initializer": normal, "b_initializer": normal},
    {"promote_dtype": in_half},
    {"a_metadata": {"tag": "a"}, "b_metadata": {"tag": "b"}},
]


@named(LORA)
def test_lora(kwargs):
    same(applied("LoRA", 5, 2, 3, **kwargs), tolerance(kwargs))


@named(LORA)
def test_lora_linear(kwargs):
    rename = {"dtype", "param_dtype", "promote_dtype"}
    options = {f"lora_{k}" if k in rename else k: v for k, v in kwargs.items()}
    same(applied("LoRALinear", 5, 3, lora_rank=2, **options), tolerance(kwargs))
    options |= {"use_bias": False, "kernel_metadata": {"tag": "k"}, "param_dtype": jnp.bfloat16}
    same(applied("LoRALinear", 5, 3, lora_rank=2, **options), 2e-2)


def test_lora_with_base_module():
    def program(nnx):
        rngs = nnx.Rngs(0)
        base = nnx.Linear(5, 3, rngs=rngs)
        options = {"b_initializer": normal, "lora_param_type": nnx.Param, "rngs": rngs}
        layer = nnx.LoRA(5, 2, 3, base_module=base, **options)
        only = nnx.LoRA(5, 2, 3, base_module=lambda x, scale: scale * x[..., :3], **options)
        y = layer(X), layer(X, out_sharding=None), only(X, scale=2.0)
        return y, [nnx.state(layer, nnx.Param), layer.lora_a, rngs]

    same(program)


def test_class_of_low_rank_parameters_filters_them():
    def program(nnx):
        layer = nnx.LoRALinear(5, 3, lora_rank=2, rngs=nnx.Rngs(0))
        paths = nnx.to_flat_state(nnx.state(layer, nnx.LoRAParam)).paths
        return (), [paths, issubclass(nnx.LoRAParam, nnx.Param)]

    same(program)


def test_layer_in_jit_and_under_a_gradient():
    def program(nnx):
        layer = nnx.LoRALinear(5, 3, lora_rank=2, b_initializer=normal, rngs=nnx.Rngs(0))
        graphdef, state = nnx.split(layer)
        loss = jax.jit(lambda state: jnp.sum(nnx.merge(graphdef, state)(X) ** 2))
        return nnx.to_pure_dict(jax.grad(loss)(state)), []

    same(program, 1e-4)


FAILURES = {
    "not a module": lambda nnx: nnx.LoRA(5, 2, 3, base_module=3, rngs=nnx.Rngs(0))(X),
    "another option": lambda nnx: nnx.LoRALinear(5, 3, lora_rank=1, q=1, rngs=nnx.Rngs(0)),
}


@pytest.mark.parametrize("program", FAILURES.values(), ids=FAILURES)
def test_except_clauses_for_flax_catch_weft_errors(program):
    same_error(program)


@pytest.mark.parametrize("method", ["__init__", "__call__"])
@pytest.mark.parametrize("name", ["LoRA", "LoRALinear"])
def test_signatures(name, method):
    same_signature(name, method)
