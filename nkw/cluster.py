"""Connection to Ray: to a running cluster, or to a cluster on this machine that ends with the command.

`nkw serve --cluster` and `nkw tune` on a cluster call it.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

LOCAL = "local"
"""Address that starts a cluster on this machine."""
_PATIENCE_SECONDS = 10.0
_MODE, _TOKEN, _TOKEN_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_LOCAL_TOKEN = secrets.token_hex(32)
"""Token of all clusters that this process starts; Ray reads a token once in a process."""


@contextmanager
def join_cluster(address: str, processors: int, namespace: str | None = None) -> Iterator[Any]:
    """Yield the module `ray`, connected to a cluster until the block ends.

    A cluster at the address "local" is started here. It listens at loopback only, requires a token that only its user
    can read, and ends with the block. Variables of the environment that are set for Ray are removed after the block.

    Args:
        address: Address of a running cluster, or "local".
        processors: Number of processors of a cluster that is started here.
        namespace: Ray's namespace of actors, or None.

    Raises:
        ImportError: Ray is not installed.
        ConnectionError: No cluster answers.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report its use over the network
    path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    with TemporaryDirectory(prefix="nkw-", ignore_cleanup_errors=True) as folder:
        settings: dict[str, Any] = {"address": address}
        added: dict[str, str] = {}
        if address == LOCAL:
            if not os.environ.keys() & {_MODE, _TOKEN, _TOKEN_FILE}:
                added = {_MODE: "token", _TOKEN_FILE: str(write_token(Path(folder)))}
            # Ray makes its folder writable for every user, so it is inside a folder that others cannot enter.
            settings |= {"_temp_dir": str(Path(folder, "ray")), "_node_ip_address": "127.0.0.1"}
            settings |= {"num_cpus": processors, "include_dashboard": False}
        elif _MODE not in os.environ and find_token_file().is_file():
            added = {_MODE: "token"}
        os.environ.update(added)  # before Ray is imported, which reads the mode once
        try:
            import ray

            _check_reachable(address)
            ray.init(
                namespace=namespace,
                runtime_env={"env_vars": {"PYTHONPATH": path}},
                log_to_driver=False,
                configure_logging=False,
                **settings,
            )
        except ImportError:
            raise
        except Exception as failed:  # Ray's errors have no common class here
            why = (str(failed).strip() or type(failed).__name__).splitlines()[0]
            raise ConnectionError(
                f"no Ray cluster answers at {address:.80} ({why:.200}): start one with `ray start --head`, set "
                f"{_TOKEN_FILE} if it demands a token, or give {LOCAL}"
            ) from None
        else:
            try:
                yield ray
            finally:
                ray.shutdown()
        finally:
            for name in added:
                del os.environ[name]


def write_token(folder: Path) -> Path:
    """Write the token of this process's clusters to the file `token` in a folder, and return its path.

    Only its user can read the file.

    Raises:
        FileExistsError: The folder already has a file `token`.
    """
    path = folder / "token"
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="ascii") as file:
        file.write(_LOCAL_TOKEN)
    return path


def find_token_file() -> Path:
    """Return the path at which Ray looks for the token of a cluster, whether or not there is a file."""
    return Path(os.environ.get(_TOKEN_FILE) or Path.home() / ".ray" / "auth_token")


def _check_reachable(address: str) -> None:
    """Check that a server listens at an address HOST:PORT, by a connection of at most 10 s; Ray would wait for minutes.

    Do nothing for an address of another form.

    Raises:
        OSError: No server listens there.
    """
    host, _, port = address.rpartition(":")
    if host and "/" not in host and port.isdecimal():
        socket.create_connection((host, int(port)), _PATIENCE_SECONDS).close()
