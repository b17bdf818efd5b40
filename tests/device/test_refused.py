"""What the stand-ins for the vendor's packages refuse, each beside what they accept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from model.device.neuron import NeuronDevice
from tests.device.core import Core, NotDocumented

FRAMEWORKS = ("native", "xla")
PAGES = np.arange(32, dtype=np.float32).reshape(4, 8)
SOURCES, DESTINATIONS = np.array([[1]], np.int32), np.array([[2]], np.int32)
COPIED = ("cache",)


def copy(pages: Any) -> dict[str, Any]:
    return {"cache": pages, "other": None, "sources": SOURCES, "destinations": DESTINATIONS}


def copied(device: NeuronDevice) -> tuple[Any, Any]:
    """Return pages before and after the first page is copied to the second, on the core."""
    pages = device.hold(PAGES)
    (after,) = device.run("copy_pages", [copy(pages)], COPIED)
    return pages, after


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_a_kernel_wrote_to_is_read_from_its_output(on: Callable[..., Core], framework: str) -> None:
    on(framework)
    device = NeuronDevice(1)
    pages, after = copied(device)
    (gathered,) = device.gather([after])
    assert np.array_equal(gathered[2], PAGES[1])
    if framework == "xla":
        with pytest.raises(NotDocumented, match="whose memory a kernel's output has taken"):
            device.gather([pages])
    else:
        assert after is pages


def test_an_argument_written_to_but_not_listed_is_refused(on: Callable[..., Core]) -> None:
    on("native")
    device = NeuronDevice(1)
    with pytest.raises(NotDocumented, match=r"writes to argument_0, which mutates_args does not have"):
        device.run("copy_pages", [copy(PAGES)], (None,))
    copied(device)


def test_mutates_args_names_parameters_and_an_operator_is_registered_once(on: Callable[..., Core]) -> None:
    core: Any = on("native")

    def nothing(x: torch.Tensor) -> None:
        """Do nothing with an argument."""

    core.nki_op("own::nothing", mutates_args={"x"})(nothing)
    with pytest.raises(RuntimeError, match="registered already"):
        core.nki_op("own::nothing", mutates_args={"x"})
    with pytest.raises(ValueError, match="y"):
        core.nki_op("own::other", mutates_args={"y"})(nothing)
    with pytest.raises(ValueError, match="no namespace"):
        core.nki_op("other", mutates_args=())


@pytest.mark.parametrize(
    ("framework", "module", "known", "unknown"),
    [
        ("xla", "torch_xla.core.xla_model", "mark_step", "sync"),
        ("native", "torch_neuronx", "nki_op", "nki_operator"),
    ],
)
def test_a_name_that_no_page_has_is_refused(
    on: Callable[..., Core], framework: str, module: str, known: str, unknown: str
) -> None:
    on(framework)
    documented_module = __import__(module, fromlist=["*"])
    assert callable(getattr(documented_module, known))
    with pytest.raises(AttributeError, match=rf"{unknown} is not on .*\.html"):
        getattr(documented_module, unknown)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_tensor_is_moved_to_a_core_that_was_taken(on: Callable[..., Core], framework: str) -> None:
    core = on(framework)
    with pytest.raises(NotDocumented, match="not taken"):
        torch.zeros(3).to(core.device)
    device = NeuronDevice(1)
    device.hold(np.zeros(3, np.float32))
    with pytest.raises(NotDocumented, match=r"torch.int64 on a core"):
        torch.zeros(3, dtype=torch.int64).to(core.device)
    with pytest.raises(RuntimeError, match="no device"):
        torch.zeros(3).to("cuda")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_kernel_takes_tensors_of_the_core(on: Callable[..., Core], framework: str) -> None:
    core: Any = on(framework)
    NeuronDevice(1)
    x, weight = torch.ones(4, 8), torch.ones(1, 8)
    if framework == "xla":
        core.kernel("rmsnorm")(x.to(core.device), weight.to(core.device), 1e-6)
        with pytest.raises(NotDocumented, match="Tensor of the host"):
            core.kernel("rmsnorm")(x, weight.to(core.device), 1e-6)
    else:
        with pytest.raises(NotDocumented, match="outside of an operator"):
            core.kernel("rmsnorm")(x.to(core.device), weight.to(core.device), 1e-6)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nothing_is_computed_with_tensors_of_the_core_outside_of_kernels(
    on: Callable[..., Core], framework: str
) -> None:
    on(framework)
    tensor = NeuronDevice(1).hold(np.ones((4, 8), np.float32))
    assert tensor[-2:].shape == (2, 8)
    for refused in (lambda: tensor + 1, lambda: tensor.sum(), lambda: tensor.numpy()):
        with pytest.raises(NotDocumented, match="of a tensor of the core"):
            refused()


def test_a_read_in_the_midst_of_a_step_ends_its_graph(on: Callable[..., Core]) -> None:
    core: Any = on("xla")
    device = NeuronDevice(1)
    x, weight = np.ones((4, 8), np.float32), np.ones((1, 8), np.float32)
    (first,) = device.run("rmsnorm", [{"x": x, "weight": weight, "eps": 1e-6}])
    (second,) = device.run("rmsnorm", [{"x": first, "weight": weight, "eps": 1e-6}])
    device.end_graph()
    device.gather([first, second])
    assert [len(graph) for graph in core.executed] == [2]
    (third,) = device.run("rmsnorm", [{"x": second, "weight": weight, "eps": 1e-6}])
    device.gather([third])
    assert [len(graph) for graph in core.executed] == [2, 1]


@pytest.mark.parametrize(("framework", "backend"), [("xla", "xla"), ("native", "neuron")])
def test_a_process_group_needs_the_backend_that_was_registered(
    on: Callable[..., Core], framework: str, backend: str
) -> None:
    core: Any = on(framework, ranks=2)
    with pytest.raises(ValueError, match="no backend 'nccl'"):
        torch.distributed.init_process_group("nccl")
    if framework == "xla":
        with pytest.raises(ValueError, match="no backend 'xla'"):
            torch.distributed.init_process_group("xla")
        with pytest.raises(NotDocumented, match="before init_process_group"):
            core.xla_device()
        import torch_xla.distributed.xla_backend  # noqa: F401
    assert backend in core.process_groups


def test_ranks_meet_after_the_process_group_is_there(on: Callable[..., Core]) -> None:
    core = on("native", ranks=2)
    from nki.collectives import ReplicaGroup

    with pytest.raises(NotDocumented, match="launched before init_process_group"):
        core.computed("all_reduce", [PAGES, ReplicaGroup([[0, 1]])])
