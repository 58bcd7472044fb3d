"""Stacked parameters: a dict whose arrays have a leading axis over equal layers.

Statistics of a single parameter, such as its root mean square or the clipping of its update, must
be computed per layer. `VDict` marks stacked subtrees; `map_blocks` maps a function over each
layer's parameters.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import DictKey


@jax.tree_util.register_pytree_with_keys_class
class VDict(dict[str, Any]):
    """A dict whose arrays have a leading axis of equal size, one entry per layer.

    It is a pytree like a dict, with the same key paths.

    >>> jax.tree.map(lambda x: x + 1, VDict(w=1.0))
    VDict({'w': 2.0})
    """

    def __repr__(self) -> str:
        return f"VDict({super().__repr__()})"

    def tree_flatten_with_keys(self):
        keys = tuple(sorted(self))
        return [(DictKey(key), self[key]) for key in keys], keys

    @classmethod
    def tree_unflatten(cls, keys: tuple[str, ...], children: Any) -> "VDict":
        return cls(zip(keys, children, strict=True))


def map_blocks(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Maps `fn` over trees like `jax.tree.map`, one layer at a time inside of a `VDict`.

    `tree` is a prefix of `rest`. Results of stacked layers are stacked again.

    >>> import jax.numpy as jnp
    >>> tree = {"a": jnp.array([3.0, 1.0]), "layers": VDict(b=jnp.array([[3.0, 1.0], [5.0, 7.0]]))}
    >>> map_blocks(jnp.max, tree)["layers"]["b"].tolist()
    [3.0, 7.0]
    """

    def of_layer(layer: dict[str, Any], *others: dict[str, Any]) -> dict[str, Any]:
        return {name: map_blocks(fn, layer[name], *(o[name] for o in others)) for name in layer}

    def at(x: Any, *others: Any) -> Any:
        if not isinstance(x, VDict):
            return fn(x, *others)
        if not jax.tree.leaves(x):
            return x
        return VDict(jax.vmap(of_layer)(dict(x), *(dict(other) for other in others)))

    return jax.tree.map(at, tree, *rest, is_leaf=lambda x: isinstance(x, VDict))
