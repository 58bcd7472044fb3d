"""Layers of NNX, one file per family: modules that hold variables and call `weft.functional`.

Parameters are drawn from the stream `params` of the argument `rngs`.
"""
