"""Tuning of a kernel: a search for the parameters with which a dry launch is fastest.

`parameters` reads what a kernel declares, `measuring` times a candidate, `workers` and `cluster` time
candidates in several processes, `search` lets optuna choose candidates, `report` and `page` present the
outcome, `table` stores it for the kernel's launches. docs/tune.md is the guide.

A candidate is a dict with one value for each parameter of the kernel. Its objective is a predicted time in ns. A
candidate is refused if its launch fails, or if its process ends or exceeds the time limit.
"""
