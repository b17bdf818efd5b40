"""Store the digests of all instruction streams and launch lists, or compare them with stored ones.

    python -m tools.digests store FILE       before a change that must change neither
    python -m tools.digests compare FILE     after it; exit status 1 if a digest differs

Kernels run dry: instructions are planned and no values computed. All streams take about seven minutes of one core, all
launch lists half a minute.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import simulate

simulate.install("simulate")

from tools.digests.launches import launch_digests  # noqa: E402
from tools.digests.streams import stream_digests  # noqa: E402


def digests(only: str) -> Iterator[tuple[str, str]]:
    """Yield (name, digest) of the launch lists and then the streams.

    `only` is "launches", "streams", or "" for both.
    """
    for source, content in ((launch_digests, "launches"), (stream_digests, "streams")):
        if only in ("", content):
            yield from source()


def main() -> int:
    """Store or compare digests and return the exit status: 1 if a digest differs, is missing or is new, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tools.digests", description=__doc__, allow_abbrev=False)
    parser.add_argument("action", choices=("store", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", choices=("", "launches", "streams"))
    options = parser.parse_args()
    computed = dict(digests(options.only))
    if options.action == "store":
        options.file.write_bytes(gzip.compress(json.dumps(computed, indent=0).encode(), mtime=0))
        print(f"{len(computed)} digests stored")
        return 0
    stored = json.loads(gzip.decompress(options.file.read_bytes()))
    if options.only:
        stored = {name: digest for name, digest in stored.items() if name in computed}
    different = sorted(
        name for name in stored.keys() | computed.keys() if stored.get(name) != computed.get(name)
    )
    for name in different[:40]:
        print(f"{name}\n  stored   {stored.get(name)}\n  computed {computed.get(name)}")
    print(f"{len(different)} of {len(stored)} digests differ")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
