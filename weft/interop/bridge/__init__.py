"""Linen in NNX and NNX in Linen: the implementation of `weft.nnx.bridge`."""
