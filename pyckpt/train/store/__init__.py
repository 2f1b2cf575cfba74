"""The checkpoints in a directory: finding, removing, reading and exporting them."""
