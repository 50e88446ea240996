"""``explain``: the byte ranges it names hold what plain slicing of the whole gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from dcp_placements import CheckpointPlacement, FusedShard, IndexShard, PlacementRules
from dcp_placements.offline import CannotLook, Checkpoint, explain
from dcp_placements.testing import cut, damage
from tests.offline_scenes import Run, save_hugging_face, save_sharded, wholes
from tests.storage_scenes import data_file

W1 = "layers.0.experts.w1"
ATTENTION = "layers.1.attention"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    save_sharded(path / "ep2")
    save_sharded(path / "stock", lean=False, digests="off")
    save_hugging_face(path / "hf", wholes())
    return path


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of rules in the working directory."""
    (tmp_path / "explain_rules.py").write_text(
        "from torch.distributed.tensor import Shard\n"
        "from dcp_placements import CheckpointPlacement, PlacementRules\n"
        "def rules(mesh):\n"
        "    return PlacementRules({'experts': CheckpointPlacement(mesh, {'ep': Shard(0)})})\n"
        "def fails(mesh):\n"
        "    raise RuntimeError('no such model')\n"
        "def nothing(mesh):\n"
        "    return None\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "explain_rules"


def rules_of(placements: Any, **more: Any) -> Any:
    return lambda mesh: PlacementRules({"layers": CheckpointPlacement(mesh, placements, **more)})


@pytest.mark.parametrize("layout", ["ep2", "stock", "hf"])
@pytest.mark.parametrize("fqn", [W1, ATTENTION, "scale", "layers.0.norm"])
def test_chunks_lie_where_it_says(saved: Path, layout: str, fqn: str) -> None:
    whole = wholes()[fqn]
    found = explain(saved / layout, fqn)
    assert (found.shape, found.dtype) == (
        tuple(whole.shape),
        str(whole.dtype).removeprefix("torch."),
    )
    for chunk in found.chunks:
        wanted = whole[tuple(slice(a, a + n) for a, n in zip(*chunk.box, strict=True))]
        assert held(saved / layout, chunk.file, chunk.elements, wanted) == raw(wanted)
    assert sum(chunk.box.numel for chunk in found.chunks) == whole.numel()


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(
        tensor.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8).tolist()
    )


def held(path: Path, file: str | None, start: int | None, like: torch.Tensor) -> bytes:
    assert file is not None
    assert start is not None
    return (path / file).read_bytes()[start : start + like.nbytes]


@pytest.mark.parametrize("layout", ["ep2", "hf"])
@pytest.mark.parametrize(
    ("fqn", "placements"),
    [
        (W1, {"ep": Shard(0)}),
        (W1, {"ep": Shard(0), "tp": Shard(0)}),
        (W1, {"ep": Shard(2), "tp": Shard(1)}),
        (ATTENTION, {"tp": FusedShard(0, 3)}),
        (ATTENTION, {"ep": Shard(1)}),
    ],
)
def test_byte_ranges_hold_the_slices_of_each_rank(
    saved: Path, layout: str, fqn: str, placements: dict[str, Any]
) -> None:
    whole = wholes()[fqn]
    axes = {"ep": 4, "tp": 2}
    found = explain(saved / layout, fqn, rules=rules_of(placements), axes=axes)
    assert found.rule == "'layers'"
    assert len(found.ranks) == 8
    itemsize = whole.itemsize
    for part in found.ranks:
        each = [placements.get(name) for name in axes]
        local = cut(whole, each, tuple(axes.values()), part.coordinate)
        assert part.local_shape == tuple(local.shape)
        assert part.holes == ()
        assert sum(known.nbytes for known in part.ranges) == local.nbytes
        values = set()
        for known in part.ranges:
            piece = whole[tuple(slice(a, a + n) for a, n in zip(*known.box, strict=True))]
            values |= set(piece.reshape(-1).tolist())
            assert known.file is not None
            assert known.first is not None
            assert known.last is not None
            data = (saved / layout / known.file).read_bytes()[known.first : known.last]
            assert data[:itemsize] == raw(piece.reshape(-1)[:1])
            assert data[-itemsize:] == raw(piece.reshape(-1)[-1:])
            if known.runs == 1:
                assert data == raw(piece)
            else:
                assert len(data) > known.nbytes
        assert values == set(local.reshape(-1).tolist())


def test_fsdp_cuts_inside_the_rule(saved: Path) -> None:
    found = explain(
        saved / "ep2",
        W1,
        rules=rules_of({"ep": Shard(0)}),
        axes={"fsdp": 2, "ep": 2},
        fsdp=["fsdp"],
    )
    assert [[known.box.offsets[0] for known in part.ranges] for part in found.ranks] == [
        *([0], [4], [2], [6]),
    ]
    assert found.axes == {"fsdp": "FSDP: Shard(0) inside the rule's cuts", "ep": "Shard(0)"}


def test_index_shards_and_one_rank(saved: Path) -> None:
    placement = {"ep": IndexShard(0, (7, 2))}
    found = explain(
        saved / "ep2",
        W1,
        rules=rules_of(placement, global_shape=(8, 5, 3)),
        axes={"ep": 2},
        rank=1,
    )
    (part,) = found.ranks
    assert part.rank == 1
    assert [known.box.offsets[0] for known in part.ranges] == [7, 2]


def test_the_rule_of_the_save_is_told(saved: Path) -> None:
    found = explain(saved / "ep2", W1)
    assert found.saved_rule == "'experts'"
    assert found.saved_axes == {"ep": 2, "fsdp": 2}
    assert found.saved_cuts[0] == "Shard(0) over 'ep' of size 2"


def test_on_the_command_line(saved: Path, run: Run, module: str) -> None:
    command = ("explain", saved / "ep2", W1, "--rules", f"{module}:rules", "--mesh", "ep=4,edp=2")
    ran = run(*command)
    assert ran.code == 0, ran.err
    assert "by rule 'experts':" in ran.out
    assert "ep: Shard(0)" in ran.out
    assert "edp: Replicate()" in ran.out
    result = run(*command, "--rank", 3, "--json").json
    (part,) = result["ranks"]
    assert part["coordinate"] == [1, 1]
    assert part["ranges"][0]["offsets"] == [2, 0, 0]
    assert part["ranges"][0]["file"] == data_file(saved / "ep2", 1).name


def test_holes_are_told(saved: Path, tmp_path: Path) -> None:
    save_sharded(tmp_path)
    damage.drop_chunk(tmp_path, W1, chunk=1)
    found = explain(tmp_path, W1, rules=rules_of({"ep": Shard(0)}), axes={"ep": 2})
    assert [part.holes for part in found.ranks] == [(((2, 0, 0), (2, 5, 3)),), ()]
    data_file(tmp_path, 0).unlink()
    assert explain(tmp_path, W1).chunks[0].elements is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["experts.w1"], "layers.0.experts.w1"),
        (["nothing.like.it"], "no tensor nothing.like.it"),
        (["step"], "an object and no tensor"),
        ([W1, "--rules", "x:y"], "go together"),
        ([W1, "--rank", 0], "--rank and --fsdp need --rules and --mesh"),
        ([W1, "--fsdp", "dp"], "--rank and --fsdp need --rules and --mesh"),
        ([W1, "--rules", "explain_rules:rules", "--mesh", "ep"], "no mesh"),
        ([W1, "--rules", "explain_rules:rules", "--mesh", "tp=2"], "no axis 'ep'"),
        ([W1, "--rules", "explain_rules:fails", "--mesh", "ep=2"], "no such model"),
        ([W1, "--rules", "explain_rules:nothing", "--mesh", "ep=2"], "no rules"),
        ([W1, "--rules", "explain_rules:rules", "--mesh", "ep=2", "--rank", 9], "no rank 9"),
        ([W1, "--rules", "explain_rules:rules", "--mesh", "ep=2", "--fsdp", "x"], "no axis x"),
    ],
)
def test_what_cannot_be_explained(
    saved: Path, run: Run, module: str, arguments: list[Any], message: str
) -> None:
    ran = run("explain", saved / "ep2", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("given", [{"rank": 1}, {"fsdp": ["dp"]}, {"axes": {"ep": 2}}])
def test_what_would_be_ignored_is_refused(saved: Path, given: dict[str, Any]) -> None:
    with pytest.raises(CannotLook, match="rules= and axes= go together; rank= and fsdp= need both"):
        explain(saved / "ep2", W1, **given)


def test_an_open_checkpoint_serves_many_calls(saved: Path) -> None:
    checkpoint = Checkpoint(saved / "ep2")
    assert explain(checkpoint, W1).fqn == W1
    with pytest.raises(CannotLook):
        explain(checkpoint, "x")
