"""`lint`: Python that runs in a simulation and that the NKI compiler refuses, found in the source without running it.

The rules are those of the language guide and the release notes, by their ids NKI001 to NKI048. Some of them need
shapes, values or the launch and are left to the simulator. Only functions that use `nki.language` or `nki.isa` are
looked at; references and test code are plain Python.
"""

from __future__ import annotations

from simulate.check.lint.launched import lint_launched
from simulate.check.lint.rules import findings_in, lint_file, lint_source, load_rules, source_of

__all__ = ["findings_in", "lint_file", "lint_launched", "lint_source", "load_rules", "source_of"]
