"""Instructions of a launch, rebuilt from its streams: plans over tensors that have no bytes yet.

A stream has templates and serial numbers, but no memory. Replay and the check of other orders rebuild the tensors and
then bind them to bytes, which means to set the byte array of each storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from simulate.isa.plan import Plan
from simulate.memory import NkiTensor, Storage
from simulate.memory.layout import Layout
from simulate.run.stream import Stream

NO_BYTES = np.empty(1, np.uint8)
"""Bytes of an unbound tensor: a single byte, because NumPy accepts a view of any size over an empty buffer."""


class Rebuilt:
    """Tensors and plans of the streams of one launch.

    `plans` has a list for each stream, one plan per event. `storages` has the allocations by (rank, serial number);
    cores of one rank share them. `views` has, under the same key, every tensor that the plans use of an allocation.
    All storages have the placeholder `NO_BYTES`, except for constants of the kernel, which have their contents.
    """

    def __init__(self, streams: Sequence[Stream]) -> None:
        self.storages: dict[tuple[int, int], Storage] = {}
        self.views: dict[tuple[int, int], list[NkiTensor]] = {}
        self._tensors: dict[tuple[int, int, int], NkiTensor] = {}
        self._streams = {stream.rank: stream for stream in streams}
        self.plans = [self._rebuild_plans(stream) for stream in streams]
        for rank, stream in self._streams.items():
            for serial, constant in stream.constants.items():
                storage = self.storage(rank, serial)
                storage.uncounted_host = constant.contents
                storage.uncounted_array = constant.contents.reshape(-1).view(np.uint8)

    def storage(self, rank: int, serial: int) -> Storage:
        """Return the storage of an allocation by rank and serial number; it is created on first use, without bytes."""
        storage = self.storages.get((rank, serial))
        if storage is None:
            record = self._streams[rank].tensors[serial]
            form = record.form
            storage = Storage(
                form.shape, form.dtype, form.buffer, record.explicit_name, array=NO_BYTES, fresh=True
            )
            storage.uncounted_array, storage.serial, storage.line = NO_BYTES, serial, record.line
            self.storages[rank, serial] = storage
            self.views[rank, serial] = []
        return storage

    def tensor(self, rank: int, serial: int, layout: Layout) -> NkiTensor:
        """Return a tensor with a layout in an allocation, and add it to `views`; equal layouts share one tensor."""
        key = rank, serial, id(layout)
        tensor = self._tensors.get(key)
        if tensor is None:
            tensor = self._tensors[key] = NkiTensor.from_layout(layout, self.storage(rank, serial))
            self.views[rank, serial].append(tensor)
        return tensor

    def _rebuild_plans(self, stream: Stream) -> list[Plan]:
        """Return the plan of every event of a stream, over the rebuilt tensors."""
        rank, templates, operands = stream.rank, stream.templates, stream.operands
        plans: list[Plan] = []
        first = 0  # index of the event's first operand
        for number in stream.template_ids:
            template = templates[number]
            plan = template.plan
            tensors: list[NkiTensor] = []
            if template.direct:
                for position, operand in enumerate(template.operands, first):
                    tensors.append(self.tensor(rank, operands[position], operand.layout))
                first += len(tensors)
            else:
                for operand in (*plan.reads, *plan.writes):
                    dynamic = operand.dynamic
                    if dynamic is None:
                        tensors.append(self.tensor(rank, operands[first], operand.layout))
                        first += 1
                        continue
                    index = self.tensor(rank, operands[first + 1], dynamic.index.layout)
                    tensor = NkiTensor.from_layout(
                        operand.layout, self.storage(rank, operands[first]), replace(dynamic, index=index)
                    )
                    self.views[rank, operands[first]].append(tensor)
                    tensors.append(tensor)
                    first += 2
            reads = len(plan.reads)
            plans.append(plan.over(tuple(tensors[:reads]), tuple(tensors[reads:])))
        return plans
