"""The programs that lifted transformations are explained with, on scopes and on modules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from weft import linen as nn
from weft.core import Scope, apply, init, lift
from weft.core import nn as core_nn


def test_pack_transposes_each_matrix_in_a_collection():
    def lift_transpose(fn, target="params", variables=True, rngs=True):
        # by default we transpose 'params' and simply pass through all other variables.
        def wrapper(scope_fn, repack_fn, variable_groups, rng_groups, *args):
            # normally we would first call into a JAX transformed function here...
            target, rest = variable_groups

            def trans(x):
                if x.ndim == 2:
                    return x.T
                return x

            target = jax.tree_util.tree_map(trans, target)
            variable_groups = (target, rest)
            scope = scope_fn(variable_groups, rng_groups)
            y = fn(scope, *args)
            out_variables = repack_fn(scope)
            return y, out_variables

        return lift.pack(
            wrapper,
            in_variable_filters=(target, variables),
            out_variable_filters=(variables,),
            rng_filters=(rngs,),
        )

    x = jnp.ones((3, 2))
    y, params = init(lift_transpose(core_nn.dense))(random.PRNGKey(0), x, 4)

    kernel = params["params"]["kernel"]
    np.testing.assert_allclose(y, x @ kernel, rtol=1e-6)
    transposed = {"params": {**params["params"], "kernel": kernel.T}}
    again = apply(lift_transpose(core_nn.dense))(transposed, x, 4)
    np.testing.assert_array_equal(again, y)


def mlp(scope: Scope, xs):
    h = core_nn.dense(scope.push("hidden"), xs, 4)
    h = jax.nn.relu(h)
    return core_nn.dense(scope.push("out"), h, 1)


def test_manual_and_lifted_forms_have_equal_variables():
    def manual(scope: Scope, xs):
        def init_fn(rng, xs):
            keys = random.split(rng, xs.shape[0])
            return jax.vmap(lambda key, x: init(mlp)(key, x)[1], in_axes=0)(keys, xs)["params"]

        apply_fn = jax.vmap(apply(mlp), in_axes=0)
        mlp_params = scope.param("mlp", init_fn, xs)
        return apply_fn({"params": mlp_params}, xs)

    def lifted(scope: Scope, xs):
        vmapped = lift.vmap(
            mlp, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=0
        )
        return vmapped(scope.push("mlp"), xs)

    xs = jnp.ones((3, 4))
    expected = {
        "mlp": {
            "hidden": {"bias": (3, 4), "kernel": (3, 4, 4)},
            "out": {"bias": (3, 1), "kernel": (3, 4, 1)},
        }
    }
    for fn in (manual, lifted):
        y, variables = init(fn)(random.PRNGKey(0), xs)
        assert y.shape == (3, 1)
        assert jax.tree_util.tree_map(jnp.shape, variables["params"]) == expected


def test_inner_state_is_vectorized_like_parameters():
    def stateful_mlp(scope: Scope, x, *, train):
        h = core_nn.dense(scope.push("hidden"), x, 4)
        norm = scope.push("norm")
        h = core_nn.batch_norm(norm, h[None], use_running_average=not train, axis_name="batch")[0]
        return core_nn.dense(scope.push("out"), jax.nn.relu(h), 1)

    def f(scope: Scope, xs, *, train):
        vmapped = lift.vmap(
            lambda scope, x: stateful_mlp(scope, x, train=train),
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True},
            in_axes=0,
            axis_name="batch",
        )
        return vmapped(scope.push("mlp"), xs)

    xs = random.normal(random.key(1), (3, 4))
    _, variables = init(f)(random.key(0), xs, train=True)
    assert variables["batch_stats"]["mlp"]["norm"]["mean"].shape == (3, 4)
    _, changed = apply(f, mutable=["batch_stats"])(variables, xs, train=True)
    means = changed["batch_stats"]["mlp"]["norm"]["mean"]
    np.testing.assert_allclose(means, np.broadcast_to(means[0], means.shape), rtol=1e-6)


class MLP(nn.Module):
    @nn.compact
    def __call__(self, xs):
        h = nn.Dense(4, name="hidden")(xs)
        h = nn.relu(h)
        return nn.Dense(1, name="out")(h)


class NaiveVmapMLP(nn.Module):
    @nn.compact
    def __call__(self, xs):
        mlp = MLP()
        return jax.vmap(lambda mlp, x: mlp(x))(mlp, xs)  # fails


class ManualVmapMLP(nn.Module):
    @nn.compact
    def __call__(self, xs):
        mlp = MLP(parent=None)
        init_fn = lambda rng, xs: jax.vmap(mlp.init, in_axes=0)(  # noqa: E731
            random.split(rng, xs.shape[0]), xs
        )["params"]
        apply_fn = jax.vmap(mlp.apply, in_axes=0)
        mlp_params = self.param("mlp", init_fn, xs)
        return apply_fn({"params": mlp_params}, xs)


class LinenVmapMLP(nn.Module):
    @nn.compact
    def __call__(self, xs):
        VmapMLP = nn.vmap(MLP, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=0)
        return VmapMLP(name="mlp")(xs)


def test_raw_vmap_of_modules_fails():
    with pytest.raises(TypeError):
        NaiveVmapMLP().init(random.PRNGKey(0), jnp.ones((3, 4)))


@pytest.mark.parametrize("model", [ManualVmapMLP(), LinenVmapMLP()], ids=["by hand", "lifted"])
def test_modules_are_vectorized_manually_and_lifted(model):
    xs = jnp.ones((3, 4))
    variables = model.init(random.PRNGKey(0), xs)
    assert jax.tree_util.tree_map(jnp.shape, variables["params"]) == {
        "mlp": {
            "hidden": {"bias": (3, 4), "kernel": (3, 4, 4)},
            "out": {"bias": (3, 1), "kernel": (3, 4, 1)},
        }
    }
    assert model.apply(variables, xs).shape == (3, 1)


class StatefulMLP(nn.Module):
    @nn.compact
    def __call__(self, x, *, train):
        h = nn.Dense(4, name="hidden")(x)
        h = nn.BatchNorm(axis_name="batch")(h, use_running_average=not train)
        h = nn.relu(h)
        return nn.Dense(1, name="out")(h)


class LinenStatefulVmapMLP(nn.Module):
    @nn.compact
    def __call__(self, xs, *, train):
        VmapMLP = nn.vmap(
            StatefulMLP,
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True},
            in_axes=0,
        )
        return VmapMLP(name="mlp")(xs, train=train)


def test_batch_norm_in_a_vectorized_module_has_averages_per_index():
    xs = jnp.ones((3, 4))
    variables = LinenStatefulVmapMLP().init(random.PRNGKey(0), xs, train=True)
    of_norm = variables["batch_stats"]["mlp"]["BatchNorm_0"]
    assert jax.tree_util.tree_map(jnp.shape, of_norm) == {"mean": (3, 4), "var": (3, 4)}
    assert LinenStatefulVmapMLP().apply(variables, xs, train=False).shape == (3, 1)
