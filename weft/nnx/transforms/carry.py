"""Objects in the carry of a loop, which come back as themselves.

A loop's state is identified by reference, so a body must return the objects that it received.
"""

from __future__ import annotations

from typing import Any

import jax

from weft.errors import TransformArgumentError
from weft.lifting.crossing import Static
from weft.nnx.transforms.calls import current_call
from weft.nnx.transforms.kind import is_object


def without_objects(given: Any, returned: Any) -> Any:
    """Returns the carry that a body returned, with leafless boxes in place of its objects.

    Raises:
        TransformArgumentError: if the returned objects differ from the given ones.
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
                    f"{type(x).__name__} than the body received; change a carried object in place "
                    "(nnx.update(model, state), variable[...] = value) and return the same "
                    "object."
                )
            x = Static(n)
            n += 1
        boxed.append(x)
    if n < len(before):
        raise TransformArgumentError(
            f"{_title()}: the body receives {len(before)} objects in its carry and returns {n}; "
            "return each in its place."
        )
    return jax.tree.unflatten(tree, boxed)


def with_objects(given: Any, returned: Any) -> Any:
    """Returns the carry that a loop returned, with the caller's own objects in it."""
    objects = [x for x in jax.tree.leaves(given, is_leaf=is_object) if is_object(x)]
    return jax.tree.map(
        lambda x: objects[x.value] if isinstance(x, Static) else x,
        returned,
        is_leaf=lambda x: isinstance(x, Static),
    )


def _title() -> str:
    call = current_call()
    return call.title if call is not None else "a loop"
