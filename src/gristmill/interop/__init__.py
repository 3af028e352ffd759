"""Captures that other programs wrote, read as our own. README.md says how an importer is added."""

from gristmill.interop.importer import Importer, Report
from gristmill.interop.registry import IMPORTERS, importer_named, importer_of

__all__ = ["IMPORTERS", "Importer", "Report", "importer_named", "importer_of"]
