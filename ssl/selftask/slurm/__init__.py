"""Training runs as SLURM jobs: plan, job, queue, epilogue of the batch script."""
