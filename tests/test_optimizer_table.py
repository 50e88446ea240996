"""The table of optimizers: each row is what the optimizer keeps, and where the planners put it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import arange, assert_same, blank, without_warning
from safetensors.torch import load_file
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementFileSystemReader,
    PlacementRules,
    Placements,
)
from dcp_placements.offline import export_safetensors, verify
from dcp_placements.testing import World
from tests.test_readme import PACKAGE, read_table

PAGE = PACKAGE / "guides" / "optimizers.md"
TABLE = read_table("Supported optimizers", PAGE)
OF_SHARDS = read_table("Optimizers whose state is the rank's own", PAGE)
OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}}
SIZES = {"M": 8, "N": 12, "R": 4, "1": 1}


def states_in(row: list[str], sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the whole shape of each state that a row names."""
    named = re.findall(r"`([\w.]+) \(([^)]*)\)`", row[1])
    return {name: tuple(sizes[size.strip()] for size in shape.split(",")) for name, shape in named}


@pytest.mark.parametrize(
    "row", [row for row in TABLE if "torch.optim" in row[0]], ids=lambda r: r[0]
)
def test_the_optimizers_of_torch_keep_what_the_table_says(row: list[str]) -> None:
    name = row[0].split("`")[1].rpartition(".")[2]
    kind = getattr(torch.optim, name)
    weight = torch.nn.Parameter(torch.randn(SIZES["M"], SIZES["N"]))
    optimizer = kind([weight], lr=0.1, **OPTIONS.get(name, {}))
    grad = torch.ones_like(weight)
    weight.grad = grad.to_sparse() if name == "SparseAdam" else grad
    optimizer.step()
    held = optimizer.state[weight]
    tensors = {
        name: tuple(value.shape) for name, value in held.items() if getattr(value, "ndim", 0)
    }
    assert tensors == states_in(row, SIZES)


def placements(rank: int, size: int, row: list[str]) -> Placements:
    mesh = World(size).mesh(rank, ep=size)
    rules: dict[str, Any] = dict.fromkeys(re.findall(r'"(\w+)": None', row[2]))
    rules["w"] = CheckpointPlacement(mesh, {"ep": Shard(0)})
    return Placements(PlacementRules(rules, optional=True))


# The other world of sizes has shards (4, 4), as ``Q (N, R)`` is whole.
@pytest.mark.parametrize("sizes", [SIZES, {"M": 8, "N": 4, "R": 4, "1": 1}], ids=["", "by chance"])
@pytest.mark.parametrize("row", TABLE, ids=lambda row: re.sub(r"\W+", " ", row[0]))
def test_each_state_is_stored_whole_and_loaded_elsewhere(
    tmp_path: Path, row: list[str], sizes: dict[str, int]
) -> None:
    shapes = states_in(row, sizes)
    if sizes is not SIZES and "refused" in row[2]:
        pytest.skip("its dims are one another's, which is refused")
    wholes = {
        name: arange(*shape, start=1000 * n) for n, (name, shape) in enumerate(shapes.items())
    }

    def part(name: str, rank: int, size: int) -> torch.Tensor:
        """Return the rows of the parameter that a state has; all of one that has none."""
        first = row[1].partition(f"`{name} (")[2][0]
        is_ruled = name.partition(".")[0] in re.findall(r'"(\w+)": None', row[2])
        follows = first == "M" and not is_ruled
        return wholes[name].chunk(size)[rank].clone() if follows else wholes[name].clone()

    def state(rank: int, size: int) -> dict[str, Any]:
        held: dict[str, Any] = {"step": torch.tensor(3.0)}
        for name in wholes:
            head, _, rest = name.partition(".")
            value = part(name, rank, size)
            if rest:
                held.setdefault(head, {})[rest] = value
            else:
                held[name] = value
        weight = arange(sizes["M"], sizes["N"], start=9000).chunk(size)[rank].clone()
        groups = [{"lr": 0.1, "params": ["w"]}]
        return {"model": {"w": weight}, "optim": {"state": {"w": held}, "param_groups": groups}}

    with without_warning():
        World(2).save(
            tmp_path,
            lambda rank: state(rank, 2),
            lambda rank: placements(rank, 2, row).save_planner(),
        )
        read = {f"optim.state.w.{name}": torch.zeros_like(value) for name, value in wholes.items()}
        dcp.load(read, checkpoint_id=tmp_path, no_dist=True)
        loaded = [blank(state(rank, 4)) for rank in range(4)]
        for rank, held in enumerate(loaded):
            held["optim"]["param_groups"] = state(rank, 4)["optim"]["param_groups"]
        World(4).load(
            tmp_path, loaded.__getitem__, lambda rank: placements(rank, 4, row).load_planner()
        )
    for name, value in wholes.items():
        assert torch.equal(read[f"optim.state.w.{name}"], value), name
    for rank in range(4):
        assert_same(loaded[rank], state(rank, 4))


@pytest.mark.filterwarnings("ignore:look at this load")
@pytest.mark.parametrize("row", TABLE, ids=lambda row: re.sub(r"\W+", " ", row[0]))
def test_state_that_a_checkpoint_lacks_is_what_the_table_says(
    tmp_path: Path, row: list[str]
) -> None:
    """The template has other values, as of a dummy step."""
    weight, lr, initial = arange(SIZES["M"], SIZES["N"], start=7), 0.25, 0.125
    held: dict[str, Any] = {"step": torch.tensor(1.0)}
    if ".SGD`" in row[0] or "Schedule" in row[0]:
        del held["step"]
    births = dict(re.findall(r"`(\w+)` (`\w+`|[\w ]+)", row[3]))
    for name in births:
        held.setdefault(name, torch.tensor(-1.0))
    for name, shape in states_in(row, SIZES).items():
        head, _, rest = name.partition(".")
        value = torch.full(shape, -1.0)
        held |= {head: held.get(head, {}) | {rest: value}} if rest else {head: value}

    def state(weight: torch.Tensor, held: dict[str, Any]) -> dict[str, Any]:
        group = {"lr": lr, "initial_accumulator_value": initial, "dampening": 0, "params": ["w"]}
        optim = {"state": {"w": held} if held else {}, "param_groups": [group]}
        return {"model": {"w": weight}, "optim": optim}

    dcp.save(state(weight, {}), checkpoint_id=tmp_path, no_dist=True)
    loaded, planner = state(torch.zeros_like(weight), held), Placements(None).load_planner()
    if row[3] == "refused":
        with pytest.raises(dcp.CheckpointException, match=r"optim\.state\.w"):
            dcp.load(loaded, checkpoint_id=tmp_path, planner=planner, no_dist=True)
        return
    dcp.load(loaded, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    known = {"`lr`": lr, "`initial_accumulator_value`": initial, "the weight": weight}
    for name, value in held.items():
        born = births.get(name, "0")
        expected = known[born] if born in known else float(born)
        assert torch.equal(value, torch.as_tensor(expected).expand(value.shape)), name


# ------------------------------------------------- state of the shard, not a shard of the state


def of_shards(held: Any, size: int, whole: torch.Tensor) -> Any:
    """Return a function that gives a rank its shard of a weight, and its state of that."""

    def state(rank: int) -> dict[str, Any]:
        weight = whole.chunk(size)[rank].clone()
        groups = [{"lr": 0.1, "params": ["w"]}]
        optim = {"state": {"w": held(weight, rank)}, "param_groups": groups}
        return {"model": {"w": weight}, "optim": optim}

    return state


def saver(rank: int, size: int = 2, above: Any = None) -> Any:
    placement = CheckpointPlacement(World(size).mesh(rank, ep=size), {"ep": Shard(0)})
    rules = {**({} if above is None else above(placement)), "w": placement}
    return Placements(PlacementRules(rules, optional=True))


def of_lbfgs(weight: torch.Tensor, rank: int) -> dict[str, Any]:
    parameter = torch.nn.Parameter(weight)
    optimizer = torch.optim.LBFGS([parameter], lr=0.1)
    parameter.grad = weight + 1 + rank
    optimizer.step(lambda: torch.tensor(1.0))
    return dict(optimizer.state[parameter])


def of_galore(weight: torch.Tensor, rank: int) -> dict[str, Any]:
    """Return the moments of a gradient in the basis of its largest right singular vectors."""
    grad = weight + (rank + 1) * torch.eye(*weight.shape)
    basis = torch.linalg.svd(grad, full_matrices=False).Vh[:2]
    low_rank = grad @ basis.T
    return {"exp_avg": 0.1 * low_rank, "exp_avg_sq": low_rank**2, "projector": {"basis": basis}}


def of_shampoo(weight: torch.Tensor, name: str = "block_0") -> dict[str, Any]:
    """Return the sums of G G' and G' G of a gradient, and the gradient, averaged."""
    factors = {"factor_matrices": {"0": weight @ weight.T, "1": weight.T @ weight}}
    return {name: {"filtered_grad": 0.1 * weight, "shampoo": factors}}


REFUSED = {
    "torch.optim.LBFGS": (of_lbfgs, "d"),
    "GaLore": (of_galore, "exp_avg"),
    "Distributed Shampoo": (lambda w, rank: of_shampoo(w), "block_0.shampoo.factor_matrices.0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_state_that_each_rank_has_of_its_shard_is_refused(tmp_path: Path, name: str) -> None:
    (row,) = [row for row in OF_SHARDS if name in row[0] and "FSDP" not in row[0]]
    assert row[2].startswith("refused")
    held, key = REFUSED[name]
    with pytest.raises(dcp.CheckpointException) as caught:
        World(2).save(tmp_path, of_shards(held, 2, arange(8, 6)), lambda r: saver(r).save_planner())
    assert re.search(rf"optim\.state\.w\.{re.escape(key)}[:,-]", str(caught.value))
    assert "2 different contents on 2 ranks" in str(caught.value)


def test_blocks_of_shampoo_with_the_name_of_a_rank_are_saved_by_that_rank(tmp_path: Path) -> None:
    (row,) = [row for row in OF_SHARDS if "FSDP" in row[0]]
    (line,) = re.findall(r'"(rank_\*)": None', row[2])

    def held(weight: torch.Tensor, rank: int) -> dict[str, Any]:
        return of_shampoo(weight, f"rank_{rank}-block_0")

    state = of_shards(held, 2, arange(8, 6))
    with pytest.raises(dcp.CheckpointException, match=r"rank_0-block_0\.filtered_grad"):
        World(2).save(tmp_path / "0", state, lambda rank: saver(rank).save_planner())
    above = lambda placement: {line: None}  # noqa: E731
    with without_warning():
        World(2).save(tmp_path / "1", state, lambda r: saver(r, above=above).save_planner())
        loaded = [blank(state(rank)) for rank in range(2)]
        for rank, own in enumerate(loaded):
            own["optim"]["param_groups"] = state(rank)["optim"]["param_groups"]
        World(2).load(
            tmp_path / "1", loaded.__getitem__, lambda r: saver(r, above=above).load_planner()
        )
    for rank in range(2):
        assert_same(loaded[rank], state(rank))


def of_8_bits(weight: torch.Tensor, rank: int) -> dict[str, Any]:
    """Return codes of each element, and the largest of each block of 256 in C order."""
    blocks = weight.reshape(-1, 256)
    largest = blocks.abs().amax(1)
    codes = (blocks / largest[:, None] * 127 + 128).to(torch.uint8).reshape(weight.shape)
    return {"state1": codes, "qmap1": torch.linspace(-1, 1, 256), "absmax1": largest}


class Blockwise(torch.Tensor):
    """Codes of 8 bits, and the largest element of each block, as torchao's ``OptimState8bit``.

    The rule is that of https://arxiv.org/abs/2110.02861, section 2.1, with equally spaced codes;
    what it implements is what torchao does for checkpoints.
    """

    BLOCK = 16

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Blockwise:
        make: Any = torch.Tensor._make_wrapper_subclass
        return make(cls, codes.shape, dtype=torch.float32)  # type: ignore[no-any-return]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, values: torch.Tensor) -> Blockwise:
        blocks = values.reshape(-1, cls.BLOCK)
        scale = blocks.abs().amax(1).clip(1e-12)
        codes = (blocks / scale[:, None] * 127).round() + 128
        return cls(codes.reshape(values.shape).to(torch.uint8), scale)

    def values(self) -> torch.Tensor:
        blocks = (self.codes.float() - 128).reshape(-1, self.BLOCK) / 127
        return (blocks * self.scale[:, None]).reshape(self.shape)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *rest: Any) -> Blockwise:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self, *rest = args
        match func.name(), *rest:
            case "aten::detach", *_:
                return cls(self.codes, self.scale)
            case "aten::is_pinned", *_:
                return False
            case "aten::slice.Tensor", dim, start, end, *_:
                step = self.shape[1:].numel()
                if dim or start * step % cls.BLOCK or end * step % cls.BLOCK:
                    raise ValueError("slices along the first dim, of whole blocks")
                blocks = slice(start * step // cls.BLOCK, end * step // cls.BLOCK)
                return cls(self.codes[start:end], self.scale[blocks])
            case "aten::copy_", other, *_:
                if not isinstance(self, cls):
                    return self.copy_(other.values())
                other = other if isinstance(other, cls) else cls.of(other)
                self.codes.copy_(other.codes)
                self.scale.copy_(other.scale)
                return self
        raise NotImplementedError(func.name())


def of_codes(values: torch.Tensor, size: int, dim: int = 0) -> Any:
    """Return a function that gives a rank its shard of a weight, and codes of a moment."""

    def state(rank: int) -> dict[str, Any]:
        shard = values.chunk(size, dim)[rank].clone()
        held = {"exp_avg": Blockwise.of(shard), "step": torch.tensor(1.0)}
        groups = [{"lr": 0.1, "params": ["w"]}]
        return {"model": {"w": shard}, "optim": {"state": {"w": held}, "param_groups": groups}}

    return state


@pytest.fixture
def allowed() -> Iterator[None]:
    with torch.serialization.safe_globals([Blockwise]):
        yield


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_tensors_of_codes_are_stored_as_each_rank_has_them(tmp_path: Path, size: int) -> None:
    (row,) = [row for row in OF_SHARDS if "torchao" in row[0]]
    assert "follows" in row[2]
    values = arange(16, 12, start=-90)
    with without_warning():
        World(2).save(tmp_path, of_codes(values, 2), lambda rank: saver(rank).save_planner())
        for reader in (None, lambda rank: PlacementFileSystemReader(tmp_path)):
            loaded = [of_codes(torch.zeros(16, 12), size)(rank) for rank in range(size)]
            World(size).load(
                tmp_path,
                loaded.__getitem__,
                lambda rank: saver(rank, size).load_planner(),
                *([] if reader is None else [reader]),
            )
            for rank, own in enumerate(loaded):
                shard = values.chunk(size)[rank]
                assert torch.equal(own["model"]["w"], shard)
                moment = own["optim"]["state"]["w"]["exp_avg"]
                assert torch.equal(moment.values(), Blockwise.of(shard).values())
        # As a tensor of the dtype that the metadata have: what the codes stand for.
        assert verify(tmp_path, contents=True).sound
        plain = {"optim.state.w.exp_avg": torch.zeros(16, 12)}
        dcp.load(plain, checkpoint_id=tmp_path, no_dist=True)
        assert torch.equal(plain["optim.state.w.exp_avg"], Blockwise.of(values).values())
        export_safetensors(tmp_path, tmp_path / "hf", prefix="", optimizer=True)
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(exported["optim.state.w.exp_avg"], Blockwise.of(values).values())


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(("dim", "size"), [(1, 2), (0, 16)], ids=["another dim", "half a block"])
def test_a_part_of_a_block_is_refused(tmp_path: Path, dim: int, size: int) -> None:
    values = arange(16, 24)
    World(2).save(tmp_path, of_codes(values, 2), lambda rank: saver(rank).save_planner())
    cut = CheckpointPlacement
    loaded = []
    for rank in range(size):
        loaded.append(of_codes(torch.zeros(16, 32), size, dim)(rank))
        shard = values.chunk(size, dim)[rank].clone()
        loaded[rank]["model"]["w"] = torch.zeros_like(shard)
        # torchao keeps a shard that is no whole number of blocks as it is.
        loaded[rank]["optim"]["state"]["w"]["exp_avg"] = torch.zeros_like(shard)
    with pytest.raises(dcp.CheckpointException) as refused:
        World(size).load(
            tmp_path,
            loaded.__getitem__,
            lambda rank: Placements(
                {"w": cut(World(size).mesh(rank, ep=size), {"ep": Shard(dim)})},
                waive={"w": "as it is cut here"},
            ).load_planner(),
            lambda rank: PlacementFileSystemReader(tmp_path),
        )
    text = str(refused.value)
    assert "optim.state.w.exp_avg: it is stored as Blockwise, of which this part" in text
    assert "whole blocks" in text


@pytest.mark.usefixtures("allowed")
def test_codes_that_a_checkpoint_lacks_are_those_of_zeros(tmp_path: Path) -> None:
    state = of_codes(arange(16, 12, start=5), 1)
    stored = state(0)
    stored["optim"]["state"] = {}
    World(1).save(tmp_path, lambda rank: stored, lambda rank: saver(rank, 1).save_planner())
    loaded = state(0)
    World(1).load(tmp_path, lambda rank: loaded, lambda rank: saver(rank, 1).load_planner())
    assert not loaded["optim"]["state"]["w"]["exp_avg"].values().any()


@pytest.mark.usefixtures("allowed")
def test_replicas_are_compared_by_their_codes(tmp_path: Path) -> None:
    """Of a parameter that no rule cuts."""

    def state(rank: int) -> dict[str, Any]:
        held = of_codes(arange(16, 12), 1)(0)
        held["optim"]["state"]["w"]["exp_avg"].codes[3, 4] += rank
        return held

    with pytest.raises(dcp.CheckpointException, match=r"w\.exp_avg: 2 different contents"):
        World(2).save(tmp_path, state, lambda rank: Placements(None).save_planner(digests="full"))


def test_8_bit_blocks_are_stored_whole_by_the_line_of_the_table(tmp_path: Path) -> None:
    (row,) = [row for row in OF_SHARDS if "bitsandbytes" in row[0]]
    assert '"absmax*": CheckpointPlacement(mesh, {"ep": Shard(0)})' in row[2]
    weight = arange(16, 64, start=1)
    whole = of_8_bits(weight, 0)
    with pytest.raises(dcp.CheckpointException, match="absmax1"):
        World(2).save(
            tmp_path / "0", of_shards(of_8_bits, 2, weight), lambda r: saver(r).save_planner()
        )
    above = lambda placement: {"absmax*": placement}  # noqa: E731
    with without_warning():
        World(2).save(
            tmp_path / "1",
            of_shards(of_8_bits, 2, weight),
            lambda rank: saver(rank, above=above).save_planner(),
        )
        read = {f"optim.state.w.{name}": torch.zeros_like(value) for name, value in whole.items()}
        dcp.load(read, checkpoint_id=tmp_path / "1", no_dist=True)
    for name, value in whole.items():
        assert torch.equal(read[f"optim.state.w.{name}"], value), name
