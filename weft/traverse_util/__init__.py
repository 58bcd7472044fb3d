"""Nested dicts as flat dicts of paths, and traversals that update parts of containers."""

from weft.traverse_util.flat_dicts import (
    empty_node,
    flatten_dict,
    path_aware_map,
    unflatten_dict,
)
from weft.traverse_util.traversals import (
    ModelParamTraversal,
    Traversal,
    TraverseAttr,
    TraverseCompose,
    TraverseEach,
    TraverseFilter,
    TraverseId,
    TraverseItem,
    TraverseMerge,
    TraverseTree,
    t_identity,
)

__all__ = [
    # Nested dicts by their paths.
    "flatten_dict",
    "unflatten_dict",
    "empty_node",
    "path_aware_map",
    # Traversals.
    "t_identity",
    "Traversal",
    "TraverseId",
    "TraverseItem",
    "TraverseAttr",
    "TraverseEach",
    "TraverseTree",
    "TraverseFilter",
    "TraverseCompose",
    "TraverseMerge",
    "ModelParamTraversal",
]
