"""Linen in NNX and NNX in Linen: the files of what users know as `weft.nnx.bridge`."""
