"""Rows of whole archives: partition by partition, in processes of one machine or on a Ray cluster."""

from gristmill.engine.build import Engine, build
from gristmill.engine.job import BuildOptions
from gristmill.engine.summary import BuildSummary

__all__ = ["BuildOptions", "BuildSummary", "Engine", "build"]
