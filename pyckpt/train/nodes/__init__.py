"""Ranks on several nodes, each of which has a directory of its own at the same path."""
