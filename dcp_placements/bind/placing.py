"""A rank's flat state dict bound to the checkpoint: one ``Placed`` per tensor that has a place.

Both planners stand on this, so that what is saved and what is loaded is worked out by the same
rule. It raises nothing: whatever does not fit becomes a ``Fault``, and the planner tells all at
once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_placements._torch import DTensor, dtensor_facts, has_hooks, is_dtensor_like
from dcp_placements.bind.binding import BindError, Binding, Own, bind, fault_of
from dcp_placements.errors import Fault
from dcp_placements.layout.sharding import Chunk
from dcp_placements.names.keys import Rename
from dcp_placements.names.optimizer_state import (
    OptimizerStates,
    counted_fault,
    counted_state,
    listed_faults,
)
from dcp_placements.rules.mesh import MeshNumbers
from dcp_placements.rules.patterns import PlacementRules, Rules, rule_name
from dcp_placements.rules.placement import CheckpointPlacement


@dataclass(slots=True)
class Placed:
    """One tensor of this rank and its place in the checkpoint.

    Attributes:
        fqn: The checkpoint's key.
        tensor: The local tensor itself, no copy.
        binding: Its place; shared by all tensors that lie alike.
        chunks: The non-empty pieces, in C order of the local tensor; shared likewise.
        rule: What to call the rule that spoke; None where none did.
        mesh: The mesh of its DTensor; None for a plain tensor.
    """

    fqn: str
    tensor: torch.Tensor
    binding: Binding
    chunks: tuple[Chunk, ...]
    rule: str | None
    mesh: Any = None

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor."""
        return self.binding.global_shape

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The local tensors that it stands for: one, unless rows are stacked."""
        return [self.tensor]

    @property
    def has_own_key(self) -> bool:
        """Whether other ranks of its mesh may not have the key at all."""
        return False

    def view(self, chunk: Chunk) -> torch.Tensor:
        """Return the piece of the local tensor that ``chunk`` is; a view, no copy."""
        tensor = self.tensor.detach()
        for dim, (offset, size) in enumerate(zip(chunk.local_offsets, chunk.sizes, strict=True)):
            if size != tensor.shape[dim]:
                tensor = tensor.narrow(dim, offset, size)
        return tensor


@dataclass(slots=True)
class Placing:
    """What became of a rank's flat state dict.

    Attributes:
        placed: By key, the tensors that have a place. Keys that are neither here nor in
            ``absent`` are left to torch's default planner.
        absent: Keys whose DTensor mesh this rank is no part of: nothing to save or load here.
        faults: What does not fit.
        matched: Rules that spoke, with the number of keys each spoke for.
    """

    placed: dict[str, Placed] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    faults: list[Fault] = field(default_factory=list)
    matched: dict[str, int] = field(default_factory=dict)


def place(state_dict: Mapping[str, Any], rules: Rules | None, rank: int) -> Placing:
    """Bind every tensor of a flat state dict to its place in the checkpoint.

    0-d tensors and non-tensors are never asked about. Optimizer state that lies as its parameter
    does takes the parameter's place, unless a rule of its own speaks for it.

    Args:
        state_dict: Flat, with the checkpoint's keys.
        rules: The user's; None leaves every tensor its own mesh and placements.
        rank: This process's rank, for messages.
    """
    placer = Placer(rules, rank)
    for fqn, value in state_dict.items():
        placer.add(fqn, value)
    placer.let_states_follow(state_dict)
    placer.check_aliases(state_dict)
    return placer.placing


class Placer:
    def __init__(self, rules: Rules | None, rank: int) -> None:
        self.rules = rules
        self.rank = rank
        self.placing = Placing()
        # Most tensors lie like another one: keyed by all that a binding is worked out from.
        self._bound: dict[Any, tuple[Binding, tuple[Chunk, ...]] | None] = {}
        self._mesh_number = MeshNumbers()
        self._dtensor_kinds: dict[type, bool] = {}
        self._names: dict[str, str] = {}
        # By key, what rules that are a callable gave.
        self._given: dict[str, CheckpointPlacement] = {}

    def add(self, fqn: str, value: Any) -> None:
        """Bind one value, if it is a tensor that has a place."""
        kind = type(value)
        dtensor = self._dtensor_kinds.get(kind)
        if dtensor and self.rules is None and kind is DTensor:
            # The common case in place: of thousands of tensors a call more would be felt.
            local, mesh, placements, whole = dtensor_facts(value)
            key = (whole, local.shape, self._mesh_number(mesh), placements, None)
            found = self._bound.get(key)
            if found is not None and type(local) is torch.Tensor:
                self.placing.placed[fqn] = Placed(fqn, local, found[0], found[1], None, mesh)
                return
        if dtensor is None:
            dtensor = self._dtensor_kinds[kind] = is_dtensor_like(value)
        if not dtensor and not isinstance(value, torch.Tensor):
            return
        try:
            placement, rule = self.ask(fqn, value)
            if has_hooks(value):
                if placement is not None:
                    raise BindError(
                        f"holds a {type(value).__name__}, which names its chunks itself, and a "
                        "rule speaks for it too",
                        "way out:     let one of them speak: None for this key in the rules",
                    )
                return
            if dtensor:
                self._bind_dtensor(fqn, value, placement, rule)
            elif placement is not None:
                shape = tuple(value.shape)
                plain = (shape, placement)
                if plain not in self._bound:
                    self._bind(Own(shape), shape, placement, plain)
                self._place(fqn, value, self._bound[plain], rule)
        except BindError as error:
            self._fault(error, fqn)

    def let_states_follow(self, state_dict: Mapping[str, Any]) -> None:
        """Give optimizer state that lies as its parameter does the parameter's place.

        Where a rule speaks for the state's own key, it follows only if the same rule speaks for
        the parameter. A plain tensor lies as its parameter if it has the local shape; a DTensor if
        its shape, mesh and placements are the parameter's own.
        """
        ruled = any(placed.rule is not None for placed in self.placing.placed.values())
        states = OptimizerStates(state_dict)
        places: dict[str, Placed | None] = {}
        for fqn, value in state_dict.items():
            dtensor = self._dtensor_kinds.get(type(value), False)
            known = self.placing.placed.get(fqn)
            if dtensor:
                if not ruled or known is None or known.rule is not None:
                    continue
            elif not isinstance(value, torch.Tensor) or not value.dim():
                continue
            state = states.of(fqn)
            if state is None or has_hooks(value):
                continue
            if state.parameter not in places:
                places[state.parameter] = self._one_place(states.keys_of(state.parameter))
            first = places[state.parameter]
            if first is None or not self.may_follow(fqn, first.fqn):
                continue
            if not dtensor:
                if tuple(value.shape) == tuple(first.tensor.shape):
                    self._follow(fqn, value, first)
            elif known is not None and self.same_own(_own(value), _own(state_dict[first.fqn])):
                self._follow(fqn, known.tensor, first, known.mesh)

    def may_follow(self, fqn: str, parameter: str) -> bool:
        """Whether no rule speaks for optimizer state itself, or the one of its parameter does.

        The same rule is the same pattern; of a callable, which has none, an equal placement.
        """
        if isinstance(self.rules, PlacementRules):
            own = self.rules.pattern_of(fqn)
            return own is None or own == self.rules.pattern_of(parameter)
        given = self._given.get(fqn)
        return given is None or given == self._given.get(parameter)

    def _one_place(self, fqns: Sequence[str]) -> Placed | None:
        """Return the place of these keys; None where they have none, or several."""
        found = [self.placing.placed.get(fqn) for fqn in fqns]
        if not found or found[0] is None:
            return None
        first = found[0]
        same = all(other is not None and other.binding == first.binding for other in found)
        return first if same else None

    def same_own(self, one: Own, other: Own) -> bool:
        """Whether two DTensors have the same shape, mesh and placements of their own."""
        if (one.shape, one.placements) != (other.shape, other.placements):
            return False
        if one.mesh is None or other.mesh is None:
            return one.mesh is other.mesh
        return self._mesh_number(one.mesh) == self._mesh_number(other.mesh)

    def _follow(self, fqn: str, tensor: torch.Tensor, first: Placed, mesh: Any = None) -> None:
        self.placing.placed[fqn] = Placed(
            fqn, tensor, first.binding, first.chunks, first.rule, mesh
        )
        self.placing.faults = [fault for fault in self.placing.faults if fault.fqn != fqn]

    def check_aliases(self, state_dict: Mapping[str, Any]) -> None:
        """Note two names of one view of a storage that lie differently."""
        if _all_differ(self.placing.placed, state_dict):
            return
        seen: dict[Any, str] = {}
        at: dict[int, tuple[str, torch.Tensor]] = {}
        placed_of = self.placing.placed.get
        for fqn, value in state_dict.items():
            placed = placed_of(fqn)
            tensor = placed.tensor if placed is not None else value
            if placed is None and (not isinstance(tensor, torch.Tensor) or has_hooks(tensor)):
                continue
            pointer = _data_ptr(tensor)
            if not pointer:
                continue
            # Nearly always the only one there: its view is looked at when a second comes.
            name, there = at.setdefault(pointer, (fqn, tensor))
            if name == fqn:
                continue
            seen.setdefault((pointer, _view_of(there)), name)
            first = seen.setdefault((pointer, _view_of(tensor)), fqn)
            if first == fqn or not tensor.numel():
                continue
            other = self.placing.placed.get(first)
            if _lies_alike(placed, other):
                continue
            ruled, missed = (fqn, first) if other is None or other.rule is None else (first, fqn)
            rule = self.placing.placed[ruled].rule if ruled in self.placing.placed else None
            self.placing.faults.append(
                Fault(
                    missed,
                    f"rank {self.rank} has it in one storage with {ruled}, but the two lie "
                    "differently in the checkpoint",
                    (
                        f"{ruled}: {_place_text(self.placing.placed.get(ruled))}",
                        f"{missed}: {_place_text(self.placing.placed.get(missed))}",
                        f"likely:      rule {rule} speaks for {ruled} and misses {missed}",
                        "way out:     name both in the rules, with one placement",
                    ),
                )
            )

    def ask(self, fqn: str, value: Any) -> tuple[CheckpointPlacement | None, str | None]:
        """Return what the rules say of a tensor, and what to call the one that spoke."""
        if self.rules is None or not value.shape:
            return None, None
        if isinstance(self.rules, PlacementRules):
            found = self.rules.find(fqn)
            if found is None:
                return None, None
            # A pattern that says None has spoken, too: it is not one that matches nothing.
            name, placement = self._names.setdefault(found[0], repr(found[0])), found[1]
        else:
            placement = self.rules(fqn, value)
            if placement is None:
                return None, None
            if not isinstance(placement, CheckpointPlacement):
                raise BindError(
                    f"was given {placement!r} by the rules, which is no CheckpointPlacement",
                    "way out:     return a CheckpointPlacement, or None to keep the tensor's own",
                )
            name = rule_name(self.rules, fqn) or ""
            self._given[fqn] = placement
        self.placing.matched[name] = self.placing.matched.get(name, 0) + 1
        return placement, None if placement is None else name

    def _bind_dtensor(
        self, fqn: str, value: Any, placement: CheckpointPlacement | None, rule: str | None
    ) -> None:
        local, mesh, placements, shape = dtensor_facts(value)
        key = (shape, local.shape, self._mesh_number(mesh), placements, placement)
        found = self._bound.get(key, _UNBOUND)
        if found is _UNBOUND:
            own = Own(tuple(shape), mesh, placements)
            found = self._bind(own, tuple(local.shape), placement, key)
        self._place(fqn, local, found, rule, mesh)

    def _bind(
        self,
        own: Own,
        local_shape: tuple[int, ...],
        placement: CheckpointPlacement | None,
        key: Any,
    ) -> tuple[Binding, tuple[Chunk, ...]] | None:
        binding = bind(own, local_shape, placement)
        found = self._bound[key] = None if binding is None else (binding, binding.layout.chunks())
        return found

    def _place(
        self,
        fqn: str,
        tensor: torch.Tensor,
        found: tuple[Binding, tuple[Chunk, ...]] | None,
        rule: str | None,
        mesh: Any = None,
    ) -> None:
        if found is None:
            self.placing.absent.add(fqn)
        else:
            self.placing.placed[fqn] = Placed(fqn, tensor, found[0], found[1], rule, mesh)

    def _fault(self, error: BindError, fqn: str) -> None:
        self.placing.faults.append(fault_of(error, fqn, self.rank, rule_name(self.rules, fqn)))


def counted_faults(
    state_dict: Mapping[str, Any], placing: Placing, rename: Rename | None
) -> list[Fault]:
    """Return the optimizer state that knows its parameters by position, where that is wrong.

    Wrong it is where keys are renamed, and where a rule says that ranks hold different parts of a
    parameter while none speaks for state of that shape.
    """
    state = counted_state(state_dict)
    if rename is not None:
        faults = [counted_fault(fqn, "keys are renamed") for fqn in state]
        faults += listed_faults(state_dict, rename)
        return list(dict.fromkeys(faults))
    if not state:
        return []
    parts = {
        placed.tensor.shape: fqn
        for fqn, placed in placing.placed.items()
        if placed.rule is not None and not placed.binding.layout.is_whole
    }
    faults = []
    for fqn in state:
        known = placing.placed.get(fqn)
        tensor = state_dict[fqn] if known is None else known.tensor
        shape = getattr(tensor, "shape", None)
        if shape in parts and (known is None or known.rule is None):
            faults.append(
                counted_fault(fqn, f"{parts[shape]}, of that shape, is sharded by a rule")
            )
    return list(dict.fromkeys(faults))


_UNBOUND: Any = object()


def _own(value: Any) -> Own:
    if not is_dtensor_like(value):
        return Own(tuple(value.shape))
    return Own(tuple(value.shape), value.device_mesh, tuple(value.placements))


def _lies_alike(one: Placed | None, other: Placed | None) -> bool:
    if one is None or other is None:
        placed = one or other
        return placed is None or placed.binding.layout.is_whole
    return one.binding.layout == other.binding.layout


def _place_text(placed: Placed | None) -> str:
    if placed is None:
        return "no rule, the whole tensor"
    axes = placed.binding.axes
    mesh = ", ".join(f"{axis.name or 'axis'}={axis.size}" for axis in axes)
    by = "no rule" if placed.rule is None else f"rule {placed.rule}"
    return f"{by}, part of a {placed.global_shape} tensor over ({mesh})"


def _all_differ(placed: Mapping[str, Placed], state_dict: Mapping[str, Any]) -> bool:
    """Whether no two tensors begin at one address; False also where that is not known."""
    tensors = [known.tensor for known in placed.values()]
    tensors += [
        value
        for fqn, value in state_dict.items()
        if fqn not in placed and isinstance(value, torch.Tensor)
    ]
    try:
        pointers = [pointer for tensor in tensors if (pointer := tensor.data_ptr())]
    except RuntimeError:  # wrapper subclasses and fake tensors have no memory
        return False
    return len(set(pointers)) == len(pointers)


def _view_of(tensor: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Return which elements from its first on a tensor has, and in which order.

    A tensor and its transpose, or the half of its columns, are other views of one storage.
    """
    strides: Sequence[int] = tensor.stride() if tensor.layout is torch.strided else tensor.shape
    dims = zip(tensor.shape, strides, strict=True)
    return tuple([(size, 0 if size == 1 else stride) for size, stride in dims])


def _data_ptr(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # wrapper subclasses and fake tensors have no memory
        return 0
