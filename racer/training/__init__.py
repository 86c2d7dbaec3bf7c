"""What surrounds learning: runs, checkpoints, processes, evaluation, the command line."""
