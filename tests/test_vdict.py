import jax
import jax.numpy as jnp
import numpy as np

from weft.vdict import VDict, map_blocks

RNG = np.random.default_rng(0)


def rms(x, y):
    return jnp.sqrt(jnp.mean(x * y))


def test_it_is_a_pytree_with_the_paths_of_a_dict():
    tree = {"a": VDict(w=1, b=2)}
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    assert [jax.tree_util.keystr(path) for path in paths] == ["['a']['b']", "['a']['w']"]
    doubled = jax.tree.map(lambda x: 2 * x, tree)["a"]
    assert doubled == VDict(w=2, b=4)
    assert type(doubled) is VDict
    assert repr(VDict(w=1)) == "VDict({'w': 1})"


def test_blocks_are_layers_where_parameters_are_stacked():
    plain, stacked, twice = (RNG.normal(size=s) for s in ((3, 4), (2, 3, 4), (5, 2, 3, 4)))
    tree = {"a": plain, "b": VDict(c={"w": stacked}), "d": VDict(e=VDict(w=twice))}
    out = map_blocks(rms, tree, tree)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    np.testing.assert_allclose(out["a"], np.sqrt(np.mean(plain**2)), rtol=1e-6)
    np.testing.assert_allclose(out["b"]["c"]["w"], np.sqrt(np.mean(stacked**2, (1, 2))), rtol=1e-6)
    np.testing.assert_allclose(out["d"]["e"]["w"], np.sqrt(np.mean(twice**2, (2, 3))), rtol=1e-6)


def test_blocks_without_arrays_stay_as_they_are():
    assert map_blocks(rms, {"a": VDict(w=None)}, {"a": VDict(w=None)}) == {"a": VDict(w=None)}


def test_it_crosses_transformations():
    tree = VDict(w=jnp.arange(3.0))
    grads = jax.jit(jax.grad(lambda t: jnp.sum(t["w"] ** 2)))(tree)
    assert type(grads) is VDict
    np.testing.assert_array_equal(grads["w"], [0.0, 2.0, 4.0])
