"""``export``, against whole tensors cut by plain slicing; read by the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementError,
    PlacementFileSystemWriter,
    PlacementRules,
    PlacementSavePlanner,
    Renames,
    Replace,
    Split,
    Stack,
    Unstack,
)
from dcp_placements.offline import CannotLook, export_safetensors
from dcp_placements.offline.safetensors_files import NAMED_DTYPES
from dcp_placements.presets import hub
from dcp_placements.testing import FakeDTensor, World, cut
from dcp_placements.testing.damage import drop_chunk, flip_bit, remove_file
from tests.offline_scenes import Run, save_hugging_face, save_sharded, saving_over
from tests.strategies import arange, examples

ROOT = Path(__file__).parents[2]
EXPERTS, WIDTH, HIDDEN = 4, 3, 6
MIXED = ("layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj")


def model() -> dict[str, torch.Tensor]:
    """Return a model's whole tensors."""
    return {
        "embed.weight": arange((10, HIDDEN)),
        MIXED[0]: arange((EXPERTS, 2 * WIDTH, HIDDEN)) + 100,
        MIXED[1]: arange((EXPERTS, HIDDEN, WIDTH)) + 1000,
        "layers.0.mlp.gate.weight": arange((EXPERTS, HIDDEN)) + 2000,
        "layers.0.o_proj.weight": arange((5, 8)) + 3000,
        "norm.weight": arange((HIDDEN,)).to(torch.bfloat16),
        "count": torch.tensor(7),
    }


def hub_names(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the model's tensors by the names and in the shapes that the hub has for Mixtral."""
    experts = "layers.0.block_sparse_moe.experts"
    found = {}
    for name, tensor in whole.items():
        if name == MIXED[0]:
            for number, row in enumerate(tensor):
                found[f"{experts}.{number}.w1.weight"] = row[: len(row) // 2]
                found[f"{experts}.{number}.w3.weight"] = row[len(row) // 2 :]
        elif name == MIXED[1]:
            for number, row in enumerate(tensor):
                found[f"{experts}.{number}.w2.weight"] = row
        else:
            found[name.replace("mlp.gate", "block_sparse_moe.gate")] = tensor
    return found


def save(path: Path, *, lean: bool = True, head: str = "model") -> dict[str, torch.Tensor]:
    """Save from ep 2 x fsdp 2, with optimizer state; ``o_proj`` is cut by columns."""
    whole, world = model(), World(4)

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, ep=2, fsdp=2)
        made: dict[str, Any] = {}
        for fqn, tensor in whole.items():
            local = tensor
            if "experts" in fqn:
                local = cut(tensor, [Shard(0)], (2,), mesh["ep"].get_coordinate())
            if local.ndim:
                local = FakeDTensor.distribute(local, mesh["fsdp"], [Shard(int("o_proj" in fqn))])
            made[fqn] = local
        optim: dict[str, Any] = {f"state.{k}.exp_avg": v for k, v in made.items()}
        optim |= {f"param_groups.{k}.lr": 0.1 for k in made}
        return {head: made, "optim": optim, "step": 3} if head else made

    def planner(rank: int) -> PlacementSavePlanner:
        mesh = world.mesh(rank, ep=2, fsdp=2)
        rules = {"mlp.experts": CheckpointPlacement(mesh, {"ep": Shard(0)})}
        return PlacementSavePlanner(PlacementRules(rules))

    def writer(rank: int) -> Any:
        return (PlacementFileSystemWriter if lean else dcp.FileSystemWriter)(path)

    world.save(path, state_dict, planner, writer)
    return whole


def read(out: Path) -> dict[str, torch.Tensor]:
    """Return what the safetensors library reads, by the index where there is one."""
    index = out / "model.safetensors.index.json"
    if not index.exists():
        assert [path.name for path in out.iterdir()] == ["model.safetensors"]
        return load_file(out / "model.safetensors")
    result = json.loads(index.read_text())
    assert {p.name for p in out.iterdir()} == {index.name, *result["weight_map"].values()}
    found = {}
    for name, file in result["weight_map"].items():
        with safe_open(out / file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
            found[name] = opened.get_tensor(name)
    nbytes = sum(tensor.nbytes for tensor in found.values())
    assert result["metadata"]["total_size"] == nbytes
    return found


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("lean", [True, False])
def test_ep_x_fsdp_becomes_the_hubs_names_in_bounded_files(lean: bool, tmp_path: Path) -> None:
    wanted = hub_names(save(tmp_path / "ckpt", lean=lean))
    limit = 400
    result = export_safetensors(
        tmp_path / "ckpt", tmp_path / "out", rename=hub.mixtral, max_shard_size=limit
    )
    found = read(tmp_path / "out")
    assert_same(found, wanted)
    assert len(result.files) > 3
    for name, nbytes in result.files.items():
        with safe_open(tmp_path / "out" / name, "pt") as opened:
            names = list(opened.keys())
        assert nbytes == sum(found[n].nbytes for n in names)
        assert nbytes <= limit or len(names) == 1
    assert result.prefix == "model"
    assert "step" in result.left_out
    assert "optim.state.embed.weight.exp_avg" in result.left_out


@pytest.mark.parametrize("short", [1, 1 << 30])
@pytest.mark.parametrize("lean", [True, False])
def test_damage_of_a_record_that_is_copied_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: int, lean: bool
) -> None:
    monkeypatch.setattr("dcp_placements.offline.assembly.SHORT_NBYTES", short)
    save(tmp_path / "ckpt", lean=lean)
    flip_bit(tmp_path / "ckpt", f"model.{MIXED[0]}")
    with pytest.raises(PlacementError, match=r"gate_up_proj: .*not what was written: their CRC-32"):
        export_safetensors(tmp_path / "ckpt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_plan_says_what_would_be_written_and_writes_nothing(tmp_path: Path, run: Run) -> None:
    wanted = hub_names(save(tmp_path / "ckpt"))
    options = ("--rename", "dcp_placements.presets.hub:mixtral", "--max-shard-size", "400")
    ran = run("export", tmp_path / "ckpt", tmp_path / "out", *options, "--dry-run", "--json")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
    written = run("export", tmp_path / "ckpt", tmp_path / "out", *options, "--json")
    assert ran.json == written.json | {"is_written": False, "notes": []}
    assert ran.json["tensors"] == len(wanted)
    ran = run("import", tmp_path / "out", tmp_path / "two", "--dry-run")
    assert ran.out.startswith(f"would be written: {len(wanted)} tensors, ")
    assert not (tmp_path / "two").exists()


def test_every_dtype_that_the_format_has_comes_through(tmp_path: Path) -> None:
    # Three elements each, the smallest first: the larger ones then have to be moved to lie well.
    dtypes = sorted([dtype for dtype in NAMED_DTYPES.values()], key=lambda dtype: dtype.itemsize)
    tensors = {
        f"t{i}": (torch.arange(3 * dtype.itemsize) % 2).to(torch.uint8).view(dtype)
        for i, dtype in enumerate(dtypes)
    }
    dcp.save({"model": dict(tensors)}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    export_safetensors(tmp_path / "ckpt", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert len(found) == len(NAMED_DTYPES)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
    # Each where its elements can be mapped: at a multiple of their size.
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    begins = 8 + int.from_bytes(data[:8], "little")
    for name, tensor in tensors.items():
        assert (begins + header[name]["data_offsets"][0]) % tensor.itemsize == 0


def test_a_dtype_is_for_floating_point_of_16_bits_or_more(tmp_path: Path) -> None:
    eight = torch.ones(4).to(torch.float8_e4m3fn)
    tensors = {"w": torch.randn(3, 4), "i": torch.arange(3), "f8": eight, "b": torch.tensor(True)}
    dcp.save(dict(tensors), checkpoint_id=tmp_path / "ckpt", no_dist=True)
    export_safetensors(tmp_path / "ckpt", tmp_path / "out", dtype=torch.bfloat16)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["w"], tensors["w"].to(torch.bfloat16))
    assert {name: t.dtype for name, t in found.items()} == {
        **{name: t.dtype for name, t in tensors.items()},
        "w": torch.bfloat16,
    }
    dcp.save({"z": torch.ones(2, dtype=torch.complex128)}, checkpoint_id=tmp_path / "z")
    with pytest.raises(PlacementError, match=r"z: .* have no dtype torch.complex128"):
        export_safetensors(tmp_path / "z", tmp_path / "z-out")
    assert not (tmp_path / "z-out").exists()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "bool", "complex64", "float8_e4m3fn"])
def test_m90_weights_are_cast_between_floats_alone(tmp_path: Path, run: Run, dtype: str) -> None:
    weights = {"w": torch.tensor([0.5, -2.25, 3.0]), "bias": torch.ones(2, dtype=torch.bfloat16)}
    dcp.save(dict(weights), checkpoint_id=tmp_path / "ckpt", no_dist=True)
    ran = run("export", tmp_path / "ckpt", tmp_path / "out", "--dtype", dtype)
    assert ran.code == 1, ran.out
    assert f"torch.{dtype}: floating-point tensors are cast to torch.float64" in ran.err
    with pytest.raises(PlacementError, match=f"dtype torch.{dtype}: "):
        export_safetensors(tmp_path / "ckpt", tmp_path / "out", dtype=getattr(torch, dtype))
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


@st.composite
def fused(draw: st.DrawFn) -> tuple[Any, ...]:
    """Draw a stack of fused tensors, how it is taken apart, and how two ranks cut it."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    groups, unit = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    shape = [draw(st.integers(1, 3)), draw(st.integers(1, 3))]
    dim = draw(st.integers(0, len(shape)))
    shape.insert(dim, sum(sizes) * groups * unit)
    rows = draw(st.none() | st.integers(0, len(shape)))
    if rows is not None:
        shape.insert(rows, draw(st.integers(1, 3)))
    return tuple(shape), dim, rows, sizes, groups, draw(st.integers(0, len(shape) - 1))


@examples(20)
@given(case=fused())
def test_whatever_is_taken_apart_is_what_slicing_gives(
    case: tuple[Any, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    shape, dim, row_dim, sizes, groups, cut_dim = case
    root = tmp_path_factory.mktemp("fused")
    whole, world = arange(shape), World(2)

    def state_dict(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, fsdp=2)
        return {"a.qkv": FakeDTensor.distribute(whole, mesh, [Shard(cut_dim)])}

    world.save(root / "ckpt", state_dict, lambda rank: PlacementSavePlanner())
    names = ["q", "k", "v"][: len(sizes)]
    split = Split("qkv", names, dim=dim, sizes=sizes, groups=groups)
    rename: Any = split
    if row_dim is not None:
        rename = Renames(Unstack("a.{}.qkv", dim=row_dim), split)
    export_safetensors(root / "ckpt", root / "out", rename=rename)
    with mock.patch("dcp_placements.offline.assembly.SHORT_NBYTES", 1):
        export_safetensors(root / "ckpt", root / "copied", rename=rename)
    wanted = {}
    rows = [whole] if row_dim is None else list(whole.unbind(row_dim))
    for number, row in enumerate(rows):
        head = "a" if row_dim is None else f"a.{number}"
        parts: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        for group in row.chunk(groups, dim) if row.shape[dim] else [row]:
            unit = group.shape[dim] // sum(sizes)
            pieces = group.split([size * unit for size in sizes], dim)
            for name, piece in zip(names, pieces, strict=True):
                parts[name].append(piece)
        wanted |= {f"{head}.{name}": torch.cat(held, dim) for name, held in parts.items()}
    assert_same(load_file(root / "out" / "model.safetensors"), wanted)
    assert_same(load_file(root / "copied" / "model.safetensors"), wanted)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_experts_by_name_become_one_tensor(dim: int, tmp_path: Path) -> None:
    rows = [arange((3, 2)) + 10 * number for number in range(3)]
    held = {f"experts.{number}.w": rows[number] for number in (2, 0, 1)}
    dcp.save(dict(held), checkpoint_id=tmp_path / "ckpt", no_dist=True)
    stack = Stack("experts.{}.w", 3, dim=dim)
    for name, short in (("out", 1 << 20), ("copied", 1)):
        with mock.patch("dcp_placements.offline.assembly.SHORT_NBYTES", short):
            export_safetensors(tmp_path / "ckpt", tmp_path / name, rename=stack)
        assert_same(read(tmp_path / name), {"experts.w": torch.stack(rows, dim)})
    with pytest.raises(PlacementError, match=r"experts.w: of 4 rows these are missing: 3"):
        export_safetensors(tmp_path / "ckpt", tmp_path / "more", rename=Stack("experts.{}.w", 4))


def test_names_must_be_one_to_one(tmp_path: Path) -> None:
    save(tmp_path / "ckpt")

    def rename(name: str) -> str | None:
        if "embed" in name:
            raise KeyError(name)
        return {"norm.weight": None, "count": "gate"}.get(name, name.replace("o_proj", "x"))

    with pytest.raises(PlacementError) as refused:
        export_safetensors(
            tmp_path / "ckpt",
            tmp_path / "out",
            rename=lambda name: rename(name) if "layers" not in name else "gate",  # type: ignore
        )
    message = str(refused.value)
    assert "embed.weight: rename= has no name for it: KeyError" in message
    assert "norm.weight: rename= has no name for it: it returned None" in message
    assert "gate: rename= gives this one name to both layers.0.mlp." in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]
    with pytest.raises(PlacementError, match=r"to several parts of norm.weight"):
        export_safetensors(
            tmp_path / "ckpt", tmp_path / "out", rename=Split("norm.weight", ("a", "a"))
        )
    with pytest.raises(PlacementError, match=r"norm.weight: cannot be split: 6 on dim 0"):
        export_safetensors(tmp_path / "ckpt", tmp_path / "out", rename=Split("norm.weight", "abcd"))


def test_tied_weights_are_written_once_when_they_are_equal(tmp_path: Path, run: Run) -> None:
    embed = torch.randn(6, 4)
    held = {"embed.weight": embed, "lm_head.weight": embed.clone(), "other": embed + 1}
    dcp.save({"model": held}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    tied = {"lm_head.weight": "embed.weight"}
    result = export_safetensors(tmp_path / "ckpt", tmp_path / "out", tied=tied)
    assert result.tied == ("lm_head.weight",)
    assert sorted(read(tmp_path / "out")) == ["embed.weight", "other"]
    ran = run("export", tmp_path / "ckpt", tmp_path / "x", "--tied", "other=embed.weight")
    assert ran.code == 1
    assert "other: is not embed.weight: they differ" in ran.err
    with pytest.raises(PlacementError, match=r"cannot be tied to gone: there is no gone"):
        export_safetensors(tmp_path / "ckpt", tmp_path / "x", tied={"other": "gone"})
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("head", ["model", "app.model"])
def test_tensors_beside_the_model_are_no_weights(head: str, tmp_path: Path) -> None:
    whole = {"norm.weight": arange((6,)), "model.embed.weight": arange((3, 2))}
    beside = {"rng": [torch.arange(4)], "step": torch.tensor(3)}
    extra = {"norm._extra_state": {"amax": torch.ones(2)}}
    saved: dict[str, Any] = {"model": whole | extra, **beside}
    if head == "app.model":
        saved = {"app": saved}
    dcp.save(saved, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    result = export_safetensors(tmp_path / "ckpt", tmp_path / "out")
    assert_same(read(tmp_path / "out"), whole | {"norm._extra_state.amax": torch.ones(2)})
    outer = head.removesuffix("model")
    assert (result.prefix, result.left_out) == (head, (f"{outer}rng.0", f"{outer}step"))
    assert f"without the prefix {head}.\n    left out: {outer}rng.0, {outer}step" in str(result)
    export_safetensors(tmp_path / "ckpt", tmp_path / "rng", prefix=f"{outer}rng")
    assert_same(read(tmp_path / "rng"), {"0": torch.arange(4)})
    export_safetensors(tmp_path / "ckpt", tmp_path / "all", prefix="")
    assert len(read(tmp_path / "all")) == 5


def test_optimizer_state_comes_along_when_asked_for(tmp_path: Path) -> None:
    whole = save(tmp_path / "ckpt")
    export_safetensors(tmp_path / "ckpt", tmp_path / "out", optimizer=True, rename=hub.mixtral)
    states = {f"optim.state.{name}.exp_avg": tensor for name, tensor in whole.items()}
    row = "optim.state.layers.0.block_sparse_moe.experts.1.w2.weight.exp_avg"
    found = read(tmp_path / "out")
    assert torch.equal(found[row], whole[MIXED[1]][1])
    assert len(found) == 2 * len(hub_names(whole))
    export_safetensors(tmp_path / "ckpt", tmp_path / "own", optimizer=True)
    assert_same(read(tmp_path / "own"), whole | states)


def test_safetensors_are_exported_too(tmp_path: Path) -> None:
    whole = {name: t for name, t in model().items() if t.ndim}
    (tmp_path / "hf").mkdir()
    save_file(whole, tmp_path / "hf" / "model.safetensors")
    export_safetensors(tmp_path / "hf", tmp_path / "out", rename=hub.mixtral, max_shard_size=500)
    assert_same(read(tmp_path / "out"), hub_names(whole))


def test_what_is_there_stays_as_it_is(tmp_path: Path) -> None:
    save(tmp_path / "ckpt")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(PlacementError, match="is there already, and is left as it is"):
        export_safetensors(tmp_path / "ckpt", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]


@pytest.mark.parametrize("damage", [drop_chunk, remove_file])
def test_what_is_not_whole_is_refused_before_anything_is_written(
    damage: Any, tmp_path: Path
) -> None:
    save(tmp_path / "ckpt")
    damage(tmp_path / "ckpt", f"model.{MIXED[0]}")
    with pytest.raises(PlacementError, match=r"not whole \(1 fault.*\n.*(hole|missing_file)"):
        export_safetensors(tmp_path / "ckpt", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_a_file_that_an_index_names_in_vain_is_missed(tmp_path: Path) -> None:
    save_hugging_face(tmp_path / "hf", {"a": torch.ones(2), "b": torch.ones(3)})
    (tmp_path / "hf" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(PlacementError, match=r"not whole .*\nb: missing_file"):
        export_safetensors(tmp_path / "hf", tmp_path / "out")
    export_safetensors(tmp_path / "hf", tmp_path / "out", exclude=["b"])
    assert sorted(read(tmp_path / "out")) == ["a"]


def test_the_command(tmp_path: Path, run: Run) -> None:
    wanted = hub_names(save(tmp_path / "ckpt"))
    ran = run(
        *("export", tmp_path / "ckpt", tmp_path / "out", "--max-shard-size", "1KiB"),
        *("--rename", "dcp_placements.presets.hub:mixtral", "--exclude", "norm", "--json"),
    )
    assert ran.code == 0, ran.err
    wanted.pop("norm.weight")
    assert_same(read(tmp_path / "out"), wanted)
    assert ran.json["tensors"] == len(wanted)
    assert "model.norm.weight" in ran.json["left_out"]
    assert sum(ran.json["files"].values()) == sum(t.nbytes for t in wanted.values())
    ran = run("export", tmp_path / "ckpt", tmp_path / "x", "--prefix", "nothing")
    assert ran.code == 1
    assert "no key of a model begins with 'nothing.'" in ran.err
    ran = run("export", tmp_path / "ckpt", tmp_path / "x", "--dtype", "ConcatTable")
    assert ran.code == 2


def test_a_map_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "ckpt")
    for rename in (Replace("encoder", "net"), lambda name: name):
        with pytest.raises(PlacementError, match="rename=: matches none of the") as refused:
            export_safetensors(tmp_path / "ckpt", tmp_path / "out", rename=rename)
        assert "likely:      the map of another model" in str(refused.value)
        assert not (tmp_path / "out").exists()


def test_names_that_a_map_leaves_are_listed(tmp_path: Path) -> None:
    held = {"a": torch.ones(2), "b": torch.ones(3), "c.w": torch.ones(4)}
    dcp.save(held, checkpoint_id=tmp_path / "ckpt")
    result = export_safetensors(tmp_path / "ckpt", tmp_path / "out", rename=Replace("c", "d"))
    assert result.unchanged == ("a", "b")
    assert "    not renamed: a, b" in str(result)
    result = export_safetensors(tmp_path / "ckpt", tmp_path / "plain")
    assert result.unchanged == ()


def test_a_map_that_exchanges_two_names_matches(tmp_path: Path) -> None:
    dcp.save({"a": torch.zeros(2), "b": torch.ones(2)}, checkpoint_id=tmp_path / "ckpt")
    export_safetensors(tmp_path / "ckpt", tmp_path / "out", rename={"a": "b", "b": "a"}.__getitem__)
    assert_same(read(tmp_path / "out"), {"a": torch.ones(2), "b": torch.zeros(2)})


def test_an_exclude_that_matches_nothing_is_warned_of(tmp_path: Path) -> None:
    save(tmp_path / "ckpt")
    with pytest.warns(UserWarning, match="'nothing': exclude= matches none of the"):
        export_safetensors(tmp_path / "ckpt", tmp_path / "out", exclude=["nothing", "norm.weight"])
    assert not any("norm.weight" in name for name in read(tmp_path / "out"))


@pytest.mark.parametrize("shard_size", [500, 1 << 30])
def test_a_source_that_is_overwritten_meanwhile_is_refused(tmp_path: Path, shard_size: int) -> None:
    source, out = tmp_path / "src", tmp_path / "out"
    save_sharded(source, lean=False)
    overwrite = saving_over(source)
    with pytest.raises(CannotLook, match="it was overwritten while it was read"):
        export_safetensors(source, out, max_shard_size=shard_size, progress=overwrite)
    assert not out.exists()
