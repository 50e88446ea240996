"""``import`` of safetensors as a DCP checkpoint, read back by torch's default planner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import assert_holds
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementError,
    PlacementLoadPlanner,
    PlacementRules,
    Renames,
    Replace,
    Split,
    Stack,
    Unstack,
)
from dcp_placements.convert import format_writers
from dcp_placements.offline import (
    CannotLook,
    diff,
    export_safetensors,
    import_checkpoint,
    open_source,
    verify,
)
from dcp_placements.offline.safetensors_files import NAMED_DTYPES
from dcp_placements.presets import hub
from dcp_placements.testing import FakeDTensor, World, cut
from tests.offline_scenes import Run, save_hugging_face
from tests.strategies import arange


def tensors() -> dict[str, torch.Tensor]:
    """Return what a directory of the hub holds."""
    held = {
        **{f"mlp.experts.{n}.gate_proj.weight": arange((3, 4)) + 100 * n for n in range(4)},
        **{f"mlp.experts.{n}.up_proj.weight": arange((3, 4)) + 100 * n + 50 for n in range(4)},
        **{f"mlp.experts.{n}.down_proj.weight": arange((4, 3)) + 100 * n + 25 for n in range(4)},
        "mlp.gate.weight": arange((4, 4)).to(torch.bfloat16),
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(5),
    }
    raw = torch.arange(48, dtype=torch.uint8) % 2
    dtypes = [dtype for dtype in NAMED_DTYPES.values() if dtype != torch.float4_e2m1fn_x2]
    return held | {f"t{i}": raw.clone().view(dtype) for i, dtype in enumerate(dtypes)}


def test_m148_two_float4_in_a_byte_are_written_and_read(tmp_path: Path) -> None:
    codes = torch.arange(48, dtype=torch.uint8).reshape(6, 8)
    dcp.save({"w": codes.view(torch.float4_e2m1fn_x2)}, checkpoint_id=tmp_path / "a", no_dist=True)
    export_safetensors(tmp_path / "a", tmp_path / "hf")
    with safe_open(tmp_path / "hf/model.safetensors", "pt") as file:
        part = file.get_slice("w")
        assert (part.get_dtype(), part.get_shape()) == ("F4", [6, 16])
    import_checkpoint(tmp_path / "hf", tmp_path / "b")
    assert diff(tmp_path / "a", tmp_path / "b").same
    state = {"w": torch.zeros_like(codes).view(torch.float4_e2m1fn_x2)}
    dcp.load(state, checkpoint_id=tmp_path / "b", planner=PlacementLoadPlanner(), no_dist=True)
    assert torch.equal(state["w"].view(torch.uint8), codes)


def test_every_tensor_is_there_whatever_its_dtype(tmp_path: Path) -> None:
    held = tensors()
    save_hugging_face(tmp_path / "hf", held)
    result = import_checkpoint(tmp_path / "hf", tmp_path / "ckpt")
    assert set(result.keys) == set(held)
    assert result.nbytes == sum(tensor.nbytes for tensor in held.values())
    assert_holds(tmp_path / "ckpt", held)
    assert verify(tmp_path / "ckpt", contents=True).sound
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "hf"]


def test_pieces_and_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {"w": arange((1 << 16, 8)), "v": arange((7, 5))}
    (tmp_path / "hf").mkdir()
    save_file(whole, tmp_path / "hf" / "model.safetensors")
    monkeypatch.setattr(format_writers, "FILE_NBYTES", 1 << 20)
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", memory=4 << 20)
    assert_holds(tmp_path / "ckpt", whole)
    sizes = [path.stat().st_size for path in (tmp_path / "ckpt").glob("*.distcp")]
    assert len(sizes) == 3
    assert max(sizes) < (1 << 20) + 8192


def test_what_is_imported_loads_into_stacked_and_fused_experts_and_exports_again(
    tmp_path: Path,
) -> None:
    held = {name: t for name, t in tensors().items() if "mlp" in name}
    save_hugging_face(tmp_path / "hf", held)
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt")
    rows = [
        torch.cat([held[f"mlp.experts.{n}.{part}_proj.weight"] for part in ("gate", "up")])
        for n in range(4)
    ]
    whole, world = torch.stack(rows), World(4)

    def state_dict(rank: int, fill: float | None = None) -> dict[str, Any]:
        mesh = world.mesh(rank, ep=2, fsdp=2)
        mine = cut(whole, [Shard(0)], (2,), mesh["ep"].get_coordinate())
        made = FakeDTensor.distribute(mine, mesh["fsdp"], [Shard(1)])
        if fill is not None:
            made.to_local().fill_(fill)
        return {"mlp.experts.gate_up_proj": made}

    def planner(rank: int) -> PlacementLoadPlanner:
        by = CheckpointPlacement(world.mesh(rank, ep=2, fsdp=2), {"ep": Shard(0)})
        return PlacementLoadPlanner(PlacementRules({"mlp.experts": by}), rename=hub.qwen3_moe)

    loaded = world.load(tmp_path / "ckpt", lambda rank: state_dict(rank, -1), planner)
    for rank in range(4):
        wanted = state_dict(rank)["mlp.experts.gate_up_proj"].to_local()
        assert torch.equal(loaded[rank]["mlp.experts.gate_up_proj"].to_local(), wanted)
    export_safetensors(tmp_path / "ckpt", tmp_path / "again")
    assert diff(tmp_path / "again", tmp_path / "hf").same


@pytest.mark.parametrize(
    ("held", "rename", "parts"),
    [
        (
            {f"layers.0.experts.{n}.w1": (3, 4) for n in range(2)},
            Unstack("experts.{}"),
            ["layers.0.experts.0-1.w1: has a number already where Unstack(pattern='experts.{}'"],
        ),
        (
            {"mlp.experts.0.down_proj.weight": (4, 3), "mlp.experts.0.up_proj.weight": (3, 4)},
            hub.qwen3_moe,
            ["rename= makes mlp.experts.{}.down_proj.weight.weight of it, and it is no stack"],
        ),
        (
            {"experts.0.gate_up": (4, 3)},
            Split("experts.*.gate_up", ("experts.{}.gate", "experts.{}.up")),
            ["rename= makes experts.{}.gate of it, and it is no stack"],
        ),
    ],
)
def test_m86_the_rename_of_an_export_is_not_applied_to_its_own_names(
    tmp_path: Path, held: dict[str, tuple[int, ...]], rename: Any, parts: list[str]
) -> None:
    save_hugging_face(tmp_path / "hf", {name: torch.ones(shape) for name, shape in held.items()})
    with pytest.raises(PlacementError) as refused:
        import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", rename=rename)
    for part in parts:
        assert part in str(refused.value), refused.value
    assert not (tmp_path / "ckpt").exists()


def deeper(name: str) -> str:
    return f"net.{name}"


def swapped(name: str) -> str:
    return {"a.w": "b.w", "b.w": "a.w"}.get(name, name)


@pytest.mark.parametrize(
    "rename",
    [
        Replace("layers", "model.layers"),
        Replace("layers.*", "layers.0"),
        Renames(Replace("norm", "net.norm"), optional=True),
        deeper,
        lambda name: name.replace("layers", "layers.layers"),
    ],
)
def test_m131_the_rename_of_an_export_is_not_applied_again(
    tmp_path: Path, run: Run, rename: Any
) -> None:
    held = {"layers.3.w": arange((3, 2)), "norm.w": arange((2,)), "head": arange((2, 2))}
    dcp.save(held, checkpoint_id=tmp_path / "saved", no_dist=True)
    for size in (1 << 20, 24):  # one file, and several with an index
        out = tmp_path / f"hf{size}"
        export_safetensors(tmp_path / "saved", out, rename=rename, max_shard_size=size)
        with pytest.raises(PlacementError, match=r"is that of the export of these files|none of"):
            import_checkpoint(out, tmp_path / "again", rename=rename)
        assert not (tmp_path / "again").exists()
        import_checkpoint(out, tmp_path / f"plain{size}")
        back = {rename(key): key for key in held}
        result = tmp_path / f"back{size}"
        import_checkpoint(out, result, rename=lambda name, back=back: back[name])
        assert_holds(result, held)


def test_m131_other_renames_and_one_that_undoes_itself_are_applied(tmp_path: Path) -> None:
    held = {"a.w": arange((3, 2)), "b.w": arange((3, 2)) + 9}
    dcp.save(held, checkpoint_id=tmp_path / "saved", no_dist=True)
    export_safetensors(tmp_path / "saved", tmp_path / "swapped", rename=swapped)
    import_checkpoint(tmp_path / "swapped", tmp_path / "undone", rename=swapped)
    assert_holds(tmp_path / "undone", held)
    export_safetensors(tmp_path / "saved", tmp_path / "named", rename=Replace("a", "x"))
    import_checkpoint(tmp_path / "named", tmp_path / "out", rename=Replace("b", "x.y"))
    assert_holds(tmp_path / "out", {"x.w": held["a.w"], "x.y.w": held["b.w"]})
    # Notes of another form, as of any file, are none.
    for number, note in enumerate(("{", "[]", "3", '{"x.w": {}}')):
        save_file(held, tmp_path / "model.safetensors", {"dcp_placements.renamed": note})
        import_checkpoint(tmp_path, tmp_path / f"of{number}", rename=Replace("a", "x"))


def test_stacked_experts_of_files_are_unstacked_by_a_rename(tmp_path: Path) -> None:
    names = ("w1", "w2")
    held = {"experts.w1": arange((3, 4, 2)), "experts.w2": arange((3, 2, 4))}
    save_hugging_face(tmp_path / "hf", held)
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", rename=Unstack("experts.{}"))
    rows = {f"experts.{n}.{name}": held[f"experts.{name}"][n] for n in range(3) for name in names}
    assert_holds(tmp_path / "ckpt", rows)


@pytest.mark.parametrize(
    "rename", [hub.mixtral, Stack("experts.{}.w", 3), Replace("module", ""), lambda name: name]
)
def test_a_rename_that_changes_no_name_is_refused(tmp_path: Path, rename: Any) -> None:
    save_hugging_face(tmp_path / "hf", {"layers.0.w": torch.ones(2)})
    with pytest.raises(PlacementError, match="matches none of the 1 tensors"):
        import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", rename=rename)
    assert not (tmp_path / "ckpt").exists()


def test_a_rename_stacks(tmp_path: Path, run: Run) -> None:
    held = {f"experts.{n}.w": arange((2, 3)) + n for n in range(3)}
    save_hugging_face(tmp_path / "hf", held)
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", rename=Stack("experts.{}.w", 3))
    assert_holds(tmp_path / "ckpt", {"experts.w": torch.stack([*held.values()])})
    ran = run("import", tmp_path / "hf", tmp_path / "cli", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["tensors"] == 3
    assert_holds(tmp_path / "cli", held)


def test_what_is_wrong_is_told_before_anything_is_written(tmp_path: Path, run: Run) -> None:
    save_hugging_face(tmp_path / "hf", tensors())
    with pytest.raises(PlacementError, match=r"gives this one name to both"):
        import_checkpoint(tmp_path / "hf", tmp_path / "ckpt", rename=lambda name: "one")
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(PlacementError, match="DCP checkpoint already"):
        import_checkpoint(tmp_path / "dcp", tmp_path / "ckpt")
    with pytest.raises(PlacementError, match="is there already"):
        import_checkpoint(tmp_path / "hf", tmp_path / "dcp")
    for option in ("--vocab-size", "--expert-parallel-size"):
        ran = run("import", tmp_path / "hf", tmp_path / "ckpt", option, 3)
        assert ran.code == 2
        assert "is not for safetensors files" in ran.err
    (tmp_path / "hf" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(PlacementError, match=r"not whole .*\n.*missing_file"):
        import_checkpoint(tmp_path / "hf", tmp_path / "ckpt")
    (tmp_path / "none").mkdir()
    with pytest.raises(CannotLook):
        import_checkpoint(tmp_path / "none", tmp_path / "ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "hf", "none"]


def test_m87_of_two_indices_none_is_guessed(tmp_path: Path, run: Run) -> None:
    save_hugging_face(tmp_path / "hf", {"w": arange((3, 4)), "v": arange((5,))})
    index = tmp_path / "hf" / "model.safetensors.index.json"
    save_file({"w": torch.zeros(3, 4)}, tmp_path / "hf" / "model.bf16-00001-of-00001.safetensors")
    other = tmp_path / "hf" / "model.bf16.safetensors.index.json"
    other.write_text('{"weight_map": {"w": "model.bf16-00001-of-00001.safetensors"}}')
    importing = ("import", tmp_path / "hf", tmp_path / "ckpt")
    for command in (importing, ("inspect", tmp_path / "hf")):
        ran = run(*command)
        assert ran.code == 2, ran.out
        assert f"2 indices of safetensors files: {other.name}, {index.name}" in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    other.unlink()
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt")
    assert_holds(tmp_path / "ckpt", {"w": arange((3, 4)), "v": arange((5,))})


@pytest.mark.parametrize(
    "names",
    [
        ["model", "consolidated"],
        ["adapter_model", "model-00001-of-00002", "model-00002-of-00002"],
        ["model", "model.fp16"],
        ["consolidated", "vision"],
    ],
)
def test_m87_a_model_beside_other_files_is_refused(
    tmp_path: Path, run: Run, names: list[str]
) -> None:
    (tmp_path / "hf").mkdir()
    for number, name in enumerate(names):
        save_file({f"w{number}": torch.ones(3)}, tmp_path / "hf" / f"{name}.safetensors")
    ran = run("import", tmp_path / "hf", tmp_path / "ckpt")
    assert ran.code == 2, ran.out
    assert "safetensors files of 2 kinds, and no index" in ran.err
    assert all(f"{name}.safetensors" in ran.err for name in names[:2])
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    "names",
    [
        ["attention", "experts"],
        ["model-00001-of-00002", "model-00002-of-00002"],
        ["shard-00001-model-00001-of-00001", "shard-00002-model-00001-of-00001"],
    ],
)
def test_m87_files_of_one_kind_or_of_parts_are_one_model(tmp_path: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        save_file({f"w{number}": torch.ones(3)}, tmp_path / f"{name}.safetensors")
    assert set(open_source(tmp_path).tensors) == {"w0", "w1"}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["model-2-of-9", "model-9-of-9"], "2 of 9 parts of model"),
        (["shard-00001-model-00001-of-00002"], "1 of 2 parts of model"),
        (["x-00000-of-00002"], "1 of 2 parts of x"),
        (["m-1-of-9999999999999999"], "1 of 9999999999999999 parts of m"),
    ],
)
def test_parts_of_a_model_without_the_others_are_refused(
    tmp_path: Path, run: Run, names: list[str], said: str
) -> None:
    (tmp_path / "hf").mkdir()
    for number, name in enumerate(names):
        save_file({f"w{number}": torch.ones(3)}, tmp_path / "hf" / f"{name}.safetensors")
    for asked in (
        ("verify", tmp_path / "hf", "--contents"),
        ("diff", tmp_path / "hf", tmp_path / "hf"),
        ("import", tmp_path / "hf", tmp_path / "ckpt"),
    ):
        assert said in run.fails(*asked)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_files_without_a_tensor_are_refused(tmp_path: Path, run: Run) -> None:
    save_file({}, tmp_path / "model.safetensors")
    assert "no tensor in model.safetensors" in run.fails("verify", tmp_path, "--contents")


def test_m87_where_there_is_an_index_other_files_do_not_count(tmp_path: Path) -> None:
    save_hugging_face(tmp_path, {"w": torch.ones(3), "v": torch.ones(2)})
    save_file({"w": torch.zeros(3), "u": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    assert set(open_source(tmp_path).tensors) == {"w", "v"}


@pytest.mark.parametrize(
    "name",
    [
        "model-TP-00{}.safetensors",
        "model-0000{}-TP-000.safetensors",
        "model-rank-{}-part-0.safetensors",
        "rank{}.safetensors",
        "tp{}_sharded_checkpoint.safetensors",
        "ep_rank_{}.safetensors",
    ],
)
@pytest.mark.parametrize("indexed", ["none", "one", "spread", "all but one"])
def test_m130_files_of_an_engines_ranks_are_refused(
    tmp_path: Path, run: Run, name: str, indexed: str
) -> None:
    """Each has a quarter of every tensor under its name, and says nothing of it."""
    whole = {"q.weight": arange((8, 4)), "o.weight": arange((8, 4)) + 100}
    path = tmp_path / "hf"
    path.mkdir()
    names = [name.format(rank) for rank in range(4)]
    for rank, file in enumerate(names):
        save_file({key: v.chunk(4)[rank].contiguous() for key, v in whole.items()}, path / file)
    index = {
        "one": dict.fromkeys(whole, names[0]),
        "spread": dict(zip(whole, names, strict=False)),
        "all but one": dict(zip("abc", names, strict=False)) | dict.fromkeys(whole, names[0]),
    }
    if indexed in index:
        document = json.dumps({"weight_map": index[indexed]})
        (path / "model.safetensors.index.json").write_text(document)
    for command in (
        ["import", path, tmp_path / "out"],
        ["verify", path],
        ["diff", path, path],
        ["export", path, tmp_path / "out"],
        ["inspect", path],
    ):
        err = run.fails(*command)
        assert "way out:     the model's own files" in err
        assert any(file in err for file in names[1:])
    assert not (tmp_path / "out").exists()


def test_m130_files_of_other_names_and_parts_that_say_where_are_beside_an_index(
    tmp_path: Path,
) -> None:
    whole = {"q.weight": arange((8, 4)), "o.weight": arange((8, 4)) + 100}
    save_hugging_face(tmp_path / "hf", whole)
    for beside in ("consolidated-00001-of-00004", "model-00001-of-00003", "optimizer-1"):
        save_file(whole, tmp_path / "hf" / f"{beside}.safetensors")
    import_checkpoint(tmp_path / "hf", tmp_path / "out")
    assert_holds(tmp_path / "out", whole)
    # Ranks of which each has other keys, as stages have.
    (tmp_path / "stages").mkdir()
    for rank, (key, value) in enumerate(whole.items()):
        save_file({key: value}, tmp_path / "stages" / f"rank{rank}.safetensors")
    import_checkpoint(tmp_path / "stages", tmp_path / "joined")
    assert_holds(tmp_path / "joined", whole)
