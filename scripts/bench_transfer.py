"""scripts/bench transfer: how long a plan between two worlds takes, and how much memory.

The 3,075 tensors of ``w1`` (DeepSeek-V3 with AdamW moments): FSDP over all ranks for the dense
part, EP 64 and FSDP for the stacks of experts. ``same`` has them cut alike for fewer ranks;
``engine`` is the model alone, one tensor per expert, TP 8 and EP over all ranks. Each case runs in
a process of its own. Seconds are CPU time of one thread, medians of the rounds.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from bench_common import PeakMemory, in_child, show, three, write_measured
from bench_workloads import WORKLOADS
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    MeshCoordinate,
    PlacementRules,
    Placements,
    Renames,
    Renumber,
    TransferWorld,
    Unstack,
    transfer_plan,
)

EXPERTS = 256
EP = 64


def whole_tensors(*, moments: bool, part: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of ``w1`` without data, under the keys of a checkpoint."""
    workload = WORKLOADS["w1"](EP, part)
    shapes = {parameter.fqn: parameter.lay.shape for parameter in workload.parameters}
    found = {f"model.{fqn}": shape for fqn, shape in shapes.items()}
    if moments:
        for fqn, shape in shapes.items():
            for name in ("exp_avg", "exp_avg_sq"):
                found[f"optim.state.{fqn}.{name}"] = shape
    return {
        key: torch.empty(shape, dtype=torch.bfloat16, device="meta") for key, shape in found.items()
    }


def trainer(ranks: int, tensors: dict[str, torch.Tensor], first: int = 0) -> TransferWorld:
    """Return a world of EP 64 and FSDP, on dim 1 of the experts, eight ranks per host."""
    ep = min(EP, ranks)

    def rules(mesh: MeshCoordinate) -> dict[str, CheckpointPlacement]:
        experts = CheckpointPlacement(mesh, {"ep": Shard(0), "edp": Shard(1)})
        return {"mlp.experts.w*": experts}

    axes = {"edp": ranks // ep, "ep": ep}
    numbers = range(first, first + ranks)
    return TransferWorld(axes, rules, tensors, fsdp=("edp", "ep"), ranks=numbers, hosts=8)


def engine(ranks: int, first: int) -> TransferWorld:
    """Return a world of TP 8 for the dense part and whole experts, EP over all ranks."""
    tp = min(8, ranks)
    held = min(ranks, EXPERTS)

    def rules(mesh: MeshCoordinate) -> Placements:
        _, rank = mesh.get_coordinate()
        dense = MeshCoordinate(("dp", "tp"), (held // tp, tp), divmod(rank, tp))
        each = EXPERTS // held
        ids = range(rank * each, (rank + 1) * each)
        return Placements(
            PlacementRules(
                {
                    "q_b_proj": CheckpointPlacement(dense, {"tp": Shard(0)}),
                    "kv_b_proj": CheckpointPlacement(dense, {"tp": Shard(0)}),
                    "o_proj": CheckpointPlacement(dense, {"tp": Shard(1)}),
                    "embed_tokens": CheckpointPlacement(dense, {"tp": Shard(0)}),
                    "lm_head": CheckpointPlacement(dense, {"tp": Shard(0)}),
                }
            ),
            rename=Renumber("experts.{}", ids, total=EXPERTS),
        )

    axes = {"replica": ranks // held, "rank": held}
    numbers = range(first, first + ranks)
    return TransferWorld(axes, rules, ranks=numbers, hosts=8)


def measure(case: str, source: int, target: int, rounds: int, part: bool) -> dict[str, Any]:
    """Return the seconds and bytes of one case."""
    tensors = whole_tensors(moments=case == "same", part=part)
    names = Renames(Unstack("experts.{}.w*")) if case == "engine" else None

    def plan() -> Any:
        sender = trainer(source, tensors)
        if case == "engine":
            return transfer_plan(sender, engine(target, source), rename=names)
        return transfer_plan(sender, trainer(target, tensors, source))

    memory = PeakMemory()
    made = plan()
    plan_s = [timed(plan) for _ in range(rounds)]
    ranks = [0, source // 2, source - 1, source, source + target // 2, source + target - 1]
    made.part(0)
    part_s = [timed(lambda rank=rank: list_columns(made.part(rank))) for rank in ranks * rounds]
    everything_s = timed(made.pairs)
    pairs = made.pairs()
    return {
        "tensors": len(tensors),
        "plan_s": statistics.median(plan_s),
        "part_s": statistics.median(part_s),
        "longest_part_s": max(part_s),
        "pairs_s": everything_s,
        "pairs": len(pairs.nbytes),
        "messages": int(pairs.messages.sum()),
        "nbytes": int(pairs.nbytes.sum()),
        "rss_bytes": memory.growth_bytes(),
    }


def list_columns(part: Any) -> int:
    """Compute all columns of a rank's part; return how many rows they have."""
    lists = part.sends, part.receives, part.copies
    return sum(len(block.first) for found in lists for block in found.arrays())


def timed(work: Callable[[], Any]) -> float:
    """Return the CPU seconds that a call takes."""
    gc.collect()
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", nargs=2, type=int, default=[2048, 512], metavar="N")
    parser.add_argument("--cases", nargs="+", default=["same", "engine"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a few layers, 16 -> 8 ranks")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    source, target = (16, 8) if args.tiny else args.ranks
    start = time.perf_counter()
    cases = {
        case: in_child(measure, case, source, target, 1 if args.tiny else args.rounds, args.tiny)
        for case in args.cases
    }
    show(
        f"transfer_plan, {source:,} -> {target:,} ranks",
        (
            "case",
            "tensors",
            "plan s",
            "a rank's part ms",
            "longest ms",
            "all pairs s",
            "pairs",
            "messages",
            "GB moved",
            "memory MB",
        ),
        [
            (
                case,
                f"{one['tensors']:,}",
                three(one["plan_s"]),
                three(one["part_s"] * 1e3),
                three(one["longest_part_s"] * 1e3),
                three(one["pairs_s"]),
                f"{one['pairs']:,}",
                f"{one['messages']:,}",
                three(one["nbytes"] / 1e9),
                three(one["rss_bytes"] / 1e6),
            )
            for case, one in cases.items()
        ],
    )
    write_measured(args, start, cases=cases)


if __name__ == "__main__":
    main()
