"""How long the property tests run: `GRISTMILL_PROPERTIES=long pytest tests/properties` for a night, else a minute."""

from __future__ import annotations

import os
from typing import Final

from hypothesis import HealthCheck, settings

__all__ = ["checked"]

_QUIET: Final = [
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
    HealthCheck.filter_too_much,
    HealthCheck.large_base_example,
]

settings.register_profile(
    "properties-ci", max_examples=500, derandomize=True, database=None, deadline=None, suppress_health_check=_QUIET
)
settings.register_profile("properties-long", max_examples=50_000, deadline=None, suppress_health_check=_QUIET)

checked: Final = settings(settings.get_profile(f"properties-{os.environ.get('GRISTMILL_PROPERTIES', 'ci')}"))
"""Decorator: run a property test with the chosen profile."""
