"""Bundles: folders that take kernels to a chip, and the results that come back.

`command` has the commands `bundle` and `compare`. `build` makes a case of a bundle, and `cases` collects the
cases. `chain` makes cases of the launches of a generation; `generation` has the records of its weights,
prompts and tokens. `sources` collects source files, and `folder` writes the bundle.

`run` is the program that runs on the instance, with the modules `run_model`, `run_chain` and `run_weights`;
no further module of this package runs there. `manifest` and `result` read a bundle and its result as
untrusted input. `values` compares outputs. `comparison` has the records of compared cases and steps,
`compare` and `steps` report them, and `blame` locates faults. docs/bundle.md has the format.
"""
