"""``python -m pyckpt``: the command line."""

from pyckpt.cli import main

main()
