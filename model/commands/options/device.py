"""Options of the chip, the instance, the ranks, the backend and the dtype of a model."""

from __future__ import annotations

from pathlib import Path

from model.commands.options.readers import count, price
from nkw.options import Rows
from nkw.targets import HARDWARE_VARIABLE, LNC_VARIABLE, TARGETS

PLANNED_LNC = (
    f"physical cores of a rank, 1 or 2; with 2 a rank is a logical core (default: {LNC_VARIABLE}, else 2 on trn2 and "
    "trn3)"
)

STACKS = ("this", "vllm-neuron", "nxdi", "optimum", "transformers-neuronx")
"""The serving stacks that have a record; a test compares them with the records."""

LIBRARIES = ("transformers-neuronx", "neuronx-distributed-inference")

ROWS: Rows = {
    "--target": dict(
        metavar="CHIP",
        choices=TARGETS,
        default="trn2",
        help="trn1, inf2, trn2 or trn3 (default: %(default)s)",
    ),
    "--hardware": dict(
        metavar="FILE",
        help="an overlay, whose numbers replace those of the chips' records (docs/calibrate.md; default: "
        f"{HARDWARE_VARIABLE}, else none)",
    ),
    "--instance": dict(
        metavar="NAME",
        help="instance type, or several over EFA: '4 x trn1.32xlarge' (default: trn2.48xlarge)",
    ),
    "--accelerator": dict(
        metavar="NAME", help="instead, the roofline of h100, a100 or any peaks given as TFLOPS,TB/s"
    ),
    "--price": dict(
        metavar="DOLLARS", type=price, help="of the instance for an hour (default: that of --prices)"
    ),
    "--prices": dict(
        metavar="FILE",
        type=Path,
        help="prices of instances, which replace the shipped ones (docs/model/planning.md)",
    ),
    "--stack": dict(
        metavar="NAME",
        choices=STACKS,
        default="this",
        help="what serves the model: this, vllm-neuron, nxdi, optimum or transformers-neuronx (default: %(default)s)",
    ),
    "--tp": dict(
        metavar="N",
        type=count,
        default=1,
        help="tensor-parallel ranks, one core each (default: %(default)s)",
    ),
    "--lnc": dict(
        metavar="N",
        type=int,
        choices=(1, 2),
        help=f"physical cores of a rank in predictions, 1 or 2 (default: {LNC_VARIABLE}, else 1)",
    ),
    "--dp": dict(
        metavar="N",
        type=count,
        default=1,
        help="groups of such ranks, which share the prompts (default: %(default)s)",
    ),
    "--pp": dict(
        metavar="N",
        type=count,
        default=1,
        help="pipeline stages of such groups, each with some of the layers (default: %(default)s)",
    ),
    "--micro-batches": dict(
        metavar="N",
        type=count,
        help="in which prompts pass the stages (default: as many as stages, or as prompts of a group)",
    ),
    "--ep": dict(
        metavar="N",
        type=count,
        default=1,
        help="groups of --tp ranks that divide the routed experts, each with its own sequences and pages "
        "(default: %(default)s)",
    ),
    "--sp": dict(
        action="store_true",
        help="the ranks of --tp cut the rows of prompts among them, for norms and residuals",
    ),
    "--backend": dict(
        metavar="NAME",
        choices=("simulate", "numpy", "neuron"),
        default="simulate",
        help="simulate, numpy or neuron (default: %(default)s)",
    ),
    "--with": dict(
        dest="library", metavar="NAME", choices=LIBRARIES, required=True, help=" or ".join(LIBRARIES)
    ),
    "--dtype": dict(
        metavar="NAME",
        choices=("auto", "float32", "bfloat16"),
        default="float32",
        help="of activations and cache: float32, bfloat16 or auto, the checkpoint's (default: %(default)s)",
    ),
    "--dtype=PLANNED": dict(
        metavar="NAME",
        choices=("auto", "bfloat16", "float16", "float32"),
        default="auto",
        help="bfloat16, float16, float32 or auto, what the config names (default: %(default)s)",
    ),
}
