"""Two semantics of objects: graphs with references, or plain pytrees.

As *graphs* (the default) objects may be shared and in cycles, and what a function does to them is
seen outside: values, references, static attributes. As *trees* they are plain pytrees: nothing is
shared, and only the values of variables come back. `graph_updates=False` keeps references in what
goes in, and brings back values alone. What holds is settled when a function is transformed.
"""

from __future__ import annotations

from typing import Any

from weft.nnx.settings import Setting


class _Switch(Setting, default=True):
    """A setting that is True or False."""

    def __init__(self, value: Any, /):
        super().__init__(bool(value))

    @classmethod
    def current_value(cls) -> bool:
        """The value that holds in this thread."""
        return cls.current()


class set_graph_mode(_Switch, default=True):
    """Sets whether objects cross transformations as graphs, where `graph=` does not say.

    Args:
        value: True for graphs, False for trees. It holds in this thread from now on, or as a
            context or decorator as long as that lasts.

    Example:
        >>> with set_graph_mode(False):
        ...     set_graph_mode.current_value()
        False
    """


class set_graph_updates(_Switch, default=True):
    """Sets whether changes of references and static attributes come back from transformations.

    Args:
        value: what holds where `graph_updates=` does not say; see `set_graph_mode`.
    """


def references_and_structure(graph: bool | None, graph_updates: bool | None) -> tuple[bool, bool]:
    """Whether objects may be shared in a call, and whether changes of structure come back.

    Args:
        graph: as the user said, None for what holds in this thread.
        graph_updates: likewise.
    """
    references = set_graph_mode.current() if graph is None else bool(graph)
    updates = set_graph_updates.current() if graph_updates is None else bool(graph_updates)
    return references, references and updates
