"""Tries each parser with damaged and hostile input: ``python -m torture.fuzz``, or ``make fuzz``.

``native/`` holds the engine's parsers, under libFuzzer and sanitizers. `parsers` holds those in
Python, and what must hold of each. `mutate` changes their inputs with an eye for their structure.
`worker` runs one of them, guided by coverage where atheris is installed. What was found stays in
``torture/corpus``, which the tests replay.
"""
