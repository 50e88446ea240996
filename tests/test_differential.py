"""Random worlds against plain slicing: whatever one saves, every other one loads."""

from __future__ import annotations

import dataclasses
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcp_placements import (
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
    PlacementSavePlanner,
)
from dcp_placements.testing import World
from tests.differential import (
    BLANK,
    Wholes,
    checkpoint,
    elements,
    opposite,
    same_bits,
    wholes,
)
from tests.drawn_worlds import Draw, draw_pair
from tests.random_ranks import Rank, Value, get
from tests.random_worlds import Pair
from tests.storage_scenes import assert_index_agrees


def save(
    pair: Pair,
    whole: Wholes,
    path: Path,
    planners: list[PlacementSavePlanner],
    *,
    lost: tuple[str, dict[str, int]] | None = None,
) -> list[list[Value]]:
    """Save on all ranks; return the tensors that each of them holds.

    Args:
        pair: The worlds.
        whole: What is saved.
        path: The checkpoint.
        planners: One per rank.
        lost: A family and numbers by level: no rank has what has all of these in its name.
    """
    options = dict(pair.save.options)
    make = FileSystemWriter if options["torch"] else PlacementFileSystemWriter
    ranks = [Rank(pair, pair.save, rank) for rank in range(pair.save.size)]
    held = [list(rank.values(whole)) for rank in ranks]
    if lost is not None:
        family, row = lost
        for values in held:
            values[:] = [
                value
                for value in values
                if value.family != family or not row.items() <= value.row.items()
            ]
    World(pair.save.size).save(
        path,
        lambda rank: ranks[rank].state_dict(held[rank], blank=False),
        planners.__getitem__,
        lambda rank: make(
            path,
            sync_files=False,
            thread_count=options["thread_count"],
            single_file_per_rank=options["single_file_per_rank"],
        ),
    )
    return held


def save_planners(pair: Pair) -> list[PlacementSavePlanner]:
    options = dict(pair.save.options)
    ranks = [Rank(pair, pair.save, rank) for rank in range(pair.save.size)]
    return [
        PlacementSavePlanner(
            rank.rules(),
            rename=rank.rename(),
            digests=options["digests"],
            dedup_save_to_lowest_rank=options["dedup_save_to_lowest_rank"],
        )
        for rank in ranks
    ]


def run(pair: Pair, root: Path) -> None:
    """Save, read back by torch, load into the other world; assert that all is as it ought to be."""
    whole = wholes(pair)
    planners = save_planners(pair)
    held = save(pair, whole, root / "1", planners)
    assert_written_once(pair, whole, root / "1", planners)
    assert_items_are_views(pair, held, planners)
    assert_torch_reads(pair, whole, root / "1")
    load(pair, whole, root / "1")
    if pair.seed % 4 == 0:
        dcp.save(checkpoint(pair, whole), checkpoint_id=root / "stock", no_dist=True)
        load(pair, whole, root / "stock")


def assert_written_once(
    pair: Pair, whole: Wholes, path: Path, planners: list[PlacementSavePlanner]
) -> None:
    expected = checkpoint(pair, whole)
    assert_index_agrees(path)
    metadata = FileSystemReader(path).read_metadata()
    assert metadata.state_dict_metadata.keys() == expected.keys()
    chunks = Counter[Any]()
    for key, value in expected.items():
        entry = metadata.state_dict_metadata[key]
        if not isinstance(value, torch.Tensor):
            assert not isinstance(entry, TensorStorageMetadata), key
            chunks[key, None] += 1
            continue
        assert isinstance(entry, TensorStorageMetadata), key
        assert (entry.size, entry.properties.dtype) == (value.shape, value.dtype), key
        count = torch.zeros(value.shape, dtype=torch.int32)
        for box in entry.chunks:
            count[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] += 1
            chunks[key, box.offsets] += 1
        assert bool((count == 1).all()), f"{key}: elements in the file {count.tolist()} times"
    # Beside them each rank writes a record that names the save.
    items = [i for planner in planners for i in planner.plan.items if i.index.fqn in expected]
    planned = Counter((item.index.fqn, item.index.offset) for item in items)
    assert planned == chunks
    places = [index for index in metadata.storage_data if index.fqn in expected]
    assert Counter((index.fqn, index.offset) for index in places) == chunks
    records = Counter((at.relative_path, at.offset) for at in metadata.storage_data.values())
    assert max(records.values(), default=1) == 1, "two chunks at one place of a file"
    nbytes = sum(value.nbytes for value in expected.values() if isinstance(value, torch.Tensor))
    report = planners[0].report
    assert report.unique_nbytes == report.whole_nbytes == nbytes
    assert nbytes == sum(
        item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
        for item in items
        if item.tensor_data is not None
    )


def assert_items_are_views(
    pair: Pair, held: list[list[Value]], planners: list[PlacementSavePlanner]
) -> None:
    """Planning copies no tensor: what is written lies in the memory of what the ranks hold."""
    scalars = {name for family in pair.families for name in family.numbers}
    for values, planner in zip(held, planners, strict=True):
        memory = {value.local.untyped_storage().data_ptr() for value in values}
        for item in planner.plan.items:
            written = planner.resolve_data(item)
            # A stack of scalars, as of optimizer steps, is made anew.
            if isinstance(written, torch.Tensor) and written.numel() > 1:
                key = item.index.fqn
                if key.rpartition(".")[2] not in scalars:
                    assert written.untyped_storage().data_ptr() in memory, key


def assert_torch_reads(pair: Pair, whole: Wholes, path: Path) -> None:
    expected = checkpoint(pair, whole)
    read = {
        key: opposite(value) if isinstance(value, torch.Tensor) else None
        for key, value in expected.items()
    }
    dcp.load(read, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(), no_dist=True)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert same_bits(read[key], value), f"{key}: the file has {read[key]}, not {value}"
        elif key.endswith(".params"):  # in any order
            assert sorted(read[key]) == sorted(value), f"{key}: {read[key]}, not {value}"
        else:
            assert read[key] == value, key


def load(pair: Pair, whole: Wholes, path: Path) -> None:
    side = pair.load
    ranks = [Rank(pair, side, rank) for rank in range(side.size)]
    blank = {key: opposite(value) for key, value in whole.items()}
    held = [list(rank.values(blank, step=BLANK)) for rank in ranks]
    make = FileSystemReader if dict(side.options)["torch"] else PlacementFileSystemReader
    loaded = World(side.size).load(
        path,
        lambda rank: ranks[rank].state_dict(held[rank], blank=True),
        lambda rank: PlacementLoadPlanner(ranks[rank].rules(), rename=ranks[rank].rename()),
        lambda rank: make(path),
    )
    for rank, values, state in zip(ranks, held, loaded, strict=True):
        where = f"on rank {rank.rank} after the load"
        for value in values:
            assert get(state, rank.path(value.key)) is value.value, f"{value.key} {where}"
            if value.of is None:
                continue
            expected = elements(whole[value.of], value.numbers, value.padding)
            assert same_bits(value.local, expected), (
                f"{value.key} {where} is {value.local}, not {expected}"
            )
        for fresh in rank.values(whole):
            if fresh.of is None:
                found = get(state, rank.path(fresh.key))
                assert torch.equal(found, fresh.local), f"{fresh.key} {where} is {found}"
        for key, value in rank.objects(values).items():
            assert get(state, rank.path(key)) == value, f"{key} {where}"


def smaller(pair: Pair) -> Iterator[Pair]:
    """Yield what is left of a pair without one of its families, objects or options."""
    for at in range(len(pair.families)):

        def without(values: tuple[Any, ...], at: int = at) -> tuple[Any, ...]:
            return (*values[:at], *values[at + 1 :])

        yield replace(
            pair,
            families=without(pair.families),
            save=replace(pair.save, holds=without(pair.save.holds)),
            load=replace(pair.load, holds=without(pair.load.holds)),
        )
    yield replace(pair, objects=())
    for at, family in enumerate(pair.families):
        for plainer in (replace(family, moments=()), replace(family, step=None, scalars=())):
            yield replace(pair, families=(*pair.families[:at], plainer, *pair.families[at + 1 :]))
    for name in ("save", "load"):
        side = getattr(pair, name)
        for plainer_side in (
            replace(side, rules="patterns"),
            replace(side, nesting="flat"),
            replace(side, wrapped=False),
        ):
            yield replace(pair, **{name: plainer_side})


def failure(pair: Pair, root: Path) -> BaseException | None:
    """Return what a pair fails with."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            run(pair, root)
            for warning in caught:
                assert is_expected(pair, str(warning.message)), str(warning.message)
        except (Exception, dcp.CheckpointException) as error:
            return error
    return None


def is_expected(pair: Pair, warning: str) -> bool:
    """Whether a load warns of what is so on purpose.

    Of replicas that the save was told not to compare; of square tensors that one side alone turns.
    """
    if "transposes it, and " in warning:
        holds = zip(pair.save.holds, pair.load.holds, strict=True)
        return any(bool(save.turned) != bool(load.turned) for save, load in holds)
    is_alone = "(1 note" in warning and "it was not compared" in warning
    return is_alone and dict(pair.save.options)["digests"] == "off"


def text_of(value: Any, indent: int = 0) -> str:
    """Return a pair as text, without what is at its default."""
    if dataclasses.is_dataclass(value) and type(value).__module__ == Pair.__module__:
        held = [
            f"{field.name}={text_of(getattr(value, field.name), indent + 4)}"
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != field.default
        ]
        return f"{type(value).__name__}({', '.join(held)})"
    if isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
        lines = [f"\n{' ' * (indent + 4)}{text_of(entry, indent + 4)}," for entry in value]
        return f"({''.join(lines)})"
    return repr(value)


def described(error: BaseException) -> tuple[str, tuple[str, int | None]]:
    """Return the text of a failure, and which line raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, dcp.CheckpointException):
        error, frames = error.failures[min(error.failures)]
    return f"{type(error).__name__}: {error}", (frames[-1].filename, frames[-1].lineno)


def kind(error: BaseException) -> tuple[Any, ...]:
    """Return what two failures of one cause have in common: the line, and the longer words."""
    text, line = described(error)
    return line, [word for word in text.split()[:40] if word.isalpha()]


def shrunk(pair: Pair, error: BaseException, root: Path) -> tuple[Pair, BaseException]:
    """Return a smaller pair that still fails, and with what."""
    for at, candidate in enumerate(smaller(pair)):
        if candidate != pair:
            found = failure(candidate, root / str(at))
            if found is not None and kind(found) == kind(error):
                return shrunk(candidate, found, root / f"{at}-")
    return pair, error


def assert_all_load(pairs: Iterable[Pair], root: Path, again: str) -> None:
    """Assert that the load of each pair has what its save had; what fails is made smaller first."""
    for pair in pairs:
        error = failure(pair, root / str(pair.seed))
        if error is not None:
            pair, error = shrunk(pair, error, root / f"{pair.seed}-smaller")
            pytest.fail(
                f"world {pair.seed} (again: pytest tests/test_differential.py -k {again} "
                f"--worlds 1 --world-seed {pair.seed}):\n{text_of(pair)}\n{described(error)[0]}"
            )


@pytest.mark.worlds(40)
def test_any_random_world_loads_what_any_other_saved(seeds: range, tmp_path: Path) -> None:
    """M28 among them: uneven, strided and empty shards, scalars, tensors without elements."""
    assert_all_load(map(draw_pair, seeds), tmp_path, "any_random_world")


@pytest.mark.worlds(20)
def test_names_of_two_steps_and_more(seeds: range, tmp_path: Path) -> None:
    """Numbers in numbers, stacks, and components that later steps and functions spell otherwise."""
    pairs = [draw_pair(seed, renamed=True) for seed in seeds]
    assert_all_load(pairs, tmp_path, "names_of_two_steps")


@pytest.mark.worlds(30)
def test_state_of_any_optimizer(seeds: range, tmp_path: Path) -> None:
    """M117 among them: moments that have size 1 along a dim; numbers other than a step."""
    pairs = [draw_pair(seed, optimizers=True) for seed in seeds]
    assert_all_load(filter(is_plain, pairs), tmp_path, "state_of_any_optimizer")


def is_plain(pair: Pair) -> bool:
    """Whether shapes tell which dims of a moment are reduced.

    They do not on a rank to which a rule leaves one row of several.
    """
    for side in (pair.save, pair.load):
        for rank in (Rank(pair, side, number) for number in range(side.size)):
            if any(value.ambiguous for value in rank.values(wholes(pair))):
                return False
    return True


@pytest.mark.worlds(30)
def test_a_number_that_no_rank_has_is_refused_whatever_renames_it(
    seeds: range, tmp_path: Path
) -> None:
    """M118, M119: also where a later step changes what the number stands in."""
    for seed in seeds:
        pair = draw_pair(seed, renamed=True)
        lost = draw_lost(Draw(f"lost {seed}"), pair)
        if lost is None:
            continue
        _, row = lost
        whole, planners = wholes(pair), save_planners(pair)
        with pytest.raises(dcp.CheckpointException) as refusal:
            save(pair, whole, tmp_path / str(seed), planners, lost=lost)
        number = [*row.values()][-1]
        text = "".join(str(error) for error, _ in refusal.value.failures.values())
        # Of a list in a stack the key itself has the number.
        assert re.search(rf"(?<!\w){number}(?!\w)", text), f"{seed}: {number} is not in {text}"
        assert not (tmp_path / str(seed) / ".metadata").exists()


def draw_lost(draw: Draw, pair: Pair) -> tuple[str, dict[str, int]] | None:
    """Return a family, and numbers of its levels from the outside in that all ranks go without."""
    known = [
        (family, at)
        for family, hold in zip(pair.families, pair.save.holds, strict=True)
        for at, (level, ids) in enumerate(zip(family.levels, hold.ids, strict=True))
        if ids is not None and ids.renumbered and ids.total and level.total > 1
        if prod(family.row)  # of tensors without elements nothing is lost
    ]
    if pair.save.wrapped or not known:
        return None  # nothing says how many there are
    family, at = draw.choice(known)
    hold = pair.save.holds[pair.families.index(family)]
    outside = zip(family.levels[at + 1 :], hold.ids[at + 1 :], strict=True)
    # It is lost everywhere, or in one row of the level outside.
    some = [level for level, ids in outside if ids is not None and draw.chance(50)]
    chosen = [*some, family.levels[at]]
    return family.name, {level.word: draw.randrange(level.total) for level in chosen}
