"""Values of parameters that were found to be faster than the defaults, by kernel, generation and bucket of launches.

`nkw tune --write` puts an entry here. `arguments` are those it was found with, as the command line names them.
"""

from __future__ import annotations

TUNED = {}
