"""What the command line shows of checkpoints, as functions that any program may call."""
