"""A torch file per rank, as verl and home-made trainers leave them, against plain slicing."""

from __future__ import annotations

import errno
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import assert_holds, assert_same
from safetensors.torch import load_file
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    IndexShard,
    MeshCoordinate,
    PlacementError,
    Placements,
)
from dcp_placements.bind.rank_shard import RankShard
from dcp_placements.offline import (
    CannotLook,
    diff,
    import_checkpoint,
    inspect,
    open_source,
    reshard,
    verify,
)
from dcp_placements.offline.directory import existing_directory
from dcp_placements.offline.sources.rank_tensors import RankTensors
from dcp_placements.testing import cut
from tests.convert.hostile import Hostile
from tests.offline_scenes import Run
from tests.strategies import arange
from tests.torchrun import python, tail

SAVER = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from tests.convert.test_rank_files import wholes, local_part

folder, kind = sys.argv[1:]
for rank in range(8):
    dist.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
    if kind == "fsdp":
        mesh = fsdp = init_device_mesh("cpu", (8,), mesh_dim_names=("fsdp",))
    elif kind == "hsdp":
        mesh = fsdp = init_device_mesh("cpu", (2, 4), mesh_dim_names=("ddp", "fsdp"))
    else:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("ep", "fsdp"))
        fsdp = mesh["fsdp"]
    model = {}
    for key, whole in wholes().items():
        is_expert = kind == "ep" and "experts" in key
        rows = whole.chunk(2)[rank // 4] if is_expert else whole
        size, at = (8, rank) if kind == "fsdp" else (4, rank % 4)
        local = local_part(rows, size, at)
        placements = [Shard(0)] if fsdp.ndim == 1 else [Replicate(), Shard(0)]
        model[key] = DTensor.from_local(
            local, fsdp, placements, run_check=False, shape=rows.shape, stride=rows.stride()
        )
    state = {0: {"exp_avg": model["embed.weight"], "step": torch.tensor(3.0)}}
    for name, value in {
        "model": model,
        "optim": {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "extra_state": {"lr_scheduler": {"last_epoch": 3}, "rng": {"cpu": torch.arange(4)}},
    }.items():
        torch.save(value, f"{folder}/{name}_world_size_8_rank_{rank}.pt")
    dist.destroy_process_group()
"""


def wholes() -> dict[str, torch.Tensor]:
    """Return a model's whole tensors; 13 rows leave short and empty parts."""
    return {
        "embed.weight": arange((13, 4)).to(torch.bfloat16),
        "layers.0.experts.gate_up": arange((4, 6, 3)) + 100,
        "layers.0.norm.weight": arange((5,)) + 1000,
    }


def local_part(rows: torch.Tensor, size: int, at: int) -> torch.Tensor:
    """Return the part of one rank, cut by ``torch.chunk``."""
    parts = rows.chunk(size)
    return parts[at].clone() if at < len(parts) else rows[:0].clone()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Give what eight ranks of verl save: real DTensors, in a process of their own."""
    held: dict[str, Path] = {}

    def save(kind: str) -> Path:
        if kind not in held:
            held[kind] = tmp_path_factory.mktemp(kind)
            program = held[kind] / "saver.py"
            program.write_text(SAVER)
            done = python(program, held[kind], kind)
            assert done.returncode == 0, tail(done)
            program.unlink()
            (held[kind] / "fsdp_config.json").write_text("{}")
        return held[kind]

    return save


def by_ep(mesh: MeshCoordinate) -> Placements:
    """Return what a rank of verl's world with expert parallelism declares."""
    return Placements({"experts": CheckpointPlacement(mesh, {"ep": Shard(0)})})


@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "ep"])
def test_verls_files_become_a_checkpoint_and_safetensors(
    saved: Callable[[str], Path], kind: str, tmp_path: Path, run: Run
) -> None:
    source = saved(kind)
    options: tuple[str, ...] = ()
    if kind == "ep":
        rules = "tests.convert.test_rank_files:by_ep"
        options = ("--rules", rules, "--mesh", "ep=2,fsdp=4")
    ran = run("import", source, tmp_path / "dcp", *options, "--json")
    assert ran.code == 0, ran.err
    assert_holds(tmp_path / "dcp", wholes())
    assert verify(tmp_path / "dcp", contents=True).sound
    assert {part["what"] for part in ran.json["beside"]} == {
        "optim_world_size_8.pt",
        "extra_state_world_size_8.pt",
    }
    ran = run("export", source, tmp_path / "hf", *options)
    assert ran.code == 0, ran.err
    assert "left out: extra_state_world_size_8.pt" in ran.out
    assert_same(load_file(tmp_path / "hf" / "model.safetensors"), wholes())


def test_experts_of_an_axis_that_nothing_names_are_refused(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(PlacementError, match=r"experts\.gate_up: .* differ in 18 of 18") as caught:
        import_checkpoint(saved("ep"), tmp_path / "out")
    assert "an axis that cuts it (ep) is in no rule and no DTensor" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_missing_renamed_or_foreign_file_is_refused(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    files = {file.name: file.read_bytes() for file in saved("fsdp").glob("model*")}

    def written(**changed: bytes | None) -> Path:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, data in (files | changed).items():
            if data is not None:
                (folder / name).write_bytes(data)
        return folder

    name = "model_world_size_8_rank_{}.pt".format
    with pytest.raises(PlacementError, match="of 8 ranks these have no file: 3"):
        open_source(written(**{name(3): None}))
    far = {f"model_world_size_8_rank_{10**11}.pt": files[name(3)]}
    with pytest.raises(PlacementError, match="files of 9 ranks, of which there are 8"):
        open_source(written(**far))
    shards = written(**dict.fromkeys(files), **{f"m_rank_{10**11}.pt": files[name(3)]})
    with pytest.raises(PlacementError, match=r"no file: 0, 1, 2, 3, 4, 5, 6, 7 and 99,999,999,992"):
        open_source(shards)
    with pytest.raises(CannotLook, match=r"files='m_rank.pt' has no \{rank\}"):
        open_source(shards, files="m_rank.pt")
    with pytest.raises(PlacementError, match="was written by rank 2, in the file of rank 3"):
        open_source(written(**{name(3): files[name(2)]}))
    with pytest.raises(CannotLook, match="files of several kinds"):
        open_source(written(**{"model_world_size_4_rank_0.pt": b""}))
    with pytest.raises(CannotLook, match=r"several files of one rank: model_world_size_8_rank_03"):
        open_source(written(**{"model_world_size_8_rank_03.pt": files[name(3)]}))
    torch.save({"step": 7}, tmp_path / "bare")
    bare = (tmp_path / "bare").read_bytes()
    with pytest.raises(PlacementError, match="hold no tensor of a model"):
        open_source(written(**dict.fromkeys(files, bare)))
    torch.save({"w": Hostile(tmp_path / "ran")}, tmp_path / "evil")
    with pytest.raises(CannotLook, match=r"asks for: +posix\.system"):
        open_source(written(**{name(3): (tmp_path / "evil").read_bytes()}))
    assert not (tmp_path / "ran").exists()


def test_plain_shards_are_placed_by_rules_with_renames(tmp_path: Path, run: Run) -> None:
    """A home-made trainer: plain tensors, experts numbered per rank, nested dicts."""
    experts = {f"experts.{n}.w": arange((4, 3)) + 100 * n for n in range(4)}
    norm, table = arange((5,)), arange((6, 7)) + 1000
    source = tmp_path / "src"
    source.mkdir()
    for rank in range(4):
        ep, tp = divmod(rank, 2)
        model: dict[str, Any] = {
            f"experts.{n}.w": cut(experts[f"experts.{2 * ep + n}.w"], [Shard(1)], (2,), (tp,))
            for n in range(2)
        }
        model |= {"norm": norm, "table": cut(table, [Shard(0)], (2,), (tp,))}
        torch.save({"model": model, "step": 7}, source / f"shard-{rank}.pth")
    options = (
        *("--files", "shard-{rank}.pth", "--mesh", "ep=2,tp=2"),
        *("--rules", "tests.convert.test_rank_files:home_made"),
    )
    ran = run("import", source, tmp_path / "dcp", *options)
    assert ran.code == 0, ran.err
    expected = {**experts, "norm": norm, "table": table}
    assert_holds(tmp_path / "dcp", {f"model.{key}": whole for key, whole in expected.items()})
    assert "copies, found equal" in ran.out
    ran = run("import", source, tmp_path / "two", *options[:2])
    assert (ran.code, "cannot be put together" in ran.err) == (1, True)
    ran = run("import", source, tmp_path / "two", *options[:2], "--mesh", "ep=2", *options[4:])
    assert (ran.code, "files of 4 ranks, and a mesh of 2" in ran.err) == (1, True)
    torch.save({"model": model | {"norm": norm + 1}, "step": 7}, source / "shard-3.pth")
    ran = run("import", source, tmp_path / "two", *options)
    assert (ran.code, "contradict each other" in ran.err) == (1, True)


def home_made(mesh: MeshCoordinate) -> Placements:
    """Return what a rank of the home-made trainer declares."""
    from dcp_placements import Renumber, contiguous

    mine = contiguous([2, 2], at=mesh.get_coordinate()[0])
    return Placements(
        {
            "experts.*.w": CheckpointPlacement(mesh, {"tp": Shard(1)}, global_shape=(4, 3)),
            "table": CheckpointPlacement(mesh, {"tp": Shard(0)}),
        },
        rename=Renumber("experts.{}", mine, total=4),
    )


def of_halves(order: int) -> Callable[[MeshCoordinate], Placements]:
    """Return what the ranks of two halves declare, the second of them first if ``order`` is -1."""

    def declare(mesh: MeshCoordinate) -> Placements:
        at = mesh.get_coordinate()[0]
        of_rank = MeshCoordinate(("ep",), (2,), (at if order > 0 else 1 - at,))
        return Placements({"w": CheckpointPlacement(of_rank, {"ep": Shard(0)})})

    return declare


@pytest.fixture
def halves(tmp_path: Path) -> Path:
    """Save a (5, 6) tensor as two ranks hold it: one transposed, one as a part of more."""
    whole, folder = arange((5, 6)), tmp_path / "halves"
    folder.mkdir()
    torch.save({"w": whole[:3].t().contiguous().t(), "norm": arange((2,))}, folder / "a_rank_0.pt")
    torch.save({"w": whole[3:], "norm": arange((2,))}, folder / "a_rank_1.pt")
    return folder


def test_ranks_files_are_a_checkpoint_for_all_tools(halves: Path, tmp_path: Path) -> None:
    def rules(mesh: MeshCoordinate) -> Placements:
        by_ep = CheckpointPlacement(mesh, {"ep": Shard(0)}, global_shape=(5, 6))
        return Placements({"w": by_ep})

    source = open_source(halves, rules=rules, axes={"ep": 2})
    import_checkpoint(source, tmp_path / "dcp")
    assert_holds(tmp_path / "dcp", {"w": arange((5, 6)), "norm": arange((2,))})
    assert diff(source, tmp_path / "dcp").same
    assert verify(source, contents=True).sound
    assert inspect(source).format == "rank_files"

    def columns(mesh: MeshCoordinate) -> Placements:
        return Placements({"w": CheckpointPlacement(mesh, {"tp": Shard(1)})})

    reshard(source, tmp_path / "columns", columns, {"tp": 3})
    assert_holds(tmp_path / "columns", {"w": arange((5, 6)), "norm": arange((2,))})
    held = open_source(tmp_path / "columns").tensors["w"]
    assert sorted(box.offsets for box in held.boxes) == [(0, 0), (0, 2), (0, 4)]
    damaged = bytearray((halves / "a_rank_1.pt").read_bytes())
    damaged[damaged.index(arange((5, 6))[3:].numpy().tobytes())] ^= 1
    (halves / "a_rank_1.pt").write_bytes(damaged)
    (fault,) = verify(source, contents=True).faults
    assert (fault.kind, fault.files) == ("checksum", ("a_rank_1.pt",))


def test_an_import_by_other_rules_is_another_output(tmp_path: Path) -> None:
    """What says where the elements are is in no file of the source."""
    for rank in range(2):
        torch.save({"w": arange((2, 3)) + 10 * rank}, tmp_path / f"a_rank_{rank}.pt")
    ids = set()
    for order in (1, -1):
        source = open_source(tmp_path, rules=of_halves(order), axes={"ep": 2})
        import_checkpoint(source, tmp_path / f"out{order}")
        ids.add((open_source(tmp_path / f"out{order}").provenance or {})["save_id"])
    assert len(ids) == 2


def test_a_dtensor_that_does_not_fit_is_refused_by_file_and_key(tmp_path: Path) -> None:
    mesh = MeshCoordinate(("fsdp",), (2,), (1,))
    shard = RankShard(torch.ones(3, 3), mesh, (Shard(0),), torch.Size((4, 3)))
    tensors = RankTensors(existing_directory(tmp_path), [])
    tensors.add("a_rank_1.pt", {"layer.w": shard, "norm": torch.ones(2)}, None)
    with pytest.raises(PlacementError, match=r"layer\.w: .*\(3, 3\)") as caught:
        tensors.whole()
    assert "file:        a_rank_1.pt" in str(caught.value)


def test_dicts_that_are_nested_too_deeply_are_one_message(tmp_path: Path) -> None:
    pickled = b"\x80\x02" + b"}X\x01\0\0\0a" * 10_000 + b"}" + b"s" * 10_000 + b"."
    with zipfile.ZipFile(tmp_path / "model_world_size_1_rank_0.pt", "w") as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/version", "3")
    with pytest.raises(CannotLook, match="nested too deeply"):
        open_source(tmp_path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    file = tmp_path / "in" / "shard_rank_0.pt"
    os.mkfifo(file)
    with pytest.raises(CannotLook, match=r"shard_rank_0\.pt: cannot be read: it is no plain file"):
        open_source(tmp_path / "in")
    file.unlink()
    torch.save({"w": torch.ones(2)}, tmp_path / "elsewhere.pt")
    file.symlink_to(tmp_path / "elsewhere.pt")
    with pytest.raises(CannotLook, match=r"cannot be read: it leads out of the directory"):
        open_source(tmp_path / "in")


def test_two_tensors_of_one_key_are_refused(tmp_path: Path) -> None:
    state = {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}
    torch.save(state, tmp_path / "shard_rank_0.pt")
    with pytest.raises(CannotLook, match=r"several tensors have one key: a\.b"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    "value", [torch.ones(2, dtype=torch.complex64).conj(), torch.eye(2).to_sparse()]
)
def test_a_tensor_with_more_than_elements_is_refused(tmp_path: Path, value: torch.Tensor) -> None:
    torch.save({"a": {"w": value}}, tmp_path / "shard_rank_0.pt")
    found = r"a\.w: is a tensor with more than elements: torch\._utils\._rebuild"
    with pytest.raises(PlacementError, match=found):
        open_source(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int16, torch.float64, torch.complex128])
def test_copies_of_one_element_are_compared_and_written_whatever_their_stride(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    (tmp_path / "saved").mkdir()
    spread = torch.arange(12.0).view(6, 2)[:, 1]
    for rank, step in enumerate((7, 1)):
        values = (torch.arange(14) + 3).to(dtype)[::step][:1]
        more = {"v": arange((2, 3)), "s": spread if rank else spread.clone()}
        torch.save({"w": values, **more}, tmp_path / "saved" / f"a_rank_{rank}.pt")
    import_checkpoint(open_source(tmp_path / "saved"), tmp_path / "out")
    torch.save({"w": values, "v": more["v"], "s": spread + 1}, tmp_path / "saved" / "a_rank_1.pt")
    with pytest.raises(PlacementError, match="differ in 6 of 6 elements"):
        open_source(tmp_path / "saved")
    loaded = {"w": torch.zeros(1, dtype=dtype), "v": torch.zeros(2, 3)}
    dcp.load(loaded, checkpoint_id=tmp_path / "out", no_dist=True)
    assert torch.equal(loaded["w"], torch.full((1,), 3).to(dtype))


@pytest.mark.parametrize("what", ["elements", "header"])
def test_a_flipped_bit_of_a_file_is_found_by_its_checksum(tmp_path: Path, what: str) -> None:
    value = arange((3, 4))
    torch.save({"w": value}, tmp_path / "a_rank_0.pt")
    (tmp_path / "metadata.json").write_text("{}")  # another file of the run
    import_checkpoint(tmp_path, tmp_path / "sound")
    data = bytearray((tmp_path / "a_rank_0.pt").read_bytes())
    at = data.index(value.numpy().tobytes())
    if what == "header":  # the length of what pads the entry
        at = data.rindex(b"PK\x03\x04", 0, at) + 28
    data[at] ^= 4
    (tmp_path / "a_rank_0.pt").write_bytes(data)
    with pytest.raises(CannotLook, match=r"a_rank_0\.pt: (is not what was written|cannot be read)"):
        import_checkpoint(tmp_path, tmp_path / "out")
    if what == "elements":
        (fault,) = verify(tmp_path, contents=True).faults
        assert (fault.kind, fault.files) == ("checksum", ("a_rank_0.pt",))


def test_tensors_without_elements_and_ranks_without_rows_are_imported(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for rank, rows in enumerate((3, 0)):
        state = {"empty": torch.ones(0, 3), "scalar": torch.tensor(3.0), "w": torch.ones(rows, 2)}
        torch.save(state, source / f"a_rank_{rank}.pt")

    def rules(mesh: MeshCoordinate) -> Placements:
        rows = IndexShard(0, [2, 0, 1] if mesh.get_coordinate()[0] == 0 else [])
        return Placements(
            {
                "empty": CheckpointPlacement(mesh, {"ep": Shard(0)}),
                "w": CheckpointPlacement(mesh, {"ep": rows}, global_shape=(3, 2)),
            }
        )

    import_checkpoint(open_source(source, rules=rules, axes={"ep": 2}), tmp_path / "out")
    wholes = {"empty": torch.ones(0, 3), "scalar": torch.tensor(3.0), "w": torch.ones(3, 2)}
    assert_holds(tmp_path / "out", wholes)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of memory")
@pytest.mark.parametrize("command", ["export", "import", "reshard"])
def test_m151_files_larger_than_the_limit_of_memory_are_mapped(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Of any command, under the limit that holds by default: a mapping takes no memory."""
    (tmp_path / "ranks").mkdir()
    parts = [torch.arange(24 << 20, dtype=torch.int32).view(-1, 1024) + rank for rank in range(2)]
    for rank, part in enumerate(parts):
        torch.save({"w": part, "b": torch.ones(3)}, tmp_path / "ranks" / f"m_rank_{rank}.pt")
    monkeypatch.setattr("dcp_placements.cli.app.default_limit", lambda: 72 << 20)
    rules = ["--rules", f"{__name__}:by_rows", "--mesh", "rank=2"]
    more = ["--memory", "8MiB"]
    if command == "reshard":  # which has the rules of the world to come, too
        more = ["--source-rules", f"{__name__}:by_rows", "--source-mesh", "rank=2"]
    ran = run(command, tmp_path / "ranks", tmp_path / "out", *rules, *more)
    assert ran.code == 0, ran
    if command == "export":
        assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], torch.cat(parts))
        return
    target = {"w": torch.zeros(48 << 10, 1024, dtype=torch.int32)}
    dcp.load(target, checkpoint_id=tmp_path / "out", no_dist=True)
    assert torch.equal(target["w"], torch.cat(parts))


def by_rows(mesh: MeshCoordinate) -> Placements:
    return Placements({"w": CheckpointPlacement(mesh, {"rank": Shard(0)}), "b": None})


def test_m151_a_lack_of_memory_or_of_rights_is_not_called_truncated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "m_rank_0.pt")

    def fail(error: BaseException) -> Callable[..., Any]:
        def read(*_: Any) -> Any:
            raise error

        return read

    lack = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    monkeypatch.setattr("dcp_placements.offline.sources.mapped_files.SavedFile", fail(lack))
    with pytest.raises(MemoryError, match="m_rank_0"):
        open_source(tmp_path)
    mapped = "dcp_placements.offline.sources.mapped_files"
    monkeypatch.setattr(f"{mapped}.SavedFile", fail(MemoryError()))
    with pytest.raises(MemoryError):
        open_source(tmp_path)
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    monkeypatch.setattr("dcp_placements.offline.sources.mapped_files.SavedFile", fail(denied))
    with pytest.raises(CannotLook, match="Permission denied") as refused:
        open_source(tmp_path)
    assert "truncated" not in str(refused.value)
