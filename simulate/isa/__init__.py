"""The instruction book: one file per instruction, pure planners, beside the helpers that instructions share.

Importing this package imports every file of `instructions` and `collectives`, which enter their planners into
`INSTRUCTIONS` and `COLLECTIVES`.
"""

import importlib
import pkgutil

from simulate.isa import collectives, instructions
from simulate.isa.book import COLLECTIVES, INSTRUCTIONS, plan_for
from simulate.isa.enums import Engine
from simulate.isa.plan import Accumulate, Cost, DmaCost, Domain, Plan, Rendezvous

__all__ = [
    "COLLECTIVES",
    "INSTRUCTIONS",
    "Accumulate",
    "Cost",
    "DmaCost",
    "Domain",
    "Engine",
    "Plan",
    "Rendezvous",
    "plan_for",
]

for _folder in (instructions, collectives):
    for _file in pkgutil.iter_modules(_folder.__path__):
        importlib.import_module(f"{_folder.__name__}.{_file.name}")
