"""Calibration: finds the numbers of a hardware record that measured kernel times contradict, and their corrections.

`entries` reads measured times, `measurement` predicts them, `numbers` turns fields of a record into parameters, `fit`
solves for their changes, `calibration` joins these, `report` presents the outcome. docs/calibrate.md is the guide.
"""
