"""Checkpoints in object stores, through obstore: ``pip install "pyckpt[cloud]"``."""
