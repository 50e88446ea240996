"""The trainer of the smoke: a small MoE transformer, its parallelism, and its training step.

Everything in here is what a user has before they meet ``dcp_placements``: plain torch, FSDP2 over
the mesh axis ``edp``, expert and vocabulary parallelism by hand over ``ep``, pipeline stages over
``pp``. Nothing imports the package, so what this module says about where a tensor belongs
(:func:`ep_cut`, :func:`global_key`, :func:`whole_tensors`) is an independent oracle for it.

The ranks of one ``ep`` group see the same tokens. Each computes its own experts on all of them and
an all-reduce adds the parts up; likewise the vocabulary. Sums run in a fixed order, so that
training twice from one state gives the same bits.
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
# FSDP cuts the hidden and the expert width unevenly over two ranks; ep4 x edp leaves 3 experts.
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
    def __init__(self) -> None:
        super().__init__()
        self.qkv = Linear(HIDDEN, 3 * HIDDEN)
        self.out = Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class MLP(nn.Module):
    """A dense gated MLP: the shared expert, and one routed expert where each is its own module."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (
            Linear(HIDDEN, WIDTH),
            Linear(WIDTH, HIDDEN),
            Linear(HIDDEN, WIDTH),
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
    def __init__(self, ep: dist.ProcessGroup, *, stacked: bool) -> None:
        super().__init__()
        self.ep, self.count = ep, EXPERTS // ep.size()
        self.router = Linear(HIDDEN, EXPERTS)
        self.shared_expert = MLP()
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
        return (routed + self.shared_expert(tokens)).view_as(x)


class Block(nn.Module):
    def __init__(self, ep: dist.ProcessGroup, *, stacked: bool) -> None:
        super().__init__()
        self.attention_norm, self.moe_norm = Norm(), Norm()
        self.attention = Attention()
        self.moe = MoE(ep, stacked=stacked)

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
        ep, pp = mesh.get_group("ep"), mesh.get_group("pp")
        self.is_first, self.is_last = pp.rank() == 0, pp.rank() == pp.size() - 1
        per_stage = LAYERS // pp.size()
        if self.is_first:
            self.embed = Embedding(ep)
        self.layers = nn.ModuleDict(
            {
                str(number): Block(ep, stacked=number % 2 == 0)
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
    shards: dict[str, dict[int, dict[int, Tensor]]] = {}
    for coordinate, state in held:
        for key, tensor in state.items():
            key = global_key(key, coordinate["ep"], ep_size)
            shards.setdefault(key, {}).setdefault(coordinate["ep"], {})[coordinate["edp"]] = tensor
    whole = {}
    for key, by_ep in shards.items():
        # FSDP2 cuts dim 0; `hc_head` is outside of it, and a step is a single number.
        fsdp = not key.endswith(".step") and ".hc_head." not in key
        parts = [
            _joined([row[c] for c in sorted(row)], key, fsdp) for _, row in sorted(by_ep.items())
        ]
        whole[key] = _joined(parts, key, ep_cut(key))
    return whole


def _joined(parts: list[Tensor], key: str, cut: bool) -> Tensor:
    if cut:
        return torch.cat(parts)
    if not all(torch.equal(part, parts[0]) for part in parts):
        raise AssertionError(f"{key}: the trainer's own replicas have drifted apart")
    return parts[0]


# Training


def fill(model: Stage, mesh: DeviceMesh, seed: int) -> None:
    """Fill the parameters with this rank's part of whole tensors that depend on the name alone."""
    ep = mesh.get_group("ep")
    for key, parameter in model.named_parameters():
        name = global_key(key, ep.rank(), ep.size()).replace("head.weight", "embed.weight")
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        cut = ep_cut(key)
        rows = len(parameter) * (ep.size() if cut else 1)
        whole = torch.randn(rows, *parameter.shape[1:], generator=generator) * 0.2
        whole = whole + 1 if name.endswith("norm.weight") else whole
        with torch.no_grad():
            parameter.copy_(whole.chunk(ep.size())[ep.rank()] if cut else whole)


class Trainer:
    """A stage, its optimizer, and its training step, on one rank of a ``(pp, edp, ep)`` mesh."""

    def __init__(self, mesh: DeviceMesh, *, seed: int) -> None:
        self.mesh, self.step = mesh, 0
        self.edp, self.pp = mesh.get_group("edp"), mesh.get_group("pp")
        self.model = Stage(mesh)
        fill(self.model, mesh, seed)
        self.model.to(mesh.device_type)
        self.outside = [p for n, p in self.model.named_parameters() if n.startswith("hc_head.")]
        for layer in self.model.layers.values():
            fully_shard(layer, mesh=mesh["edp"])
        fully_shard(self.model, mesh=mesh["edp"], ignored_params=set(self.outside))
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
        # The data depends on the step and the edp rank: ranks of one ep or pp group share it.
        generator = torch.Generator().manual_seed(1000 * self.step + self.edp.rank())
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
            dist.all_reduce(parameter.grad, group=self.edp)
            parameter.grad /= self.edp.size()
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
