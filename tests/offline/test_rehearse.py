"""``rehearse`` against real loads: what ranks read is counted in the readers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    MeshCoordinate,
    PlacementError,
    PlacementFileSystemReader,
    PlacementLoadPlanner,
    PlacementRules,
    Placements,
    PlacementSavePlanner,
    Renames,
    Renumber,
    Replace,
    Stack,
)
from dcp_placements.offline import CannotLook, diff, open_source, rehearse, reshard
from dcp_placements.testing import FakeDTensor, FakeMesh, World, cut, damage
from tests.offline_scenes import Run, rules_by_ep, save_sharded, wholes
from tests.storage_scenes import data_file

EXPERTS = {f"layers.{layer}.experts.w1": (8, 60, 64) for layer in range(2)}
DENSE = {"layers.0.attention": (300, 40), "layers.0.norm": (96,), "layers.1.large": (512, 512)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four ranks: experts over ep, then edp; dense tensors over edp."""
    path = tmp_path_factory.mktemp("saved")
    world = World(4)

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, ep=2, edp=2)
        made: dict[str, Any] = {"step": 7}
        for fqn, shape in EXPERTS.items():
            part = cut(torch.ones(shape), [Shard(0)], (2,), mesh["ep"].get_coordinate())
            made[fqn] = FakeDTensor.distribute(part, mesh["edp"], [Shard(0)])
        for fqn, shape in DENSE.items():
            made[fqn] = FakeDTensor.distribute(torch.ones(shape), mesh, [Replicate(), Shard(0)])
        return made

    world.save(
        path,
        state_dict,
        lambda rank: PlacementSavePlanner(rules_by_ep(world.mesh(rank, ep=2, edp=2))),
    )
    return path


def load_for_real(
    path: Path, axes: dict[str, int], fsdp: list[str], reader: Any
) -> list[tuple[Any, int]]:
    """Load on every rank; return each one's reader, and the bytes of its tensors."""
    world = World(torch.Size(axes.values()).numel())
    readers = [reader(path) for _ in range(world.size)]
    nbytes = [0] * world.size

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, **axes)
        made: dict[str, Any] = {"step": 0}
        for fqn, shape in {**EXPERTS, **DENSE}.items():
            held, own = torch.zeros(shape), fsdp
            if fqn in EXPERTS:
                held = cut(held, [Shard(0)], (axes["ep"],), mesh["ep"].get_coordinate())
                own = [name for name in fsdp if name != "ep"]
            if own:
                ranks = mesh[own].mesh.flatten()
                one = FakeMesh((len(ranks),), ("+".join(own),), rank=rank, ranks=ranks)
                made[fqn] = FakeDTensor.distribute(held, one, [Shard(0)])
                held = made[fqn].to_local()
            else:
                made[fqn] = held
            nbytes[rank] += held.nbytes
        return made

    world.load(
        path,
        state_dict,
        lambda rank: PlacementLoadPlanner(rules_by_ep(world.mesh(rank, **axes))),
        lambda rank: readers[rank],
    )
    return list(zip(readers, nbytes, strict=True))


@pytest.mark.parametrize("fsdp", [[], ["edp"], ["edp", "ep"]], ids=lambda names: "+".join(names))
@pytest.mark.parametrize("axes", [{"edp": 2, "ep": 2}, {"edp": 2, "ep": 4}, {"edp": 3, "ep": 1}])
def test_predicts_what_a_load_reads(saved: Path, axes: dict[str, int], fsdp: list[str]) -> None:
    found = rehearse(saved, rules_by_ep, axes, fsdp=fsdp)
    assert found.loads
    real = load_for_real(saved, axes, fsdp, PlacementFileSystemReader)
    assert len(real) == len(found.ranks)
    for expected, (reader, nbytes) in zip(found.ranks, real, strict=True):
        assert expected.files == reader.opens
        assert expected.memory_nbytes == expected.wanted_nbytes == nbytes
        # Up to the bytes before the elements of each chunk.
        assert (
            expected.slices_nbytes
            <= reader.bytes_read
            <= expected.slices_nbytes + 1024 * expected.reads
        )


def test_torchs_reader_takes_at_least_what_is_said(saved: Path) -> None:
    class Counting(dcp.FileSystemReader):
        nbytes = 0

        def _slice_file(self, file: Any, sinfo: Any) -> Any:
            self.nbytes += sinfo.length
            return super()._slice_file(file, sinfo)

    axes = {"edp": 2, "ep": 4}
    found = rehearse(saved, rules_by_ep, axes, fsdp=["edp", "ep"])
    real = load_for_real(saved, axes, ["edp", "ep"], Counting)
    # Beside the chunks the ids of the saves that wrote the files are read.
    for rank, (reader, _) in zip(found.ranks, real, strict=True):
        assert 0 <= reader.nbytes - rank.chunks_nbytes <= 128 * len(list(saved.glob("*.distcp")))
    assert found.ranks[0].chunks_nbytes > 1.5 * found.ranks[0].wanted_nbytes


MOE = {f"layers.{layer}.experts.{at}.w": (6, 4) for layer in range(2) for at in range(4)}
MOE |= {f"layers.{layer}.router": (8, 5) for layer in range(2)}
BY_PATTERN = {"experts": ["edp"], "**": ["edp", "ep"]}


def numbered(mesh: Any, ids: Any = range) -> Placements:
    """Experts as names of their own, which no rule cuts: ep is in their numbers."""
    at = mesh.get_local_rank("ep")
    return Placements(None, rename=Renumber("experts.{}", ids(2 * at, 2 * at + 2), total=4))


def forgotten(mesh: Any) -> Placements:
    return numbered(mesh, lambda start, stop: range(2))


@pytest.mark.parametrize("placements", [numbered, forgotten])
def test_m112_experts_over_edp_and_the_rest_over_edp_and_ep(
    tmp_path: Path, placements: Any
) -> None:
    """A trainer on ``(edp=2, ep=2)``: the verdict and the bytes are those of its load."""
    dcp.save({key: torch.ones(shape) for key, shape in MOE.items()}, checkpoint_id=tmp_path)
    axes, world = {"edp": 2, "ep": 2}, World(4)
    held: list[int] = []

    def state_dict(rank: int) -> dict[str, Any]:
        edp = rank // 2
        both = FakeMesh((4,), ("fsdp",), rank=rank)
        own = FakeMesh((2,), ("edp",), rank=edp)
        made = {}
        for key, shape in MOE.items():
            if not re.search(r"experts\.[23]", key):
                mesh = own if "experts" in key else both
                made[key] = FakeDTensor.distribute(torch.zeros(shape), mesh, [Shard(0)])
        held.append(sum(one.to_local().nbytes for one in made.values()))
        return made

    try:
        world.load(tmp_path, state_dict, lambda r: placements(world.mesh(r, **axes)).load_planner())
        loads = True
    except dcp.CheckpointException:
        loads = False
    assert loads == (placements is numbered)
    found = rehearse(tmp_path, placements, axes, fsdp=BY_PATTERN)
    assert found.loads == loads, found.faults
    assert [rank.memory_nbytes for rank in found.ranks] == held
    # By one list for all tensors each expert is cut over ep, too: other bytes than the trainer's.
    assert rehearse(tmp_path, numbered, axes, fsdp=["edp", "ep"]).ranks[0].memory_nbytes < held[0]


def test_fsdp_of_a_pattern_that_matches_no_key_is_a_finding(saved: Path, run: Run) -> None:
    given = ("--rules", "tests.offline_scenes:rules_by_ep", "--mesh", "edp=2,ep=2")
    ran = run("rehearse", saved, *given, "--fsdp", "edp,ep", "--fsdp", "expert=edp")
    assert ran.code == 1
    assert "fsdp('expert'): no key on any rank matches" in ran.out
    assert run("rehearse", saved, *given, "--fsdp", "experts=edp").code == 0


def test_who_asks_for_what_of_one_tensor(saved: Path, run: Run) -> None:
    key = "layers.1.experts.w1"
    found = rehearse(saved, rules_by_ep, {"edp": 2, "ep": 4}, fqn="layers.1.experts")
    assert [(one.fqn, one.box.offsets[0], one.ranks) for one in found.requests] == [
        (key, 0, (0, 4)),
        (key, 2, (1, 5)),
        (key, 4, (2, 6)),
        (key, 6, (3, 7)),
    ]
    # Each box by itself, against all chunks of the checkpoint.
    stored = {chunk.box: chunk.file for chunk in open_source(saved).tensors[key].chunks}
    for one in found.requests:
        start, stop = one.box.offsets[0], one.box.offsets[0] + one.box.sizes[0]
        meets = [
            file
            for box, file in stored.items()
            if box.offsets[0] < stop and start < box.offsets[0] + box.sizes[0]
        ]
        assert list(one.files) == sorted(set(map(str, meets)))
    given = ("--rules", "tests.offline_scenes:rules_by_ep", "--mesh", "edp=2,ep=4", "--fqn", key)
    ran = run("rehearse", saved, *given)
    assert re.search(rf"{key} +\[2:4, :, :\] +1, 5 +__", ran.out), ran.out
    assert run("rehearse", saved, *given[:-1], "nothing").code == 2


def test_a_hole_is_told_to_the_ranks_that_need_it(tmp_path: Path) -> None:
    save_sharded(tmp_path, lean=False)
    damage.drop_chunk(tmp_path, "layers.0.experts.w1", chunk=2)
    found = rehearse(tmp_path, rules_by_ep, {"ep": 4, "edp": 2})
    assert not found.loads
    (fault,) = found.faults
    assert fault.fqn == "layers.0.experts.w1"
    assert "[4:6, :, :]" in fault.headline
    assert "ranks 4-5" in str(fault)


def test_a_missing_file_is_told_to_the_ranks_that_open_it(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    file = data_file(tmp_path, 3)
    file.unlink()
    found = rehearse(tmp_path, rules_by_ep, {"ep": 4}, expect=["layers.0.experts.w1"])
    assert [fault.fqn for fault in found.faults] == [file.name]
    assert "on:          rank 3" in str(found.faults[0])


def test_missing_unread_and_unmatched_are_told(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    rules = {"nothing.like.it": None}
    found = rehearse(
        tmp_path, lambda mesh: PlacementRules(rules), {"dp": 2}, expect=["scale", "layers.9.norm"]
    )
    assert found.missing == ("layers.9.norm",)
    assert set(found.unread) == {*wholes(), "step"} - {"scale"}
    assert found.unmatched == ("'nothing.like.it'",)
    assert not found.loads
    assert found.unique_nbytes == 4


def layer_by_layer(mesh: Any) -> Placements:
    """Name a rank's only layer by its number in the model."""
    at = mesh.get_coordinate()[0]
    return Placements(None, rename=Renumber("layers.{}", [at], total=4))


def test_keys_of_one_rank_are_told_apart_from_those_of_all(tmp_path: Path) -> None:
    state_dict = {f"layers.{n}.w": torch.ones(3, 2) for n in range(4)} | {"embed": torch.ones(2)}
    dcp.save(state_dict, checkpoint_id=tmp_path, no_dist=True)

    def notes(*expect: str) -> str:
        found = rehearse(tmp_path, layer_by_layer, {"pp": 4}, expect=expect)
        return "\n".join(map(str, found.notes))

    first = notes("layers.0.w", "embed")
    assert first.startswith("layers.1-3.w: not expected, and other layers")
    assert "those of one rank" in first
    assert notes(*state_dict) == ""
    assert "one rank" not in notes("embed")  # nothing says that the layers belong to it

    def replaced(mesh: Any) -> Placements:
        return Placements(None, rename=Replace("model.layers", "layers"))

    found = rehearse(tmp_path, replaced, {"dp": 1}, expect=["model.layers.0.w", "embed", "other"])
    (note, *_) = map(str, found.notes)
    assert note.startswith("model.layers.0.w: a rank's own name of layers.0.w")
    assert "1 expected key of 3" in note


def misspelt(mesh: Any) -> Placements:
    """Rules and names by EP, each with a typing error."""
    rename = Renumber("expert.{}", [0], total=None)
    return Placements({"expert": CheckpointPlacement(mesh, {"ep": Shard(0)})}, rename=rename)


def test_declarations_that_match_no_key_are_findings(tmp_path: Path, run: Run) -> None:
    save_sharded(tmp_path / "ckpt")
    found = rehearse(tmp_path / "ckpt", misspelt, {"ep": 2})
    assert found.loads
    assert found.unmatched == ("'expert'", "rename=Renumber('expert.{}')")
    (note,) = found.notes
    assert "no key on any rank matches" in note.headline
    assert "likely:      'expert' is no component of any key; 'experts' is" in str(note)
    given = ("--rules", "tests.offline.test_rehearse:misspelt", "--mesh", "ep=2")
    ran = run("rehearse", tmp_path / "ckpt", *given)
    assert ran.code == 1, ran.err
    assert "rename=Renumber('expert.{}'): no key on any rank matches" in ran.out
    assert ran.out.splitlines()[-1] == "loads, but with declarations that match no key"


def test_m89_a_checkpoint_is_not_rewritten_by_declarations_that_match_no_key(
    tmp_path: Path, run: Run
) -> None:
    save_sharded(tmp_path / "ckpt")
    given = ("--rules", "tests.offline.test_rehearse:misspelt", "--mesh", "ep=2")
    ran = run("reshard", tmp_path / "ckpt", tmp_path / "out", *given)
    assert ran.code == 1, ran.err
    assert "cannot be rewritten for this world" in ran.err
    assert "rename=Renumber('expert.{}'): no key on any rank matches" in ran.err
    assert "likely:      'expert' is no component of any key; 'experts' is" in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_what_may_match_nothing_is_no_finding(tmp_path: Path) -> None:
    save_sharded(tmp_path)

    def rules(mesh: Any) -> Placements:
        table = {"layers": None, "nothing.like.it": None}
        rename = Renames(Renumber("expert.{}", [0], None), optional=True)
        return Placements(PlacementRules(table, optional=True), rename=rename)

    assert rehearse(tmp_path, rules, {"ep": 2}).unmatched == ()

    def stacked(mesh: Any) -> Placements:
        # In the checkpoint, experts have no numbers after these steps.
        return Placements(
            None, rename=Renames(Renumber("experts.{}", [0], 8), Stack("experts.{}", 8))
        )

    assert rehearse(tmp_path, stacked, {"ep": 2}).unmatched == ()


def test_a_rule_that_does_not_fit_is_a_fault(tmp_path: Path) -> None:
    save_sharded(tmp_path)

    def rules(mesh: Any) -> PlacementRules:
        return PlacementRules(
            {
                "norm": CheckpointPlacement(mesh, {"ep": Shard(1)}),
                "attention": CheckpointPlacement(mesh, {"ep": Shard(0)}, global_shape=(12, 10)),
                "w1": CheckpointPlacement(mesh, {"ep": FusedShard(0, (3, 4))}),
            }
        )

    found = rehearse(tmp_path, rules, {"ep": 2})
    message = {fault.fqn: str(fault) for fault in found.faults}
    assert set(message) == {"layers.0.norm", "layers.1.attention", "layers.0.experts.w1"}
    assert "dim 1" in message["layers.0.norm"]
    assert "(12, 10) is needed" in message["layers.1.attention"]
    assert "add up to 7" in message["layers.0.experts.w1"]


def test_a_function_that_returns_no_placement_is_a_fault(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    found = rehearse(tmp_path, lambda mesh: lambda fqn, tensor: "norm" in fqn and 3, {"ep": 2})
    assert {fault.fqn for fault in found.faults} >= {"layers.0.norm", "layers.1.attention"}
    assert "was given 3 by the rules, which is no CheckpointPlacement" in str(found)


class MeshOfOthers(MeshCoordinate):
    """A mesh that this rank is no part of."""

    def get_coordinate(self) -> Any:
        return None


@pytest.mark.parametrize("fsdp", [[], ["edp"]], ids=["plain", "fsdp"])
def test_what_does_not_fit_is_said_as_a_load_says_it(tmp_path: Path, fsdp: list[str]) -> None:
    """A rule on a mesh of other ranks; and parts that are not those of the dim."""
    save_sharded(tmp_path)

    def rules(mesh: Any) -> PlacementRules:
        others = MeshOfOthers(mesh.names, mesh.sizes, mesh.coordinate)
        own = others if mesh.get_local_rank("ep") else mesh
        parts = CheckpointPlacement(mesh, {"ep": FusedShard(0, (3, 4))})
        return PlacementRules({"norm": CheckpointPlacement(own, {"ep": Shard(0)}), "w1": parts})

    faults = rehearse(tmp_path, rules, {"ep": 2, "edp": 2}, fsdp=fsdp).faults
    by_key = {fault.fqn: str(fault) for fault in faults}
    assert set(by_key) == {"layers.0.norm", "layers.0.experts.w1"}
    norm = by_key["layers.0.norm"]
    assert "the rank is not part of the rule's mesh" in norm
    assert "ranks 2-3" in norm
    parts = by_key["layers.0.experts.w1"]
    for text in (
        "add up to 7",
        "ranks 0-3",
        "declared:    [FusedShard(0, (3, 4))",
        "by rule:     'w1'",
    ):
        assert text in parts


def test_m54_uneven_parts_without_global_shape_do_not_load(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    found = rehearse(tmp_path, rules_by_ep, {"ep": 3})
    assert not found.loads
    assert {fault.fqn for fault in found.faults} == {"layers.0.experts.w1", "layers.0.experts.w2"}
    assert "(torch: Size mismatch)" in found.faults[0].headline


UNEVEN = {"no global_shape": None, "global_shape": (7, 3)}


@pytest.mark.parametrize("fsdp", [[], ["dp"]], ids=["plain", "fsdp"])
@pytest.mark.parametrize("placement", [Shard(0), FusedShard(0, (4, 3)), Shard(1)], ids=str)
@pytest.mark.parametrize("expected", UNEVEN)
def test_m54_the_verdict_is_that_of_the_load(
    tmp_path: Path, placement: Any, expected: str, fsdp: list[str]
) -> None:
    """Parts that plain slicing gives, loaded for real on every rank."""
    whole = torch.arange(21.0).reshape(7, 3)
    dcp.save({"w": whole}, checkpoint_id=tmp_path, no_dist=True)
    axes = {"ep": 2, "dp": 2}
    world = World(4)

    def rules(mesh: Any) -> PlacementRules:
        ep = CheckpointPlacement(mesh, {"ep": placement}, global_shape=UNEVEN[expected])
        return PlacementRules({"w": ep})

    def state(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, **axes)
        part = torch.zeros_like(cut(whole, [placement], (2,), mesh["ep"].get_coordinate()))
        return {"w": FakeDTensor.distribute(part, mesh["dp"], [Shard(0)]) if fsdp else part}

    try:
        world.load(tmp_path, state, lambda r: PlacementLoadPlanner(rules(world.mesh(r, **axes))))
        loads = True
    except dcp.CheckpointException:
        loads = False
    found = rehearse(tmp_path, rules, axes, fsdp=fsdp)
    assert found.loads == loads == (UNEVEN[expected] is not None)


def test_m54_notes_are_what_a_load_warns_of(tmp_path: Path) -> None:
    dcp.save({"mlp.gate_up_proj": torch.ones(8, 3)}, checkpoint_id=tmp_path, no_dist=True)

    def rules(mesh: Any) -> PlacementRules:
        return PlacementRules({"gate_up_proj": CheckpointPlacement(mesh, {"tp": Shard(0)})})

    found = rehearse(tmp_path, rules, {"tp": 2})
    assert found.loads
    (note,) = found.notes
    assert "its name says several tensors in one" in note.headline


def test_what_differs_from_the_save_is_told_unless_it_is_waived(tmp_path: Path) -> None:
    world, key = World(2), "mlp.gate_up.weight"

    def by_tp(placement: Any, **options: Any) -> Any:
        def at(mesh: Any) -> Placements:
            rules = PlacementRules({key: CheckpointPlacement(mesh, {"tp": placement})})
            return Placements(rules, **options)

        return at

    def planner(rank: int) -> PlacementSavePlanner:
        return by_tp(FusedShard(0, 2))(world.mesh(rank, tp=2)).save_planner()

    world.save(tmp_path, lambda rank: {key: torch.ones(4, 3)}, planner)
    (fault,) = rehearse(tmp_path, by_tp(Shard(0)), {"tp": 2}).faults
    for part in (
        f"{key}: this load cuts it by 'tp' in another way than the save did",
        "on:          ranks 0-1",
        "saved:       FusedShard(0, 2) over 'tp' of size 2",
        "this load:   Shard(0) over 'tp' of size 2",
        'way out:     {"tp": FusedShard(0, 2)} in the rules of this load',
    ):
        assert part in str(fault)
    assert rehearse(tmp_path, by_tp(FusedShard(0, (4, 4))), {"tp": 2}).loads
    assert rehearse(tmp_path, by_tp(Shard(0), waive={"gate_up": "cut apart"}), {"tp": 2}).loads


def test_commands(saved: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("some_rules.py").write_text(
        "from torch.distributed.tensor import Shard\n"
        "from dcp_placements import CheckpointPlacement, PlacementRules\n"
        "def rules(mesh):\n"
        "    return PlacementRules({'experts': CheckpointPlacement(mesh, {'ep': Shard(0)})})\n"
        "def broken(mesh):\n"
        "    raise RuntimeError('of no use')\n"
    )
    given = ("rehearse", saved, "--rules", "some_rules:rules", "--mesh", "ep=8,edp=128")
    ran = run(*given, "--fsdp", "edp")
    assert (ran.code, ran.err) == (0, "")
    assert "1,024 ranks" in ran.out
    assert max(map(len, ran.out.splitlines())) < 120
    result = run(*given, "--json").json
    assert result["loads"] is True
    assert [rank["rank"] for rank in result["ranks"]] == list(range(1024))

    Path("keys.json").write_text(json.dumps(["step", "lost"]))
    ran = run(*given, "--expect", "keys.json")
    assert ran.code == 1
    assert "missing:   1 key: lost" in ran.out
    for wrong in (
        ("--rules", "some_rules:broken"),
        ("--mesh", "ep"),
        ("--fsdp", "tp"),
        ("--expect", "no_such_file"),
    ):
        assert "Traceback" not in run.fails(*given, *wrong)


def test_an_unknown_fsdp_axis_is_refused(saved: Path) -> None:
    with pytest.raises(CannotLook, match="no axis tp for FSDP"):
        rehearse(saved, rules_by_ep, {"ep": 2}, fsdp=["tp"])


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, None),
        ({"w": (8, 4)}, "is (8, 3), where the whole model has (8, 4)"),
        ({"lost": (2,)}, "lost: no rank has this key of the whole model"),
        ({"b": None}, "the whole model has no such key"),
    ],
    ids=["right", "shape", "missing", "unknown"],
)
@pytest.mark.parametrize("axes", [{"ep": 2}, {"ep": 4}, {"ep": 1}])
@pytest.mark.parametrize("by_level", [False, True])
def test_m129_the_whole_model_of_the_rules_decides_as_in_the_load(
    tmp_path: Path,
    run: Run,
    axes: dict[str, int],
    changed: dict[str, Any],
    text: str | None,
    by_level: bool,
) -> None:
    stored = {"model": {"w": torch.arange(24.0).view(8, 3), "b": torch.ones(2)}, "step": 1}
    dcp.save(stored, checkpoint_id=tmp_path / "saved", no_dist=True)
    shapes = {"w": (8, 3), "b": (2,), **changed}
    model = {key: shape for key, shape in shapes.items() if shape is not None}

    def rules(mesh: Any) -> Placements:
        whole = {"model": model} if by_level else model
        return Placements({"w": CheckpointPlacement(mesh, {"ep": Shard(0)})}, whole=whole)

    world = World(axes["ep"])

    def state(rank: int) -> dict[str, Any]:
        part = torch.zeros(8, 3).chunk(world.size)[rank]
        return {"model": {"w": part, "b": torch.zeros(2)}, "step": 0}

    rehearsal = rehearse(tmp_path / "saved", rules, axes)
    assert rehearsal.loads == (text is None)
    paths = tmp_path / "saved", tmp_path / "out"

    def load() -> None:
        world.load(paths[0], state, lambda rank: rules(world.mesh(rank, **axes)).load_planner())

    if text is None:
        load()
        reshard(*paths, rules, axes)
        assert diff(*paths).same
        return
    assert text in str(rehearsal)
    with pytest.raises(dcp.CheckpointException, match=re.escape(text)):
        load()
    with pytest.raises(PlacementError, match=re.escape(text)):
        reshard(*paths, rules, axes)
    assert not paths[1].exists()


def test_m129_ranks_that_lack_the_whole_model_and_levels_that_differ_are_named(
    tmp_path: Path,
) -> None:
    layers = {f"layers.{n}.w": torch.ones(2) for n in range(3)}
    stored = {"model": layers, "ema": {"layers.0.w": torch.ones(2)}}
    dcp.save(stored, checkpoint_id=tmp_path, no_dist=True)
    whole = {key: (2,) for key in layers}
    some = rehearse(
        tmp_path,
        lambda mesh: Placements({}, whole=whole if mesh.get_coordinate()[0] else None),
        {"ep": 3},
    )
    assert "the ranks do not agree on whole=: not given on rank 0; given on ranks 1-2" in str(some)
    assert not some.loads
    with_note = rehearse(tmp_path, lambda mesh: Placements({}, whole=whole), {"ep": 3})
    assert with_note.loads
    assert "ema: is not the whole model: an average" in str(with_note)
    waived = Placements({}, whole=whole, waive={"ema": "of one layer"})
    assert not rehearse(tmp_path, lambda mesh: waived, {"ep": 3}).notes


def test_state_follows_none_of_several_parameters_that_are_cut_differently(tmp_path: Path) -> None:
    world, w = World(2), torch.arange(24.0).reshape(8, 3)

    def placements(mesh: Any) -> Placements:
        return Placements({"model.w": CheckpointPlacement(mesh, {"ep": Shard(0)}), "ema.w": None})

    def state_dict(rank: int) -> dict[str, Any]:
        state = {"exp_avg": w + 2}
        return {
            "model": {"w": cut(w, [Shard(0)], (2,), (rank,))},
            "ema": {"w": w + 1},
            "optim": {"state": {"w": state}, "param_groups": {"w": {"lr": 0.1}}},
        }

    def planner(rank: int) -> PlacementSavePlanner:
        return placements(world.mesh(rank, ep=2)).save_planner()

    world.save(tmp_path / "c", state_dict, planner)
    rehearsal = rehearse(tmp_path / "c", placements, {"ep": 2})
    assert rehearsal.loads, str(rehearsal)
    assert {rank.memory_nbytes for rank in rehearsal.ranks} == {(12 + 24 + 24) * 4}


def test_ranks_that_disagree_on_a_total_are_refused_as_in_the_load(tmp_path: Path) -> None:
    experts = {f"experts.{n}.w": torch.ones(2) * n for n in range(4)}
    world = World(2)

    def own(rank: int) -> dict[str, Any]:
        return {f"experts.{n}.w": experts[f"experts.{2 * rank + n}.w"] for n in range(2)}

    def placements(mesh: Any, more: int = 0) -> Placements:
        rank = mesh.get_coordinate()[0]
        rename = Renumber("experts.{}", [2 * rank, 2 * rank + 1], total=4 + more * rank)
        return Placements(None, rename=rename, waive={"experts": "another model"} if more else None)

    world.save(tmp_path, own, lambda rank: placements(world.mesh(rank, ep=2)).save_planner())
    assert rehearse(tmp_path, placements, {"ep": 2}).loads
    rehearsal = rehearse(tmp_path, lambda mesh: placements(mesh, 1), {"ep": 2})
    assert "the ranks do not agree on total=: 4 on rank 0; 5 on rank 1" in str(rehearsal)
    assert not rehearsal.loads
