"""The frameworks' own tests of saving and resuming, run against pyckpt's classes."""
