"""``reshard`` against plain slicing, torch's default planner in one process, and real loads."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import assert_holds
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    IndexShard,
    MeshCoordinate,
    PlacementError,
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
    PlacementRules,
    Placements,
    PlacementSavePlanner,
    Renames,
    Renumber,
    Stack,
    contiguous,
)
from dcp_placements.convert import format_writers
from dcp_placements.offline import CannotLook, diff, inspect, open_source, rehearse, reshard, verify
from dcp_placements.testing import FakeDTensor, World, cut, damage
from tests.offline_scenes import Run, rules_by_ep, save_hugging_face, save_sharded
from tests.offline_scenes import wholes as small
from tests.remote_scenes import save
from tests.storage_scenes import Flipped, assert_record_of
from tests.strategies import arange


def files_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


# Whole models, between topologies


def test_stacked_steps_of_experts_that_two_axes_cut_are_no_refusal(tmp_path: Path) -> None:
    """Ranks have a step per expert; a planner asks no rule about those, so neither do commands."""
    world, whole = World(4), arange((4, 3, 6))

    def rules(mesh: Any) -> Placements:
        renames = Renames(
            Renumber("experts.{}", contiguous([2, 2], at=mesh.get_coordinate()[0]), 4),
            Stack("experts.{}", 4),
        )
        cuts = CheckpointPlacement(mesh, {"ep": Shard(0), "etp": Shard(2)})
        return Placements({"experts.w": cuts}, rename=renames)

    def state_dict(rank: int) -> dict[str, Any]:
        ep, etp = divmod(rank, 2)
        made: dict[str, Any] = {}
        for at, expert in enumerate((2 * ep, 2 * ep + 1)):
            held = cut(whole[expert], [Shard(1)], (2,), (etp,))
            made[f"model.experts.{at}.w"] = held
            made[f"optim.state.experts.{at}.w.exp_avg"] = held + 100
            made[f"optim.state.experts.{at}.w.step"] = torch.tensor(7.0)
        return made

    world.save(
        tmp_path / "source",
        state_dict,
        lambda rank: rules(world.mesh(rank, ep=2, etp=2)).save_planner(),
    )
    assert not rehearse(tmp_path / "source", rules, {"ep": 2, "etp": 2}).faults
    reshard(tmp_path / "source", tmp_path / "out", rules, {"ep": 2, "etp": 2})
    state = {"exp_avg": whole + 100, "step": torch.full((4,), 7.0)}
    expected = {f"optim.state.experts.w.{name}": value for name, value in state.items()}
    assert_holds(tmp_path / "out", {"model.experts.w": whole, **expected})


# What each rank reads


def columns(mesh: MeshCoordinate) -> PlacementRules:
    return PlacementRules({"w*": CheckpointPlacement(mesh, {"tp": Shard(1)})})


def test_a_load_opens_one_file_per_rank_and_reads_most_of_it(tmp_path: Path) -> None:
    whole = {f"w{n}": arange((n + 60, 400)) + n for n in range(6)}
    rows, world = World(3), World(4)
    rows.save(
        tmp_path / "rows",
        lambda rank: {
            key: FakeDTensor.distribute(t, rows.mesh(rank, fsdp=3), [Shard(0)])
            for key, t in whole.items()
        },
        lambda rank: PlacementSavePlanner(),
    )
    before = rehearse(tmp_path / "rows", columns, {"tp": 4})
    assert {rank.files for rank in before.ranks} == {3}
    reshard(tmp_path / "rows", tmp_path / "out", columns, {"tp": 4})
    after = rehearse(tmp_path / "out", columns, {"tp": 4})
    assert {rank.files for rank in after.ranks} == {1}
    for rank in range(4):
        reader = PlacementFileSystemReader(tmp_path / "out")
        local = {key: torch.zeros(t.shape[0], 100) for key, t in whole.items()}
        mesh = world.mesh(rank, tp=4)
        held = {key: FakeDTensor(local[key], mesh, [Shard(1)], t.shape) for key, t in whole.items()}
        planner = PlacementLoadPlanner(columns(mesh))
        planner.set_up_planner(held, reader.read_metadata(), True)
        reader.set_up_storage_reader(reader.read_metadata(), True, rank=rank)
        (plan,) = planner.create_global_plan([planner.create_local_plan()])
        reader.read_data(planner.finish_plan(plan), planner).wait()
        for key, t in whole.items():
            assert torch.equal(local[key], t[:, 100 * rank : 100 * rank + 100])
        assert reader.opens == 1
        size = next((tmp_path / "out").glob(f"__{rank}_*")).stat().st_size
        assert reader.bytes_read > 0.9 * size


def test_replicas_are_in_the_file_of_the_lowest_rank(tmp_path: Path) -> None:
    save_sharded(tmp_path / "source")
    axes = {"dp": 2, "ep": 2}
    message = reshard(tmp_path / "source", tmp_path / "out", rules_by_ep, axes, fsdp=[])
    found = inspect(tmp_path / "out").tensors
    assert [found[fqn].ranks for fqn in small()] == [(0, 1), (0, 1), (0,), (0,), (0,)]
    assert len(message.files) == 2
    assert "without a file of their own: 2 ranks" in str(message)
    assert [rank.files for rank in rehearse(tmp_path / "out", rules_by_ep, axes).ranks] == [
        1,
        2,
        1,
        2,
    ]


def test_ranks_that_hold_the_same_experts_under_renumbered_names(tmp_path: Path) -> None:
    whole = {f"experts.{n}.w": arange((4, 3)) + n for n in range(4)} | {"norm": arange((3,))}
    dcp.save(dict(whole), checkpoint_id=tmp_path / "source", no_dist=True)

    def rules(mesh: MeshCoordinate) -> Placements:
        first = 2 * mesh.get_coordinate()[0]
        return Placements({}, rename=Renumber("experts.{}", [first, first + 1], total=4))

    reshard(tmp_path / "source", tmp_path / "out", rules, {"ep": 2})
    found = inspect(tmp_path / "out")
    assert [found.tensors[fqn].ranks for fqn in whole] == [(0,), (0,), (1,), (1,), (0,)]
    assert found.renames == ("Renumber('experts.{}', total=4)",)
    world = World(2)
    loaded = world.load(
        tmp_path / "out",
        lambda rank: {
            **{f"experts.{n}.w": torch.zeros(4, 3) for n in (0, 1)},
            "norm": torch.ones(3),
        },
        lambda rank: rules(MeshCoordinate(["ep"], [2], [rank])).load_planner(),
    )
    for rank in range(2):
        assert torch.equal(loaded[rank]["experts.1.w"], whole[f"experts.{2 * rank + 1}.w"])

    def two(mesh: MeshCoordinate) -> Placements:
        return Placements({}, rename=Renumber("experts.{}", [0, 1], total=4))

    def one(mesh: MeshCoordinate) -> Placements:
        return Placements({}, rename=Renumber("experts.{}", mesh.get_coordinate(), total=4))

    for lacking, message in (
        (two, "several ranks ask for 0-1 of it, and none for 2-3"),
        (one, "experts.2-3.w: no rank of this world has"),
    ):
        with pytest.raises(PlacementError, match=message):
            reshard(tmp_path / "source", tmp_path / "two", lacking, {"ep": 2})


# Contents


@pytest.mark.parametrize("short", [1, 1 << 20])
def test_contents_of_any_dtype_and_size_are_those_of_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: int
) -> None:
    monkeypatch.setattr("dcp_placements.offline.assembly.SHORT_NBYTES", short)
    monkeypatch.setattr(format_writers, "LEAST_NBYTES", 100)
    monkeypatch.setattr("dcp_placements.convert.conversion.MEMORY_NBYTES", 100)
    whole: dict[str, Any] = {
        str(dtype): (torch.arange(24 * 9) % 5).reshape(24, 9).to(dtype)
        for dtype in (torch.float64, torch.bfloat16, torch.bool, torch.int8, torch.complex64)
    }
    whole |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(2), "turned": arange((24, 9)).t()}
    state = {**whole, "object": {"a": [1, "x"]}}
    dcp.save(dict(state), checkpoint_id=tmp_path / "source", no_dist=True)

    def rules(mesh: MeshCoordinate) -> PlacementRules:
        held = CheckpointPlacement(mesh, {"x": Shard(0)})
        return PlacementRules({"empty": None, "**": held})

    reshard(tmp_path / "source", tmp_path / "out", rules, {"x": 3})
    assert diff(tmp_path / "source", tmp_path / "out").same
    assert verify(tmp_path / "out", contents=True).sound
    assert_holds(tmp_path / "out", whole)
    data = (tmp_path / "out").glob("__0_*")
    table = open_source(tmp_path / "out").tensors["torch.float64"].chunks
    (file,) = data
    first = next(chunk for chunk in table if chunk.file == file.name)
    saved = file.read_bytes()[first.start : first.start + first.nbytes]
    assert_record_of(saved, whole["torch.float64"][:8].clone())


@pytest.mark.usefixtures("flipped_is_known")
def test_m88_objects_keep_the_transforms_of_their_records(tmp_path: Path) -> None:
    state = {"w": arange((8, 3)), "step": 7, "scheduler": {"lr": [0.1, 0.2]}}
    writer = dcp.FileSystemWriter(tmp_path / "a", _extensions=[Flipped()])
    dcp.save(state, storage_writer=writer)
    reshard(tmp_path / "a", tmp_path / "b", lambda mesh: PlacementRules({}), {"dp": 2})
    assert verify(tmp_path / "b", contents=True).faults == ()
    found = {"w": torch.zeros(8, 3), "step": 0, "scheduler": {"lr": [0.0, 0.0]}}
    dcp.load(found, checkpoint_id=tmp_path / "b", no_dist=True)
    assert torch.equal(found.pop("w"), state["w"])
    assert found == {"step": 7, "scheduler": {"lr": [0.1, 0.2]}}


# Its record, its refusals, and what an interrupted one leaves


def test_the_new_checkpoint_is_described_as_one_of_its_world(tmp_path: Path, run: Run) -> None:
    save_sharded(tmp_path / "source", step=7)
    axes = ("--mesh", "ep=4,dp=2", "--rules", "tests.offline_scenes:rules_by_ep", "--fsdp", "dp")
    ran = run("reshard", tmp_path / "source", tmp_path / "out", *axes, "--json")
    assert ran.code == 0, ran.err
    assert len(ran.json["files"]) == 8
    shown = run("inspect", tmp_path / "out", "--json").json
    source = open_source(tmp_path / "source").provenance
    provenance = open_source(tmp_path / "out").provenance
    assert provenance is not None
    assert source is not None
    assert provenance["resharded_from"] == source["save_id"] != provenance["save_id"]
    assert (provenance["step"], provenance["world_size"]) == (7, 8)
    assert "Shard(0) over 'ep' of size 4" in shown["cuts"][0]["cuts"][0]
    for command in ("verify", "doctor"):
        assert run(command, tmp_path / "out").code == 0
    assert run("verify", tmp_path / "out", "--contents").code == 0
    assert run("diff", tmp_path / "source", tmp_path / "out").code == 0
    again = run("reshard", tmp_path / "source", tmp_path / "out", *axes)
    assert (again.code, "is there already" in again.err) == (2, True)
    assert run("reshard", tmp_path / "out", tmp_path / "out", *axes).code == 2


@pytest.mark.parametrize(
    "harm", [damage.drop_chunk, damage.remove_file, damage.truncate, damage.overlap_chunk]
)
def test_a_damaged_source_is_refused_before_anything_is_written(harm: Any, tmp_path: Path) -> None:
    save_sharded(tmp_path / "source", lean=False)
    harm(tmp_path / "source", "layers.0.experts.w1")
    with pytest.raises(PlacementError, match="it is not whole"):
        reshard(tmp_path / "source", tmp_path / "out", rules_by_ep, {"ep": 4})
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("command", ["reshard", "export", "import"])
def test_a_source_that_is_gone_once_the_output_is_complete_is_no_failure(
    tmp_path: Path, run: Run, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    if command == "import":
        save_hugging_face(source, {"w": torch.arange(6.0)})
    else:
        save_sharded(source)
    more = ("--rules", "tests.offline_scenes:rules_by_ep", "--mesh", "ep=4")
    rename = os.rename

    def renamed(old: Any, new: Any, **options: Any) -> None:
        rename(old, new, **options)
        if Path(new) == out:
            rename(source, tmp_path / "elsewhere")

    monkeypatch.setattr(os, "rename", renamed)
    ran = run(command, source, out, *(more if command == "reshard" else ()))
    assert (ran.code, ran.err) == (0, "")
    assert (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_a_record_that_is_read_in_part_is_compared_first(tmp_path: Path, cut: int) -> None:
    """Two ranks read halves of a record, also where these are columns."""
    whole = torch.arange(4.0 * 6 * 8).view(4, 6, 8)
    writer = PlacementFileSystemWriter(tmp_path / "source")
    dcp.save({"w": whole}, storage_writer=writer, planner=PlacementSavePlanner(), no_dist=True)

    def halves(mesh: MeshCoordinate) -> PlacementRules:
        return PlacementRules({"w": CheckpointPlacement(mesh, {"tp": Shard(cut)})})

    result = reshard(tmp_path / "source", tmp_path / "sound", halves, {"tp": 2})
    assert not result.notes
    assert_holds(tmp_path / "sound", {"w": whole})
    (file,) = (tmp_path / "source").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.index(whole[3, 5, 7].numpy().tobytes())] ^= 1  # in the half that comes last
    file.write_bytes(data)
    with pytest.raises(PlacementError, match=r"w: .*elements at byte .* are not what was written"):
        reshard(tmp_path / "source", tmp_path / "out", halves, {"tp": 2})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_records_without_checksums_are_named(tmp_path: Path, ranks: int) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        save(str(tmp_path / "source"), {"w": torch.arange(48.0).view(8, 6)})
    finally:
        torch.serialization.set_crc32_options(before)

    def rows(mesh: MeshCoordinate) -> PlacementRules:
        return PlacementRules({"w": CheckpointPlacement(mesh, {"tp": Shard(0)})})

    result = reshard(tmp_path / "source", tmp_path / "out", rows, {"tp": ranks})
    assert result.notes == ("without checksums, so that nothing proves the contents: w",)


def test_at_a_url_what_is_read_in_part_is_named(tmp_path: Path, memory: str) -> None:
    """It would be downloaded twice."""
    save(memory, {"w": torch.arange(48.0).view(8, 6), "whole": torch.ones(4)})

    def halves(mesh: MeshCoordinate) -> PlacementRules:
        return PlacementRules({"w": CheckpointPlacement(mesh, {"tp": Shard(0)})})

    (note,) = reshard(memory, tmp_path / "out", halves, {"tp": 2}).notes
    assert note == "read in part, so not compared with checksums: w"


def test_what_a_load_would_be_refused_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_sharded(tmp_path / "source")
    source = tmp_path / "source"
    with pytest.raises(PlacementError, match=r"experts.w1.*\(9, 5, 3\) is needed"):
        reshard(source, tmp_path / "out", rules_by_ep, {"ep": 3})
    with pytest.raises(CannotLook, match="no axis 'ep'"):
        reshard(source, tmp_path / "out", rules_by_ep, {"tp": 2})
    with pytest.raises(CannotLook, match="no axis dp for FSDP"):
        reshard(source, tmp_path / "out", rules_by_ep, {"ep": 2}, fsdp=["dp"])

    def half(mesh: MeshCoordinate) -> PlacementRules:
        rows = IndexShard(0, (mesh.get_coordinate()[0], 2))
        return PlacementRules(
            {"w2": CheckpointPlacement(mesh, {"ep": rows}, global_shape=(8, 3, 5))}
        )

    with pytest.raises(PlacementError, match=r"experts.w2: nobody holds all of the \(8, 3, 5\)"):
        reshard(source, tmp_path / "out", half, {"ep": 2})
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(CannotLook, match="there is room for 100 B"):
        reshard(source, tmp_path / "out", rules_by_ep, {"ep": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_safetensors_are_rewritten_too(tmp_path: Path) -> None:
    save_hugging_face(tmp_path / "hf", small())
    reshard(tmp_path / "hf", tmp_path / "out", rules_by_ep, {"ep": 2})
    assert_holds(tmp_path / "out", small())


def fixed_times(path: Path) -> None:
    for file in path.iterdir():
        os.utime(file, (1e9, 1e9))


def test_a_source_of_equal_names_sizes_and_times_is_begun_anew(tmp_path: Path) -> None:
    source = tmp_path / "src"
    save_sharded(source, lean=False)
    fixed_times(source)

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reshard(source, tmp_path / "out", rules_by_ep, {"ep": 4}, progress=stop)
    save_sharded(source, lean=False, add=1000.0)
    fixed_times(source)
    assert reshard(source, tmp_path / "out", rules_by_ep, {"ep": 4}).kept == ()
    assert_holds(tmp_path / "out", {key: value + 1000 for key, value in small().items()})


def test_the_partial_directory_of_the_output_is_no_source(tmp_path: Path) -> None:
    partial = tmp_path / ".out.partial"
    save_sharded(partial)
    (tmp_path / "link").symlink_to(partial)
    before = files_of(partial)
    for source in (partial, tmp_path / "link", open_source(partial)):
        with pytest.raises(CannotLook, match=r"what an interrupted attempt at .* left"):
            reshard(source, tmp_path / "out", rules_by_ep, {"ep": 4})
    assert files_of(partial) == before


@pytest.mark.parametrize("out", ["", ".", "a\0b"])
def test_an_output_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    save_sharded(tmp_path / "src")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(CannotLook, match="this names no output"):
        reshard(tmp_path / "src", out, rules_by_ep, {"ep": 4})
    assert list((tmp_path / "empty").iterdir()) == []


def test_steps_that_ranks_have_one_of_for_all_rows_are_kept(tmp_path: Path) -> None:
    state = {"w": {"exp_avg": arange((4, 3)), "step": torch.full((4,), 3.0)}}
    saved = {"model": {"w": arange((4, 3))}, "optim": {"state": state}}
    dcp.save(saved, checkpoint_id=tmp_path / "in", no_dist=True)

    def rules(mesh: Any) -> Placements:
        return Placements({"w": CheckpointPlacement(mesh, {"ep": Shard(0)})})

    reshard(tmp_path / "in", tmp_path / "out", rules, {"ep": 2})
    wholes = {"optim.state.w.exp_avg": arange((4, 3)), "optim.state.w.step": torch.full((4,), 3.0)}
    assert_holds(tmp_path / "out", {"model.w": arange((4, 3)), **wholes})
