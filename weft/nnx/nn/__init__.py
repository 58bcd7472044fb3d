"""Layers of NNX, a file for each family: they hold variables, and call `weft.functional`."""
