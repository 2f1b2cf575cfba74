"""pyckpt in other people's training loops: a module for each framework.

Each module imports its framework, and nothing else does: `pip install pyckpt[lightning]` brings the
framework that `pyckpt.integrations.lightning` needs. What the frameworks have in common (what a
training state is made of, when it is saved, what a failed save does) is `pyckpt.Checkpointer`'s;
these modules say only where in a framework its parts are found.
"""
