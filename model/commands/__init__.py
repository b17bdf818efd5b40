"""Commands of `nkw` that work with models: options, entries and reports."""
