"""What every way of writing a model shares above the lifting engine: the language of filters."""

from weft.core.filters import DenyList, in_filter

__all__ = ["DenyList", "in_filter"]
