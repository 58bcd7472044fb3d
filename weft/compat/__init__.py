"""Modules and names for programs written for Flax, for AXLearn or for earlier versions.

Nothing else in Weft imports it: `weft` opens the door (`weft.compat.door`), which leads from the
paths that those programs import to the modules here, and to the rest of Weft.
"""
