"""The names of the simulated chips. Command lines read them from here, because this module imports nothing."""

TARGETS = ("trn1", "inf2", "trn2", "trn3")
"""Canonical names of the simulated chips, in the order of their generations."""

GENERATIONS = {"gen2": "trn1", "gen3": "trn2", "gen4": "trn3"}
"""Names of NeuronCore generations, each with the chip that it means."""

DEFAULT_TARGET = "trn2"
TARGET_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"
"""The environment variable that names the chip, here as for the real package."""
HARDWARE_VARIABLE = "NKW_HARDWARE"
"""The environment variable that names an overlay: a file whose numbers replace those of the chips' records."""
