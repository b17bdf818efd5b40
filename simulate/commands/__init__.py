"""Commands that join a report of the simulator with a way to run scripts: run, time, memory, check, fidelity."""
