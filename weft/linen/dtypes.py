"""The dtype in which a layer computes; the functions are those of `weft.functional.dtypes`."""

from weft.functional.dtypes import canonicalize_dtype, promote_dtype

__all__ = ["canonicalize_dtype", "promote_dtype"]
