"""Random-access datasets behind the functions of `weft.input.grain`.

As in Grain, an index beyond the length refers to the next epoch, with another shuffle.
"""

from collections.abc import Callable

import grain


class ProportionMapDataset(grain.MapDataset):
    """Elements whose index, modulo a period, is in a range."""

    def __init__(self, parent: grain.MapDataset, *, start: int, end: int, period: int):
        super().__init__(parent)
        self._start, self._kept, self._period = start, end - start, period
        whole, rest = divmod(len(parent), period)
        self._length = whole * self._kept + min(max(rest - start, 0), self._kept)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        epoch, index = divmod(index, self._length)
        round_, place = divmod(index, self._kept)
        parent_index = round_ * self._period + self._start + place
        return self._parent[parent_index + epoch * len(self._parent)]

    def __str__(self) -> str:
        end = self._start + self._kept
        return f"ProportionMapDataset[{self._start}:{end} of {self._period}]"


class PadMapDataset(grain.MapDataset):
    """Dataset padded to a length."""

    def __init__(self, parent: grain.MapDataset, *, length: int, pad_example_fn: Callable):
        super().__init__(parent)
        self._length, self._pad_example_fn = length, pad_example_fn

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        epoch, index = divmod(index, self._length)
        if index < len(self._parent):
            return self._parent[index + epoch * len(self._parent)]
        return self._pad_example_fn(self._parent[0])

    def __str__(self) -> str:
        return f"PadMapDataset({self._length})"
