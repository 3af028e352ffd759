"""Rollouts as a service: gateway, ledger and pipeline put together."""
