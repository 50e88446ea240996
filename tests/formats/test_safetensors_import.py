"""``import --from hf``: safetensors as a DCP checkpoint, read back by torch's default planner."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementError,
    PlacementLoadPlanner,
    PlacementRules,
    Renames,
    Replace,
    Stack,
)
from dcp_placements.formats.huggingface import importing as safetensors_import
from dcp_placements.offline import (
    CannotLook,
    diff,
    export_safetensors,
    import_safetensors,
    verify,
)
from dcp_placements.presets import hub
from dcp_placements.storage.safetensors_files import DTYPES
from dcp_placements.testing import FakeDTensor, World, cut
from tests.offline_scenes import Run, overwriting, run, save_hugging_face
from tests.preset_scenes import read_whole
from tests.strategies import arange

__all__ = ["run"]


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
    return held | {f"t{i}": raw.clone().view(d.torch) for i, d in enumerate(DTYPES.values())}


def test_every_tensor_is_there_whatever_its_dtype(tmp_path: Path) -> None:
    held = tensors()
    save_hugging_face(tmp_path / "hf", held)
    result = import_safetensors(tmp_path / "hf", tmp_path / "ckpt")
    assert set(result.keys) == set(held)
    assert result.nbytes == sum(tensor.nbytes for tensor in held.values())
    found = read_whole(tmp_path / "ckpt")
    assert sorted(found) == sorted(held)
    for name, tensor in held.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        a, b = found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        assert torch.equal(a, b), name
    assert verify(tmp_path / "ckpt", contents=True).sound
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "hf"]


def test_pieces_and_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {"w": arange((1 << 16, 8)), "v": arange((7, 5))}
    (tmp_path / "hf").mkdir()
    save_file(whole, tmp_path / "hf" / "model.safetensors")
    monkeypatch.setattr(safetensors_import, "FILE_NBYTES", 1 << 20)
    import_safetensors(tmp_path / "hf", tmp_path / "ckpt", memory=4 << 20)
    found = read_whole(tmp_path / "ckpt")
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    sizes = [path.stat().st_size for path in (tmp_path / "ckpt").glob("*.distcp")]
    assert len(sizes) == 3
    assert max(sizes) < (1 << 20) + 8192


def test_what_is_imported_loads_into_stacked_and_fused_experts_and_exports_again(
    tmp_path: Path,
) -> None:
    held = {name: t for name, t in tensors().items() if "mlp" in name}
    save_hugging_face(tmp_path / "hf", held)
    import_safetensors(tmp_path / "hf", tmp_path / "ckpt")
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
    ("rename", "block", "gate", "up", "down"),
    [
        ("mixtral", "block_sparse_moe", "w1", "w3", "w2"),
        ("qwen3_moe", "mlp", "gate_proj", "up_proj", "down_proj"),
    ],
)
def test_the_rename_of_an_export_makes_the_stacked_tensors_of_the_module(
    tmp_path: Path, run: Run, rename: str, block: str, gate: str, up: str, down: str
) -> None:
    held: dict[str, torch.Tensor] = {"model.embed.weight": arange((7, 4))}
    stacked = {"model.embed.weight": held["model.embed.weight"]}
    for layer in range(2):
        head, module = f"model.layers.{layer}.{block}", f"model.layers.{layer}.mlp"
        fused, downs = [], []
        for n in range(11):
            parts = [arange((3, 4)) + 100 * n + at + 7 * layer for at in (0.25, 0.5)]
            downs.append(arange((4, 3)) + 100 * n + 7 * layer)
            held |= {
                f"{head}.experts.{n}.{gate}.weight": parts[0],
                f"{head}.experts.{n}.{up}.weight": parts[1],
                f"{head}.experts.{n}.{down}.weight": downs[-1],
            }
            fused.append(torch.cat(parts))
        held[f"{head}.gate.weight"] = arange((11, 4)) + layer
        stacked |= {
            f"{module}.experts.gate_up_proj": torch.stack(fused),
            f"{module}.experts.down_proj": torch.stack(downs),
            f"{module}.gate.weight": held[f"{head}.gate.weight"],
        }
    save_hugging_face(tmp_path / "hf", held)
    name = f"dcp_placements.presets.hub:{rename}"
    ran = run("import", tmp_path / "hf", tmp_path / "ckpt", "--from", "hf", "--rename", name)
    assert ran.code == 0, ran.err
    assert "rename:    that of an export, read backwards" in ran.out
    found = read_whole(tmp_path / "ckpt")
    assert found.keys() == stacked.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in stacked.items())
    export_safetensors(tmp_path / "ckpt", tmp_path / "out", rename=getattr(hub, rename), prefix="")
    assert diff(tmp_path / "out", tmp_path / "hf").same


FIRST, SECOND = "mlp.experts.0.down_proj.weight", "mlp.experts.1.down_proj.weight"


@pytest.mark.parametrize(
    ("held", "rename", "parts"),
    [
        (
            {"mlp.experts.0.gate_proj.weight": (2, 2), "mlp.experts.2.gate_proj.weight": (2, 2)},
            hub.qwen3_moe,
            ["not those of an export by this rename", "some are missing: mlp.experts.0.up_proj"],
        ),
        (
            {FIRST: (2, 2), "mlp.experts.2.down_proj.weight": (2, 2)},
            hub.qwen3_moe,
            ["mlp.experts.2.down_proj.weight: a row or a part before it is missing"],
        ),
        (
            {FIRST: (2, 2), SECOND: (2, 3)},
            hub.qwen3_moe,
            ["mlp.experts.down_proj: tensors of different dtypes or shapes cannot be joined"],
        ),
        (
            {"layers.0.w": (2,)},
            Renames(Replace("a", "layers"), Replace("b", "layers")),
            ["layers.0.w: rename= gives a.0.w and b.0.w this name"],
        ),
        ({"layers.0.w": (2,)}, hub.mixtral, ["changes none of these names", "another model"]),
        (
            {"experts.w": (3, 2)},
            Stack("experts.{}.w", 3),
            ["changes none of these names", "Stack(pattern='experts.{}.w'", "backwards"],
        ),
        ({"layers.w": (2,)}, Replace("module", ""), ["changes none", "by=''", "backwards"]),
        ({"layers.w": (2,)}, Replace("model*", "model"), ["changes none", "backwards"]),
        ({"layers.w": (2,)}, lambda name: name, ["changes none of these names", "backwards"]),
    ],
)
def test_a_rename_that_fits_in_no_direction_is_refused(
    tmp_path: Path, held: dict[str, tuple[int, ...]], rename: Any, parts: list[str]
) -> None:
    save_hugging_face(tmp_path / "hf", {name: torch.ones(shape) for name, shape in held.items()})
    with pytest.raises(PlacementError) as refused:
        import_safetensors(tmp_path / "hf", tmp_path / "ckpt", rename=rename)
    for part in parts:
        assert part in str(refused.value), refused.value
    assert not (tmp_path / "ckpt").exists()


def test_a_rename_stacks(tmp_path: Path, run: Run) -> None:
    held = {f"experts.{n}.w": arange((2, 3)) + n for n in range(3)}
    save_hugging_face(tmp_path / "hf", held)
    import_safetensors(tmp_path / "hf", tmp_path / "ckpt", rename=Stack("experts.{}.w", 3))
    assert torch.equal(read_whole(tmp_path / "ckpt")["experts.w"], torch.stack([*held.values()]))
    ran = run("import", tmp_path / "hf", tmp_path / "cli", "--from", "hf", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["keys"] == 3
    assert sorted(read_whole(tmp_path / "cli")) == sorted(held)


def test_what_is_wrong_is_told_before_anything_is_written(tmp_path: Path, run: Run) -> None:
    save_hugging_face(tmp_path / "hf", tensors())
    with pytest.raises(PlacementError, match=r"gives this one name to both"):
        import_safetensors(tmp_path / "hf", tmp_path / "ckpt", rename=lambda name: "one")
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(PlacementError, match="DCP checkpoint already"):
        import_safetensors(tmp_path / "dcp", tmp_path / "ckpt")
    with pytest.raises(PlacementError, match="is there already"):
        import_safetensors(tmp_path / "hf", tmp_path / "dcp")
    for option in ("--vocab-size", "--expert-parallel-size"):
        ran = run("import", tmp_path / "hf", tmp_path / "ckpt", "--from", "hf", option, 3)
        assert ran.code == 2
        assert "megatron" in ran.err
    ran = run("import", tmp_path / "hf", tmp_path / "c", "--from", "megatron", "--memory", "1GiB")
    assert ran.code == 2
    (tmp_path / "hf" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(PlacementError, match=r"not whole\n.*missing_file"):
        import_safetensors(tmp_path / "hf", tmp_path / "ckpt")
    (tmp_path / "none").mkdir()
    with pytest.raises(CannotLook):
        import_safetensors(tmp_path / "none", tmp_path / "ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "hf", "none"]


def test_what_a_stopped_import_leaves_goes_with_the_next(tmp_path: Path) -> None:
    save_hugging_face(tmp_path / "hf", tensors())

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        import_safetensors(tmp_path / "hf", tmp_path / "ckpt", progress=stop)
    assert not (tmp_path / "ckpt").exists()
    import_safetensors(tmp_path / "hf", tmp_path / "ckpt")
    assert diff(tmp_path / "ckpt", tmp_path / "hf").same
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "hf"]


def test_files_that_are_overwritten_meanwhile_are_refused(tmp_path: Path) -> None:
    source, out = tmp_path / "hf", tmp_path / "ckpt"
    save_hugging_face(source, tensors())
    with pytest.raises(CannotLook, match="it was overwritten while it was read") as caught:
        import_safetensors(source, out, progress=overwriting(source, "*.safetensors"))
    assert "model-00001-of-00002.safetensors" in str(caught.value)
    assert not out.exists()
    import_safetensors(source, out)
    assert diff(out, source).same
