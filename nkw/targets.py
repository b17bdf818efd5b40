"""Names of the simulated chips. Command lines read them here, because this module imports nothing."""

TARGETS = ("trn1", "inf2", "trn2", "trn3")
"""Canonical names of the simulated chips, in the order of their generations."""

GENERATIONS = {"gen2": "trn1", "gen3": "trn2", "gen4": "trn3"}
"""Names of NeuronCore generations, each with the chip that it means."""

DEFAULT_TARGET = "trn2"
TARGET_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"
"""Environment variable that selects the chip, as for the real package."""
LNC_VARIABLE = "NEURON_LOGICAL_NC_CONFIG"
"""Environment variable with the number of physical cores of a rank (LNC), as for the real package."""
HARDWARE_VARIABLE = "NKW_HARDWARE"
"""Environment variable with the path of an overlay, a file whose numbers replace numbers of the chips' records."""
