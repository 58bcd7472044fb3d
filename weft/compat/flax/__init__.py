"""Modules with the names, arguments and results of Flax's, next to its layers in the rest of Weft.

`paths.txt` has the modules of Flax that are laid out differently in Weft.
"""
