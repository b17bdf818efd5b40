"""Options of the model's commands: one table, with a file for each subject.

A command's `arguments.py` names its rows with `options`, and changes a row with `option`.
"""

from model.commands.options import (
    client,
    device,
    engine,
    images,
    inputs,
    outputs,
    quantisation,
    sampling,
    server,
    workload,
)
from nkw.options import OptionTable

_TABLE = OptionTable(
    {
        "model and inputs": inputs.ROWS,
        "chip, ranks and prices": device.ROWS,
        "sampling": sampling.ROWS,
        "images": images.ROWS,
        "engine": engine.ROWS,
        "quantisation": quantisation.ROWS,
        "reports": outputs.ROWS,
        "server": server.ROWS,
        "client": client.ROWS,
        "load": workload.ROWS,
    }
)
option = _TABLE.option
options = _TABLE.options
