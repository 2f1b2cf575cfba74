"""The checkpoints in a directory: which there are, which go, how they are read and exported."""
