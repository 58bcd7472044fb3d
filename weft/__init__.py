"""Weft: one JAX neural-network library, three ways to write a model, one trainer.

Nothing is imported here: `import weft.config` stays free of JAX, and each way of writing is paid
for when it is used.
"""

__version__ = "0.1.0"
