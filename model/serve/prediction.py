"""Predicted clock of a server: how long its steps would take on the target, from dry launches.

The engine counts the shapes that it launched. Each shape is predicted once, in a child process and after `/metrics` has
asked for it.
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

    def seconds(self, launch_counts: Mapping[StepShape, int]) -> tuple[float, int]:
        """Return the predicted seconds of all launches, and the number of launches without a prediction.

        A new shape is predicted in the background, for later calls. Shapes that verify drafts are not predicted.

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
        """End the child process and the thread that waits for its answers."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._stop_child()

    def _predict(self, shape: StepShape) -> None:
        """Store the prediction of a shape; a child that has ended or takes too long is replaced for the next shape."""
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
    """Answer every shape with its seconds as JSON, null without a prediction, until the pipe is closed.

    This is the child process. It ignores the signals that a terminal sends to the whole group.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    predictor = StepPredictor(deployment)
    with suppress(EOFError, OSError):
        while True:
            pipe.send_bytes(json.dumps(predictor.predict(json.loads(pipe.recv_bytes()))).encode())
