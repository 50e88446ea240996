"""Mistakes and damage around ``Placements.resharder()``: each is refused, by name, or read right.

Ranks of a world are played one after another in this process: the engine gathers nothing but what
its ``ShardingMetadata`` say, and its files are ``torch.save``'s.
"""

from __future__ import annotations

import pickle
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    IndexShard,
    MeshCoordinate,
    PlacementError,
    PlacementFileSystemReader,
    Placements,
    Renames,
    Renumber,
    Stack,
    Unstack,
    offline,
)
from dcp_placements._torch import rehearsed
from dcp_placements.errors import CannotLook
from dcp_placements.storage.store import LocalStore

engine = pytest.importorskip("torch_checkpointing.distributed_metadata")

Declare = Callable[[int, int], Placements]


def ep(rank: int, size: int) -> MeshCoordinate:
    return MeshCoordinate(("ep",), (size,), (rank,))


def sharded(pattern: str = "w", placement: Any = None, **shapes: Any) -> Declare:
    """Return a declaration of one rule over ep."""

    def declare(rank: int, size: int) -> Placements:
        rule = CheckpointPlacement(ep(rank, size), {"ep": placement or Shard(0)}, **shapes)
        return Placements({pattern: rule})

    return declare


def undeclared(rank: int, size: int) -> Placements:
    return Placements(None)


def save(path: Path, values: Sequence[Any], declare: Declare, item: str = "model") -> None:
    """Save one item of a world, as the engine does."""
    path.mkdir(exist_ok=True)
    groups: dict[Any, list[Any]] = {}
    for rank, value in enumerate(values):
        with rehearsed(rank, len(values)):
            resharder = declare(rank, len(values)).resharder()
            found = resharder.extract_sharding_metadata(item, value)
        torch.save(value, path / f"{item}_{rank}.pt")
        for own, metadata in found.items():
            of_path = groups.setdefault(own, [])
            of_path.append(engine.GlobalObjectMetadata(metadata, (rank,)))
    layouts = dict.fromkeys(range(len(values)))
    metadata = engine.DistributedMetadata(
        {item: engine.DistributedItemMetadata(groups, layouts)}, len(values)
    )
    (path / "metadata.pkl").write_bytes(pickle.dumps(metadata.to_dict()))


def load(
    path: Path,
    value: Any,
    placements: Placements,
    *,
    rank: int = 0,
    size: int = 1,
    item: str = "model",
    **options: Any,
) -> list[Any]:
    """Fill an item on one rank, as the engine does."""
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    stored = pickle.loads((path / "metadata.pkl").read_bytes())
    source = engine.DistributedMetadata.from_dict(stored).metadata.get(item)
    storage = LocalFileSystemStorageConfig().create_storage()
    with rehearsed(rank, size):
        resharder = placements.resharder(**options)
        target = resharder.extract_sharding_metadata(item, value)
        if not resharder.should_reshard(source, target):
            return [()]
        missing: list[Any] = resharder.load(path, item, target, source, value, storage)
    return missing


WHOLE = torch.arange(24.0).reshape(4, 6)
HALVES = [{"w": WHOLE[:2].clone()}, {"w": WHOLE[2:].clone()}]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a checkpoint of two ep ranks."""
    save(tmp_path / "ckpt", HALVES, sharded())
    return tmp_path / "ckpt"


def whole(path: Path, **options: Any) -> torch.Tensor:
    """Return what one rank reads as the whole ``w``."""
    found = {"w": torch.full((4, 6), -1.0)}
    load(path, found, Placements(None), **options)
    return found["w"]


def test_two_halves_are_one_tensor(saved: Path) -> None:
    assert torch.equal(whole(saved), WHOLE)


def test_fewer_and_more_ranks_read_their_parts(saved: Path) -> None:
    for rank in range(4):
        found = {"w": torch.zeros(1, 6)}
        load(saved, found, sharded()(rank, 4), rank=rank, size=4)
        assert torch.equal(found["w"], WHOLE[rank : rank + 1])


@pytest.mark.parametrize(
    ("values", "declare"),
    [
        ([{"w": WHOLE[:, :3].contiguous()}, {"w": WHOLE[:, 3:].t().contiguous().t()}],
         sharded(placement=Shard(1))),
        ([{"w": WHOLE[:, [0, 1, 3]]}, {"w": WHOLE[:, [2, 4, 5]]}], None),
        ([{"w": WHOLE[[0, 2]]}, {"w": WHOLE[[1, 3]]}],
         sharded(placement=FusedShard(0, 2))),
    ],
)  # fmt: skip
def test_columns_transposed_and_fused_parts_are_read_in_place(
    tmp_path: Path, values: list[Any], declare: Declare | None
) -> None:
    def listed(rank: int, size: int) -> Placements:
        rows = [(0, 1, 3), (2, 4, 5)][rank]
        return sharded(placement=IndexShard(1, rows), global_shape=(4, 6))(rank, size)

    save(tmp_path / "ckpt", values, declare or listed)
    assert torch.equal(whole(tmp_path / "ckpt"), WHOLE)


def test_views_with_steps_and_repeats_are_read(tmp_path: Path) -> None:
    spaced = torch.zeros(4, 2, 18)
    spaced[::2, 1, 2::3] = WHOLE[:2]
    repeated = torch.tensor([[7.0], [8.0]]).expand(2, 6)
    save(tmp_path / "ckpt", [{"w": spaced[::2, 1, 2::3]}, {"w": repeated}], sharded())
    assert torch.equal(whole(tmp_path / "ckpt"), torch.cat([WHOLE[:2], repeated]))
    part = {"w": torch.zeros(4, 3)}
    columns = sharded(placement=Shard(1))(1, 2)
    load(tmp_path / "ckpt", part, columns, rank=1, size=2, waive={"w": "cut otherwise"})
    assert torch.equal(part["w"], torch.cat([WHOLE[:2], repeated])[:, 3:])


def test_views_of_one_storage_that_lie_otherwise_are_not_read_alike(tmp_path: Path) -> None:
    flat = torch.arange(18.0)
    values = {
        "a": flat[:6].view(2, 3),
        "b": flat[6:12].view(3, 2).t(),
        "c": flat[12:18].view(2, 3),
    }

    save(tmp_path / "ckpt", [values], undeclared)
    into = {key: torch.zeros_like(value) for key, value in values.items()}
    load(tmp_path / "ckpt", into, undeclared(0, 1))
    assert all(torch.equal(into[key], value) for key, value in values.items())


def test_experts_by_their_own_numbers_are_loaded_as_one_stack_and_back(tmp_path: Path) -> None:
    def numbered(rank: int, size: int) -> Placements:
        rows = range(rank * 4 // size, (rank + 1) * 4 // size)
        return Placements(None, rename=Renumber("experts.{}", rows, total=4))

    def stacked(rank: int, size: int) -> Placements:
        rows = range(rank * 4 // size, (rank + 1) * 4 // size)
        names = Renumber("experts.{}", rows, total=4)
        return Placements(None, rename=Renames(names, Stack("experts.{}", 4)))

    values = [
        {"experts": {str(at): {"w": WHOLE[2 * rank + at].clone()} for at in range(2)}}
        for rank in range(2)
    ]
    save(tmp_path / "one", values, numbered)
    found = {"experts": {"0": {"w": torch.zeros(6)}}}
    load(tmp_path / "one", found, numbered(3, 4), rank=3, size=4)
    assert torch.equal(found["experts"]["0"]["w"], WHOLE[3])
    save(tmp_path / "two", values, stacked)
    held = {"experts": {"w": torch.zeros(4, 6)}}
    load(tmp_path / "two", held, Placements(None))
    assert torch.equal(held["experts"]["w"], WHOLE)
    unstacked = {"experts": {"w": torch.zeros(4, 6)}}
    load(tmp_path / "one", unstacked, Placements(None, rename=Unstack("experts.{}")))
    assert torch.equal(unstacked["experts"]["w"], WHOLE)


def test_nested_values_of_all_kinds_are_restored_in_place(tmp_path: Path) -> None:
    def value(factor: float) -> dict[str, Any]:
        return {
            "state": {0: {"step": torch.tensor(3.0 * factor), "m": torch.ones(2) * factor}},
            "list": [torch.full((2,), 5.0 * factor), 7 * factor],
            "pair": (torch.full((2,), 9.0 * factor), "a"),
            "text": "b" * int(factor),
            "empty": torch.zeros(0, 3),
        }

    save(tmp_path / "ckpt", [value(1)], undeclared)
    found = value(2)
    tensor = found["state"][0]["m"]
    assert load(tmp_path / "ckpt", found, Placements(None)) == []
    assert found["state"][0]["m"] is tensor
    assert tensor.tolist() == [1.0, 1.0]
    assert found["state"][0]["step"] == 3.0
    assert found["list"][0].tolist() == [5.0, 5.0]
    assert found["list"][1] == 7
    assert found["pair"][0].tolist() == [9.0, 9.0]
    assert found["text"] == "b"


def test_an_item_that_is_a_tensor_is_read(tmp_path: Path) -> None:
    save(tmp_path / "ckpt", [WHOLE[:2].clone(), WHOLE[2:].clone()], sharded("model"))
    found = torch.zeros(4, 6)
    load(tmp_path / "ckpt", found, Placements(None))
    assert torch.equal(found, WHOLE)


def test_a_wider_dtype_is_warned_of_or_refused(saved: Path) -> None:
    found = {"w": torch.zeros(4, 6, dtype=torch.bfloat16)}
    with pytest.warns(UserWarning, match="loaded with less precision than stored"):
        load(saved, found, Placements(None))
    assert torch.equal(found["w"], WHOLE.bfloat16())
    with pytest.raises(PlacementError, match=r"model\.w"):
        load(saved, found, Placements(None), cast="error")


def test_a_missing_key_is_refused_or_told_to_the_engine(saved: Path) -> None:
    found = {"w": torch.zeros(4, 6), "new": torch.ones(2)}
    with pytest.raises(PlacementError, match=r"model\.new: the checkpoint lacks this key"):
        load(saved, found, Placements(None))
    with pytest.raises(PlacementError, match="nothing_such"):
        load(saved, found, Placements({"nothing_such": None}))
    with pytest.warns(UserWarning, match=r"model\.new: not in the checkpoint: left as it was"):
        assert load(saved, found, Placements(None), optional=["new"]) == [("new",)]
    assert found["new"].tolist() == [1.0, 1.0]


def test_a_flipped_byte_is_found(saved: Path) -> None:
    file = saved / "model_1.pt"
    data = bytearray(file.read_bytes())
    data[data.index(WHOLE[2:].numpy().tobytes()) + 5] ^= 1
    file.write_bytes(data)
    with pytest.raises(PlacementError, match=r"model_1.pt are not what was written: their CRC-32"):
        whole(saved)
    assert not torch.equal(whole(saved, check_crc=False), WHOLE)
    assert not offline.verify(saved, contents=True).sound

    def rows(mesh: MeshCoordinate) -> Placements:
        return Placements({"w": CheckpointPlacement(mesh, {"ep": Shard(0)})})

    for ranks in (2, 4):  # whole records, and halves of them
        with pytest.raises(PlacementError, match=r"model_1.pt: is not what was written"):
            offline.reshard(saved, saved.parent / "out", rows, {"ep": ranks})


@pytest.mark.parametrize("damage", ["missing", "short", "head", "text"])
def test_a_damaged_file_is_refused_by_its_name(saved: Path, damage: str) -> None:
    file = saved / "model_1.pt"
    data = file.read_bytes()
    file.unlink()
    if damage != "missing":
        cut = {"short": data[: len(data) // 2], "head": b"PK" + data[5:], "text": b"no"}[damage]
        file.write_bytes(cut)
    with pytest.raises(PlacementError, match=r"model_1\.pt"):
        whole(saved)


def test_a_file_of_another_model_is_refused(saved: Path) -> None:
    torch.save({"w": torch.zeros(3, 6)}, saved / "model_1.pt")
    with pytest.raises(PlacementError, match=r"model_1.pt has \(3, 6\) torch.float32 at 'w'"):
        whole(saved)
    torch.save({"v": torch.zeros(3, 6)}, saved / "model_1.pt")
    with pytest.raises(PlacementError, match=r"model\.v: is in model_1\.pt, and not in metadata"):
        whole(saved)
    torch.save({"w": "text"}, saved / "model_1.pt")
    with pytest.raises(PlacementError, match=r"model_1\.pt has no plain tensor at 'w'"):
        whole(saved)


def test_tensors_that_the_metadata_of_a_manager_do_not_name_are_not_lost(saved: Path) -> None:
    for rank, half in enumerate(HALVES):
        torch.save({**half, "late": torch.ones(3)}, saved / f"model_{rank}.pt")
    for look in (whole, offline.verify, offline.inspect):
        with pytest.raises(PlacementError, match=r"model\.late: is in model_0\.pt, and not in"):
            look(saved)


def test_tools_compare_copies_by_what_is_in_the_files(tmp_path: Path) -> None:
    save(tmp_path / "ckpt", [{"w": WHOLE.clone(), "b": WHOLE[0]}] * 2, undeclared)
    assert offline.verify(tmp_path / "ckpt").sound
    torch.save({"w": WHOLE + 1, "b": WHOLE[0]}, tmp_path / "ckpt" / "model_1.pt")
    with pytest.raises(PlacementError, match=r"model\.w: 2 different contents on 2 ranks"):
        offline.verify(tmp_path / "ckpt")


@pytest.mark.parametrize(
    ("start", "steps"),
    [(0, (5, 1)), (0, (1, 6)), (0, (0, 0)), (0, (6,)), (1, (6, 1)), (999, (6, 1)), (0, (6, 6))],
)
def test_chunks_that_do_not_lie_in_their_tensor_are_refused(
    saved: Path, start: int, steps: tuple[int, ...]
) -> None:
    stored = pickle.loads((saved / "metadata.pkl").read_bytes())
    for groups in stored["metadata"]["model"]["nested_path_to_metadata"].values():
        for group in groups:
            (part,) = group["sharding_metadata"]["data"]["parts"]
            part["chunks"] = tuple((*chunk[:2], start, steps) for chunk in part["chunks"])
    (saved / "metadata.pkl").write_bytes(pickle.dumps(stored))
    with pytest.raises(PlacementError, match=r"metadata\.pkl: its metadata are broken"):
        whole(saved)


def test_metadata_of_a_newer_version_are_refused(saved: Path) -> None:
    stored = pickle.loads((saved / "metadata.pkl").read_bytes())
    for groups in stored["metadata"]["model"]["nested_path_to_metadata"].values():
        for group in groups:
            group["sharding_metadata"]["data"] = {"version": 9, "what": "ever"}
    (saved / "metadata.pkl").write_bytes(pickle.dumps(stored))
    with pytest.raises(PlacementError, match="of version 9, and this release reads 1"):
        whole(saved)


@pytest.mark.parametrize("way", ["absolute", "upwards", "link"])
def test_files_outside_of_the_directory_need_trust(tmp_path: Path, saved: Path, way: str) -> None:
    """The offline tools refuse them always."""
    outside = tmp_path / "outside.pt"
    (saved / "model_1.pt").rename(outside)
    name = {"absolute": str(outside), "upwards": "../outside.pt", "link": "model_1.pt"}[way]
    if way == "link":
        (saved / name).symlink_to(outside)
    stored = pickle.loads((saved / "metadata.pkl").read_bytes())
    kind = {"type": "TorchSerialization", "data": {}}
    stored["metadata"]["model"]["rank_to_layout_info"] = {
        0: {"file_path": "model_0.pt", "serialization_format": kind},
        1: {"file_path": name, "serialization_format": kind},
    }
    (saved / "metadata.pkl").write_bytes(pickle.dumps(stored))
    assert whole(saved).equal(WHOLE)
    with pytest.raises(PlacementError, match=r"not opened with restricted=True: .*out of the dir"):
        whole(saved, restricted=True)
    with pytest.raises(PlacementError, match="out of the directory"):
        offline.verify(saved)


def test_broken_metadata_are_refused(saved: Path) -> None:
    stored = pickle.loads((saved / "metadata.pkl").read_bytes())
    for groups in stored["metadata"]["model"]["nested_path_to_metadata"].values():
        for group in groups:
            group["sharding_metadata"]["data"]["parts"] = [{"fqn": 7}]
    (saved / "metadata.pkl").write_bytes(pickle.dumps(stored))
    with pytest.raises(PlacementError, match="its metadata are broken"):
        whole(saved)


def test_any_flipped_byte_of_a_file_is_refused_or_does_no_harm(saved: Path) -> None:
    for file in (saved / "model_0.pt", saved / "metadata.pkl"):
        data = file.read_bytes()
        for at in range(0, len(data), 3):
            file.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
            try:
                if file.suffix == ".pt":
                    assert torch.equal(whole(saved), WHOLE), at
                else:
                    offline.verify(saved)
            except PlacementError:
                pass
        file.write_bytes(data)


def test_little_more_than_what_is_needed_is_read(tmp_path: Path) -> None:
    def read_nbytes() -> int:
        return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])

    large = torch.arange(float(1 << 20)).reshape(128, 8192)
    halves = [{key: half.clone() for key in ("w", "v")} for half in large.chunk(2)]
    save(tmp_path / "ckpt", halves, sharded("*"))
    for declare, part in (
        (sharded("*"), large[32:64]),
        (sharded("*", placement=Shard(1)), large[:, 2048:4096]),
    ):
        found = {key: torch.zeros_like(part).contiguous() for key in ("w", "v")}
        before = read_nbytes()
        waive = dict.fromkeys(("w", "v"), "cut along another dim")
        load(tmp_path / "ckpt", found, declare(1, 4), rank=1, size=4, waive=waive)
        needed = 2 * part.nbytes
        assert needed < read_nbytes() - before < 1.1 * needed + (32 << 10)
        assert torch.equal(found["w"], part)
        assert torch.equal(found["v"], part)


def test_an_item_without_metadata_is_refused(saved: Path) -> None:
    with pytest.raises(PlacementError, match=r"metadata\.pkl has nothing of other\.w"):
        load(saved, {"w": torch.zeros(4, 6)}, Placements(None), item="other")


def test_a_hole_is_refused(tmp_path: Path) -> None:
    def declare(rank: int, size: int) -> Placements:
        return sharded(placement=IndexShard(0, [(0, 1), (3,)][rank]), global_shape=(4, 6))(
            rank, size
        )

    save(tmp_path / "ckpt", [{"w": WHOLE[:2].clone()}, {"w": WHOLE[3:].clone()}], declare)
    with pytest.raises(PlacementError, match=r"model.w: .*\n.*missing: +\[2:3, :\] of \(4, 6\)"):
        whole(tmp_path / "ckpt")


def test_copies_that_differ_are_refused_or_one_is_read(tmp_path: Path) -> None:
    save(tmp_path / "ckpt", HALVES, undeclared)
    found = {"w": torch.zeros(2, 6)}
    with pytest.raises(PlacementError, match="2 different contents on 2 ranks"):
        load(tmp_path / "ckpt", found, Placements(None))
    with pytest.warns(UserWarning, match="2 different contents on 2 ranks"):
        load(tmp_path / "ckpt", found, Placements(None), rank=1, size=2, on_conflict="warn")
    assert torch.equal(found["w"], WHOLE[2:])
    with pytest.raises(PlacementError, match="2 different contents on 2 ranks"):
        offline.verify(tmp_path / "ckpt")


def test_objects_that_name_more_than_plain_values_need_trust(tmp_path: Path) -> None:
    value = {"w": WHOLE.clone(), "where": Path("a")}
    save(tmp_path / "ckpt", [value], undeclared)
    found = {"w": torch.zeros(4, 6), "where": Path("b")}
    with pytest.raises(PlacementError, match=r"model\.where: this object of model_0\.pt cannot be"):
        load(tmp_path / "ckpt", found, Placements(None), restricted=True)
    load(tmp_path / "ckpt", found, Placements(None))
    assert found["where"] == Path("a")
    with pytest.raises(PlacementError, match=r"model\.where: this object of model_0\.pt cannot be"):
        load(tmp_path / "ckpt", {"where": Path("b")}, Placements(None), size=2, restricted=True)
    with pytest.raises(PlacementError, match="no load of it can be proved"):
        load(tmp_path / "ckpt", {"a": 1}, Placements(None), item="other", restricted=True)


class Counted:
    """Has a tensor that is asked for when the object is made, and refers to itself."""

    def __init__(self) -> None:
        self.me, self.counts, self.storage = self, torch.ones(3), torch.ones(2).untyped_storage()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.total = float(state["counts"].sum())


class Listed(list[Any]):
    """A list of a class of its own."""


@pytest.mark.parametrize("engines", [False, True])
def test_objects_of_all_kinds_are_restored(tmp_path: Path, engines: bool) -> None:
    value = {
        "w": WHOLE.clone(),
        "counted": Counted(),
        "last": deque([1, (2, deque([3]))], maxlen=7),
        "plain": Listed([5, 6]),
        "listed": Listed([WHOLE * 2]),
    }
    (save_theirs if engines else partial(save, declare=undeclared))(tmp_path / "ckpt", [value])
    found = {**dict.fromkeys(value), "w": torch.zeros(4, 6), "listed": Listed([torch.zeros(4, 6)])}
    load(tmp_path / "ckpt", found, Placements(None))
    assert torch.equal(found["w"], WHOLE)
    assert torch.equal(found["listed"][0], WHOLE * 2)
    assert (found["last"], found["last"].maxlen, found["plain"]) == (value["last"], 7, [5, 6])
    assert (found["counted"].total, found["counted"].storage.tolist()[:4]) == (3.0, [0, 0, 128, 63])


def test_the_whole_model_is_compared_with_weights_and_not_with_an_optimizer(saved: Path) -> None:
    load(saved, {"w": torch.zeros(4, 6)}, Placements(None, whole={"w": (4, 6)}))
    with pytest.raises(PlacementError, match=r"where the whole model has \(8, 6\)"):
        load(saved, {"w": torch.zeros(4, 6)}, Placements(None, whole={"w": (8, 6)}))
    declared = Placements(None, whole={"w": (4, 6)})
    state = {"state": {"w": {"exp_avg": torch.ones(4, 6)}}}
    save(saved, [state], lambda rank, size: declared, item="optimizer")
    found = {"state": {"w": {"exp_avg": torch.zeros(4, 6)}}}
    load(saved, found, declared, item="optimizer")
    assert found["state"]["w"]["exp_avg"].all()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "duplicated flatten key model.a.b"),
        ({"w": torch.ones(2, 2).to_sparse()}, "cannot be read from a file in place"),
        ({"w": torch.ones(2, dtype=torch.complex64).conj()}, "be read from a file in place"),
        ({"w": torch.ones(2, device="meta")}, "is a meta tensor"),
    ],
)
def test_what_cannot_be_read_again_is_refused_at_the_save(
    tmp_path: Path, value: Any, text: str
) -> None:
    with pytest.raises(PlacementError, match=text):
        save(tmp_path / "ckpt", [value], undeclared)


def test_ranks_with_other_keys_and_objects_of_their_own(tmp_path: Path) -> None:
    values = [{f"layers.{rank}": torch.full((2,), float(rank)), "rng": [rank]} for rank in (0, 1)]
    save(tmp_path / "ckpt", values, undeclared)
    for rank, size, own in ((1, 2, 1), (2, 3, 0)):
        found = {"layers.0": torch.ones(2), "layers.1": torch.zeros(2), "rng": [9]}
        load(tmp_path / "ckpt", found, Placements(None), rank=rank, size=size)
        assert found["rng"] == [own]
        assert found["layers.0"].tolist() == [0.0, 0.0]
        assert found["layers.1"].tolist() == [1.0, 1.0]


def test_options_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(PlacementError, match="given together"):
        Placements(None).resharder(axes={"ep": 2})
    with pytest.raises(PlacementError, match="given together"):
        Placements(None).resharder(source=lambda mesh: {})
    with pytest.raises(PlacementError, match="on_conflict"):
        Placements(None).resharder(on_conflict="ignore")
    with pytest.raises(PlacementError, match="cast"):
        Placements(None).resharder(cast="sometimes")
    with pytest.raises(PlacementError, match="exchange=: not here"):
        Placements(None).resharder(exchange=True)
    assert Placements(None).resharder(source=lambda mesh: {}, axes={"ep": 2})


def save_theirs(path: Path, values: Sequence[Any], item: str = "model") -> dict[str, Any]:
    """Save an item of a world without this package; return the options that declare it."""
    path.mkdir(exist_ok=True)
    for rank, value in enumerate(values):
        torch.save(value, path / f"{item}_{rank}.pt")
    layouts = dict.fromkeys(range(len(values)))
    metadata = engine.DistributedMetadata(
        {item: engine.DistributedItemMetadata({}, layouts)}, len(values)
    )
    (path / "metadata.pkl").write_bytes(pickle.dumps(metadata.to_dict()))
    return {"source": lambda mesh: Placements(None), "axes": {"dp": len(values)}}


def _parts_of_larger(at: int, step: int = 1) -> list[Any]:
    return [{"w": (torch.arange(64.0) + rank)[at : at + 24 * step : step]} for rank in range(2)]


@pytest.mark.parametrize(
    "copies",
    [
        _parts_of_larger(0),
        _parts_of_larger(40),
        _parts_of_larger(1, 2),
        [{"w": WHOLE[:, :4]}, {"w": WHOLE[:, :4].t().contiguous().view(4, 4)}],
        [{"w": WHOLE[:2]}, {"w": WHOLE[2:].clone()}],
        [{"w": WHOLE[:, :4].clone()}, {"w": WHOLE[:, :4].clone().t()}],
        [{"w": torch.arange(1e4)}, {"w": torch.arange(2e4)[10000:]}],
    ],
)
@pytest.mark.parametrize("checksums", [True, False])
def test_other_copies_in_files_of_the_engine_are_refused(
    tmp_path: Path, copies: list[Any], checksums: bool
) -> None:
    torch.serialization.set_crc32_options(checksums)
    try:
        world = save_theirs(tmp_path / "ckpt", copies)
    finally:
        torch.serialization.set_crc32_options(True)
    for options in ({}, world):
        with pytest.raises(PlacementError, match=r"model\.w: 2 different contents on 2 ranks"):
            load(tmp_path / "ckpt", copies[0], Placements(None), **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex128])
def test_copies_in_another_order_of_dims_are_compared(tmp_path: Path, dtype: torch.dtype) -> None:
    value = WHOLE.to(dtype)
    copies = [{"w": value.t().contiguous().t()}, {"w": value.clone()}]
    save_theirs(tmp_path / "ckpt", copies)
    found = {"w": torch.zeros(4, 6, dtype=dtype)}
    load(tmp_path / "ckpt", found, Placements(None))
    assert torch.equal(found["w"], value)
    copies[0]["w"][3, 5] = 99
    save_theirs(tmp_path / "ckpt", copies)
    with pytest.raises(PlacementError, match=r"model\.w: 2 different contents on 2 ranks"):
        load(tmp_path / "ckpt", found, Placements(None))


def test_equal_copies_that_lie_otherwise_in_files_are_equal(tmp_path: Path) -> None:
    copies = [
        {"w": WHOLE.clone()},
        {"w": WHOLE.t().contiguous().t()},
        {"w": torch.stack([WHOLE, -WHOLE], -1)[..., 0]},
        {"w": torch.cat([-WHOLE, WHOLE])[4:]},
    ]
    world = save_theirs(tmp_path / "ckpt", copies)
    found = {"w": torch.zeros(4, 6)}
    load(tmp_path / "ckpt", found, Placements(None), **world)
    assert torch.equal(found["w"], WHOLE)


@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize("factor", [1, 2])
def test_rows_that_several_ranks_hold_or_one_holds_twice_are_compared(
    tmp_path: Path, is_ours: bool, factor: int
) -> None:
    rows = [(0, 2, 0), (0, 1), (0, 3)]
    values = [{"w": WHOLE[list(held)]} for held in rows]
    values[0]["w"][2] *= factor

    def declare(rank: int, size: int) -> Placements:
        return sharded(placement=IndexShard(0, rows[rank]), global_shape=(4, 6))(rank, size)

    options = {}
    if is_ours:
        save(tmp_path / "ckpt", values, declare)
    else:
        save_theirs(tmp_path / "ckpt", values)
        declared = lambda mesh: declare(mesh.get_coordinate()[0], 3)  # noqa: E731
        options = {"source": declared, "axes": {"ep": 3}}
    if factor == 1:
        assert torch.equal(whole(tmp_path / "ckpt", **options), WHOLE)
        return
    with pytest.raises(PlacementError, match=r"2 copies of \[0:1, :\] of \(4, 6\) on one rank"):
        whole(tmp_path / "ckpt", **options)


def test_padding_that_differs_is_no_conflict(tmp_path: Path) -> None:
    halves = [WHOLE[:2], torch.cat([WHOLE[2:3], torch.zeros(1, 6)])]
    copies = [{"w": halves[0]}, {"w": halves[1]}, {"w": halves[0]}, {"w": halves[1].clone()}]
    copies[3]["w"][1] = 5.0
    save_theirs(tmp_path / "ckpt", [{"w": one["w"].clone()} for one in copies])

    def declare(mesh: Any) -> Placements:
        shapes = {"global_shape": (3, 6), "padded_shape": (4, 6)}
        return Placements({"w": CheckpointPlacement(mesh, {"tp": Shard(0)}, **shapes)})

    found = {"w": torch.zeros(3, 6)}
    world = {"source": declare, "axes": {"dp": 2, "tp": 2}}
    load(tmp_path / "ckpt", found, Placements(None), **world)
    assert torch.equal(found["w"], WHOLE[:3])


def test_items_with_one_key_are_told_apart(tmp_path: Path) -> None:
    save(tmp_path / "ckpt", [{"ema.w": WHOLE}], undeclared)
    first = pickle.loads((tmp_path / "ckpt" / "metadata.pkl").read_bytes())
    save(tmp_path / "ckpt", [{"w": -WHOLE}], undeclared, item="model.ema")
    both = pickle.loads((tmp_path / "ckpt" / "metadata.pkl").read_bytes())
    both["metadata"] |= first["metadata"]
    (tmp_path / "ckpt" / "metadata.pkl").write_bytes(pickle.dumps(both))
    with pytest.raises(PlacementError, match=r"model\.ema\.w: two items have this key"):
        offline.inspect(tmp_path / "ckpt")
    found = {"w": torch.zeros(4, 6)}
    load(tmp_path / "ckpt", found, Placements(None), item="model.ema")
    assert torch.equal(found["w"], -WHOLE)


def test_a_rank_without_tensors_has_objects_of_its_own(tmp_path: Path) -> None:
    save(tmp_path / "ckpt", [{"w": WHOLE, "epoch": 1}, {"epoch": 2}], undeclared)
    found = {"w": torch.zeros(4, 6), "epoch": 0}
    load(tmp_path / "ckpt", found, Placements(None), rank=1, size=2)
    assert found["epoch"] == 2
    assert torch.equal(found["w"], WHOLE)
    for rank, epoch in enumerate((1, 2, 1)):  # a new rank's are those of the lowest
        lone = {"epoch": 0}
        load(tmp_path / "ckpt", lone, Placements(None), rank=rank, size=3)
        assert lone["epoch"] == epoch
    assert "objects stay in the files of ranks: model.epoch" in str(
        offline.inspect(tmp_path / "ckpt")
    )


class Named(dict[str, Any]):
    """A dict of a class of its own."""


def test_parameters_with_attributes_and_dicts_of_other_classes_are_read(tmp_path: Path) -> None:
    def value(factor: float) -> dict[str, Any]:
        weight = torch.nn.Parameter(WHOLE * factor)
        weight.is_expert = True  # type: ignore[attr-defined]
        inner: Any = defaultdict(dict)
        inner["w"] = WHOLE[0] * factor
        return {"p": weight, "d": inner, "n": Named(w=WHOLE[1] * factor)}

    save(tmp_path / "ckpt", [value(1)], undeclared)
    found = value(0)
    load(tmp_path / "ckpt", found, Placements(None))
    assert torch.equal(found["p"], WHOLE)
    assert torch.equal(found["d"]["w"], WHOLE[0])
    assert torch.equal(found["n"]["w"], WHOLE[1])


def test_two_chunks_that_begin_at_one_byte_are_told_apart(tmp_path: Path) -> None:
    def declare(rank: int, size: int) -> Placements:
        rows = [(0, 1, 3), (2,)][rank]
        return sharded(placement=IndexShard(0, rows), global_shape=(4, 6))(rank, size)

    repeated = WHOLE[:1].expand(3, 6)
    save(tmp_path / "ckpt", [{"w": repeated}, {"w": WHOLE[2:3].clone()}], declare)
    assert torch.equal(whole(tmp_path / "ckpt"), WHOLE[[0, 0, 2, 0]])


def test_a_save_compares_its_own_shapes_with_the_whole_model(tmp_path: Path) -> None:
    def declare(rank: int, size: int) -> Placements:
        rules = {"w": CheckpointPlacement(ep(rank, size), {"ep": Shard(1)})}
        return Placements(rules, whole={"w": (4, 6)})

    with pytest.raises(PlacementError, match=r"model\.w: .*\(2, 12\).* \(4, 6\)"):
        save(tmp_path / "ckpt", HALVES, declare)


def test_a_conflict_names_the_rule_of_the_save(tmp_path: Path) -> None:
    def declare(rank: int, size: int) -> Placements:
        return Placements({"w": CheckpointPlacement(ep(rank, size), {})})

    save(tmp_path / "ckpt", HALVES, declare)
    with pytest.raises(PlacementError, match=r"by rule: +'w'"):
        load(tmp_path / "ckpt", {"w": torch.zeros(2, 6)}, Placements(None))


def test_a_rename_with_a_typo_at_a_load_is_refused_as_none_is(tmp_path: Path) -> None:
    def declare(rank: int, size: int, pattern: str = "experts.{}") -> Placements:
        numbers = range(rank * 4 // size, (rank + 1) * 4 // size)
        return Placements(None, rename=Renumber(pattern, numbers, total=4))

    values = [{f"experts.{at}": WHOLE[2 * rank + at].clone() for at in (0, 1)} for rank in (0, 1)]
    save(tmp_path / "ckpt", values, declare)
    found = {"experts.0": torch.zeros(6)}
    load(tmp_path / "ckpt", found, declare(3, 4), rank=3, size=4)
    assert torch.equal(found["experts.0"], WHOLE[3])
    for placements in (declare(3, 4, "expert.{}"), Placements(None)):
        with pytest.raises(PlacementError, match="rename= was forgotten in this load"):
            load(tmp_path / "ckpt", found, placements, rank=3, size=4)


def test_rows_that_a_load_stacks_by_local_numbers_are_refused(tmp_path: Path) -> None:
    def declare(rank: int, size: int, numbered: bool = True) -> Placements:
        numbers = range(rank * 4 // size, (rank + 1) * 4 // size)
        steps = [Renumber("experts.{}", numbers, total=4)] if numbered else []
        return Placements(None, rename=Renames(*steps, Stack("experts.{}", total=4)))

    values = [{f"experts.{at}": WHOLE[2 * rank + at].clone() for at in (0, 1)} for rank in (0, 1)]
    save(tmp_path / "ckpt", values, declare)
    found = {f"experts.{at}": torch.zeros(6) for at in (0, 1)}
    load(tmp_path / "ckpt", found, declare(1, 2), rank=1, size=2)
    assert torch.equal(torch.stack([*found.values()]), WHOLE[2:])
    with pytest.raises(PlacementError, match=r"asks for rows 0-1 of it, by its local numbers"):
        load(tmp_path / "ckpt", found, declare(1, 2, numbered=False), rank=1, size=2)
    whole = {f"experts.{at}": torch.zeros(6) for at in range(4)}
    load(tmp_path / "ckpt", whole, declare(0, 1, numbered=False), size=2)
    assert torch.equal(torch.stack([*whole.values()]), WHOLE)


def test_a_save_warns_of_what_is_likely_declared_wrongly(tmp_path: Path) -> None:
    def declare(rank: int, size: int) -> Placements:
        ep_of_rank = ep(rank, size)
        rows = CheckpointPlacement(
            ep_of_rank, {"ep": Shard(0)}, global_shape=(3, 6), padded_shape=(4, 6)
        )
        return Placements({"w": rows})

    with pytest.warns(UserWarning, match=r"look at this save \(1 note\)\n.*\n?.*is padding by the"):
        save(tmp_path / "ckpt", HALVES, declare)


def test_state_of_experts_that_were_never_stepped_is_waived_at_the_load(tmp_path: Path) -> None:
    def declare(rank: int, size: int) -> Placements:
        return Placements(None, rename=Renumber("experts.{}", [2 * rank, 2 * rank + 1], total=4))

    def optimizer(rank: int, count: int = 2) -> dict[str, Any]:
        rows = {f"state.experts.{at}.exp_avg": WHOLE[2 * rank + at].clone() for at in range(count)}
        return rows

    save(tmp_path / "ckpt", [optimizer(0), optimizer(1, 1)], declare, item="optim")
    target, reason = optimizer(0), {"optim.state.experts": "one of them is unrouted"}
    for state in target.values():
        state.zero_()
    at: dict[str, Any] = {"rank": 0, "size": 2, "item": "optim"}
    with pytest.raises(PlacementError, match="no rank holds 3 of 0-3"):
        load(tmp_path / "ckpt", target, declare(0, 2), **at)
    load(tmp_path / "ckpt", target, declare(0, 2), waive=reason, **at)
    assert torch.equal(target["state.experts.1.exp_avg"], WHOLE[1])


def test_dcp_says_of_such_a_directory_what_reads_it(saved: Path) -> None:
    with pytest.raises(PlacementError, match=r"Placements\.resharder\(\) loads it"):
        PlacementFileSystemReader(saved).read_metadata()


def test_metadata_that_unfold_to_far_more_than_their_file_are_refused(saved: Path) -> None:
    stored = pickle.loads((saved / "metadata.pkl").read_bytes())
    (groups,) = stored["metadata"]["model"]["nested_path_to_metadata"].values()
    groups[0]["ranks"] = tuple(range(3000))
    many = {f'["{at}"]': groups for at in range(1000)}
    stored["metadata"]["model"]["nested_path_to_metadata"] = many
    (saved / "metadata.pkl").write_bytes(pickle.dumps(stored))
    with pytest.raises((PlacementError, CannotLook), match="far more of itself than its size"):
        offline.inspect(saved)


def test_an_import_by_other_placements_of_the_engines_files_is_another_output(
    tmp_path: Path,
) -> None:
    save_theirs(tmp_path / "ckpt", HALVES)
    ids = set()
    for order in (1, -1):

        def rules(mesh: MeshCoordinate, order: int = order) -> Placements:
            at = mesh.get_coordinate()[0]
            by_ep = CheckpointPlacement(ep(at if order > 0 else 1 - at, 2), {"ep": Shard(0)})
            return Placements({"w": by_ep})

        source = offline.open_source(tmp_path / "ckpt", rules=rules, axes={"ep": 2})
        offline.import_checkpoint(source, tmp_path / f"out{order}")
        ids.add((offline.open_source(tmp_path / f"out{order}").provenance or {})["save_id"])
    assert len(ids) == 2


@pytest.mark.parametrize("ours", [True, False])
def test_tools_open_each_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    values = [{"w": half["w"], "norm": torch.ones(3)} for half in HALVES]
    rules = sharded()
    if ours:
        save(tmp_path, values, rules)
    else:
        save_theirs(tmp_path, values)
    names: list[str] = []
    opens = LocalStore.open
    monkeypatch.setattr(
        LocalStore, "open", lambda self, name: names.append(name) or opens(self, name)
    )
    declared = {"rules": lambda mesh: rules(mesh.get_coordinate()[0], 2), "axes": {"ep": 2}}
    held = offline.open_source(tmp_path, **({} if ours else declared))
    assert held.tensors["model.w"].shape == (4, 6)
    assert names == ["metadata.pkl", "model_0.pt", "model_1.pt"]
