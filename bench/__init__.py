"""Benchmarks: each module measures one kind of work against a floor from the same run; `python -m bench` runs them.

A module has `run()`, which returns one dictionary a measurement: `name`, `seconds`, `floor_seconds`, `ratio`, `target`
(a ratio, or None) and `ok`. Nothing here is a test: a slow machine fails nothing.
"""
