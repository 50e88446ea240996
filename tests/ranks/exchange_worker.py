"""One of four gloo ranks: loads that read each byte once and exchange it.

    OMP_NUM_THREADS=1 python tests/ranks/forked.py 4 tests/ranks/exchange_worker.py OUT

Writes ``OUT/<rank>.json``: by scenario what differs from the whole tensors cut by plain slicing,
what was read and exchanged, and with what it was refused. ``test_exchange_ranks.py`` starts it.
With ``OUT lost HOW`` the last of four ranks is lost while the others exchange.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcp_placements import (
    CheckpointPlacement,
    IndexShard,
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
)
from dcp_placements.offline import rehearse
from tests.ranks.scenes import Facts, Scenarios, arange, heard, local, refusal, same, stock_whole

SCENARIOS = Scenarios()
scenario = SCENARIOS.add
State = dict[str, Any]


def saved(wholes: State, path: Path) -> None:
    """Save whole tensors from rank 0 alone: one file."""
    if dist.get_rank() == 0:
        with heard():
            dcp.save(wholes, checkpoint_id=path, planner=dcp.DefaultSavePlanner(), no_dist=True)
    dist.barrier()


def emptied(state: State) -> State:
    with torch.no_grad():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                local(value).fill_(77)
    return state


def load(path: Path, state: State, wanted: State, rules: Any = None, **options: Any) -> Facts:
    """Load with an exchange; return what differs from this rank's part, and what it took."""
    planner = PlacementLoadPlanner(rules, **{"exchange": True, **options})
    reader = PlacementFileSystemReader(path)
    dcp.load(emptied(state), storage_reader=reader, planner=planner)
    return facts(planner, reader, state, wanted)


def facts(planner: PlacementLoadPlanner, reader: Any, state: State, wanted: State) -> Facts:
    report = planner.report
    return {
        "differing": [
            name
            for name, part in wanted.items()
            if not (
                same(local(state[name]), part)
                if isinstance(part, torch.Tensor)
                else state[name] == part
            )
        ],
        "compared": len(wanted),
        "read": reader.bytes_read,
        "opens": reader.opens,
        "counted": [report.traffic.storage_nbytes, report.traffic.opens],
        "exchanged": report.traffic.exchanged_nbytes,
        "wanted": report.wanted_nbytes,
        "text": str(report),
        "alone": list(report.alone),
        "largest": max(
            (local(v).nbytes for v in state.values() if isinstance(v, torch.Tensor)), default=0
        ),
    }


def two_by_two(*names: str) -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


@scenario
def hsdp(path: Path) -> Facts:
    """FSDP2 over two replicas of two shards, with AdamW moments: saved by the same ranks."""
    mesh = two_by_two("replicate", "shard")
    torch.manual_seed(dist.get_rank() // 2 * 0)
    model = nn.Sequential(
        *[nn.Linear(384, 701) if i % 2 else nn.Linear(701, 384) for i in range(6)]
    )
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for number, parameter in enumerate(model.parameters()):
        grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        parameter.grad = distribute_tensor(grad, mesh, [Replicate(), Shard(0)], src_data_rank=None)
    optimizer.step()
    state = get_model_state_dict(model)
    state |= get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    dcp.save(state, checkpoint_id=path, planner=PlacementSavePlanner())
    dist.barrier()
    wholes = stock_whole(path)
    mine = mesh.get_local_rank("shard")
    wanted = {}
    for name, value in state.items():
        if isinstance(value, DTensor):
            rows = -(-value.shape[0] // 2)
            wanted[name] = wholes[name][mine * rows : (mine + 1) * rows]
        elif isinstance(value, torch.Tensor):
            wanted[name] = wholes[name].clone()
    found = load(path, state, wanted)
    stock = dcp.FileSystemReader(path)
    dcp.load(emptied(state), storage_reader=stock, planner=PlacementLoadPlanner())
    found["plainly"] = [n for n, part in wanted.items() if not same(local(state[n]), part)]
    found["unique"] = sum(whole.nbytes for whole in wholes.values())
    return found


@scenario
def experts(path: Path) -> Facts:
    """Experts over ``ep``, with replicas along ``edp``; a router that all four have."""
    mesh = two_by_two("ep", "edp")
    rules = PlacementRules({"w1": CheckpointPlacement(mesh, {"ep": Shard(0)})})
    wholes = {f"layers.{n}.w1": arange(4, 300, 401, start=n) for n in range(3)}
    wholes |= {f"layers.{n}.router": arange(300, 701, start=n) for n in range(3)}
    mine = mesh.get_local_rank("ep")
    wanted = {n: w.chunk(2)[mine].clone() if "w1" in n else w.clone() for n, w in wholes.items()}
    state = {name: part.clone() for name, part in wanted.items()}
    dcp.save(
        state,
        storage_writer=PlacementFileSystemWriter(path),
        planner=PlacementSavePlanner(rules),
    )
    found = load(path, state, wanted, rules)

    def rules_at(mesh: Any) -> PlacementRules:
        return PlacementRules({"w1": CheckpointPlacement(mesh, {"ep": Shard(0)})})

    rehearsed = rehearse(path, rules_at, {"ep": 2, "edp": 2}).ranks[dist.get_rank()]
    plainly = load(path, state, wanted, rules, exchange=False)
    found["predicted"] = [rehearsed.exchange_nbytes, rehearsed.slices_nbytes, rehearsed.files]
    found["plainly"] = [plainly["differing"], *plainly["counted"]]
    return found | {"unique": sum(whole.nbytes for whole in wholes.values())}


@scenario
def all_ranks_alike(path: Path) -> Facts:
    """Plain tensors of all kinds, scalars and objects that every rank has whole."""
    wholes: State = {f"norm.{n}": arange(64, start=n) for n in range(40)}
    wholes |= {"big": arange(1024, 701), "int": torch.arange(12345), "step": torch.tensor(3.0)}
    wholes |= {"flag": torch.tensor([True, False, True]), "half": arange(33, 5).bfloat16()}
    wholes |= {"one": arange(1, 1, 6), "complex": torch.randn(7, 3, dtype=torch.cfloat)}
    state = {name: whole.clone() for name, whole in wholes.items()}
    wholes["epoch"], state["epoch"] = 4, 0
    if dist.get_rank() == 0:
        torch.manual_seed(9)
    wholes["complex"] = torch.view_as_complex(arange(7, 3, 2))
    # A tensor that lies in memory column by column.
    state["big"] = torch.empty(701, 1024).t()
    # Columns of others, in messages of several.
    wholes |= {"column": arange(4), "narrow": arange(3, 1), "single": arange(1)}
    held = torch.empty(4, 3)
    state |= {"column": held[:, 1], "narrow": held[:3, :1], "single": held[3:, 2]}
    saved(wholes, path)
    found = load(path, state, wholes)
    return found | {"unique": sum(w.nbytes for w in wholes.values() if hasattr(w, "nbytes"))}


@scenario
def odd_parts(path: Path) -> Facts:
    """Uneven and empty shards, columns, strides, a cast, and tensors that cannot be exchanged."""
    mesh = two_by_two("replicate", "shard")
    mine = mesh.get_local_rank("shard")
    wholes = {"rows": arange(7, 5), "few": arange(1, 5), "columns": arange(6, 9)}
    wholes |= {"wide": arange(64, 20000), "listed": arange(6, 5), "cast": arange(600, 900)}
    placements = {"rows": Shard(0), "few": Shard(0), "columns": Shard(1), "wide": Shard(1)}
    state: State = {
        name: distribute_tensor(torch.zeros(wholes[name].shape), mesh, [Replicate(), placement])
        for name, placement in placements.items()
    }
    state["cast"] = distribute_tensor(
        torch.zeros(600, 900, dtype=torch.bfloat16), mesh, [Replicate(), Shard(0)]
    )
    state["listed"] = torch.zeros(3, 5)
    rows = [[0, 2, 4], [1, 3, 5]][mine]
    picks = CheckpointPlacement(mesh, [Replicate(), IndexShard(0, rows)], global_shape=(6, 5))
    wanted = {
        "rows": wholes["rows"][mine * 4 : mine * 4 + 4],
        "few": wholes["few"][mine : mine + 1],
        "columns": wholes["columns"][:, mine * 5 : mine * 5 + 5].contiguous(),
        "wide": wholes["wide"][:, mine * 10000 : mine * 10000 + 10000].contiguous(),
        "cast": wholes["cast"][mine * 300 : mine * 300 + 300].bfloat16(),
        "listed": wholes["listed"][rows],
    }
    saved(wholes, path)
    rules = PlacementRules({"listed": picks})
    return load(path, state, wanted, rules, cast="allow")


@scenario
def other_topology(path: Path) -> Facts:
    """Saved as four shards of columns, loaded as two replicas of two shards of rows."""
    four = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    mesh = two_by_two("replicate", "shard")
    wholes = {f"w{n}": arange(1024, 700, start=n) for n in range(4)}
    old: State = {
        name: distribute_tensor(whole, four, [Shard(1)], src_data_rank=None)
        for name, whole in wholes.items()
    }
    dcp.save(old, checkpoint_id=path, planner=PlacementSavePlanner())
    mine = mesh.get_local_rank("shard")
    wanted = {name: whole.chunk(2)[mine] for name, whole in wholes.items()}
    state = {
        name: distribute_tensor(torch.zeros(1024, 700), mesh, [Replicate(), Shard(0)])
        for name in wholes
    }
    found = load(path, state, wanted)
    return found | {"unique": sum(whole.nbytes for whole in wholes.values())}


@scenario
def not_alike(path: Path) -> Facts:
    """Ranks that do not want the same read for themselves; those that do exchange."""
    mesh = two_by_two("replicate", "shard")
    wholes = {"plain": arange(900, 500), "w": arange(1400, 800)}
    mine = mesh.get_local_rank("shard")
    state: State = {
        "w": distribute_tensor(torch.zeros(1400, 800), mesh, [Replicate(), Shard(0)]),
        "plain": torch.zeros(900, 500, dtype=torch.float64 if dist.get_rank() == 3 else None),
    }
    wanted = {"w": wholes["w"].chunk(2)[mine], "plain": wholes["plain"].to(state["plain"].dtype)}
    saved(wholes, path)
    found = load(path, state, wanted)
    return found | {"unique": wholes["w"].nbytes + 4 * wholes["plain"].nbytes}


@scenario
def many_small(path: Path) -> Facts:
    """Small tensors beside a large one."""
    wholes: State = {f"norm.{n}": arange(512, start=n) for n in range(100)}
    wholes |= {"big": arange(900, 1000)}
    state = {name: whole.clone() for name, whole in wholes.items()}
    dcp.save(
        state,
        storage_writer=PlacementFileSystemWriter(path),
        planner=PlacementSavePlanner(),
    )
    dist.barrier()
    found = load(path, state, wholes)
    return found | {"unique": sum(whole.nbytes for whole in wholes.values())}


@scenario
def one_rank_needs_no_tensor(path: Path) -> Facts:
    """A rank that asks for objects alone, beside others that need the same tensors."""
    wholes: State = {"w": arange(900, 700), "epoch": 4}
    saved(wholes, path)
    asked = ["epoch"] if dist.get_rank() == 2 else ["w", "epoch"]
    state = {"w": torch.zeros(900, 700), "epoch": 0}
    found = load(
        path, {name: state[name] for name in asked}, {name: wholes[name] for name in asked}
    )
    return found | {"unique": wholes["w"].nbytes}


@scenario
def tied(path: Path) -> Facts:
    """One memory under two keys, which each rank reads and compares, beside what is exchanged."""
    wholes = {"embed": arange(700, 900), "head": arange(700, 900), "w": arange(900, 700)}
    saved(wholes, path)
    weight = torch.zeros(700, 900)
    return load(path, {"embed": weight, "head": weight, "w": torch.zeros(900, 700)}, wholes)


@scenario
def untied(path: Path) -> Facts:
    """As tied, but the checkpoint has different tensors under the two keys."""
    saved({"embed": arange(700, 900), "head": -arange(700, 900), "w": arange(900, 700)}, path)
    state = {**dict.fromkeys(("embed", "head"), torch.zeros(700, 900)), "w": torch.zeros(900, 700)}
    planner, reader = PlacementLoadPlanner(exchange=True), PlacementFileSystemReader(path)
    refused = refusal(lambda: dcp.load(state, storage_reader=reader, planner=planner))
    return {"refused": refused, "late": False}


@scenario
def stock_reader(path: Path) -> Facts:
    """A reader that does not call the exchange: everything is read, with a warning."""
    wholes = {"w": arange(1024, 700)}
    saved(wholes, path)
    state = {"w": torch.zeros(1024, 700)}
    planner = PlacementLoadPlanner(exchange=True)
    dcp.load(state, checkpoint_id=path, planner=planner)
    return {"same": same(state["w"], wholes["w"]), "noted": list(planner.report.warnings)}


@scenario
def a_plain_key_per_rank(path: Path) -> Facts:
    """A replicated tensor, and one of each rank's own (the state of its random numbers)."""
    wholes = {"w": arange(1024, 700)} | {f"rng.{rank}": arange(700, 3) + rank for rank in range(4)}
    saved(wholes, path)
    own = f"rng.{dist.get_rank()}"
    state: State = {"w": torch.zeros(1024, 700), own: torch.zeros(700, 3)}
    return load(path, state, {key: wholes[key] for key in state})


@scenario
def not_all_planners(path: Path) -> Facts:
    wholes = {"w": arange(1024, 700)}
    saved(wholes, path)
    return load(path, {"w": torch.zeros(1024, 700)}, wholes, exchange=dist.get_rank() != 2)


@scenario
def part_of_the_world(path: Path) -> Facts:
    """Two loads at a time, each on a process group of its own."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[dist.get_rank() // 2]
    wholes = {"w": arange(1024, 700)}
    saved(wholes, path)
    outcome: Facts = {}
    for name, exchange in (("true", True), ("group", group)):
        state = {"w": torch.zeros(1024, 700)}
        planner = PlacementLoadPlanner(exchange=exchange)
        reader = PlacementFileSystemReader(path)
        dcp.load(state, storage_reader=reader, planner=planner, process_group=group)
        outcome[name] = facts(planner, reader, state, wholes)
    return outcome


@scenario
def one_planner_twice(path: Path) -> Facts:
    """The second load is of another state dict, and a planner in between is pickled."""
    import pickle

    planner = PlacementLoadPlanner(exchange=True)
    outcome = []
    for number in range(2):
        wholes = {f"w{number}": arange(700, 900, start=number), "s": arange(5, start=number)}
        saved(wholes, path / str(number))
        state = {name: torch.zeros_like(whole) for name, whole in wholes.items()}
        reader = PlacementFileSystemReader(path / str(number))
        dcp.load(state, storage_reader=reader, planner=planner)
        outcome.append(facts(planner, reader, state, wholes))
        planner = pickle.loads(pickle.dumps(planner))
    return {"loads": outcome}


def damaged(path: Path, damage: Callable[[Path], None], **options: Any) -> Facts:
    """Load what each rank wrote a quarter of, one file of it damaged."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    wholes = {f"w{n}": arange(1024, 900, start=n) for n in range(4)}
    old = {
        name: distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        for name, whole in wholes.items()
    }
    moments = {name: {"step": torch.ones(()), "exp_avg": torch.ones(3)} for name in ("w0", "w1")}
    groups = [{"params": ["w0", "w1"], "lr": 0.1}]
    old = {"model": old, "optim": {"state": {"w1": moments["w1"]}, "param_groups": groups}}
    dcp.save(old, checkpoint_id=path, planner=dcp.DefaultSavePlanner())
    dist.barrier()
    if dist.get_rank() == 0:
        damage(path / "__2_0.distcp")
    dist.barrier()
    model = {name: torch.full((1024, 900), 77.0) for name in wholes}
    state = {"model": model, "optim": {"state": moments, "param_groups": groups}}
    planner = PlacementLoadPlanner(exchange=True, **options)
    reader = PlacementFileSystemReader(path)
    started = time.monotonic()
    refused = refusal(lambda: dcp.load(state, storage_reader=reader, planner=planner))
    late = time.monotonic() - started > 20
    return {"refused": refused, "late": late, "reset": not moments["w0"]["exp_avg"].any().item()}


@scenario
def missing_file(path: Path) -> Facts:
    return damaged(path, Path.unlink)


@scenario
def short_file(path: Path) -> Facts:
    return damaged(path, lambda file: os.truncate(file, file.stat().st_size // 2))


@scenario
def flipped_byte(path: Path) -> Facts:
    def flip(file: Path) -> None:
        held = bytearray(file.read_bytes())
        held[len(held) // 8] ^= 1
        file.write_bytes(held)

    return damaged(path, flip)


class Losing(PlacementLoadPlanner):
    """Loses its rank before, or while, it sends what it read."""

    how = ""
    out = Path()
    sending = False

    def finish_reads(self, plan: Any, error: BaseException | None, **counts: Any) -> None:
        if self.how == "stuck":
            while not all((self.out / f"{rank}.json").exists() for rank in range(3)):
                time.sleep(0.1)
            os._exit(0)
        self.sending = True
        super().finish_reads(plan, error, **counts)

    def lookup_tensor(self, index: Any) -> torch.Tensor:
        if self.how == "killed while it sends" and self.sending:
            os._exit(0)
        return super().lookup_tensor(index)


def lost(out: Path, how: str) -> None:
    """Be one of four ranks, of which the last is lost after the reads."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    wholes = {f"w{n}": arange(1024, 900, start=n) for n in range(8)}
    saved(wholes, out / "checkpoint")
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=4))
    state = {name: torch.zeros(1024, 900) for name in wholes}
    planner = Losing(exchange=True)
    planner.how, planner.out = how if rank == 3 else "", out
    reader = PlacementFileSystemReader(out / "checkpoint")
    started = time.monotonic()
    refused = refusal(lambda: dcp.load(state, storage_reader=reader, planner=planner))
    seconds = time.monotonic() - started
    (out / f"{rank}.json").write_text(json.dumps({"refused": refused, "seconds": seconds}))
    os._exit(0)


def main() -> None:
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    if sys.argv[2:3] == ["lost"]:
        lost(out, sys.argv[3])
    dist.init_process_group("cpu:gloo", timeout=timedelta(seconds=60))
    SCENARIOS.run(sys.argv[2:], out, lambda name: out / name)


if __name__ == "__main__":
    main()
