"""torchrun --nproc-per-node 4 scripts/examples/live_transfer.py

A live state dict goes from one mesh to another of the same job, by the plan that each rank computes
for itself: from FSDP 2 x TP 2 with gate over up in one tensor, to TP 4 with two tensors.
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from dcp_placements import CheckpointPlacement, FusedShard, Split, TransferWorld, transfer_plan
from dcp_placements.testing import cut

WHOLE = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
SPLIT = Split("gate_up", ("gate", "up"))


def trainer_rules(mesh) -> dict:
    return {"mlp.gate_up": CheckpointPlacement(mesh, {"tp": FusedShard(0, 2)})}


def engine_rules(mesh) -> dict:
    return {"mlp.*": CheckpointPlacement(mesh, {"tp": Shard(0)})}


def move(part, source: dict, target: dict) -> None:
    """Send and receive the messages of one rank."""
    for one in part.copies:
        into = target[one.target_fqn][one.target_slices]
        into.copy_(source[one.source_fqn][one.source_slices].reshape(into.shape))
    sends = [(source[m.source_fqn][m.source_slices].contiguous(), m) for m in part.sends]
    receives = [(target[m.target_fqn][m.target_slices], m) for m in part.receives]
    buffers = [torch.empty(into.shape, dtype=m.dtype) for into, m in receives]
    ops = [dist.P2POp(dist.isend, tensor, m.target_rank) for tensor, m in sends]
    pairs = zip(buffers, receives, strict=True)
    ops += [dist.P2POp(dist.irecv, buffer, m.source_rank) for buffer, (_, m) in pairs]
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()
    for buffer, (into, _) in zip(buffers, receives, strict=True):
        into.copy_(buffer)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tensors = {"mlp.gate_up": WHOLE.to("meta")}
    trainer = TransferWorld({"fsdp": 2, "tp": 2}, trainer_rules, tensors, fsdp=["fsdp"])
    engine = TransferWorld({"tp": 4}, engine_rules)
    fsdp, tp = divmod(rank, 2)
    source = {"mlp.gate_up": cut(WHOLE, [FusedShard(0, 2), Shard(0)], (2, 2), (tp, fsdp))}
    target = {key: torch.zeros(3, 6) for key in ("mlp.gate", "mlp.up")}
    move(transfer_plan(trainer, engine, rename=SPLIT).part(rank), source, target)
    gate, up = WHOLE.chunk(2)
    expected = {"mlp.gate": gate.chunk(4)[rank], "mlp.up": up.chunk(4)[rank]}
    equal = torch.tensor(int(all(torch.equal(target[key], expected[key]) for key in expected)))
    dist.all_reduce(equal, dist.ReduceOp.MIN)
    if rank == 0:
        print("equal bit for bit:", bool(equal), flush=True)
    dist.destroy_process_group()
