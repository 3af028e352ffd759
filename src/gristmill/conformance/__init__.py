"""Conformance cases: run them on the real code and compare with what is right. See README.md in this folder."""

from gristmill.conformance.check import Checked, check
from gristmill.conformance.run import UNSUPPORTED_KINDS, read_case, run_case

__all__ = ["UNSUPPORTED_KINDS", "Checked", "check", "read_case", "run_case"]
