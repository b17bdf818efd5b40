"""The options of `nkw compile`."""

from model.commands.options import options
from model.commands.serve.arguments import ENGINE

DESCRIPTION = (
    "Compile the graphs of an engine for NeuronCores: every step that its buckets allow. Without AWS Neuron's packages "
    "the graphs are counted, and what is missing is said. Written to the vendor's documentation; it has not run on a "
    "chip."
)
OPTIONS = options("model --target --tp --out=CACHE --list --launch --dtype", *ENGINE)
