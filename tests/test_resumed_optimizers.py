"""A training that goes on in another world takes the steps that it would have taken.

A model is trained whole, with a real optimizer of torch. One world saves slices of it, another one
loads, and both the whole and the slices go on. What never had a gradient has one then, so that
state which the checkpoint lacks has to be what torch gives it at birth.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import Shard

from dcp_placements import CheckpointPlacement, PlacementRules, Placements, Renumber
from dcp_placements.testing import FakeMesh, World, cut
from tests.drawn_worlds import Draw

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.1),
    "Adagrad": partial(torch.optim.Adagrad, initial_accumulator_value=0.25),
    "Adamax": torch.optim.Adamax,
    "AdamW": partial(torch.optim.AdamW, amsgrad=True),
    "ASGD": partial(torch.optim.ASGD, t0=1),
    "Muon": torch.optim.Muon,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "plain SGD": partial(torch.optim.SGD, lr=0.1),
}
OF_ALL_ELEMENTS = ("Adafactor", "Muon")
"""Whose step of a slice is not the slice of the step."""

SHAPES = ((), (4,), (6,), (1,), (4, 6), (8, 4), (4, 1), (1, 6), (4, 2, 6), (4, 4, 1, 2), (2, 6))


@dataclass(frozen=True)
class Training:
    """A model and its optimizer.

    Attributes:
        optimizer: Which.
        shapes: Of the parameters, by name, ``*`` for the number of a layer.
        layers: How many.
        still: Parameters, of single layers, that have no gradient before the save.
        frozen: Those that the optimizer does not know.
        flat: Whether the optimizer's state dict is flattened.
    """

    optimizer: str
    shapes: dict[str, tuple[int, ...]]
    layers: int
    still: frozenset[str]
    frozen: frozenset[str]
    flat: bool

    def names(self, layers: range) -> Iterator[tuple[str, str]]:
        """Yield the parameters of some layers: the name there, counted from 0, and in the whole."""
        for name in self.shapes:
            for at, layer in enumerate(layers if "*" in name else (0,)):
                yield name.replace("*", str(at)), name.replace("*", str(layer))


@dataclass(frozen=True)
class Topology:
    """A world of ``pp`` stages, each of ``tp`` ranks.

    Attributes:
        stages: Where the layers of each begin, and where the last ones end.
        tp: Ranks per stage.
        dims: Of each name of ``Training.shapes`` which ``tp`` shards, if any.
        follows: Whether the rules name the parameters alone.
    """

    stages: tuple[int, ...]
    tp: int
    dims: dict[str, int]
    follows: bool

    @property
    def size(self) -> int:
        return (len(self.stages) - 1) * self.tp

    def mesh(self, rank: int) -> FakeMesh:
        return FakeMesh((len(self.stages) - 1, self.tp), ("pp", "tp"), rank=rank)

    def layers(self, rank: int) -> range:
        stage = rank // self.tp
        return range(self.stages[stage], self.stages[stage + 1])

    def placements(self, rank: int, training: Training) -> Placements:
        pattern = "^model\\.{}$" if self.follows else "(?:^|\\.){}(?:\\.|$)"
        rules: dict[Any, CheckpointPlacement] = {}
        for name, dim in self.dims.items():
            regex = pattern.format(name.replace(".", "\\.").replace("*", "\\d+"))
            rules[re.compile(regex)] = CheckpointPlacement(self.mesh(rank), {"tp": Shard(dim)})
        ids = self.layers(rank)
        rename = Renumber("layers.{}", ids, training.layers) if len(self.stages) > 2 else None
        return Placements(PlacementRules(rules, optional=True), rename=rename)

    def slice(self, rank: int, name: str, whole: torch.Tensor, like: torch.Size) -> torch.Tensor:
        """Return what a rank has of a parameter or its state, of which reduced dims are whole."""
        dim = self.dims.get(name)
        if dim is None or not whole.dim() or whole.shape[dim] != like[dim]:
            return whole.detach().clone()
        return cut(whole.detach(), [Shard(dim)], [self.tp], [rank % self.tp])


def draw_training(draw: Draw) -> Training:
    optimizer = draw.choice((*OPTIMIZERS, "Adafactor", "Adafactor"))
    names = ["embed", *(f"layers.*.{part}" for part in "abcd"[: draw.randint(1, 4)])]
    shapes = {name: draw.choice(SHAPES) for name in names}
    if optimizer == "Muon":
        shapes = {name: draw.choice([s for s in SHAPES if len(s) == 2]) for name in names}
    layers = draw.randint(1, 4)
    some = [frozenset[str]()] * 2
    for at, percent in enumerate((30, 20)):
        # Of all layers, or of some.
        chosen = [name for name in names[1:] if draw.chance(percent)]
        among = [layer for layer in range(layers) if draw.chance(70)]
        some[at] = frozenset(name.replace("*", str(layer)) for name in chosen for layer in among)
    return Training(optimizer, shapes, layers, *some, draw.chance(50))


def draw_topology(draw: Draw, training: Training) -> Topology:
    cuts = draw.some(training.layers + 1, at_least=2)
    stages = (0, *[at for at in cuts if 0 < at < training.layers], training.layers)
    tp = draw.choice((1, 2, 2, 4)) if draw.chance(80) else 1
    dims = {}
    for name, shape in training.shapes.items():
        # A rank that has one row of several cannot tell a reduced dim by its shape.
        least = 2 * tp if training.optimizer == "Adafactor" and tp > 1 else tp
        fit = [dim for dim, size in enumerate(shape) if size % tp == 0 and size >= least]
        if fit and draw.chance(80):
            dims[name] = draw.choice(fit)
    return Topology(stages, tp, dims, draw.chance(50))


class Model(nn.Module):
    """Parameters under dotted names."""

    def __init__(self, parameters: dict[str, torch.Tensor], frozen: set[str]) -> None:
        super().__init__()
        for name, value in parameters.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, nn.Parameter(value.clone(), name not in frozen))


def trained(model: Model, optimizer: torch.optim.Optimizer, grads: dict[str, Any]) -> None:
    for name, parameter in model.named_parameters():
        parameter.grad = grads.get(name)
    optimizer.step()
    optimizer.zero_grad()


class Trainer:
    """A model and its optimizer: the whole, or what a rank has of it."""

    def __init__(self, training: Training, named: dict[str, torch.Tensor], own: dict[str, str]):
        self.training, self.own = training, own
        frozen = {name for name in named if own[name] in training.frozen}
        self.model = Model(named, frozen)
        known = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = OPTIMIZERS[training.optimizer](known) if known else None

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"model": dict(self.model.state_dict())}
        if self.optimizer is not None:
            options = StateDictOptions(flatten_optimizer_state_dict=self.training.flat)
            state["optim"] = get_optimizer_state_dict(self.model, self.optimizer, options=options)
        return state


def generic(name: str) -> str:
    """Return the name with ``*`` for the number of its layer."""
    first, *rest = name.split(".")
    return ".".join([first, "*", *rest[1:]]) if rest else first


def grads_of(training: Training, draw: torch.Generator, *, all_of_them: bool) -> dict[str, Any]:
    return {
        name: torch.randn(training.shapes[generic(name)], generator=draw)
        for _, name in training.names(range(training.layers))
        if all_of_them or name not in training.still
    }


def resume(seed: int, root: Path) -> None:
    draw, generator = Draw(f"resumed {seed}"), torch.Generator().manual_seed(seed)
    training = draw_training(draw)
    saving, loading = draw_topology(draw, training), draw_topology(draw, training)
    names = {whole: whole for _, whole in training.names(range(training.layers))}
    first = {
        name: torch.randn(training.shapes[generic(name)], generator=generator) for name in names
    }
    whole = Trainer(training, first, names)
    if whole.optimizer is None:
        return
    for _ in range(2):
        trained(whole.model, whole.optimizer, grads_of(training, generator, all_of_them=False))
    parameters = dict(whole.model.named_parameters())

    def held(topology: Topology, rank: int, *, blank: bool) -> Trainer:
        own = dict(training.names(topology.layers(rank)))
        named = {}
        for name, of in own.items():
            value = topology.slice(rank, generic(of), parameters[of], parameters[of].shape)
            named[name] = torch.full_like(value, -9) if blank else value
        return Trainer(training, named, own)

    def saved(rank: int) -> dict[str, Any]:
        trainer = held(saving, rank, blank=False)
        if trainer.optimizer is not None:
            mine = dict(trainer.model.named_parameters())
            active = {
                n: torch.ones_like(p)
                for n, p in mine.items()
                if trainer.own[n] not in training.still
            }
            trained(trainer.model, trainer.optimizer, active)
            for name, parameter in mine.items():
                of = trainer.own[name]
                parameter.data.copy_(
                    saving.slice(rank, generic(of), parameters[of], parameters[of].shape)
                )
                for key, value in whole.optimizer.state.get(parameters[of], {}).items():
                    part = saving.slice(rank, generic(of), value, parameters[of].shape)
                    assert trainer.optimizer.state[parameter][key].shape == part.shape
                    trainer.optimizer.state[parameter][key] = part
        return trainer.state_dict()

    World(saving.size).save(
        root, saved, lambda rank: saving.placements(rank, training).save_planner()
    )
    stored = whole.state_dict()
    assert_stored(root, stored)
    trainers = [held(loading, rank, blank=True) for rank in range(loading.size)]
    states = World(loading.size).load(
        root,
        lambda rank: trainers[rank].state_dict(),
        lambda rank: loading.placements(rank, training).load_planner(),
    )
    for trainer, state in zip(trainers, states, strict=True):
        if trainer.optimizer is not None:
            options = StateDictOptions(flatten_optimizer_state_dict=training.flat)
            set_optimizer_state_dict(
                trainer.model, trainer.optimizer, state["optim"], options=options
            )
    assert_slices(whole, trainers, loading, training, states=True)
    if training.optimizer in OF_ALL_ELEMENTS and loading.tp > 1:
        return
    for _ in range(2):
        grads = grads_of(training, generator, all_of_them=True)
        trained(whole.model, whole.optimizer, grads)
        for rank, trainer in enumerate(trainers):
            mine = {
                name: loading.slice(rank, generic(of), grads[of], grads[of].shape)
                for name, of in trainer.own.items()
            }
            if trainer.optimizer is not None:
                trained(trainer.model, trainer.optimizer, mine)
        assert_slices(whole, trainers, loading, training, states=False)


def assert_stored(path: Path, whole: dict[str, Any]) -> None:
    """Assert that torch reads the whole model and all of its optimizer state."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    expected = {
        key: value
        for key, value in flatten_state_dict(whole)[0].items()
        if isinstance(value, torch.Tensor)
    }
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {key for key, entry in metadata.items() if hasattr(entry, "chunks")}
    assert tensors == expected.keys()
    read = {key: torch.full_like(value, -5) for key, value in expected.items()}
    dcp.load(read, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(), no_dist=True)
    for key, value in expected.items():
        assert torch.equal(read[key], value), key


def assert_slices(
    whole: Trainer,
    trainers: list[Trainer],
    topology: Topology,
    training: Training,
    *,
    states: bool,
) -> None:
    """Assert that each rank has the slices of the weights, and of what has stepped."""
    parameters = dict(whole.model.named_parameters())
    for rank, trainer in enumerate(trainers):
        for name, parameter in trainer.model.named_parameters():
            of = parameters[trainer.own[name]]
            called = generic(trainer.own[name])
            where = f"{trainer.own[name]} on rank {rank}"
            expected = topology.slice(rank, called, of, of.shape)
            torch.testing.assert_close(parameter.data, expected, rtol=1e-5, atol=1e-6, msg=where)
            if states and trainer.optimizer is not None and whole.optimizer is not None:
                for key, value in whole.optimizer.state.get(of, {}).items():
                    part = topology.slice(rank, called, value, of.shape)
                    assert torch.equal(trainer.optimizer.state[parameter][key], part), (where, key)


@pytest.mark.worlds(20)
def test_a_resumed_training_takes_the_steps_that_it_would_have_taken(
    seeds: range, tmp_path: Path
) -> None:
    """M34, M115, M117: of each of torch's optimizers, in both of torch's forms."""
    for seed in seeds:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            resume(seed, tmp_path / str(seed))
