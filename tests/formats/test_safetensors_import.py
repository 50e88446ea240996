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
from tests.offline_scenes import Run, run, save_hugging_face
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
    return held | {f"t{i}": raw.clone().view(d) for i, d in enumerate(DTYPES.values())}


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


def test_a_map_of_an_export_is_refused_with_the_direction(tmp_path: Path) -> None:
    save_hugging_face(
        tmp_path / "hf",
        {f"layers.0.mlp.experts.{n}.gate_proj.weight": torch.ones(2, 2) for n in range(3)},
    )
    with pytest.raises(PlacementError, match="rename changes none of these names") as refused:
        import_safetensors(tmp_path / "hf", tmp_path / "ckpt", rename=hub.qwen3_moe)
    assert "from the files' names to the checkpoint's" in str(refused.value)
    assert "PlacementLoadPlanner(rules, rename=presets.hub.qwen3_moe)" in str(refused.value)
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
