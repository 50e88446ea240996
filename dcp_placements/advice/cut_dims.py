"""Which axes cut which dims of a tensor, by what the ranks hold of it.

Contents say along which axes ranks hold other shards: the fewest that leave no two different
contents at one place. Which dim they cut, the shape of the whole tensor says; where that is not
known, shapes of other tensors and the names of the field do. Experts of shape (2, 6, 3) on each of
two ep ranks, in a model whose norms have 3 elements::

    axes      ep: all that are at one position along it hold the same
    dims      0: stacked experts lie along it
    fitting   Fitting((("ep", Shard(0)),))
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from math import prod
from typing import Any, NamedTuple

from torch.distributed.tensor import Shard

from dcp_placements.advice.block import Fitting, MeshNames
from dcp_placements.advice.facts import FactsOfRanks, OnRanks, TensorFacts, differing_axes
from dcp_placements.advice.local_numbers import PIPELINE_AXIS
from dcp_placements.layout.boxes import Shape
from dcp_placements.layout.sharding import Sharding
from dcp_placements.names.known_names import (
    COPIED_BY_NAME,
    DATA_AXIS,
    EXPERT_AXIS,
    GATE_UP,
    NAMES_EXPERT,
    QKV,
    TENSOR_AXIS,
)
from dcp_placements.rules.placement import FusedShard, RaggedShard, cut_of, shard_dim

_JOINED = re.compile(r"(?:^|[._])(?:w?kv(?:_proj)?(?=\.|$)|w\d_?w\d)")
"""Names of tensors that join others along a dim, perhaps: shapes and contents fit a plain shard."""
_ROW_PARALLEL = re.compile(
    r"(?:(?:^|[._])(?:o_proj|out_proj|down_proj|c_proj|linear_proj|linear_fc2|dense_4h_to_h|fc2|w2"
    r"|wo)|(?:^|\.)(?:out|proj))(?:\.lora_A(?:\.\w+)?)?(?:[._](?:weight|bias))?$"
)
"""Names of weights whose input dim tensor-parallel ranks share out."""
_NAME_OF_VOCABULARY = re.compile(
    r"(?:^|[._])(?:w?embed\w*|wte|lm_head|embed_out|output(?:_layer)?|head|unembed\w*)(?:[._]weight)?$"
)

_NORM_OF_BLOCK = re.compile(
    r"(?i)^(?!.*(?:^|[._])(?:qk?|k|kv|query|key|value|head)_?(?:layer_?)?(?:norm|ln)(?:[._]|$))"
    r"(?!.*(?:norm|ln)_(?:q|k|query|key)(?:\.|$))"
    r"(?!.*(?:^|\.)[^.]*(?:att(?:n|ention)|mixer|mamba|ssm)[^.]*\.[^.]*(?:norm|ln)[^.]*(?:\.[^.]+)?$)"
    r"(?:.*[._])?(?:[a-z]*norm[a-z0-9_]*|ln\d*(?:_\w+)?)(?:\.(?:\{\}|\*))?(?:\.(?:weight|scale|gamma|g))?$"
)
"""Names of norms that have the hidden size, and not that of a head or of what is inside a layer."""
_NAME_OF_STACK = re.compile(r"(?i)expert|moe")
_LORA = re.compile(r"(?:^|\.)lora_[AB](?:\.|$)")
_NAME_OF_ATTENTION = re.compile(r"(?i)att(?:n|ention)")

_BY_NAME = "taken by its name"

_MOST_AXES = 3


class KindOfTensor(NamedTuple):
    """Tensors of one name, but for numbers, of equal shapes on the same ranks.

    Attributes:
        name: The name, with ``{}`` for numbers.
        shape: Shape of the whole tensors; None where it is not known.
        names: Their names.
        held: By tensor, what the ranks hold.
    """

    name: str
    shape: Shape | None
    names: Sequence[str]
    held: Sequence[OnRanks]

    @property
    def shards(self) -> list[TensorFacts]:
        """The shards of the first tensor."""
        return [tensor for _, tensor in self.held[0]]

    @property
    def local_shape(self) -> Shape:
        """The shape of the first shard over its own mesh."""
        return self.held[0][0][1].shape

    @property
    def ndim(self) -> int:
        """Number of dims of a shard."""
        return len(self.local_shape)

    @property
    def module(self) -> str:
        """The name of its module: ``layers.{}.attn`` of ``layers.{}.attn.o_proj.weight``."""
        name = self.name.removesuffix("{}")
        return name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[0]

    @property
    def body(self) -> list[int]:
        """The dims but for that of stacked experts."""
        is_stack = self.ndim == 3 and NAMES_EXPERT.search(self.name) is not None
        return list(range(1 if is_stack else 0, self.ndim))

    @property
    def is_row_parallel(self) -> bool:
        """Whether its name says that tensor-parallel ranks share out its input dim."""
        return _ROW_PARALLEL.search(self.name) is not None

    def is_stack(self, axis: str) -> bool:
        """Whether dim 0 is that of stacked experts, where an axis cuts it."""
        is_expert = NAMES_EXPERT.search(self.name) is not None
        return self.ndim == 3 and (is_expert or EXPERT_AXIS.match(axis) is not None)


@dataclass(frozen=True)
class DimFinder:
    """Finds the axes and dims of kinds of tensors.

    Attributes:
        facts: What all ranks hold.
        mesh_names: Which axes a mesh has together.
        kinds: All kinds of tensors.
    """

    facts: FactsOfRanks
    mesh_names: MeshNames
    kinds: Sequence[KindOfTensor]

    @cached_property
    def hidden(self) -> set[int]:
        """Sizes of the norms of blocks that are equal on all ranks."""
        sizes = set()
        for kind in self.kinds:
            is_vector = kind.ndim == 1 and is_block_norm(kind.name)
            if not is_vector or len({shard.shape for shard in kind.shards}) > 1:
                continue
            if not differing_axes(kind.held, self.facts.named, self.facts.sizes)[0]:
                sizes.add(kind.local_shape[0])
        return sizes

    @cached_property
    def transposed(self) -> dict[str, bool]:
        """Whether weights are kept as (in, out), by their module, and by their number of dims.

        Shapes show it of some weights of a module, and the others are kept in the same way.
        """
        votes: dict[str, list[bool]] = {}
        for kind in self.kinds:
            body = kind.body
            cut = self._cut_by_shape(kind, body)
            if cut is None or _NAME_OF_VOCABULARY.search(kind.name) or self.is_sound(kind, ()):
                continue
            is_transposed = cut != body[1 if kind.is_row_parallel else 0]
            for place in (kind.module, str(kind.ndim)):
                votes.setdefault(place, []).append(is_transposed)
        return {place: 2 * sum(of_place) > len(of_place) for place, of_place in votes.items()}

    def fittings(self, kind: KindOfTensor) -> tuple[list[Fitting], str]:
        """Return the placements that make the shards of a kind, and what is open.

        Returns:
            The likeliest placement first; none where nothing fits, and then the reason.
        """
        first = kind.names[0]
        if first not in self._results:
            self._results[first] = self._fittings(kind)
        return self._results[first]

    @cached_property
    def _results(self) -> dict[str, tuple[list[Fitting], str]]:
        """By the first name of a kind, what fits it."""
        return {}

    @cached_property
    def _by_module(self) -> dict[str, list[KindOfTensor]]:
        """The kinds by the name of their module."""
        of_module: dict[str, list[KindOfTensor]] = {}
        for kind in self.kinds:
            of_module.setdefault(kind.module, []).append(kind)
        return of_module

    def _fittings(self, kind: KindOfTensor) -> tuple[list[Fitting], str]:
        shards, facts = kind.shards, self.facts
        ndims = {len(shard.shape) for shard in shards}
        if len(ndims) > 1 or (kind.shape is not None and ndims != {len(kind.shape)}):
            model = "" if kind.shape is None else f", the whole model has {kind.shape}"
            return [], f"the ranks hold {_shapes_text(shards)}{model}"
        are_equal = kind.shape is None and len({shard.shape for shard in shards}) == 1
        if are_equal and self.is_sound(kind, ()):
            return [Fitting()], ""
        free = [axis for axis in facts.sizes if axis not in shards[0].own_axes]
        differ, equal = differing_axes(kind.held, facts.named, free)
        sound: list[tuple[tuple[str, ...], list[Fitting]]] = []
        any_shape_fits = False
        for axes in self._subsets(kind, free):
            fitting = list(self._over(kind, axes))
            any_shape_fits = any_shape_fits or bool(fitting)
            if fitting and self.is_sound(kind, axes):
                sound.append((axes, fitting))
                if kind.shape is None:
                    break
        if not sound:
            if kind.shape is not None and not any_shape_fits:
                text = " x ".join(f"{name} {facts.sizes[name]}" for name in free) or "no axis"
                held = _shapes_text(shards)
                return [], f"no Shard over {text} makes {kind.shape} of the parts {held}"
            names = ", ".join(sorted(differ)) or "no axis that is known"
            return [], (
                f"the contents differ along {names}, and no placement shards that: a name that "
                "each rank counts for itself, or copies that drifted"
            )
        # Shards of one tensor that are equal would be a coincidence.
        likely = [pair for pair in sound if not equal & set(pair[0])] or sound
        fittings = [fitting for _, of_axes in likely for fitting in of_axes]
        return self._with_reason(kind, fittings)

    def _with_reason(
        self, kind: KindOfTensor, fittings: list[Fitting]
    ) -> tuple[list[Fitting], str]:
        """Return the placements that are worth a look, and what is open of the first."""
        first = fittings[0]
        dims = [entry.dim for _, entry in first.placements]
        if kind.shape is None:
            if not self._is_by_name_alone(kind, first):
                fittings = fittings[:1]
            is_rows = any(
                TENSOR_AXIS.match(axis) and not entry.dim for axis, entry in first.placements
            )
            if is_rows and _NAME_OF_VOCABULARY.search(kind.name):
                return fittings, self._padding_note(kind, first)
        together = [axis for axis, entry in first.placements if dims.count(entry.dim) > 1]
        if together and len(fittings) == 1:
            return fittings, (
                f"taken in the order of the mesh, {together[0]} first; shapes fit {together[-1]} "
                "first as well, which is a _StridedShard over the axes left of it"
            )
        return fittings, ""

    def is_sound(self, kind: KindOfTensor, axes: Sequence[str]) -> bool:
        """Whether ranks at one position along axes hold one content, and each position is held.

        Where the shape of the whole is not known, no two positions hold the same: equal contents at
        two are copies.
        """
        count = prod([self.facts.sizes[axis] for axis in axes])
        for held in kind.held:
            contents: dict[Any, Any] = {}
            positions: dict[Any, set[tuple[int, ...]]] = {}
            for rank, tensor in held:
                position = tuple([self.facts.positions[rank][axis] for axis in axes])
                positions.setdefault(tensor.part, set()).add(position)
                if tensor.digest is not None:
                    place = position, tensor.part, tensor.shape
                    if contents.setdefault(place, tensor.digest) != tensor.digest:
                        return False
            different = {(part, shape, digest) for (_, part, shape), digest in contents.items()}
            if kind.shape is None and len(different) < len(contents):
                return False
            if any(len(several) < count for several in positions.values()):
                return False
        return True

    def _subsets(self, kind: KindOfTensor, free: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Yield sets of axes that may cut a kind: those of the fewest ranks first, then by name."""
        ranked: list[tuple[Any, tuple[str, ...]]] = []
        penalties = {axis: _penalty(kind, axis) for axis in free}
        usable = {axis: penalty for axis, penalty in penalties.items() if penalty is not None}
        for count in range(min(_MOST_AXES, len(usable), kind.ndim) + 1):
            for axes in combinations(usable, count):
                if len({self.facts.named.axes[axis].positions for axis in axes}) < count:
                    continue
                penalty = sum([usable[axis] for axis in axes])
                is_one_mesh = self.mesh_names.ordered(axes)[1]
                if not is_one_mesh:
                    axes = tuple(sorted(axes, key=lambda axis: not EXPERT_AXIS.match(axis)))
                size = prod([self.facts.sizes[axis] for axis in axes])
                ranked.append(((size, penalty, count, not is_one_mesh), axes))
        yield from [axes for _, axes in sorted(ranked, key=lambda pair: pair[0])]

    def _over(self, kind: KindOfTensor, axes: tuple[str, ...]) -> Iterator[Fitting]:
        """Yield the placements over some axes that make the shards, the likeliest dims first."""
        orders = [self._dims(kind, axis) for axis in axes]
        choices = product(*[range(len(order)) for order in orders])
        for choice in sorted(choices, key=lambda choice: (sum(choice), choice)):
            dims = [order[number] for order, number in zip(orders, choice, strict=True)]
            placements = tuple(zip(axes, map(Shard, dims), strict=True))
            if kind.shape is not None:
                fitting = self._of_shape(kind.shape, kind.held[0], placements)
            else:
                fitting = self._of_shards(kind, placements)
            if fitting is not None:
                yield fitting

    def _dims(self, kind: KindOfTensor, axis: str) -> list[int]:
        """Return the dims that an axis may cut, the likeliest first."""
        dims, is_stack = list(range(kind.ndim)), kind.is_stack(axis)
        if EXPERT_AXIS.match(axis) and kind.ndim == 2 and kind.shape is None:
            likeliest = self._cut_by_shape(kind, dims) or 0
            return [likeliest, 1 - likeliest]
        if EXPERT_AXIS.match(axis) or (is_stack and not TENSOR_AXIS.match(axis)):
            return dims
        body = dims[1:] if is_stack else dims
        first = self._cut_by_shape(kind, body)
        if first is None:
            transposed = self.transposed
            is_transposed = transposed.get(kind.module, transposed.get(str(kind.ndim), False))
            is_transposed = is_transposed and not _NAME_OF_VOCABULARY.search(kind.name)
            is_second = len(body) > 1 and kind.is_row_parallel != is_transposed
            first = body[1 if is_second else 0]
        return [first, *[dim for dim in body if dim != first], *(dims[:1] if is_stack else [])]

    def _cut_by_shape(self, kind: KindOfTensor, body: Sequence[int]) -> int | None:
        """Return the one dim that is not the hidden size; None where none or several are not."""
        if _LORA.search(kind.name):
            return None  # its rank may be any number
        others = [dim for dim in body if kind.local_shape[dim] not in self.hidden]
        return others[0] if len(others) == 1 and len(body) > 1 else None

    def _is_by_name_alone(self, kind: KindOfTensor, fitting: Fitting) -> bool:
        """Whether a dim is cut that no shape shows, nor that experts lie along it."""
        for axis, entry in fitting.placements:
            is_stack = kind.is_stack(axis)
            is_along = EXPERT_AXIS.match(axis) and _NAME_OF_STACK.search(kind.name)
            if kind.ndim == 1 or (entry.dim == 0 and kind.ndim > 2 and is_along):
                continue
            if is_stack and all(other.dim for _, other in fitting.placements):
                return True  # its experts may lie along this axis
            body = list(range(1 if is_stack else 0, kind.ndim))
            if self._cut_by_shape(kind, body) != entry.dim:
                return True
        return False

    def _of_shards(
        self, kind: KindOfTensor, placements: tuple[tuple[str, Any], ...]
    ) -> Fitting | None:
        """Return placements with the shapes that the shards add up to; None where they do not."""
        dims = [entry.dim for _, entry in placements]
        if len(set(dims)) < len(dims):
            return None
        whole, uneven = list(kind.local_shape), {}
        for axis, entry in placements:
            sizes: dict[int, set[int]] = {}
            for rank, tensor in kind.held[0]:
                position = self.facts.positions[rank][axis]
                sizes.setdefault(position, set()).add(tensor.shape[entry.dim])
            is_unlike = any(len(several) > 1 for several in sizes.values())
            if is_unlike or len(sizes) < self.facts.sizes[axis]:
                return None
            row = tuple([sizes[position].pop() for position in range(self.facts.sizes[axis])])
            whole[entry.dim] = sum(row)
            if len(set(row)) > 1:
                uneven[axis] = RaggedShard(entry.dim, row)
        uncut = [dim for dim in range(kind.ndim) if dim not in dims]
        if any(shard.shape[dim] != whole[dim] for shard in kind.shards for dim in uncut):
            return None
        fitting = self._of_shape(tuple(whole), kind.held[0], placements)
        if fitting is None and uneven:
            return Fitting(tuple([(axis, uneven.get(axis, entry)) for axis, entry in placements]))
        return fitting

    def _of_shape(
        self, shape: Shape, held: OnRanks, placements: tuple[tuple[str, Any], ...]
    ) -> Fitting | None:
        """Return placements with the shapes that they need; None where they do not fit.

        Args:
            shape: Shape of the whole tensor.
            held: What the ranks hold of it.
            placements: The placements by axis.
        """
        sizes, positions = self.facts.sizes, self.facts.positions
        cuts = tuple([cut_of(entry, len(shape), axis, sizes[axis]) for axis, entry in placements])
        first = held[0][1].shape
        cut_shape = list(first)
        dims = [shard_dim(entry, len(shape)) for _, entry in placements]
        cut_dims = {dim for dim in dims if dim is not None}
        for dim, cut in zip(dims, cuts, strict=True):
            if dim is not None:
                cut_shape[dim] *= cut.size

        def fits(sharding: Sharding) -> bool:
            return all(
                sharding.shard([positions[rank][axis] for axis, _ in placements])[0] == tensor.shape
                for rank, tensor in held
            )

        if fits(Sharding(shape, cuts)):
            return Fitting(placements, None if tuple(cut_shape) == shape else shape)
        is_padded = all(size >= stored for size, stored in zip(cut_shape, shape, strict=True))
        only_cut = all(cut_shape[d] == shape[d] or d in cut_dims for d in range(len(shape)))
        # Each rank has rows that are no padding.
        is_held = all(shape[dim] > cut_shape[dim] - first[dim] for dim in cut_dims)
        if is_padded and only_cut and is_held and fits(Sharding(shape, cuts, tuple(cut_shape))):
            return Fitting(placements, shape, tuple(cut_shape))
        return None

    def _padding_note(self, kind: KindOfTensor, fitting: Fitting) -> str:
        """Return how to declare padding, of which only the unsharded model tells."""
        shape = list(kind.local_shape)
        for axis, entry in fitting.placements:
            shape[entry.dim] *= self.facts.sizes[axis]
        rows = ", ".join(["ROWS", *map(str, shape[1:])])
        return (
            f"where its last rows are padding, add global_shape=({rows}), "
            f"padded_shape={tuple(shape)}; ROWS without it"
        )

    def granted(self, kind: KindOfTensor, fitting: Fitting) -> Iterator[str]:
        """Yield what no fact shows and a placement takes for granted.

        Args:
            kind: The tensors.
            fitting: Their placement.
        """
        if fitting.placements:
            yield "shards follow each other in the order of the ranks along their axis"
        if fitting.padded is not None:
            yield "padding is at the end of the whole tensor"
        for axis, entry in fitting.placements if kind.shape is None else ():
            is_stack = kind.is_stack(axis)
            if entry.dim == 0 and kind.ndim > 2 and EXPERT_AXIS.match(axis):
                yield "stacked experts lie along dim 0"
            elif self._cut_by_shape(kind, range(1 if is_stack else 0, kind.ndim)) is not None:
                yield "a dim as long as the norms is whole"

    def by_name(self, kind: KindOfTensor, fitting: Fitting) -> tuple[Fitting | None, str]:
        """Return a placement as a name has it that says several tensors in one, and what is open.

        Returns:
            None where the name says so, and nothing tells their sizes.
        """
        placements, note = dict(fitting.placements), ""
        for axis, entry in fitting.placements:
            if EXPERT_AXIS.match(axis) or (kind.ndim == 3 and not entry.dim):
                continue
            if isinstance(entry, RaggedShard):
                if not (GATE_UP.search(kind.name) or QKV.search(kind.name)):
                    continue
                joined = self._uneven_fused(kind, fitting, axis)
                return joined, _BY_NAME if joined else "its name says several in one, cut unevenly"
            rows = kind.local_shape[entry.dim]
            if kind.shape is not None and fitting.padded is None:
                rows = kind.shape[entry.dim] // self.facts.sizes[axis]
            if QKV.search(kind.name) and not GATE_UP.search(kind.name):
                parts = self._query_key_value(kind, axis, rows)
                sizes = "(rows of Q, rows of K, rows of V)"
                note = (
                    f"its name says Q, K and V in one: FusedShard({entry.dim}, {sizes}) over {axis}"
                )
            else:
                parts, note = self._gate_up(kind, axis, entry.dim, rows)
            if parts is None:
                return None, note
            placements[axis] = entry if parts == 1 else FusedShard(entry.dim, parts)
        named = fitting._replace(placements=tuple(placements.items()))
        if named != fitting:
            plain = fitting.text(self.mesh_names)
            is_said = GATE_UP.search(kind.name) or QKV.search(kind.name)
            return named, f"{_BY_NAME if is_said else note}; the shapes fit {plain} as well"
        if not note and _JOINED.search(kind.name) and fitting.placements:
            note = "taken as one tensor by its shape; FusedShard where it joins several"
        return named, note

    def _gate_up(
        self, kind: KindOfTensor, axis: str, dim: int, rows: int
    ) -> tuple[int | None, str]:
        """Return how many tensors a kind joins along its rows, and what is open.

        What gate and up put out has twice the columns of the weight that takes it in.

        Args:
            kind: Weights whose rows an axis cuts.
            axis: The axis.
            dim: The dim of their rows.
            rows: Rows of a shard.

        Returns:
            None where the name says several, and nothing tells their sizes.
        """
        columns, follower = self._columns_behind(kind, axis, dim)
        if GATE_UP.search(kind.name):
            if rows == columns:
                return 1, f"taken as one tensor: {follower} has as many columns as it has rows"
            if rows == 2 * columns or (not columns and rows % 2 == 0):
                return 2, _BY_NAME
            return None, "its name says several in one, and nothing tells their sizes"
        if not columns or rows <= columns:
            return 1, ""
        compared = f"a rank has {rows} rows of it, and {columns} columns of {follower}"
        if rows == 2 * columns and not _NAME_OF_ATTENTION.search(kind.name):
            return 2, f"taken as two in one: {compared}"
        return 1, f"taken as one tensor; FusedShard where it joins several: {compared}"

    def _columns_behind(self, kind: KindOfTensor, axis: str, dim: int) -> tuple[int, str]:
        """Return how many columns a rank has of the weight that takes in what a kind puts out.

        Args:
            kind: Weights whose rows an axis cuts.
            axis: The axis.
            dim: The dim of their rows.

        Returns:
            The most columns of a weight of the same module, and its name; 0 where there is none.
        """
        most = 0, ""
        for other in self._by_module[kind.module]:
            if other.name == kind.name or other.ndim != kind.ndim:
                continue
            fittings = self.fittings(other)[0]
            entry = dict(fittings[0].placements).get(axis) if fittings else None
            if not isinstance(entry, Shard) or entry.dim == dim:
                continue
            if kind.local_shape[entry.dim] == other.local_shape[dim]:
                columns = other.local_shape[entry.dim]
                if other.shape is not None and fittings[0].padded is None:
                    columns = other.shape[entry.dim] // self.facts.sizes[axis]
                most = max(most, (columns, _name_of(other)))
        return most

    def _uneven_fused(self, kind: KindOfTensor, fitting: Fitting, axis: str) -> Fitting | None:
        """Return the placement of joined gate and up whose halves ``torch.chunk`` makes uneven.

        Args:
            kind: The joined tensors.
            fitting: Their placement as one tensor, ragged along the axis.
            axis: The axis that cuts them.

        Returns:
            None where the shards have other sizes, and where others are joined.
        """
        placements, shape = dict(fitting.placements), list(kind.local_shape)
        for name, entry in placements.items():
            is_ragged = isinstance(entry, RaggedShard)
            factor = self.facts.sizes[name]
            shape[entry.dim] = sum(entry.sizes) if is_ragged else shape[entry.dim] * factor
        placements[axis] = FusedShard(placements[axis].dim, 2)
        if not GATE_UP.search(kind.name) or any(
            isinstance(entry, RaggedShard) for entry in placements.values()
        ):
            return None
        return self._of_shape(tuple(shape), kind.held[0], tuple(placements.items()))

    def _query_key_value(
        self, kind: KindOfTensor, axis: str, rows: int
    ) -> int | tuple[int, ...] | None:
        """Return the parts of joined Q, K and V: Q is as large as the input of what follows.

        Args:
            kind: The joined tensors.
            axis: The axis that cuts them.
            rows: Rows of a shard.
        """
        name = kind.names[0]
        match = QKV.search(f".{name}")
        parent = "" if match is None else name[: match.start()]
        size = self.facts.sizes[axis]
        for other in self.kinds:
            names = [name for name in other.names if name.startswith(parent)]
            is_beside = any(name.removeprefix(parent).count(".") < 2 for name in names)
            if is_beside and other.ndim == 2 and other.is_row_parallel:
                query = other.local_shape[self._dims(other, axis)[0]]
                key, rest = divmod(rows - query, 2)
                if rest == 0 and 0 < key <= query:
                    return 3 if key == query else (query * size, key * size, key * size)
        return None


def _penalty(kind: KindOfTensor, axis: str) -> int | None:
    """Return how unlikely an axis cuts a kind, by their names; None for never."""
    is_known = kind.shape is not None
    if PIPELINE_AXIS.match(axis):
        return 5 if is_known else None
    if NAMES_EXPERT.search(kind.name):
        if EXPERT_AXIS.match(axis):
            return 0
        return 3 if DATA_AXIS.match(axis) else 1
    if TENSOR_AXIS.match(axis):
        return 0
    if EXPERT_AXIS.match(axis):
        return 2 if is_known or not COPIED_BY_NAME.search(kind.name) else None
    if DATA_AXIS.match(axis):
        return 4 if is_known else None
    return 1


def is_block_norm(name: str) -> bool:
    """Whether a name is that of a norm of the hidden size.

    >>> is_block_norm("layers.{}.norm.weight"), is_block_norm("layers.{}.attn.q_norm.weight")
    (True, False)
    """
    return _NORM_OF_BLOCK.search(name) is not None


def _name_of(kind: KindOfTensor) -> str:
    return kind.name.replace("{}", "*")


def _shapes_text(shards: Sequence[TensorFacts]) -> str:
    return ", ".join(sorted({str(shard.shape) for shard in shards}))
