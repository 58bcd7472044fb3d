"""Functions of `weft.nnx` that take objects as graphs, whatever the settings are."""

import functools

from weft import nnx

_GRAPH = """clone flatten get_abstract_model graphdef iter_children iter_graph iter_modules
    recursive_map reseed split state view view_info"""
_GRAPH_UPDATES = """cached_partial checkify cond custom_vjp eval_shape fori_loop fork_rngs grad jit
    jvp pmap remat scan shard_map split_rngs switch value_and_grad vjp vmap while_loop"""

for _name in _GRAPH.split():
    globals()[_name] = functools.partial(getattr(nnx, _name), graph=True)
for _name in _GRAPH_UPDATES.split():
    globals()[_name] = functools.partial(
        getattr(nnx, _name), graph=True, graph_updates=True
    )
