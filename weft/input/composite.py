"""Inputs composed of other inputs, concatenated or zipped.

concatenated: a1 a2 b1 b2 b3        zipped: {a: a1, b: b1} {a: a2, b: b2}
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from weft import config, errors
from weft.hierarchy.module import Module, nowrap
from weft.input.base import Input
from weft.typing import Nested


class CompositeInput(Input):
    """Base of composite inputs, whose children each read their own part of the data."""

    class Config(Input.Config):
        """Configures a composite input."""

        is_training: config.Required[bool] = config.REQUIRED
        """Whether the input is for training; set in each of `inputs` with the field."""

    def _add_inputs(
        self, inputs: Mapping[str, config.InstantiableConfig]
    ) -> dict[str, Input]:
        """Adds the inputs as children.

        Raises InputDatasetError if there is none, or one has its own dispatcher.
        """
        if not inputs:
            raise errors.InputDatasetError(
                f"{self.path()}: inputs is empty, so there are no batches; add at least one input"
            )
        added: Any = {}
        for name, cfg in inputs.items():
            child: Any = cfg.clone()
            if hasattr(child, "is_training"):
                child.is_training = self.config.is_training
            if child.input_dispatcher is not None:
                raise errors.InputDatasetError(
                    f"{self.path()}: {name!r} has an input_dispatcher; the batches are "
                    f"dispatched together: set it in {type(self).__name__} instead"
                )
            # It determines the part of the data that each of them reads.
            if self.dispatcher is not None:
                child.input_dispatcher = self.dispatcher.config
            added[name] = self._add_child(name, child)
        return added


class ConcatenatedInput(CompositeInput):
    """Batches of several inputs, one input after the other.

    All inputs but the last must be finite.
    """

    class Config(CompositeInput.Config):
        inputs: Sequence[config.InstantiableConfig] = []

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._inputs = self._add_inputs(
            {f"input{i}": c for i, c in enumerate(cfg.inputs)}
        )

    @nowrap
    def dataset(self) -> Iterable[Nested[np.ndarray]]:
        return _Composite(_ConcatenatedIterator, self._inputs)


class ZipInput(CompositeInput):
    """Dicts with one batch of each input; ends with the first input that ends."""

    class Config(CompositeInput.Config):
        inputs: dict[str, config.InstantiableConfig] = {}

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._inputs = self._add_inputs(cfg.inputs)

    @nowrap
    def dataset(self) -> Iterable[Nested[np.ndarray]]:
        return _Composite(_ZipIterator, self._inputs)


class _Composite:
    """Dataset that opens the datasets of its parts when iterated."""

    def __init__(
        self,
        iterator_class: "type[_CompositeIterator]",
        inputs: Mapping[str, Input],
    ):
        self._iterator_class, self._inputs = iterator_class, inputs

    def __iter__(self) -> "_CompositeIterator":
        return self._iterator_class(
            {
                name: iter(input_.dataset())
                for name, input_ in self._inputs.items()
            }
        )


class _CompositeIterator(Iterator[Any]):
    """Iterator whose state consists of the states of its parts, if they have one."""

    def __init__(self, parts: Mapping[str, Any]):
        self._parts = dict(parts)

    def __getattr__(self, name: str) -> Any:
        # Present only if all parts can be saved, which marks the iterator as savable.
        if name in ("get_state", "set_state") and all(
            hasattr(part, name) for part in self._parts.values()
        ):
            return self._get_states if name == "get_state" else self._set_states
        raise AttributeError(
            f"{type(self).__name__!r} has no attribute {name!r}"
        )

    def _get_states(self) -> dict[str, Any]:
        return {name: part.get_state() for name, part in self._parts.items()}

    def _set_states(self, state: Mapping[str, Any]) -> None:
        for name, part in self._parts.items():
            part.set_state(state[name])

    def close(self) -> None:
        for part in self._parts.values():
            if hasattr(part, "close"):
                part.close()


class _ConcatenatedIterator(_CompositeIterator):
    def __next__(self) -> Any:
        # An ended part ends again, so its position need not be saved.
        for part in self._parts.values():
            try:
                return next(part)
            except StopIteration:
                continue
        raise StopIteration


class _ZipIterator(_CompositeIterator):
    def __next__(self) -> Any:
        # If one ends, those before it must not advance: only returned batches count.
        state = self.get_state() if hasattr(self, "get_state") else None
        batch = {}
        for name, part in self._parts.items():
            try:
                batch[name] = next(part)
            except StopIteration:
                if state is not None:
                    self.set_state(state)
                raise
        return batch
