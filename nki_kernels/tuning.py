"""The parameters of a kernel: their values in one launch are given, or from the table `tuned.py`, or the defaults.

A kernel that can be tuned declares its parameters in its file as rows (name, default, domain), in a tuple
`PARAMETERS`, and has a last argument `tuning`: a dict of values by name, or None. `<kernel>_bucket`, which
takes the kernel's arguments, names the launches that share one entry of the table. `nkw tune` reads all
three.

Parameters change the time of a kernel and what it takes of SBUF and PSUM, never its results.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tuned import TUNED


def name_bucket(dtype, sizes, variant):
    """Return the name of the launches that share a table entry, such as "bfloat16 2048x4096x1024 aT".

    It has the dtype, or "other" for neither float32 nor bfloat16, and the sizes, each rounded up to a power
    of two. Tile sizes that suit one size suit those just below it. variant: added at the end, if it is not
    empty.
    """
    name = "other"
    if dtype == nl.float32:
        name = "float32"
    elif dtype == nl.bfloat16:
        name = "bfloat16"
    for i in range(len(sizes)):
        rounded = 1
        while rounded < sizes[i]:
            rounded = rounded * 2
        name = f"{name}{'x' if i > 0 else ' '}{rounded}"
    return f"{name} {variant}" if variant else name


def find_generation():
    """Return the generation of the NeuronCore for which the kernel is specialised: "gen2", "gen3" or "gen4"."""
    version = nisa.get_nc_version()
    if version == nisa.nc_version.gen2:
        return "gen2"
    if version == nisa.nc_version.gen3:
        return "gen3"
    return "gen4"


def choose_parameters(kernel, parameters, launches, tuning):
    """Return the list of the values of all parameters of a kernel, in the order of its rows.

    A value comes from `tuning`, or if that is None from the entry of TUNED for this core, kernel and bucket.
    A parameter without such a value has its default.

    Args:
        kernel: its name, as in keys of TUNED.
        parameters: its rows (name, default, domain).
        launches: its bucket, as `name_bucket` returns it.
        tuning: dict of values by name, or None.

    Raises:
        AssertionError: if a name is not among the rows, or a value not in its domain.
    """
    values = {}
    for name, default, _ in parameters:
        values[name] = default
    changed = tuning
    if changed is None:
        changed = TUNED.get(f"{kernel} {find_generation()} {launches}", {}).get("values", {})
    for name, value in changed.items():
        assert name in values, f"{kernel} has no parameter {name}; it has {list(values)}"
        values[name] = value
    for name, _, domain in parameters:
        assert values[name] in domain, f"{name} of {kernel} is one of {domain}, not {values[name]}"
    return list(values.values())
