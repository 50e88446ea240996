"""Random trainers without a declaration: the block that a refusal hands over saves the truth."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_placements.advice.block import block_in
from dcp_placements.testing import World
from tests.test_handed_over import Positions, assert_saves, filled, fused, job, refusal

Cuts = dict[str, tuple[int, list[int] | None]]
"""By key, the dim that tp cuts, and the sizes of the tensors that are joined along it."""


class Trainer:
    """A model with drawn sizes and names, cut by hand over drawn axes.

    Args:
        seed: What is drawn.
        padded: Whether its vocabulary may be padded.
    """

    def __init__(self, seed: int, *, padded: bool) -> None:
        self.draw = draw = random.Random(seed)
        self.layers = draw.choice([1, 2, 4])
        self.experts = draw.choice([4, 8])
        self.kind = draw.choice(["dense", "packed", "list"])
        self.hidden = draw.choice([6, 8, 12])
        # Where each rank has as many rows as columns, names alone tell which dim is cut.
        self.inner = draw.choice([size for size in (4, 8, 10, 12) if size != 2 * self.hidden])
        self.vocabulary = draw.choice([16, 24, 32])
        self.cuts: Cuts = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        pairs = ("embed_tokens.weight", "lm_head.weight"), ("embed.weight", "output.weight")
        for key in draw.choice(pairs):
            self.add(key, (self.vocabulary, self.hidden), 0)
        attention = draw.choice(["apart", "joined", "transposed"])
        joined = draw.random() < 0.5
        # Weights of one model are kept in one way, experts perhaps in another.
        is_transposed = attention == "transposed" or (self.kind == "packed" and draw.random() < 0.3)
        query, key_value = draw.choice([(8, 8), (8, 4), (12, 4)])
        for layer in range(self.layers):
            self.add(f"layers.{layer}.norm.weight", (self.hidden,))
            self.add_attention(f"layers.{layer}.attn", attention, query, key_value)
            self.add_mlp(f"layers.{layer}.mlp", joined=joined, is_transposed=is_transposed)
        self.axes: dict[str, int] = {}
        if self.layers > 1 and draw.random() < 0.3:
            self.axes["pp"] = 2
        if draw.random() < 0.4:
            self.axes["dp"] = 2
        if self.kind != "dense" and draw.random() < 0.8:
            self.axes["ep"] = 2
        if draw.random() < 0.6 or not self.axes.keys() & {"pp", "ep"}:
            self.axes["tp"] = 2
        self.padding = draw.choice([0, 1, 3]) if padded and "tp" in self.axes else 0
        for key, (rows, *columns) in list(self.shapes.items()):
            if rows == self.vocabulary and not key.startswith("layers"):
                self.shapes[key] = rows - self.padding, *columns
        self.whole = filled(self.shapes)

    def add(
        self, key: str, shape: tuple[int, ...], dim: int | None = None, parts: Any = None
    ) -> None:
        self.shapes[key] = shape
        if dim is not None:
            self.cuts[key] = dim, parts

    def add_attention(self, module: str, attention: str, query: int, key_value: int) -> None:
        hidden, sizes = self.hidden, [query, key_value, key_value]
        match attention:
            case "apart":
                for name, rows in zip("qkv", sizes, strict=True):
                    self.add(f"{module}.{name}_proj.weight", (rows, hidden), 0)
            case "joined":
                self.add(f"{module}.qkv_proj.weight", (sum(sizes), hidden), 0, sizes)
            case _:
                self.add(f"{module}.c_attn.weight", (hidden, sum(sizes)), 1, sizes)
                self.add(f"{module}.c_proj.weight", (query, hidden), 0)
                return
        self.add(f"{module}.o_proj.weight", (hidden, query), 1)

    def add_mlp(self, module: str, *, joined: bool, is_transposed: bool) -> None:
        hidden, inner = self.hidden, self.inner
        if self.kind == "dense" and is_transposed:
            self.add(f"{module}.c_fc.weight", (hidden, inner), 1)
            self.add(f"{module}.c_proj.weight", (inner, hidden), 0)
            return
        if self.kind == "dense":
            if joined:
                self.add(f"{module}.gate_up_proj.weight", (2 * inner, hidden), 0, [inner, inner])
            else:
                for name in ("gate_proj", "up_proj"):
                    self.add(f"{module}.{name}.weight", (inner, hidden), 0)
            self.add(f"{module}.down_proj.weight", (hidden, inner), 1)
            return
        self.add(f"{module}.router.weight", (self.experts, hidden))
        if self.kind == "list":
            for expert in range(self.experts):
                up, down = (inner, hidden), (hidden, inner)
                if is_transposed:
                    up, down = down, up
                self.add(f"{module}.experts.{expert}.w1.weight", up, int(is_transposed))
                self.add(f"{module}.experts.{expert}.w2.weight", down, int(not is_transposed))
            return

        def packed(rows: int, columns: int) -> tuple[int, ...]:
            return (self.experts, *((columns, rows) if is_transposed else (rows, columns)))

        up, down = (2, 1) if is_transposed else (1, 2)
        if joined:
            shape = packed(2 * inner, hidden)
            self.add(f"{module}.experts.gate_up_proj", shape, up, [inner, inner])
            self.add(f"{module}.experts.down_proj", packed(hidden, inner), down)
        else:
            self.add(f"{module}.experts.w1", packed(inner, hidden), up)
            self.add(f"{module}.experts.w2", packed(hidden, inner), down)

    def cut(self, key: str, value: torch.Tensor, at: Positions) -> tuple[str, torch.Tensor] | None:
        components = key.split(".")
        if key.startswith("layers") and "pp" in self.axes:
            own = range(self.layers // 2 * at["pp"], self.layers // 2 * (at["pp"] + 1))
            if int(components[1]) not in own:
                return None
            components[1] = str(int(components[1]) - own.start)
        elif "pp" in self.axes and at["pp"] == key.startswith("embed"):
            return None
        if "experts" in components and "ep" in self.axes:
            if self.kind == "packed":
                value = value.chunk(2)[at["ep"]]
            else:
                own = range(self.experts // 2 * at["ep"], self.experts // 2 * (at["ep"] + 1))
                if int(components[4]) not in own:
                    return None
                components[4] = str(int(components[4]) - own.start)
        if "tp" in self.axes and key in self.cuts:
            dim, parts = self.cuts[key]
            if len(value) == self.vocabulary - self.padding and not key.startswith("layers"):
                padding = torch.zeros(self.padding, value.shape[1], dtype=value.dtype)
                value = torch.cat([value, padding])
            value = fused(value, parts or [value.shape[dim]], 2, at["tp"], dim)
        return ".".join(components), value


@pytest.mark.worlds(8)
@pytest.mark.parametrize("is_known", [False, True], ids=["unknown", "whole"])
def test_a_block_saves_the_truth(is_known: bool, seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        trainer = Trainer(seed, padded=is_known)
        world = World(torch.Size(trainer.axes.values()).numel(), trainer.axes)
        state = job(trainer.whole, trainer.cut, world)
        options = {"whole": trainer.shapes} if is_known else {}
        text = refusal(tmp_path, world, state, **options)
        block = block_in(text)
        assert block, (seed, text)
        assert_saves(tmp_path / str(seed), trainer.whole, state, block, world)


@pytest.mark.worlds(6)
def test_a_block_reaches_groups_without_a_mesh(seeds: range, tmp_path: Path) -> None:
    """The ranks that hold equal contents are the axes."""
    for seed in seeds:
        trainer = Trainer(seed, padded=False)
        named = World(torch.Size(trainer.axes.values()).numel(), trainer.axes)
        state, world = job(trainer.whole, trainer.cut, named), World(named.size)
        text = refusal(tmp_path, world, state)
        block = block_in(text)
        assert block, (seed, text)
        assert "meshes[" not in block
        assert_saves(tmp_path / str(seed), trainer.whole, state, block, world)
