"""Runs as SLURM jobs: plan, job, queue, end of the batch script."""
