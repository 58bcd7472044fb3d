"""Starting one program as several processes: on this machine, by Slurm, by Kubernetes.

A `Job` is a config: a command, how many processes, what each needs. `LocalJob` runs them here,
`SlurmJob` writes a script for `sbatch`, `JobSetJob` a manifest for `kubectl`. Each process reads in
`weft.launch.distributed` where it stands among the others, and joins them by `jax.distributed`.
"""
