import jax
import numpy as np
import pytest


def names(path):
    return "/".join(key.key for key in path)


def wave(shape, offset=0.0):
    """Values for inputs that are easily written down for another library too."""
    values = np.sin(np.arange(np.prod(shape, dtype=int)) * 0.7 + offset).reshape(shape)
    return jax.device_put(values.astype(np.float32))


@pytest.fixture(name="wave", scope="session")
def wave_fixture():
    return wave


@pytest.fixture(scope="session")
def filled():
    """Makes a state for a module without drawing it, which would take seconds to compile.

    The i-th parameter, by the order of paths, is 0.3 sin(k + i), and 1 more if it is a scale.
    """

    def fill(module):
        specs = module.create_parameter_specs_recursively()
        leaves, tree = jax.tree_util.tree_flatten_with_path(specs)
        order = {path: i for i, path in enumerate(sorted(names(path) for path, _ in leaves))}
        values = []
        for path, spec in leaves:
            size = np.prod(spec.shape, dtype=int)
            value = 0.3 * np.sin(np.arange(size) + order[names(path)]).reshape(spec.shape)
            value += names(path).endswith("scale")
            values.append(jax.device_put(value.astype(np.float32)))
        return tree.unflatten(values)

    return fill
