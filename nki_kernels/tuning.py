"""The parameters of a kernel: their values in one launch are given, or from the table `tuned.py`, or the defaults.

A kernel that can be tuned declares its parameters in its file as rows (name, default, domain), in a tuple
`PARAMETERS`, and has a last argument `tuning`: a dict of values by name, or None. `<kernel>_bucket`, which takes the
kernel's arguments, names the launches that share one entry of the table. `nkw tune` reads all three.

Parameters change the time of a kernel and what it takes of SBUF and PSUM, never its results.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tuned import TUNED


def bucket(dtype, sizes, variant):
    """Return the name of the launches that share a table entry, such as "bfloat16 2048x4096x1024 aT".

    Each size is rounded up to a power of two: tile sizes that suit one suit those just below it.
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


def generation():
    """Return the generation of the core for which the kernel is specialised, as the table names it."""
    version = nisa.get_nc_version()
    if version == nisa.nc_version.gen2:
        return "gen2"
    if version == nisa.nc_version.gen3:
        return "gen3"
    return "gen4"


def parameters_of(kernel, parameters, launches, tuning):
    """Return the value of every parameter of `kernel`, in the order of its rows.

    parameters: the kernel's rows (name, default, domain). launches: the bucket. tuning: values that are given, by
    name; None takes those of the table. A parameter without such a value has its default.
    """
    values = {}
    for name, default, _ in parameters:
        values[name] = default
    changed = tuning
    if changed is None:
        changed = TUNED.get(f"{kernel} {generation()} {launches}", {}).get("values", {})
    for name, value in changed.items():
        assert name in values, f"{kernel} has no parameter {name}; it has {list(values)}"
        values[name] = value
    for name, _, domain in parameters:
        assert values[name] in domain, f"{name} of {kernel} is one of {domain}, not {values[name]}"
    return list(values.values())
