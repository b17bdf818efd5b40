"""Quantisation of model folders in numpy: schemes, rounding with and without calibration, containers, and errors.

`schemes` lists what can be written. `process` rounds a model layer by layer, with the statistics that `calibration`
collects, and `folder` writes the result. `evaluation` compares a quantised model with its original.
"""
