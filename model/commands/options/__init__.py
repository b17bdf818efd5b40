"""Options of the model's commands: one table, with a file for each subject. A command names its rows."""

from model.commands.options import client, device, engine, inputs, outputs, sampling, server, workload
from nkw.options import OptionTable

_TABLE = OptionTable(
    *(inputs.ROWS, device.ROWS, sampling.ROWS, engine.ROWS, outputs.ROWS, server.ROWS, client.ROWS),
    workload.ROWS,
)
option = _TABLE.option
options = _TABLE.options
