"""The kinds of objects in a training state, and how each is saved and restored."""
