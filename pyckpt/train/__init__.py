"""Whole training states: what they are made of, when they are saved, which are kept."""
