"""Bundles: kernels that travel to a chip in a folder, and what comes back.

`command` has the commands `bundle` and `compare`. `build` makes a case of a bundle, `cases` gathers all of them,
`chain` makes cases of the launches of a generation, whose weights, prompts and tokens are records of `generation`;
`sources` collects the source files that they need, `folder` writes it all. `run` is the program that goes along and
runs on the instance, with `run_model`, `run_chain` and `run_weights` as further parts; nothing else of this package
does. `manifest` and `result` read a bundle and its result, whatever has become of their files on the way; `values`
compares outputs, `comparison` has cases and steps as they came back, `compare` and `steps` report them, and `blame`
says where a fault is to be looked for. docs/bundle.md has the format.
"""
