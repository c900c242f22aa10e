"""Many runs over one config: on this machine, by Slurm or by Ray."""
