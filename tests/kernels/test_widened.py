"""Many tiny 16-bit tensors widened into one allocation: values, placing, and errors.

Every value is held to torch's own cast, bit for bit, on each device there is; the GPU path has its own code for where
a tensor's values go, so that it runs the same cases.
"""

from __future__ import annotations

import pytest
import torch

from megasetup import kernels
from megasetup.kernels import convert, native

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.bfloat16, torch.float16]
COUNTS = [
    [256] * 60,
    [8, 4, 12],
    [5, 1, 7, 4, 0, 3],
    [5, 6, 7],  # one place size, several lengths
    [3, 3],
    [1],
    [0],
    [0, 0, 0],
    [0, 9, 0],
    [70_001, 2],
]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pattern(dtype: torch.dtype, device: str) -> None:
    low = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device).view(dtype)
    wide = torch.cat(kernels.widened(list(low.view(256, 256))))
    numbers = ~low.isnan()
    assert torch.equal(bits(wide)[numbers], bits(low.to(torch.float32))[numbers])
    assert wide[~numbers].isnan().all()
    if dtype == torch.bfloat16:
        assert torch.equal(bits(wide), low.view(torch.int16).to(torch.int32) << 16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_values_and_places(counts: list[int], dtype: torch.dtype, device: str) -> None:
    sources = [torch.randn(count, device=device).to(dtype) for count in counts]
    copies = [source.clone() for source in sources]
    targets = kernels.widened(sources)
    assert isinstance(targets, list)
    assert len(targets) == len(sources)
    for source, copy, target in zip(sources, copies, targets, strict=True):
        assert torch.equal(source, copy)
        assert (target.dtype, target.shape, target.device) == (torch.float32, source.shape, source.device)
        assert torch.equal(bits(target), bits(source.to(torch.float32)))
        assert target.is_contiguous()
        assert target.numel() == 0 or target.data_ptr() % 16 == 0
    assert len({target.untyped_storage()._cdata for target in targets}) == 1
    # Padding to 16 bytes is all that the allocation holds besides the values.
    assert targets[0].untyped_storage().nbytes() == sum(-(-count // 4) * 16 for count in counts)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("counts", [[8, 8], [5, 6, 7], [8, 4, 12]], ids=str)
def test_targets_do_not_overlap(counts: list[int], device: str) -> None:
    targets = kernels.widened([torch.zeros(count, dtype=torch.bfloat16, device=device) for count in counts])
    for index, target in enumerate(targets):
        target.fill_(index + 1)
    for index, target in enumerate(targets):
        assert torch.equal(target, torch.full_like(target, index + 1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offset", range(1, 9))
def test_sources_at_any_alignment(offset: int, device: str) -> None:
    pool = torch.randn(300, device=device).bfloat16()
    sources = [pool[offset : offset + 37], pool[offset + 100 : offset + 229]]
    for source, target in zip(sources, kernels.widened(sources), strict=True):
        assert torch.equal(target, source.float())


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_source_twice(device: str) -> None:
    source = torch.randn(6, device=device).bfloat16()
    first, second = kernels.widened([source, source])
    first.zero_()
    assert torch.equal(second, source.float())


def test_source_that_requires_grad() -> None:
    source = torch.randn(6).bfloat16().requires_grad_()
    (target,) = kernels.widened([source])
    assert torch.equal(target, source.detach().float())
    assert not target.requires_grad


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [[256] * 60, [5, 1, 7, 4, 0, 3]], ids=str)
def test_one_by_one_gives_the_same(
    counts: list[int], dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As with a torch that does not offer DLPack's C interface.
    monkeypatch.setattr(convert, "_read", lambda sources: None)
    sources = [torch.randn(count, device=device).to(dtype) for count in counts]
    targets = kernels.widened(sources)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(bits(target), bits(source.to(torch.float32)))
    assert targets[0].untyped_storage().nbytes() == sum(-(-count // 4) * 16 for count in counts)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_read_in_one_call(device: str) -> None:
    plain = torch.randn(8, device=device).bfloat16()
    for sources in ([plain, plain[3:]], (plain,), [torch.nn.Parameter(plain)], [plain[:0], plain[::8]]):
        vectors = convert._read(sources)
        assert vectors.counts == [source.numel() for source in sources]
        assert vectors.places == [-(-source.numel() // 4) * 4 for source in sources]
        assert vectors.total == sum(vectors.places)
        assert vectors.padded == (vectors.places != vectors.counts)
        assert vectors.on_gpu == (device == "cuda")


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "odd_one",
    [
        torch.zeros(4, dtype=torch.float16),
        torch.zeros(4),
        torch.zeros(2, 2, dtype=torch.bfloat16),
        torch.zeros(8, dtype=torch.bfloat16)[::2],
        torch.zeros(4, dtype=torch.bfloat16, device="meta"),
        torch._neg_view(torch.zeros(4, dtype=torch.bfloat16)),
        torch.zeros(4, dtype=torch.bfloat16).as_subclass(Subclass),
        torch.zeros(4, dtype=torch.bfloat16).to_sparse(),
    ],
    ids=["dtype", "FP32", "two dimensions", "strides", "meta", "negated", "subclass", "sparse"],
)
def test_what_is_not_read_in_one_call(odd_one: torch.Tensor) -> None:
    assert convert._read([torch.zeros(4, dtype=torch.bfloat16), odd_one]) is None


def test_subclass_is_widened_all_the_same() -> None:
    source = torch.randn(6).bfloat16().as_subclass(Subclass)
    (target,) = kernels.widened([source])
    assert torch.equal(target, source.as_subclass(torch.Tensor).float())


def test_no_memory_and_negated_values_are_errors() -> None:
    gone = torch.zeros(4, dtype=torch.bfloat16)
    gone.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="has no memory"):
        kernels.widened([torch.zeros(4, dtype=torch.bfloat16), gone])
    with pytest.raises(ValueError, match="negated view"):
        kernels.widened([torch._neg_view(torch.zeros(4, dtype=torch.bfloat16))])


@pytest.mark.parametrize("module", ["compiled", "absent"])
def test_set_data(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if module == "absent":
        monkeypatch.setattr(native, "load", lambda: None)
    tensors = [torch.zeros(3, dtype=torch.bfloat16), torch.nn.Parameter(torch.zeros(2))]
    values = (torch.tensor([1.0, 2.0]), torch.tensor([3.0]))
    kernels.set_data(tensors, values)
    for tensor, value in zip(tensors, values, strict=True):
        assert torch.equal(tensor, value)
        assert tensor.data_ptr() == value.data_ptr()
    assert isinstance(tensors[1], torch.nn.Parameter)
    kernels.set_data([], [])
    with pytest.raises(ValueError, match="2 tensors and 1 values"):
        kernels.set_data(tensors, values[:1])
    with pytest.raises(TypeError):
        kernels.set_data(tensors[:1], [3])  # type: ignore[list-item]


def test_nothing() -> None:
    assert kernels.widened([]) == []


@pytest.mark.parametrize("counts", [[8, 8], [5, 1, 0], [0, 0]], ids=str)
def test_meta(counts: list[int]) -> None:
    targets = kernels.widened([torch.empty(count, dtype=torch.float16, device="meta") for count in counts])
    assert [target.shape for target in targets] == [(count,) for count in counts]
    assert {(target.dtype, target.device.type) for target in targets} == {(torch.float32, "meta")}


@pytest.mark.parametrize(
    ("odd_one", "error", "message"),
    [
        (torch.zeros(4, dtype=torch.float16), TypeError, r"'torch\.bfloat16', 'torch\.float16'"),
        (torch.zeros(4, dtype=torch.float32), TypeError, r"'torch\.bfloat16', 'torch\.float32'"),
        (torch.zeros(4, dtype=torch.float64), TypeError, r"'torch\.bfloat16', 'torch\.float64'"),
        (torch.zeros(4, dtype=torch.int16), TypeError, r"'torch\.bfloat16', 'torch\.int16'"),
        (torch.zeros(4, dtype=torch.int64), TypeError, r"'torch\.bfloat16', 'torch\.int64'"),
        (torch.zeros(4, dtype=torch.bfloat16, device="meta"), ValueError, r"\['cpu', 'meta'\]: one call takes one"),
        (torch.zeros(2, 4, dtype=torch.bfloat16), ValueError, r"source 1 has shape \(2, 4\).*one dimension"),
        (torch.zeros((), dtype=torch.bfloat16), ValueError, r"source 1 has shape \(\).*one dimension"),
        (torch.zeros(8, dtype=torch.bfloat16)[::2], ValueError, r"source 1 .* strides \(2,\).*side by side"),
    ],
)
def test_errors(odd_one: torch.Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kernels.widened([torch.zeros(4, dtype=torch.bfloat16), odd_one])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.int64, torch.float8_e4m3fn])
def test_alike_but_not_16_bit_floats(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=r"must all be torch\.bfloat16, or all torch\.float16"):
        kernels.widened([torch.zeros(4).to(dtype), torch.zeros(4).to(dtype)])


@pytest.mark.gpu
def test_host_and_gpu_in_one_call() -> None:
    with pytest.raises(ValueError, match=r"\['cpu', 'cuda:0'\]: one call takes one device"):
        kernels.widened([torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.bfloat16, device="cuda")])


@pytest.mark.multigpu
def test_gpu_that_is_not_the_current_one() -> None:
    sources = [torch.randn(count, device="cuda:1").bfloat16() for count in (5, 256)]
    targets = kernels.widened(sources)
    for source, target in zip(sources, targets, strict=True):
        assert target.device == source.device
        assert torch.equal(target, source.float())
    assert torch.cuda.current_device() == 0
