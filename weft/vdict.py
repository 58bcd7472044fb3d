"""Stacked parameters: a dict that says that its arrays are those of several equal layers.

Where layers repeat, their parameters are one array with a leading axis. Most mathematics need not
know; what takes statistics of "a parameter" does: its root mean square, or the clipping of its
update, is meant for each layer by itself. A `VDict` marks such a subtree, and `map_blocks` maps a
function over the parameters of a tree, over each layer's where they are stacked.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import DictKey


@jax.tree_util.register_pytree_with_keys_class
class VDict(dict[str, Any]):
    """A dict whose arrays all have a leading axis of the same size, one entry per layer.

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
    """`jax.tree.map`, where `fn` sees one layer at a time inside of a `VDict`.

    Args:
      fn: takes one array of each tree.
      tree: gives the structure.
      *rest: further trees, which `tree` is a prefix of.

    Returns:
      A tree like `tree`; results of stacked layers are stacked again.

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
