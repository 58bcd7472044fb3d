"""Objects that are carried through a loop: they come back as themselves.

The engine brings back the state of all objects that went in. So where a body returns its carry, the
objects in it have nothing to add, and must be the ones that it was given: a loop's state is known
by reference.
"""

from __future__ import annotations

from typing import Any

import jax

from weft.errors import TransformArgumentError
from weft.lifting.crossing import Static
from weft.nnx.transforms.calls import current_call
from weft.nnx.transforms.kind import is_object


def without_objects(given: Any, returned: Any) -> Any:
    """What a body returns as its carry, with boxes without leaves for the objects in it.

    Args:
        given: the carry that the body was given.
        returned: the carry that it returns.

    Raises:
        TransformArgumentError: if another object is returned than was given, or another structure.
    """
    before = [x for x in jax.tree.leaves(given, is_leaf=is_object) if is_object(x)]
    leaves, tree = jax.tree_util.tree_flatten_with_path(returned, is_leaf=is_object)
    n = 0
    boxed = []
    for path, x in leaves:
        if is_object(x):
            if n >= len(before) or x is not before[n]:
                raise TransformArgumentError(
                    f"{_title()}: the carry{jax.tree_util.keystr(path)} is returned as another "
                    f"{type(x).__name__} than the body was given; a carried object is changed "
                    "where it is (nnx.update(model, state), variable[...] = value) and the same "
                    "one is returned."
                )
            x = Static(n)
            n += 1
        boxed.append(x)
    if n < len(before):
        raise TransformArgumentError(
            f"{_title()}: the body is given {len(before)} objects in its carry and returns {n}; "
            "return each of them in its place."
        )
    return jax.tree.unflatten(tree, boxed)


def with_objects(given: Any, returned: Any) -> Any:
    """What a loop returns as its carry, with the caller's own objects in it."""
    objects = [x for x in jax.tree.leaves(given, is_leaf=is_object) if is_object(x)]
    return jax.tree.map(
        lambda x: objects[x.value] if isinstance(x, Static) else x,
        returned,
        is_leaf=lambda x: isinstance(x, Static),
    )


def _title() -> str:
    call = current_call()
    return call.title if call is not None else "a loop"
