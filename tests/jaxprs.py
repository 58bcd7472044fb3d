"""What the jaxpr of a function contains."""

import jax


def largest_array(fn, *args):
    """Returns the size of the largest array that a function computes, also in inner functions.

    Arguments may be shapes.
    """
    return max(_sizes(jax.make_jaxpr(fn)(*args).jaxpr))


def _sizes(jaxpr):
    for eqn in jaxpr.eqns:
        yield from (var.aval.size for var in eqn.outvars if hasattr(var.aval, "size"))
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_has_equations):
            if _has_equations(value):
                yield from _sizes(getattr(value, "jaxpr", value))


def _has_equations(value):
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")
