"""Dtype of a layer's computation, from `weft.functional.dtypes`."""

from weft.functional.dtypes import canonicalize_dtype, promote_dtype

__all__ = ["canonicalize_dtype", "promote_dtype"]
