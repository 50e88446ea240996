"""The trainer of the smoke: a small MoE transformer, its parallelism, and its training step.

Everything in here is what a user has before they meet ``dcp_placements``: plain torch, FSDP2 over
the mesh axis ``edp`` and replicas of that over ``hsdp``, expert and vocabulary parallelism by hand
over ``ep``, tensor parallelism by hand over ``tp``, pipeline stages over ``pp``. Nothing imports
the package, so what this module says about where a tensor belongs (:func:`ep_cut`, :func:`tp_cut`,
:func:`global_key`, :func:`whole_tensors`) is an independent oracle for it.

The ranks of one ``ep`` or ``tp`` group see the same tokens. Each computes its own experts on all of
them and an all-reduce adds the parts up; likewise the vocabulary, the attention heads and the width
of the shared expert. Sums run in a fixed order, so that training twice from one state gives the
same bits.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

LAYERS, EXPERTS, TOP_K = 4, 12, 3
# tp cuts the width of the shared expert unevenly over two ranks, and FSDP that of all experts; ep4
# leaves 3 experts.
HIDDEN, HEADS, WIDTH, VOCAB = 36, 4, 21, 132
BATCH, LENGTH = 4, 16


# Communication that autograd sees, as in tensor-parallel trainers


class _Spread(torch.autograd.Function):
    """Identity forward; sums the gradients of the group backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    """Sums over the group forward; identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Join(torch.autograd.Function):
    """Joins the group's last dims forward; gives each rank its own piece of the gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.width = group, x.shape[-1]
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.narrow(-1, ctx.group.rank() * ctx.width, ctx.width), None


# The model. Parameters are made empty, and filled by `fill` from whole tensors.


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))


class Linear(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.weight = _empty(outer, inner)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = _empty(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (HIDDEN,), self.weight)


class Attention(nn.Module):
    """This rank's heads: its rows of Q, then its rows of K, then its rows of V."""

    def __init__(self, tp: dist.ProcessGroup) -> None:
        super().__init__()
        self.tp, self.heads = tp, HEADS // tp.size()
        self.qkv = Linear(HIDDEN, 3 * HIDDEN // tp.size())
        self.out = Linear(HIDDEN // tp.size(), HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(_Spread.apply(x, self.tp)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        return _Sum.apply(self.out(mixed.transpose(1, 2).flatten(2)), self.tp)


class MLP(nn.Module):
    """A dense gated MLP: the shared expert, and one routed expert where each is its own module."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (
            Linear(HIDDEN, width),
            Linear(width, HIDDEN),
            Linear(HIDDEN, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class StackedExperts(nn.Module):
    """The rank's own experts in one tensor per matrix, as for a grouped matmul."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.w1 = _empty(count, HIDDEN, WIDTH)
        self.w2 = _empty(count, WIDTH, HIDDEN)
        self.w3 = _empty(count, HIDDEN, WIDTH)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        inner = F.silu(torch.einsum("th,ehf->etf", x, self.w1))
        inner = inner * torch.einsum("th,ehf->etf", x, self.w3)
        return torch.einsum("te,eth->th", weights, torch.bmm(inner, self.w2))


class ExpertList(nn.ModuleList):
    """The rank's own experts, one module each, numbered locally: 0 is another one on each rank."""

    def __init__(self, count: int) -> None:
        super().__init__(MLP() for _ in range(count))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for index, expert in enumerate(self):
            y = y + weights[:, index, None] * expert(x)
        return y


class MoE(nn.Module):
    def __init__(self, ep: dist.ProcessGroup, tp: dist.ProcessGroup, *, stacked: bool) -> None:
        super().__init__()
        self.ep, self.tp, self.count = ep, tp, EXPERTS // ep.size()
        self.router = Linear(HIDDEN, EXPERTS)
        self.shared_expert = MLP(len(torch.arange(WIDTH).chunk(tp.size())[tp.rank()]))
        if stacked:
            self.experts: nn.Module = StackedExperts(self.count)
        else:
            self.experts_list: nn.Module = ExpertList(self.count)
        self.stacked = stacked

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, HIDDEN)
        scores = self.router(tokens).softmax(-1)
        chosen = scores >= scores.topk(TOP_K).values[:, -1:]
        weights = _Spread.apply(scores * chosen, self.ep)
        own = weights[:, self.ep.rank() * self.count :][:, : self.count]
        experts = self.experts if self.stacked else self.experts_list
        routed = _Sum.apply(experts(_Spread.apply(tokens, self.ep), own), self.ep)
        shared = _Sum.apply(self.shared_expert(_Spread.apply(tokens, self.tp)), self.tp)
        return (routed + shared).view_as(x)


class Block(nn.Module):
    def __init__(self, ep: dist.ProcessGroup, tp: dist.ProcessGroup, *, stacked: bool) -> None:
        super().__init__()
        self.attention_norm, self.moe_norm = Norm(), Norm()
        self.attention = Attention(tp)
        self.moe = MoE(ep, tp, stacked=stacked)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.moe(self.moe_norm(x))


class Embedding(nn.Module):
    """This rank's rows of the vocabulary."""

    def __init__(self, ep: dist.ProcessGroup) -> None:
        super().__init__()
        self.ep, self.rows = ep, VOCAB // ep.size()
        self.weight = _empty(self.rows, HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.ep.rank() * self.rows
        mine = (local >= 0) & (local < self.rows)
        return _Sum.apply(self.weight[local.where(mine, 0)] * mine[..., None], self.ep)


class Head(nn.Module):
    """The rows of the vocabulary again: logits of all of it, from each rank's share."""

    def __init__(self, ep: dist.ProcessGroup) -> None:
        super().__init__()
        self.ep = ep
        self.weight = _empty(VOCAB // ep.size(), HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return _Join.apply(F.linear(_Spread.apply(x, self.ep), self.weight), self.ep)


class HyperHead(nn.Module):
    """``hc_head``: small parameters that every rank keeps whole, outside of FSDP."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.base = _empty(HIDDEN), _empty(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.scale) + self.base


class Stage(nn.Module):
    """One pipeline stage: its own layers under their global numbers, embedding first, head last."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        ep, tp, pp = (mesh.get_group(axis) for axis in ("ep", "tp", "pp"))
        self.is_first, self.is_last = pp.rank() == 0, pp.rank() == pp.size() - 1
        per_stage = LAYERS // pp.size()
        if self.is_first:
            self.embed = Embedding(ep)
        self.layers = nn.ModuleDict(
            {
                str(number): Block(ep, tp, stacked=number % 2 == 0)
                for number in range(pp.rank() * per_stage, (pp.rank() + 1) * per_stage)
            }
        )
        if self.is_last:
            self.norm, self.hc_head, self.head = Norm(), HyperHead(), Head(ep)
        if self.is_first and self.is_last:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.is_first else x
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.hc_head(self.norm(x))) if self.is_last else x


# Where tensors belong: the trainer's own knowledge


def ep_cut(key: str) -> bool:
    """Whether the ranks of an ``ep`` group hold consecutive rows of this parameter or moment."""
    if key.endswith(".step"):
        return False
    return re.search(r"\.experts\.w\d|(^|\.)(embed|head)\.weight", key) is not None


def tp_cut(key: str) -> tuple[int, int] | None:
    """Which dim the ranks of a ``tp`` group share, and how many tensors are joined along it."""
    for name, cut in (
        (r"attention\.qkv", (0, 3)),
        (r"attention\.out", (1, 1)),
        (r"shared_expert\.w[13]", (0, 1)),
        (r"shared_expert\.w2", (1, 1)),
    ):
        if re.search(rf"\.{name}\.weight", key) and not key.endswith(".step"):
            return cut
    return None


def global_key(key: str, ep_rank: int, ep_size: int) -> str:
    """The key with the number of a per-expert module counted over all ranks."""
    first = ep_rank * (EXPERTS // ep_size)
    return re.sub(
        r"\.experts_list\.(\d+)\.", lambda m: f".experts_list.{first + int(m[1])}.", key, count=1
    )


def whole_tensors(held: list[tuple[dict[str, int], Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """Put the whole tensors together from every rank's ``(coordinate, state)``, by torch.cat.

    ``state`` is a flat state dict of CPU tensors whose DTensors were replaced by their local
    tensors. Raises AssertionError where ranks that ought to hold the same bytes do not.
    """
    ep_size = 1 + max(coordinate["ep"] for coordinate, _ in held)
    shards: dict[str, dict[tuple[int, ...], Tensor]] = {}
    for coordinate, state in held:
        at = tuple(coordinate[axis] for axis in JOINED)
        for key, tensor in state.items():
            shards.setdefault(global_key(key, coordinate["ep"], ep_size), {})[at] = tensor
    return {key: _whole(key, parts) for key, parts in shards.items()}


JOINED = ("ep", "tp", "hsdp", "edp")
"""Axes whose ranks have parts or replicas of what a stage holds; FSDP cuts last, over ``edp``."""


def _whole(key: str, parts: dict[tuple[int, ...], Tensor]) -> Tensor:
    for axis in reversed(JOINED):
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        for at in sorted(parts):
            groups.setdefault(at[:-1], []).append(parts[at])
        parts = {at: _joined(axis, group, key) for at, group in groups.items()}
    return parts[()]


def _joined(axis: str, group: list[Tensor], key: str) -> Tensor:
    # FSDP2 cuts dim 0; `hc_head` is outside of it, and a step is a single number.
    fsdp = not key.endswith(".step") and ".hc_head." not in key
    if (axis == "edp" and fsdp) or (axis == "ep" and ep_cut(key)):
        return torch.cat(group)
    if axis == "tp" and (cut := tp_cut(key)):
        dim, joined = cut
        of_each = zip(*(shard.chunk(joined, dim) for shard in group), strict=True)
        return torch.cat([torch.cat(shards, dim) for shards in of_each], dim)
    if not all(torch.equal(part, group[0]) for part in group):
        raise AssertionError(f"{key}: the trainer's own replicas have drifted apart")
    return group[0]


# Training


def fill(model: Stage, mesh: DeviceMesh, seed: int) -> None:
    """Fill the parameters with this rank's part of whole tensors that depend on the name alone."""
    ep, tp = mesh.get_group("ep"), mesh.get_group("tp")
    for key, parameter in model.named_parameters():
        name = global_key(key, ep.rank(), ep.size()).replace("head.weight", "embed.weight")
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        shape = list(parameter.shape)
        if ep_cut(key):
            shape[0] *= ep.size()
        if cut := tp_cut(key):
            shape[cut[0]] = WIDTH if ".shared_expert." in key else shape[cut[0]] * tp.size()
        part = torch.randn(shape, generator=generator) * 0.2
        part = part + 1 if name.endswith("norm.weight") else part
        if ep_cut(key):
            part = part.chunk(ep.size())[ep.rank()]
        if cut:
            dim, joined = cut
            each = [one.chunk(tp.size(), dim)[tp.rank()] for one in part.chunk(joined, dim)]
            part = torch.cat(each, dim)
        with torch.no_grad():
            parameter.copy_(part)


class Trainer:
    """A stage, its optimizer, and its training step, on one rank of a mesh."""

    def __init__(self, mesh: DeviceMesh, *, seed: int) -> None:
        self.mesh, self.step = mesh, 0
        self.edp, self.hsdp, self.pp = (mesh.get_group(a) for a in ("edp", "hsdp", "pp"))
        fsdp = mesh["edp"] if self.hsdp.size() == 1 else mesh["hsdp", "edp"]
        self.model = Stage(mesh)
        fill(self.model, mesh, seed)
        self.model.to(mesh.device_type)
        self.outside = [p for n, p in self.model.named_parameters() if n.startswith("hc_head.")]
        for layer in self.model.layers.values():
            fully_shard(layer, mesh=fsdp)
        fully_shard(self.model, mesh=fsdp, ignored_params=set(self.outside))
        # Two groups, as trainers have them; foreach would mix DTensors with plain tensors.
        groups: list[list[nn.Parameter]] = [[], []]
        for parameter in self.model.parameters():
            groups[parameter.ndim < 2].append(parameter)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": group, "weight_decay": decay}
                for group, decay in zip(groups, (0.01, 0.0), strict=True)
                if group
            ],
            lr=3e-3,
            foreach=False,
        )

    def train(self, steps: int) -> list[float]:
        """Train for some steps; the loss of each, on the last stage, and 0 on the others."""
        return [self._train_step() for _ in range(steps)]

    def _train_step(self) -> float:
        # The data depends on the step and the hsdp and edp ranks: the others' groups share it.
        replica = self.hsdp.rank() * self.edp.size() + self.edp.rank()
        generator = torch.Generator().manual_seed(1000 * self.step + replica)
        start = torch.randint(VOCAB, (BATCH, 1), generator=generator)
        tokens = ((start + 7 * torch.arange(LENGTH + 1)) % VOCAB).to(self.mesh.device_type)
        shape = (BATCH, LENGTH, HIDDEN)

        x = tokens[:, :-1]
        if not self.model.is_first:
            x = torch.empty(shape, device=tokens.device)
            dist.recv(x, group=self.pp, group_src=self.pp.rank() - 1)
            x.requires_grad_()
        y = self.model(x)
        loss = torch.zeros((), device=tokens.device)
        if self.model.is_last:
            loss = F.cross_entropy(y.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        else:
            dist.send(y.detach(), group=self.pp, group_dst=self.pp.rank() + 1)
            grad = torch.empty(shape, device=tokens.device)
            dist.recv(grad, group=self.pp, group_src=self.pp.rank() + 1)
            y.backward(grad)
        if x.grad is not None:
            dist.send(x.grad, group=self.pp, group_dst=self.pp.rank() - 1)

        for parameter in self.outside:
            assert parameter.grad is not None
            for group in (self.edp, self.hsdp):
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= group.size()
        self._tie()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.95  # so that a run that continues needs the saved one
        self.step += 1
        return loss.item()

    def _tie(self) -> None:
        # Embedding and head lie on two stages then: one weight, the sum of both gradients.
        if self.model.is_first == self.model.is_last:
            return
        weight = self.model.embed.weight if self.model.is_first else self.model.head.weight
        assert isinstance(weight.grad, DTensor)
        dist.all_reduce(weight.grad.to_local(), group=self.pp)
