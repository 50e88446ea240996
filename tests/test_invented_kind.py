"""A kind of placement that somebody invents, and tells some places of: each public path is then
right, or refuses it by name, and none takes it for a kind that it knows.

The kind has a block size: of two ranks the first has rows 0, 1, 4, 5 of eight, in blocks of two. It
is told to the declarations alone, or to the layout as well, which is all that its rows depend on.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import arange, assert_holds, assert_same, blank, warned, without_warning
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    PlacementError,
    Placements,
    Split,
    Unstack,
    check,
)
from dcp_placements.bind.rule_and_dtensor import SharedPlaces
from dcp_placements.errors import CannotPlace
from dcp_placements.layout import sharding
from dcp_placements.layout.sharding import Cut, Intervals, Kind
from dcp_placements.offline import diagnose, export_safetensors, inspect, rehearse, reshard, verify
from dcp_placements.rules import placement as rules_placement
from dcp_placements.testing import FakeDTensor, FakeMesh, World, cut

WORLD = World(2)
WHOLE = arange(8, 3)


class NewKind(StrEnum):
    """A member that somebody adds to ``Kind``."""

    CYCLIC = "cyclic"


NEW: Any = NewKind.CYCLIC


@dataclass(frozen=True)
class CyclicShard:
    """Blocks of rows in turn."""

    dim: int
    block: int

    def is_replicate(self) -> bool:
        return False

    def is_partial(self) -> bool:
        return False


CYCLIC = CyclicShard(0, 2)


def tell_declarations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell the places of the rules: what kind it is, and how it cuts."""
    own = CyclicShard.__module__.partition(".")[0], CyclicShard.__name__
    monkeypatch.setitem(rules_placement._SPLITTING, own, NEW)
    real = rules_placement.cut_of

    def cut_of(placement: Any, ndim: int, axis: str | None, size: int) -> Cut:
        if isinstance(placement, CyclicShard):
            return Cut(placement.dim, axis, size, NEW, placement.block)
        return real(placement, ndim, axis, size)

    for name, module in list(sys.modules.items()):
        if name.startswith("dcp_placements") and getattr(module, "cut_of", None) is real:
            monkeypatch.setattr(module, "cut_of", cut_of)


def tell_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell the layout: which rows it leaves."""
    tell_declarations(monkeypatch)
    real = sharding.cut_intervals

    def cut_intervals(intervals: Intervals, one: Cut, position: Any) -> Intervals:
        if one.kind is not NEW:
            return real(intervals, one, position)
        total = sum(stop - start for start, stop in intervals)
        block = one.parts
        assert isinstance(block, int)
        rows = [row for row in range(total) if row // block % one.size == position]
        return real(intervals, one._replace(kind=Kind.LISTED, parts=1), tuple(rows))

    monkeypatch.setattr(sharding, "cut_intervals", cut_intervals)


def rows(position: int) -> torch.Tensor:
    return WHOLE.reshape(2, 2, 2, 3)[:, position].reshape(4, 3).clone()


def mesh(rank: int) -> FakeMesh:
    return WORLD.mesh(rank, ep=2)


def declared(placement: Any, **options: Any) -> Callable[[Any], Placements]:
    return lambda mesh: Placements({"w": CheckpointPlacement(mesh, {"ep": placement})}, **options)


def cyclic(rank: int) -> dict[str, Any]:
    return {"w": rows(rank)}


def save(path: Path, state: Any = cyclic, placements: Any = None) -> None:
    of = placements or declared(CYCLIC)
    WORLD.save(path, state, lambda rank: of(mesh(rank)).save_planner())


def loaded(path: Path, state: Any = cyclic, placements: Any = None) -> dict[int, Any]:
    of = placements or declared(CYCLIC)
    states = {rank: blank(state(rank)) for rank in range(2)}
    WORLD.load(path, states.__getitem__, lambda rank: of(mesh(rank)).load_planner())
    return states


def plainly(path: Path) -> Path:
    """Save the truth by torch's planner, with the record of a plain declaration."""
    save(path, lambda rank: {"w": WHOLE.chunk(2)[rank].clone()}, declared(Shard(0)))
    return path


def loads_plain_save(path: Path) -> None:
    assert_same(loaded(plainly(path / "plain")), {rank: cyclic(rank) for rank in range(2)})


def saves(path: Path) -> None:
    save(path / "saved")
    assert_holds(path / "saved", {"w": WHOLE})


def saves_and_loads(path: Path) -> None:
    saves(path)
    assert_same(loaded(path / "saved"), {rank: cyclic(rank) for rank in range(2)})


def saves_and_loads_plainly(path: Path) -> None:
    saves(path)
    states = loaded(path / "saved", lambda rank: {"w": WHOLE[:4]}, declared(Shard(0)))
    assert_same(states, {rank: {"w": WHOLE.chunk(2)[rank]} for rank in range(2)})


def saves_inside_fsdp(path: Path) -> None:
    four = World(4)

    def state(rank: int) -> dict[str, Any]:
        both = four.mesh(rank, ep=2, fsdp=2)
        part = rows(both.get_coordinate()[0])
        return {"w": FakeDTensor.distribute(part, both["fsdp"], [Shard(0)])}

    four.save(
        path / "saved",
        state,
        lambda rank: declared(CYCLIC)(four.mesh(rank, ep=2, fsdp=2)).save_planner(),
    )
    assert_holds(path / "saved", {"w": WHOLE})


def replaces_a_dtensor(path: Path) -> None:
    """The DTensor says ``Shard`` over the axis of the rule: which of both speaks is not known."""
    save(
        path / "saved", lambda rank: {"w": FakeDTensor(rows(rank), mesh(rank), [Shard(0)], (8, 3))}
    )
    assert_holds(path / "saved", {"w": WHOLE})


def is_a_dtensor(path: Path) -> None:
    save(
        path / "saved",
        lambda rank: {"w": FakeDTensor(rows(rank), mesh(rank), [CYCLIC], (8, 3))},
        lambda mesh: Placements(None),
    )
    assert_holds(path / "saved", {"w": WHOLE})


def splits(path: Path) -> None:
    split = Split("w", ["gate", "up"])
    save(path / "saved", placements=declared(CYCLIC, rename=split))
    gate, up = WHOLE.chunk(2)
    assert_holds(path / "saved", {"gate": gate, "up": up})
    states = loaded(path / "saved", placements=declared(CYCLIC, rename=split))
    assert_same(states, {rank: cyclic(rank) for rank in range(2)})


def splits_otherwise(path: Path) -> None:
    """Parts that were saved by their own names, into a tensor that is cut in blocks."""
    parts = dict(zip(("gate", "up"), WHOLE.chunk(2), strict=True))

    def state(rank: int) -> dict[str, Any]:
        return {name: part.chunk(2)[rank].clone() for name, part in parts.items()}

    def plain(mesh: Any) -> Placements:
        return Placements({"*": CheckpointPlacement(mesh, {"ep": Shard(0)})})

    save(path / "saved", state, plain)
    split = declared(CYCLIC, rename=Split("w", ["gate", "up"]))
    assert_same(loaded(path / "saved", placements=split), {r: cyclic(r) for r in range(2)})


def unstacks(path: Path) -> None:
    unstack = declared(CYCLIC, rename=Unstack("w.{}"))
    save(path / "saved", placements=unstack)
    assert_holds(path / "saved", {f"w.{n}": row for n, row in enumerate(WHOLE)})
    assert_same(loaded(path / "saved", placements=unstack), {r: cyclic(r) for r in range(2)})


def checks(path: Path) -> None:
    check({"w": WHOLE.clone()}, declared(CYCLIC)(World(1).mesh(0, ep=1)))


def rehearses(path: Path) -> None:
    rehearsal = rehearse(plainly(path / "plain"), declared(CYCLIC), {"ep": 2})
    text = str(rehearsal)
    if not rehearsal.loads:
        raise PlacementError(text)
    assert sorted(rank.wanted_nbytes for rank in rehearsal.ranks) == [48, 48]


def rehearses_its_save(path: Path) -> None:
    saves(path)
    assert rehearse(path / "saved", declared(Shard(0)), {"ep": 2}).loads


def reshards(path: Path) -> None:
    reshard(plainly(path / "plain"), path / "out", declared(CYCLIC), {"ep": 2})
    assert_holds(path / "out", {"w": WHOLE})


def reshards_its_save(path: Path) -> None:
    saves(path)
    reshard(path / "saved", path / "out", declared(Shard(0)), {"ep": 2})
    assert_holds(path / "out", {"w": WHOLE})


def exports(path: Path) -> None:
    from safetensors.torch import load_file

    saves(path)
    export_safetensors(path / "saved", path / "out")
    assert_same(load_file(path / "out" / "model.safetensors"), {"w": WHOLE})


def inspects(path: Path) -> None:
    saves(path)
    assert "cyclic" not in str(inspect(path / "saved"))  # its record is not known
    assert verify(path / "saved", contents=True).sound
    diagnose(path / "saved")


def resharder(path: Path) -> None:
    pytest.importorskip("torch_checkpointing")
    from engines.test_saved_items import load as load_item
    from engines.test_saved_items import save as save_items

    def of(rank: int, size: int) -> Placements:
        return declared(CYCLIC)(WORLD.mesh(rank, ep=2))

    save_items(path / "items", [cyclic(0), cyclic(1)], of)
    for rank in range(2):
        found = blank(cyclic(rank))
        load_item(path / "items", found, of(rank, 2), rank=rank, size=2)
        assert_same(found, cyclic(rank))


PATHS = (
    saves,
    loads_plain_save,
    saves_and_loads,
    saves_and_loads_plainly,
    saves_inside_fsdp,
    replaces_a_dtensor,
    is_a_dtensor,
    splits,
    splits_otherwise,
    unstacks,
    checks,
    rehearses,
    rehearses_its_save,
    reshards,
    reshards_its_save,
    exports,
    inspects,
    resharder,
)
REFUSED = {
    tell_declarations: {*PATHS},
    # Where a kind that is known would be compared, or decide who speaks for an axis.
    tell_layout: {
        loads_plain_save,
        replaces_a_dtensor,
        splits,
        splits_otherwise,
        rehearses,
        reshards,
        resharder,
    },
}


@pytest.mark.parametrize("tell", [tell_declarations, tell_layout])
@pytest.mark.parametrize("path", PATHS)
def test_m133_every_public_path_is_right_or_refuses_it_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tell: Any, path: Any
) -> None:
    tell(monkeypatch)
    text = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            path(tmp_path)
        except (PlacementError, dcp.CheckpointException) as error:
            text = str(error)
    assert ("a cut of kind cyclic is not supported here" in text) == bool(text), text
    assert bool(text) == (path in REFUSED[tell])


def test_m133_a_kind_that_only_its_name_is_known_of_is_refused_where_it_is_declared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = CyclicShard.__module__.partition(".")[0], CyclicShard.__name__
    monkeypatch.setitem(rules_placement._SPLITTING, own, NEW)
    for ask in (
        lambda: CheckpointPlacement(mesh(0), {"ep": CYCLIC}, global_shape=(8, 3)),
        lambda: SharedPlaces().bind(
            (torch.ones(4, 3), None, (), torch.Size((4, 3))),
            CheckpointPlacement(mesh(0), {"ep": CYCLIC}),
        ),
        lambda: rules_placement.format_placement(CYCLIC),
        lambda: str(Cut(0, "ep", 2, NEW, 2)),
    ):
        with pytest.raises(CannotPlace, match="a cut of kind cyclic is not supported here"):
            ask()


class Derived(Shard):
    """Other rows than those of its base class."""


@pytest.mark.parametrize("placement", [CYCLIC, Derived(0), Shard, object()])
def test_m133_the_reference_refuses_a_placement_that_it_does_not_know(placement: Any) -> None:
    with pytest.raises(ValueError, match="how that cuts a tensor is not known"):
        cut(WHOLE, [placement], [2], [0])
    with pytest.raises(ValueError, match="how that cuts a tensor is not known"):
        FakeDTensor.distribute(WHOLE, mesh(0), [placement])


def test_m135_a_record_keeps_the_keys_that_it_understands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later version saved ``w`` in blocks, and ``v`` as it is known here."""

    def state(rank: int) -> dict[str, Any]:
        return {"w": rows(rank), "v": WHOLE.chunk(2)[rank].clone(), "norm": arange(3)}

    def later(mesh: Any) -> Placements:
        return Placements(
            {
                "w": CheckpointPlacement(mesh, {"ep": CYCLIC}),
                "v": CheckpointPlacement(mesh, {"ep": Shard(0)}),
            }
        )

    with monkeypatch.context() as patch:
        tell_layout(patch)
        save(tmp_path, state, later)

    def plain(rank: int) -> dict[str, Any]:
        return {key: WHOLE.chunk(2)[rank].clone() for key in "wv"} | {"norm": arange(3)}

    def of(placement: Any, **options: Any) -> Callable[[Any], Placements]:
        return lambda mesh: Placements(
            {key: CheckpointPlacement(mesh, {"ep": placement}) for key in "wv"}, **options
        )

    with warned() as texts:
        assert_same(loaded(tmp_path, plain, of(Shard(0))), {r: plain(r) for r in range(2)})
    (text,) = set(texts)
    for part in ("w: the save cut it in a way that is not known here", "kind cyclic", "later"):
        assert part in text
    assert "v:" not in text
    with without_warning():
        loaded(tmp_path, plain, of(Shard(0), waive={"w": "in blocks, as we know"}))
        loaded(  # asks for nothing of w
            tmp_path,
            lambda rank: {"v": WHOLE[:4]},
            lambda mesh: Placements({"v": CheckpointPlacement(mesh, {"ep": Shard(0)})}),
        )
    with pytest.raises(dcp.CheckpointException, match=r"v: this load cuts it by 'ep' in another"):
        loaded(tmp_path, plain, of(FusedShard(0, 2)))
