"""Layers as nodes of a tree of modules, each made from a config; see `weft.hierarchy.layers`."""
