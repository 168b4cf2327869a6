"""The command line: arguments and printing, nothing else."""
