"""Engines: adapters, connections, replicas and the probe."""
