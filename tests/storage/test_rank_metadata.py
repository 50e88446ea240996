"""A directory with the metadata of single ranks alone is refused by every reader and command."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import assert_holds

from dcp_placements import (
    PlacementError,
    PlacementFileSystemReader,
    PlacementLoadPlanner,
    PlacementSavePlanner,
)
from dcp_placements.errors import CannotLook
from dcp_placements.offline import shapes
from dcp_placements.testing import World
from tests.offline_scenes import Run
from tests.storage_scenes import blank, load, save_alone, sharded, wholes
from tests.versions import passes_on_errors

SIZE = 4
WORLD = World(SIZE)
WHOLE = wholes(2, (9, 5))
ALIKE = {"norm": torch.arange(3.0), "lr": 0.1}
ALONE = "describes its own part alone"
RULES = ("--rules", "tests.offline_scenes:rules_by_ep", "--mesh", "ep=4")

COMMANDS: dict[str, tuple[Any, ...]] = {
    "inspect": ("it",),
    "verify": ("it", "--contents"),
    "diff": ("it", "sound"),
    "diff, the other way": ("sound", "it"),
    "rehearse": ("it", *RULES),
    "doctor": ("it", "--experts-per-layer", 8),
    "draw": ("it", "layers.0.weight", "-o", "drawn.svg"),
    "stock-metadata": ("it",),
    "export": ("it", "out"),
    "reshard": ("it", "out", *RULES),
}


def state(rank: int) -> dict[str, Any]:
    return {**sharded(WORLD, rank, WHOLE, 0), **ALIKE}


@pytest.fixture
def it(tmp_path: Path) -> Path:
    """What torch's planner and writer leave after a save without collectives."""
    for rank in range(SIZE):
        save_alone(tmp_path / "it", rank, state(rank))
    return tmp_path / "it"


@passes_on_errors
@pytest.mark.parametrize("planner", [PlacementLoadPlanner, dcp.DefaultLoadPlanner])
@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("lost", [None, 0, 3])
def test_our_reader_refuses_it(it: Path, planner: Any, restricted: bool, lost: int | None) -> None:
    if lost is not None:
        (it / f"__{lost}.metadata").unlink()
    reader = PlacementFileSystemReader(it, restricted=restricted)
    into = {"norm": torch.full((3,), 7.0)}
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(into, storage_reader=reader, planner=planner(), no_dist=True)
    text = str(caught.value)
    assert ALONE in text
    assert f"found:       __{int(lost == 0)}.metadata" in text
    assert into["norm"].eq(7).all()
    with pytest.raises(FileNotFoundError, match=ALONE):
        reader.read_metadata()
    for fresh in (reader, PlacementFileSystemReader(it)):
        with pytest.raises(PlacementError):
            fresh.read_metadata(rank=1)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_refuse_it(
    it: Path, command: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(it.parent)
    dcp.save(blank(WHOLE), checkpoint_id="sound")
    before = sorted(it.parent.rglob("*"))
    err = run.fails(command.partition(",")[0], *COMMANDS[command])
    assert "it: no checkpoint of whole tensors: there is no .metadata" in err
    assert "found:       __0.metadata, __1.metadata" in err
    assert "use_collectives=False" in err
    assert "way out:     load it by torch's planner" in err
    assert sorted(it.parent.rglob("*")) == before


def test_import_and_shapes_refuse_it(it: Path, run: Run) -> None:
    with pytest.raises(CannotLook, match=ALONE):
        shapes(it)
    assert run("import", it, it.parent / "out").code == 2
    assert not (it.parent / "out").exists()


def test_the_message_of_many_ranks_is_short(tmp_path: Path) -> None:
    for rank in range(2000):
        (tmp_path / f"__{rank}.metadata").touch()
    with pytest.raises(FileNotFoundError) as caught:
        PlacementFileSystemReader(tmp_path).read_metadata()
    assert len(str(caught.value)) < 700 + len(str(tmp_path))


@pytest.mark.parametrize("name", ["__0.metadata.tmp", "__a.metadata", "_0.metadata", "0.metadata"])
def test_other_names_are_no_metadata_of_ranks(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(FileNotFoundError, match=r"no complete checkpoint"):
        PlacementFileSystemReader(tmp_path).read_metadata()


def test_metadata_of_ranks_beside_those_of_all_are_passed_over(it: Path, run: Run) -> None:
    """A save with collectives, into the directory of one without."""
    WORLD.save(it, state, lambda rank: PlacementSavePlanner())
    saved = {**WHOLE, **ALIKE}
    read = load(it, blank(saved), PlacementFileSystemReader(it))
    assert torch.equal(read["layers.1.weight"], WHOLE["layers.1.weight"])
    assert run("verify", it, "--contents").code == 0


class Own(dcp.FileSystemReader):
    """Reads the metadata of one rank, as torch's load makes it do where there are no others."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path)
        self.own = rank

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        return super().read_metadata(rank=self.own)


@pytest.mark.parametrize("dim", [0, 1])
def test_what_torchs_reader_gives_our_planner_is_right_or_has_holes(it: Path, dim: int) -> None:
    def into(rank: int) -> dict[str, Any]:
        return sharded(WORLD, rank, {key: torch.zeros_like(WHOLE[key]) for key in WHOLE}, dim)

    def load_it() -> list[dict[str, Any]]:
        return WORLD.load(it, into, lambda rank: PlacementLoadPlanner(), partial(Own, it))

    if dim == 1:
        with pytest.raises(dcp.CheckpointException) as caught:
            load_it()
        (error, _) = caught.value.failures[0]
        assert "nobody stored [3:9, 0:2] of (9, 5)" in str(error)
        assert "without collectives" in str(error)
        return
    for rank, read in enumerate(load_it()):
        for key, value in sharded(WORLD, rank, WHOLE, 0).items():
            assert torch.equal(read[key].to_local(), value.to_local())


def test_the_way_out_leads_to_a_whole_checkpoint(it: Path, tmp_path: Path) -> None:
    held = WORLD.load(
        it,
        lambda rank: {
            **sharded(WORLD, rank, WHOLE, 0, empty=True),
            "norm": torch.zeros(3),
            "lr": 0.0,
        },
        lambda rank: dcp.DefaultLoadPlanner(),
        partial(Own, it),
    )
    with warnings.catch_warnings(action="error"):
        WORLD.save(tmp_path / "new", held.__getitem__, lambda rank: PlacementSavePlanner())
    assert_holds(tmp_path / "new", {**WHOLE, "norm": ALIKE["norm"]})
