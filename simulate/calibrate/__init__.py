"""Calibration: finds the numbers of a hardware record that measured kernel times contradict, and their corrections."""
