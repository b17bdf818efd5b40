"""Predicted clock of a server: how long the engine's launches would take on the target chip, from dry launches.

The engine counts how often it launched each step shape. A shape is predicted once, in a child process, after `/metrics`
has asked for it.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection

from model.layers.launch import StepShape
from model.llm.prediction import Deployment, StepPredictor, verifies_drafts
from model.serve.child import start_child

_MAX_PREDICTION_SECONDS = 60


class StepTimes:
    """Predicted times of step shapes, computed by a child process.

    A child process computes them, because a prediction would keep the interpreter lock from the server's threads.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._executor = ThreadPoolExecutor(1, "prediction")
        self._child: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._seconds: dict[StepShape, float | None] = {}
        """Seconds by shape; None where a shape has no prediction, or none yet."""

    def predict_seconds(self, launch_counts: Mapping[StepShape, int]) -> tuple[float, int]:
        """Return the predicted seconds of all launches together, and the number of launches without a prediction.

        A new shape is predicted in the background, for later calls. Shapes that verify drafts are never predicted.

        Args:
            launch_counts: The number of launches of each shape.
        """
        total, missing = 0.0, 0
        for shape, count in launch_counts.items():
            if shape not in self._seconds:
                self._seconds[shape] = None
                if not verifies_drafts(shape):
                    self._executor.submit(self._predict, shape)
            seconds = self._seconds[shape]
            if seconds is None:
                missing += count
            else:
                total += seconds * count
        return total, missing

    def stop(self) -> None:
        """Kill the child process, and drop shapes that are not predicted yet."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._stop_child()

    def _predict(self, shape: StepShape) -> None:
        """Ask the child process for the seconds of a shape and store them; the first call starts the child.

        A child that has ended or takes more than 60 s is stopped, and the shape stays without a prediction.
        """
        self._child = self._child or start_child(_predict_shapes, self._deployment)
        _, pipe = self._child
        try:
            pipe.send_bytes(json.dumps(shape.sizes).encode())
            if not pipe.poll(_MAX_PREDICTION_SECONDS):
                raise EOFError
            self._seconds[shape] = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            self._stop_child()

    def _stop_child(self) -> None:
        if self._child is not None:
            process, pipe = self._child
            self._child = None
            process.kill()
            process.wait()
            pipe.close()


def _predict_shapes(pipe: Connection, deployment: Deployment) -> None:
    """Answer every shape that arrives on the pipe with its seconds as JSON, or null without a prediction.

    This function is the child process. It returns when the pipe is closed, and ignores SIGINT and SIGTERM, which a
    terminal sends to the whole process group.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    predictor = StepPredictor(deployment)
    with suppress(EOFError, OSError):
        while True:
            pipe.send_bytes(json.dumps(predictor.predict(json.loads(pipe.recv_bytes()))).encode())
