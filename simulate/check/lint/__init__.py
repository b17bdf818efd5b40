"""`lint`: Python that runs in a simulation and that the NKI compiler refuses, found in the source without running it.

The rules are those of the language guide and the release notes, with the ids NKI001 to NKI048. Rules that
need shapes, values or the launch are left to the simulator. Only functions that use `nki.language`, `nki.isa`
or `nki.collectives` are checked, with the plain functions that kernels call for some rules; references and
test code are plain Python. A rule is a function under `@lint_rule` that yields a `Spot` for each fault; its
docstring begins with the sentence that `explain` prints.
"""

from __future__ import annotations

from simulate.check.lint.launched import lint_launched
from simulate.check.lint.rules import findings_in, lint_file, lint_source, load_rules, source_of

__all__ = ["findings_in", "lint_file", "lint_launched", "lint_source", "load_rules", "source_of"]
