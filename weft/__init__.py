"""Weft: one JAX neural-network library, three ways to write a model, one trainer.

Imports nothing, so that `import weft.config` stays free of JAX.
"""

__version__ = "0.1.0"
