"""Breaks pyckpt on purpose, and counts what it survives: `make torture`, `make fuzz`, `make soak`.

Each module runs alone, as ``python -m torture.NAME``, and writes ``torture/results/NAME.json``.
"""
