"""Launchers of one program as several processes: on this machine, with Slurm, with Kubernetes.

A `Job` is a config: a command, the number of processes and their resources. `LocalJob` runs it
here, `SlurmJob` writes a script for `sbatch`, `JobSetJob` a manifest for `kubectl`. Each process
finds its id with `weft.launch.distributed` and joins the others through `jax.distributed`.
"""

from weft._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
