"""JAX's transformations of functions of objects: each argument says what happens to its state.

`kind` is how objects cross, `calls` what the transformations share: what was said of the arguments,
whose names errors show. `jit` remembers how the objects of a call looked, so that the next one
costs what `jax.jit` costs. All else is the engine of `weft.lifting` with the signatures of JAX.
"""
