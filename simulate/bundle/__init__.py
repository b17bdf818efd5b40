"""Bundles: kernels that travel to a chip in a folder, and what comes back.

`command` has the commands `bundle` and `compare`. `build` makes a case of a bundle, `cases` gathers all of them,
`sources` collects the source files that they need, `folder` writes it all. `run` is the program that goes along and
runs on the instance; nothing else of this package does. `manifest` and `result` read a bundle and its result, whatever
has become of their files on the way; `values` compares outputs and `blame` says where a fault is to be looked for.
docs/bundle.md has the format.
"""
