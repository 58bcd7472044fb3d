"""Two semantics of objects: graphs with references, or plain pytrees.

As *graphs* (the default), objects may be shared and cyclic, and all changes in a function are
visible outside: values, references, static attributes. As *trees*, nothing is shared, and only the
values of variables come back. `graph_updates=False` allows shared input references, and brings back
values only. The mode is fixed when a function is transformed.
"""

from __future__ import annotations

from typing import Any

from weft.nnx.settings import Setting


class _Switch(Setting, default=True):
    """A boolean setting."""

    def __init__(self, value: Any, /):
        super().__init__(bool(value))

    @classmethod
    def current_value(cls) -> bool:
        """Returns the value in this thread."""
        return cls.current()


class set_graph_mode(_Switch, default=True):
    """Sets whether objects cross transformations as graphs by default.

    Args:
        value: True for graphs, False for trees; the default of `graph=`. It applies to this thread
            from now on, or within a context or decorated function.

    Example:
        >>> with set_graph_mode(False):
        ...     set_graph_mode.current_value()
        False
    """


class set_graph_updates(_Switch, default=True):
    """Sets whether transformations bring back changes of references and static attributes.

    Args:
        value: the default of `graph_updates=`; for its scope see `set_graph_mode`.
    """


def references_and_structure(graph: bool | None, graph_updates: bool | None) -> tuple[bool, bool]:
    """Returns whether objects may be shared, and whether changes of structure come back."""
    references = set_graph_mode.current() if graph is None else bool(graph)
    updates = set_graph_updates.current() if graph_updates is None else bool(graph_updates)
    return references, references and updates
