"""Rows to the formats of trainers: a module for each of them. README.md says how one is added."""

from gristmill.export.trainers.layout import by_rollout
from gristmill.export.trainers.projection import Kept, Projection, Sample, Source
from gristmill.export.trainers.registry import PROJECTIONS
from gristmill.export.trainers.samples import read_samples

__all__ = ["PROJECTIONS", "Kept", "Projection", "Sample", "Source", "by_rollout", "read_samples"]
