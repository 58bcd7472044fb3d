"""Layers of NNX, one file per family: modules that hold variables and call `weft.functional`."""
