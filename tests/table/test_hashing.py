"""Digests speak of the elements in C order, however they lie in memory."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable

import numpy as np
import pytest
import torch

from dcp_placements.table.digests import (
    full_digest,
    object_digest,
    sampled_digests,
)


def sampled(tensor: torch.Tensor) -> bytes | None:
    return sampled_digests([tensor])[0]


def contents(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    return torch.arange(numel).remainder(251).to(torch.uint8).reshape(shape).to(dtype)


@pytest.mark.parametrize("position", [0, 63, -1, -64])
def test_a_changed_end_of_a_large_tensor_changes_the_sampled_digest(position: int) -> None:
    tensor = contents((100_003,))
    changed = tensor.clone()
    changed[position] += 1
    assert sampled(changed) != sampled(tensor)


@pytest.mark.parametrize("shape", [(3, 5), (41, 300), (1500, 1500)])
def test_equal_elements_have_equal_digests_however_they_lie(shape: tuple[int, ...]) -> None:
    """The largest is read a few MiB at a time where it is not contiguous."""
    tensor = contents(shape)
    for other in (tensor.t().contiguous().t(), torch.stack([tensor, tensor], -1)[..., 1]):
        assert sampled(other) == sampled(tensor)
        assert full_digest(other) == full_digest(tensor)


def test_a_view_that_negates_has_the_digest_of_its_values() -> None:
    """It is contiguous, and its memory is not what it stands for."""
    tensor = contents((41, 300), torch.int16)
    assert sampled(torch._neg_view(tensor)) == sampled(-tensor) != sampled(tensor)
    complex_ones = torch.complex(contents((41, 300)), contents((41, 300)))
    assert sampled(complex_ones.conj()) == sampled(complex_ones.conj().resolve_conj())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(), (7,), (41, 300), (1500, 1500), (2000, 3, 700)])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.complex128]
)
def test_a_tensor_of_a_gpu_has_the_digest_of_its_copy(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = contents(shape, dtype)
    views = {"whole": tensor, "rows": tensor[1:] if shape else tensor}
    if len(shape) > 1:
        views |= {"transposed": tensor.mT, "middle": tensor[..., 1:-1], "one": tensor[:1]}
    for name, view in views.items():
        on_gpu = tensor.cuda().as_strided(view.shape, view.stride(), view.storage_offset())
        assert sampled(on_gpu) == sampled(view), name
        assert full_digest(on_gpu) == full_digest(view), name


def test_full_digest_sees_an_element_between_those_that_are_sampled() -> None:
    tensor = contents((317, 313))
    changed = tensor.clone()
    changed[4, 1] += 1
    assert sampled(changed) == sampled(tensor)
    assert full_digest(changed) != full_digest(tensor)


def test_bits_count_not_values() -> None:
    zero, minus_zero = torch.zeros(4), -torch.zeros(4)
    assert torch.equal(zero, minus_zero)
    assert sampled(zero) != sampled(minus_zero)
    nan = torch.full((4,), float("nan"))
    assert sampled(nan) == sampled(nan.clone())


def test_scalars_and_empty_tensors_have_digests() -> None:
    assert sampled(torch.tensor(3.0)) == sampled(torch.tensor(3.0))
    assert sampled(torch.tensor(3.0)) != sampled(torch.tensor(4.0))
    assert sampled(torch.zeros(0, 3)) == sampled(torch.zeros(2, 0))
    assert sampled(torch.zeros(0, 3)) is not None
    assert full_digest(torch.tensor(3.0)) != full_digest(torch.tensor(4.0))
    assert full_digest(torch.zeros(0, 3)) == full_digest(torch.zeros(5, 0))


def test_what_has_no_memory_has_no_digest() -> None:
    meta = torch.empty(3, device="meta")
    sparse = torch.eye(3).to_sparse()
    assert sampled_digests([meta, torch.ones(3), sparse]) == [None, sampled(torch.ones(3)), None]
    assert full_digest(meta) is None
    assert full_digest(sparse) is None


class Settings:
    """An object with a tensor in it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def counted(*keys: str) -> defaultdict[str, int]:
    made: defaultdict[str, int] = defaultdict(int)
    made.update({key: len(key) for key in keys})
    return made


SQUARE = np.arange(6.0).reshape(2, 3)
OBJECTS = np.array([["a", 1], [None, 2.5]], object)
EQUAL: dict[str, tuple[object, object, object]] = {
    "tensor": (torch.ones(3), torch.ones(3), torch.zeros(3)),
    "view": (torch.ones(6)[:3], torch.ones(3), torch.ones(6)[:4]),
    "shape": (torch.ones(2, 3), torch.ones(2, 3), torch.ones(3, 2)),
    "dtype": (torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    "class": (torch.ones(2), torch.ones(2), torch.nn.Parameter(torch.ones(2))),
    "transposed": (torch.ones(2, 3).t(), torch.ones(3, 2), torch.ones(2, 3)),
    "sparse": (torch.eye(3).to_sparse(), torch.eye(3).to_sparse(), torch.ones(3, 3).to_sparse()),
    "generator": (
        torch.Generator().manual_seed(1).get_state(),
        torch.Generator().manual_seed(1).get_state(),
        torch.Generator().manual_seed(2).get_state(),
    ),
    "instance": (Settings(torch.ones(3)), Settings(torch.ones(3)), Settings(torch.zeros(3))),
    "array": (SQUARE, np.asfortranarray(SQUARE), SQUARE + 1),
    "shape of an array": (SQUARE, SQUARE[:], SQUARE.reshape(3, 2)),
    "array of objects": (OBJECTS, np.asfortranarray(OBJECTS), OBJECTS.T),
    "defaultdict": (counted("a", "bb"), counted("bb", "a"), counted("a", "ccc")),
    "factory": (counted("a"), counted("a"), defaultdict(float, a=1)),
    "Counter": (Counter("abb"), Counter("bab"), Counter("aab")),
    "OrderedDict": (OrderedDict(a=1, b=2), OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
}


@pytest.mark.parametrize("case", EQUAL)
@pytest.mark.parametrize(
    "within", [lambda x: x, lambda x: (x, 1), lambda x: [{"k": x}], lambda x: defaultdict(int, k=x)]
)
def test_objects_are_compared_by_what_they_contain(
    case: str, within: Callable[[object], object]
) -> None:
    one, same, other = (object_digest(within(value)) for value in EQUAL[case])
    assert one is not None
    assert one == same
    assert other not in (one, None)


def test_objects_that_contain_themselves_have_a_digest() -> None:
    loop: list[object] = [1]
    loop.append(loop)
    assert isinstance(object_digest(loop), bytes)


def test_what_cannot_be_pickled_has_no_digest() -> None:
    assert object_digest(lambda: None) is None
