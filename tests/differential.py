"""What a checkpoint of a random model has to hold: which elements, under which names.

Every tensor that anybody has, a rank or the checkpoint, is a selection of the elements of a whole
one. ``dcp_placements.testing.reference`` works out which elements, on their numbers, from the
definition of the placements, and from none of the library's layouts.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from dcp_placements.testing.reference import numbered, part
from tests.random_worlds import Family, Pair

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
RATE, BLANK = 0.5, -7.0
NO_DETOUR: Mapping[str, str] = {}


# Bits


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as integers, which compare as bits and can be sliced."""
    kind = BITS.get(tensor.dtype.itemsize)
    return tensor if kind is None else tensor.view(kind)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(bits(tensor.detach().contiguous()) for tensor in (one, other)))


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: str) -> torch.Tensor:
    """Return a tensor of random bits."""
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    if dtype.itemsize not in BITS:
        return torch.randn(shape, dtype=dtype, generator=generator)
    kind = BITS[dtype.itemsize]
    low, high = torch.iinfo(kind).min, torch.iinfo(kind).max
    if dtype is torch.bool:
        low, high = 0, 2
    return torch.randint(low, high, shape, dtype=kind, generator=generator).view(dtype)


def opposite(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of which no element is as in ``tensor``."""
    if tensor.dtype is torch.bool:
        return ~tensor
    return tensor + 1 if tensor.dtype.itemsize not in BITS else (~bits(tensor)).view(tensor.dtype)


def elements(whole: torch.Tensor, numbers: torch.Tensor, padding: int) -> torch.Tensor:
    """Return the elements of these numbers, and bits of ``padding`` where the number is -1."""
    flat = bits(whole).reshape(-1)
    rest = flat.new_full((), padding % 2 if whole.dtype is torch.bool else padding % 120)
    if not flat.numel():
        return rest.expand(numbers.shape).clone().view(whole.dtype)
    return torch.where(numbers < 0, rest, flat[numbers.clamp(min=0)]).view(whole.dtype)


def in_memory(tensor: torch.Tensor, memory: str) -> torch.Tensor:
    """Return the same tensor in memory that lies so."""
    if memory == "view":
        room = tensor.new_empty(tensor.numel() + 5)
        placed = room[3 : 3 + tensor.numel()].view(tensor.shape)
    elif memory == "transposed":
        placed = tensor.new_empty(tensor.shape[::-1]).permute(list(range(tensor.dim()))[::-1])
    elif memory == "parameter" and tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
        return torch.nn.Parameter(tensor.clone())
    else:
        return tensor.clone()
    bits(placed).copy_(bits(tensor))
    return placed


# Names and elements


def name_of(
    family: Family, numbers: Mapping[str, Any], middle: str, words: Mapping[str, str] = NO_DETOUR
) -> str:
    """Return the name of one parameter of a family.

    Args:
        family: Of which.
        numbers: By level, of those that names distinguish.
        middle: The part, or what the parts are called together.
        words: Components that are spelled otherwise, by the checkpoint's.
    """
    name, last = [words.get(family.name, family.name)], "weight"
    for level in reversed(family.levels):
        number = numbers.get(level.word)
        if level.joined:
            last += "" if number is None else str(number)
        else:
            name.append(words.get(level.word, level.word))
            name += [] if number is None else [str(number)]
    return ".".join([*name, *([middle] if middle else []), last])


def middles(family: Family, *, by_parts: bool) -> list[str]:
    """Return what the parts are called, or all of them together."""
    if not family.parts:
        return [""]
    parts = [f"{family.name}_part{n}" for n in range(len(family.parts))]
    return parts if by_parts else [f"{family.name}_fused"]


def key_of(pair: Pair, name: str, state: str) -> str:
    """Return the key of a parameter, or of what the optimizer has of it."""
    model, optim = pair.prefixes
    if state == "":
        return f"{model}.{name}" if model else name
    return f"{optim}.state.{name}.{state}"


Rows = dict[str, Callable[[dict[str, int]], Any]]
"""By level, the numbers that there are, given those of the level outside."""


def units(
    family: Family, rows: Rows, *, by_parts: bool
) -> Iterator[tuple[dict[str, int], int, dict[str, torch.Tensor]]]:
    """Yield each tensor of its own: its row of each level in ``rows``, its part, its elements.

    These by state: of the parameter and of each of its moments.
    """
    chosen: list[dict[str, int]] = [{}]
    for level in reversed(family.levels):
        if level.word in rows:
            chosen = [{**c, level.word: n} for c in chosen for n in rows[level.word](c)]
    for row in chosen:
        labels = list(family.labels)
        states = {state: numbered(family.shape_of(state)) for state in ("", *family.moments)}
        for word, number in row.items():
            dim = labels.index(word)
            states = {state: numbers.select(dim, number) for state, numbers in states.items()}
            labels.remove(word)
        if not by_parts:
            yield row, 0, states
            continue
        dim = labels.index(f"r{family.part_dim}")
        for at in range(len(family.parts)):
            parts = (family.parts, family.groups)
            yield row, at, {s: part(numbers, at, dim, *parts) for s, numbers in states.items()}


Wholes = dict[tuple[str, str], torch.Tensor]
"""By family and state, all of it in one tensor."""


def wholes(pair: Pair) -> Wholes:
    """Return the contents of a model, random bits."""
    return {
        (family.name, state): drawn(
            family.shape_of(state),
            torch.float32 if state else family.dtype,
            f"{pair.seed}/{family.name}/{state}/",
        )
        for family in pair.families
        for state in ("", *family.moments)
    }


def checkpoint(pair: Pair, whole: Wholes) -> dict[str, Any]:
    """Return what the file holds after a save, by key: tensors and objects."""
    found: dict[str, Any] = dict(pair.objects)
    optimized: list[str] = []
    for family, hold in zip(pair.families, pair.save.holds, strict=True):
        rows: Rows = {
            level.word: (lambda outside, total=level.total: range(total))
            for level in family.levels
            if not level.stacked
        }
        both = list(zip(family.levels, hold.ids, strict=True))
        # Of steps that the ranks have one per row, a stack has as many.
        steps = [level.total for level, ids in reversed(both) if level.stacked and ids is not None]
        names = middles(family, by_parts=family.split)
        for row, at, states in units(family, rows, by_parts=family.split):
            name = name_of(family, row, names[at])
            for state, numbers in states.items():
                key = key_of(pair, name, state)
                found[key] = elements(whole[family.name, state], numbers, 0)
            for scalar, number in family.numbers.items():
                found[key_of(pair, name, scalar)] = torch.full(steps, number)
            if family.optimized:
                optimized.append(name)
    return {**found, **groups_of(pair, optimized)}


def groups_of(pair: Pair, names: list[str]) -> dict[str, Any]:
    """Return the parameter groups of an optimizer of these parameters: each its own, or one."""
    groups = f"{pair.prefixes[1]}.param_groups"
    if pair.flat:
        return {f"{groups}.{name}.lr": RATE for name in names}
    return {f"{groups}.0.params": names, f"{groups}.0.lr": RATE} if names else {}
