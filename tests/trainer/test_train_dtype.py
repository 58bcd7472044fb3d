import jax
import jax.numpy as jnp
import pytest

from weft.errors import TrainDtypeError
from weft.trainer.train_dtype import cast_floats, cast_for_forward, per_param_train_dtype_by_path

PARAMS = {
    "emb": {"weight": jnp.ones(2)},
    "norm": {"scale": jnp.ones(2), "count": jnp.ones(2, jnp.int32)},
    "linear": {"weight": jnp.ones(2), "bias": jnp.ones(2)},
}
BATCH = {"image": jnp.ones(3), "label": jnp.ones(3, jnp.int32)}


def dtypes_of(tree):
    return jax.tree.map(lambda x: str(x.dtype), tree)


def test_only_floats_are_cast():
    assert dtypes_of(cast_floats(BATCH, jnp.bfloat16)) == {"image": "bfloat16", "label": "int32"}
    assert cast_floats(BATCH, None) is BATCH


@pytest.mark.parametrize("dtype", [jnp.bfloat16, "bfloat16", jnp.dtype("bfloat16")], ids=str)
def test_one_dtype_is_that_of_parameters_and_batch(dtype):
    params, batch = cast_for_forward(PARAMS, BATCH, dtype)
    assert dtypes_of(params["norm"]) == {"scale": "bfloat16", "count": "int32"}
    assert dtypes_of(batch) == {"image": "bfloat16", "label": "int32"}
    assert cast_for_forward(PARAMS, BATCH, None) == (PARAMS, BATCH)


def test_the_first_rule_that_matches_a_path_gives_the_dtype():
    rules = [("norm/.*", None), ("emb/weight", jnp.float16), (".*/weight", jnp.float32)]
    train_dtype = per_param_train_dtype_by_path(jnp.bfloat16, update_rules=rules)
    params, batch = cast_for_forward(PARAMS, BATCH, train_dtype)
    assert dtypes_of(params) == {
        "emb": {"weight": "float16"},
        "norm": {"scale": "float32", "count": "int32"},
        "linear": {"weight": "float32", "bias": "bfloat16"},
    }
    assert dtypes_of(batch)["image"] == "bfloat16"
    _, batch = cast_for_forward(PARAMS, BATCH, lambda params: jax.tree.map(lambda x: None, params))
    assert dtypes_of(batch)["image"] == "float32"


def test_a_rule_that_matches_nothing_is_named():
    train_dtype = per_param_train_dtype_by_path(update_rules=[("norm/scales", None)])
    with pytest.raises(TrainDtypeError, match=r"'norm/scales' of train_dtype.*norm/scale"):
        cast_for_forward(PARAMS, BATCH, train_dtype)
