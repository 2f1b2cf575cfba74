"""The Offloader: what goes, what stays, and that no step can see half of it.

On the CPU, with a backend whose copies are as late as a stream may make them: they run when someone
waits for them, and until then the memory that they are to fill holds rubbish.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed.checkpoint as dcp
from _staging import check_saved, engine, frozen, slowed, writer_to
from torch import Tensor, UntypedStorage

import pyckpt
from pyckpt.optim import Offloader, buffers
from pyckpt.optim import offloader as offloader_module


class LateBackend:
    """Tensors with dimensions are "on the device"; 0-d ones are on the host."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], Any]] = []
        self.done = 0
        self.buffers: list[int] = []
        self.copied: list[int] = []
        self.fail_buffers = False

    def holds(self, tensor: Tensor) -> bool:
        return tensor.dim() > 0

    def host_buffer(self, nbytes: int) -> Tensor:
        if self.fail_buffers:
            raise MemoryError("no pinned memory")
        self.buffers.append(nbytes)
        return torch.full((nbytes,), 0xFF, dtype=torch.uint8)

    def copy_out(self, copies: Sequence[tuple[Tensor, UntypedStorage]]) -> None:
        for host, storage in copies:
            # The allocator keeps freed memory until the copy is done, so the values are these.
            snapshot = _bytes(storage).clone()
            self.copied.append(storage.nbytes())
            self.queue.append(lambda host=host, snapshot=snapshot: host.copy_(snapshot))

    def copy_in(self, copies: Sequence[tuple[UntypedStorage, Tensor]]) -> None:
        for storage, host in copies:
            target = _bytes(storage).fill_(0xFF)
            self.queue.append(lambda target=target, host=host: target.copy_(host))

    def fence(self) -> int:
        return len(self.queue)

    def order_after(self, fence: int) -> None:
        for late in self.queue[self.done : fence]:
            late()
        self.done = max(self.done, fence)

    wait = order_after


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def waiting() -> list[Offloader]:
    """Those that a step would be ordered behind."""
    return list(offloader_module._guarding.values())


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateBackend]:
    backend = LateBackend()
    monkeypatch.setattr(buffers, "backend_for", lambda device: backend)
    yield backend
    assert not waiting()  # nothing is left behind


def trained(count: int = 3, **options: Any) -> tuple[list[Tensor], torch.optim.Adam]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(4, 3 + index)) for index in range(count)]
    optimizer = torch.optim.Adam(params, lr=0.1, **options)
    train(optimizer)
    return params, optimizer


def train(optimizer: torch.optim.Optimizer) -> None:
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.full_like(param, 0.5)
    optimizer.step()


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [t for s in optimizer.state.values() for key, t in s.items() if key != "step"]


def steps(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [state["step"] for state in optimizer.state.values()]


def nbytes(tensors: list[Tensor]) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


@pytest.mark.slow
# Of torch itself, when it first traces a step.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_rounds_are_no_reason_to_compile_again(backend: LateBackend) -> None:
    """More rounds than dynamo compiles a function for; the compiled steps wait all the same."""
    torch._dynamo.reset()
    params, optimizer = trained(2)
    expected, stays = trained(2)
    offloader = Offloader(optimizer)
    compiled: Any = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        compiled()
        stays.step()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(torch._dynamo.config.recompile_limit + 2):
            with offloader:
                pass
            compiled()
            stays.step()
    assert not torch._dynamo.utils.counters["frames"]
    assert backend.done == len(backend.queue)
    torch.testing.assert_close(params, expected)


def test_a_round_is_bit_exact_and_frees_the_memory(backend: LateBackend) -> None:
    params, optimizer = trained()
    twin_params, twin = trained()
    tensors = moments(optimizer)
    expected = [tensor.clone() for tensor in tensors]
    expected[0].fill_(float("nan"))
    tensors[0].fill_(float("nan"))
    weights = nbytes(params)
    with Offloader(optimizer) as offloader:
        assert offloader.offloaded
        assert nbytes(tensors) == [0] * len(tensors)
        assert nbytes(params) == weights
        assert [int(step) for step in steps(optimizer)] == [1, 1, 1]
    assert not offloader.offloaded
    offloader.wait()
    after = moments(optimizer)
    assert all(a is b for a, b in zip(after, tensors, strict=True))
    for ours, theirs in zip(after, expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    tensors[0].copy_(moments(twin)[0])
    train(optimizer)
    train(twin)
    assert all(torch.equal(a, b) for a, b in zip(params, twin_params, strict=True))


def test_a_step_waits_for_the_state(backend: LateBackend) -> None:
    params, optimizer = trained()
    twin_params, twin = trained()
    with Offloader(optimizer):
        pass
    assert not torch.equal(moments(optimizer)[0], moments(twin)[0])  # the copies are late indeed
    train(twin)  # another optimizer's step changes nothing
    assert backend.done < len(backend.queue)
    train(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(params, twin_params, strict=True))
    assert not waiting()


def test_state_dict_waits_for_the_state_and_so_does_the_step(backend: LateBackend) -> None:
    _, optimizer = trained()
    expected = [tensor.clone() for tensor in moments(optimizer)]
    with Offloader(optimizer):
        pass
    saved = optimizer.state_dict()["state"]
    found = [t for state in saved.values() for key, t in state.items() if key != "step"]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert waiting()  # a step may come on another stream
    train(optimizer)


@pytest.mark.parametrize(
    "use",
    [
        train,
        lambda optimizer: optimizer.state_dict(),
        lambda optimizer: optimizer.load_state_dict({}),
    ],
    ids=["step", "state_dict", "load_state_dict"],
)
def test_use_while_it_is_out_is_an_error(
    backend: LateBackend, use: Callable[[torch.optim.Optimizer], Any]
) -> None:
    _, optimizer = trained()
    offloader = Offloader(optimizer)
    offloader.offload()
    with pytest.raises(RuntimeError, match=r"offloaded. Call reload\(\) first"):
        use(optimizer)
    offloader.reload()
    train(optimizer)


def test_later_rounds_allocate_nothing(backend: LateBackend) -> None:
    _, optimizer = trained()
    offloader = Offloader(optimizer)
    for _ in range(3):
        offloader.offload()
        offloader.offload()  # does nothing
        offloader.reload()
        offloader.reload()
        train(optimizer)
    assert len(backend.buffers) == 1
    assert offloader.host_bytes == backend.buffers[0]
    optimizer.load_state_dict(optimizer.state_dict())  # the same, in new tensors
    with offloader:
        assert nbytes(moments(optimizer)) == [0] * 6
    assert len(backend.buffers) == 1
    offloader.close()
    offloader.close()
    assert offloader.host_bytes == 0


def test_state_that_appears_between_rounds(backend: LateBackend) -> None:
    _, optimizer = trained()
    offloader = Offloader(optimizer)
    with offloader:
        pass
    param = torch.nn.Parameter(torch.randn(50, 50))
    optimizer.add_param_group({"params": [param]})
    param.grad = torch.ones_like(param)
    optimizer.step()
    expected = [tensor.clone() for tensor in moments(optimizer)]
    for _ in range(2):
        with offloader:
            assert nbytes(moments(optimizer)) == [0] * 8
        offloader.wait()
        for ours, theirs in zip(moments(optimizer), expected, strict=True):
            assert torch.equal(ours, theirs)
    assert len(backend.buffers) == 2


def test_an_optimizer_without_state(backend: LateBackend) -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))])
    with Offloader(optimizer) as offloader:
        train(optimizer)
        assert not offloader.offloaded
    assert backend.buffers == []


def test_shared_memory_travels_once_and_what_parameters_use_stays(backend: LateBackend) -> None:
    params, optimizer = trained(2)
    flat = torch.arange(24.0)
    optimizer.state[params[0]]["a"] = flat[:12].view(3, 4)
    optimizer.state[params[1]]["b"] = flat[6:]
    optimizer.state[params[1]]["nested"] = [{"c": flat}, (flat[::2],)]
    optimizer.state[params[1]]["weight"] = params[1].detach()
    optimizer.state[params[1]]["empty"] = torch.empty(0)
    optimizer.state["shared"] = {"d": torch.ones(5)}
    with Offloader(optimizer):
        assert sorted(backend.copied) == sorted([48, 48, 64, 64, 24 * 4, 20])
        assert flat.untyped_storage().nbytes() == 0
        assert params[1].untyped_storage().nbytes() == 64
    train(optimizer)
    assert torch.equal(flat, torch.arange(24.0))
    assert torch.equal(optimizer.state[params[1]]["nested"][1][0], torch.arange(0.0, 24.0, 2))
    flat[0] = -1.0
    assert optimizer.state[params[0]]["a"][0, 0] == -1.0
    assert torch.equal(optimizer.state["shared"]["d"], torch.ones(5))


def test_a_save_under_way_gets_what_the_state_was(backend: LateBackend, tmp_path: Path) -> None:
    """It still copies the state when its call returns; freed memory is soon somebody else's."""
    params = [torch.nn.Parameter(torch.rand(4000)) for _ in range(20)]
    optimizer = torch.optim.Adam(params)
    train(optimizer)
    with engine(io_threads=1, max_pinned_bytes=256 << 20) as own:
        stager = pyckpt.PinnedStager(engine=own, optimizers=[optimizer])
        state = optimizer.state_dict()
        before = frozen(state)
        with slowed(own):
            future = dcp.async_save(
                state, storage_writer=writer_to(tmp_path, stager=stager, engine=own)
            )
            Offloader(optimizer).offload()
            rubbish = [torch.full((4000,), float("nan")) for _ in range(80)]
        future.result()
    assert rubbish
    check_saved(before, tmp_path)
    waiting()[0].reload()
    train(optimizer)


def test_no_host_memory_leaves_everything_in_place(backend: LateBackend) -> None:
    _, optimizer = trained()
    before = nbytes(moments(optimizer))
    backend.fail_buffers = True
    with pytest.raises(MemoryError, match="no pinned memory"):
        Offloader(optimizer).offload()
    assert nbytes(moments(optimizer)) == before
    train(optimizer)


def test_no_device_memory_leaves_everything_out(backend: LateBackend) -> None:
    params, optimizer = trained()
    twin_params, twin = trained()
    offloader = Offloader(optimizer)
    offloader.offload()
    entry = offloader._away[2]
    size, entry.nbytes = entry.nbytes, 1 << 60
    with pytest.raises(RuntimeError, match="memory"):
        offloader.reload()
    assert offloader.offloaded
    assert nbytes(moments(optimizer)) == [0] * 6
    entry.nbytes = size
    offloader.reload()
    train(optimizer)
    train(twin)
    assert all(torch.equal(a, b) for a, b in zip(params, twin_params, strict=True))


def test_the_state_does_not_go_with_the_offloader(backend: LateBackend) -> None:
    _, optimizer = trained()
    Offloader(optimizer).offload()
    gc.collect()
    (offloader,) = waiting()
    offloader.reload()
    offloader.wait()
    gone = weakref.ref(offloader)
    del offloader
    gc.collect()
    assert gone() is None


def test_the_copies_back_are_waited_for_without_the_offloader(backend: LateBackend) -> None:
    params, optimizer = trained()
    twin_params, twin = trained()
    Offloader(optimizer).offload()
    waiting()[0].reload()
    gc.collect()
    train(optimizer)
    train(twin)
    assert all(torch.equal(a, b) for a, b in zip(params, twin_params, strict=True))


def test_nothing_outlives_an_optimizer_that_never_steps_again(backend: LateBackend) -> None:
    params, optimizer = trained()
    with Offloader(optimizer) as offloader:
        pass
    host = offloader._buffers[torch.device("cpu")][0]
    gone = [weakref.ref(some) for some in (offloader, optimizer, params[0], host)]
    del params, optimizer, offloader, host
    backend.queue.clear()
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4


class ScheduleFree(torch.optim.SGD):
    """Uses its state outside of ``step``, as the optimizers of schedulefree 1.4 do."""

    def eval(self) -> None:
        self.lerp()

    def train(self) -> None:
        self.lerp()

    @torch.no_grad()
    def lerp(self) -> None:
        for param in self.param_groups[0]["params"]:
            param.lerp_(self.state[param]["momentum_buffer"], 0.5)


def wrapped(base: torch.optim.Optimizer) -> Any:
    wrapper = pytest.importorskip("schedulefree").ScheduleFreeWrapper(base)
    wrapper.train()
    return wrapper


SCHEDULE_FREE: dict[str, Callable[[list[Tensor]], Any]] = {
    "optimizer": lambda params: ScheduleFree(params, lr=0.1, momentum=0.9),
    "wrapper": lambda params: wrapped(torch.optim.SGD(params, lr=0.1, momentum=0.9)),
}


@pytest.mark.parametrize("use", ["step", "eval"])
@pytest.mark.parametrize("kind", ["optimizer", pytest.param("wrapper", marks=pytest.mark.slow)])
def test_state_that_is_used_outside_of_the_step(backend: LateBackend, kind: str, use: str) -> None:
    both = []
    for offloaded in (True, False):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(4, 3)) for _ in range(2)]
        optimizer = SCHEDULE_FREE[kind](params)
        for _ in range(2):
            train(optimizer)
        if offloaded:
            weights = [param.detach().clone() for param in params]
            offloader = Offloader(optimizer)
            for _ in range(2):
                with offloader:
                    for name in ("step", "train", "eval"):
                        with pytest.raises(RuntimeError, match=rf"{name}.*Call reload\(\) first"):
                            getattr(optimizer, name)()
                    assert all(map(torch.equal, params, weights))
        getattr(optimizer, use)()
        if use == "eval":
            optimizer.train()
        train(optimizer)
        assert not {"step", "train", "eval"} & vars(optimizer).keys()
        both.append(params)
    assert all(map(torch.equal, *both))


@pytest.mark.slow
def test_a_copy_of_what_is_guarded_is_not(backend: LateBackend) -> None:
    params = [torch.nn.Parameter(torch.randn(4, 3))]
    wrapper = SCHEDULE_FREE["wrapper"](params)
    train(wrapper)
    with Offloader(wrapper) as offloader:
        pass
    copied = copy.deepcopy(wrapper)
    assert [copied.step.__self__, copied.eval.__self__] == [copied, copied]
    train(copied)
    assert waiting() == [offloader]
    train(wrapper)


def test_a_method_that_somebody_else_replaces_too(backend: LateBackend) -> None:
    _, optimizer = trained()
    calls: list[str] = []
    optimizer.eval = lambda: calls.append("eval")  # type: ignore[attr-defined]
    offloader = Offloader(optimizer)
    with offloader:
        ours = optimizer.eval  # type: ignore[attr-defined]
        optimizer.eval = lambda: (calls.append("outer"), ours())  # type: ignore[attr-defined]
    offloader.wait()
    optimizer.eval()  # type: ignore[attr-defined]
    assert calls == ["outer", "eval"]


def test_on_a_machine_without_gpus_the_state_stays() -> None:
    _, optimizer = trained()
    before = nbytes(moments(optimizer))
    with Offloader(optimizer) as offloader:
        assert not offloader.offloaded
        assert nbytes(moments(optimizer)) == before
        train(optimizer)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(1 << 20, device="cuda")) for _ in range(8)]
    twin_params = [torch.nn.Parameter(param.detach().clone()) for param in params]
    optimizer, twin = (torch.optim.Adam(some, fused=True) for some in (params, twin_params))
    offloader = Offloader(optimizer)
    for turn in range(3):
        train(optimizer)
        train(twin)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with torch.inference_mode(turn == 0):  # as something that generates may have it
            offloader.offload()
        with offloader:
            offloader.wait()
            # Device scalars (fused `step`) go too.
            assert before - torch.cuda.memory_allocated() >= 2 * 8 * (4 << 20)
            rubbish = torch.full((8 << 20,), float("nan"), device="cuda")
            del rubbish
    train(optimizer)
    train(twin)
    assert all(torch.equal(a, b) for a, b in zip(params, twin_params, strict=True))
    offloader.close()
