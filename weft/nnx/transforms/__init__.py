"""JAX's transformations for functions of objects.

`kind` moves objects into and out of a transformation, `calls` holds the open calls that errors
name, `jit` caches the structure of objects between calls, and `weft.lifting` does the rest.
"""
