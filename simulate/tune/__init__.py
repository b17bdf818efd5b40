"""Tuning a kernel: the values of its parameters with which a dry launch is fastest.

`parameters` reads what a kernel declares, `measuring` times one candidate, `workers` and `cluster` do that in many
processes, `search` decides with optuna which candidate is next, `report` and `page` show what was found, `table` keeps
it where kernels look it up. docs/tune.md is the guide.
"""
