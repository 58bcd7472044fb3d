from weft.launch.distributed import joined_processes as joined_processes
from weft.launch.job import Job as Job
from weft.launch.jobset import JobSetJob as JobSetJob
from weft.launch.local import LocalJob as LocalJob
from weft.launch.slurm import SlurmJob as SlurmJob
