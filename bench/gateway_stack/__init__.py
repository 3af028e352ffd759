"""Processes that the gateway's benchmark starts: an engine, the gateway, and what it is compared with."""
