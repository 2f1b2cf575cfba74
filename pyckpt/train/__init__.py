"""Whole training states: their objects, when to save them, and which checkpoints to keep."""
