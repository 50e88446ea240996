"""Every name of torch that is private, or is not documented: imported here and nowhere else.

A new torch breaks this file only. Its functions are thin wrappers and make no decisions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import WriteItem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.default_planner import (
    _EmptyStateDictLoadPlanner as WholeFileLoadPlanner,
)
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    DEFAULT_SUFFIX,
    SerializationFormat,
    _OverlappingCpuLoader,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.filesystem import _StoragePrefix as StoragePrefix
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormat
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list as chunk_list
from torch.distributed.checkpoint.planner_helpers import _create_write_items as default_write_items
from torch.distributed.checkpoint.state_dict_saver import (
    _stateful_to_state_dict as state_dicts_of_statefuls,
)
from torch.distributed.checkpoint.utils import _DistWrapper as DistWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.serialization import _get_layout
from torch.torch_version import TorchVersion

__all__ = [
    "CURRENT_DCP_VERSION",
    "DEFAULT_SUFFIX",
    "DistWrapper",
    "MemoryFormat",
    "SerializationFormat",
    "ShardedTensor",
    "StorageInfo",
    "StoragePrefix",
    "StridedShard",
    "WholeFileLoadPlanner",
    "chunk_list",
    "default_write_items",
    "flatten_state_dict",
    "narrow_tensor_by_index",
    "rehearsed",
    "state_dicts_of_statefuls",
    "traverse_state_dict",
]

T = TypeVar("T")

layout_named: Callable[[str], torch.layout] = _get_layout
"""Returns the layout of a name such as ``torch.strided``."""

Seam = tuple[ModuleType, str]
"""A global of one of torch's modules, which the functions there look up at each call."""

SAVE: Seam = (state_dict_saver, "_save_state_dict")
"""Behind ``save`` and ``save_state_dict``; takes ``planner`` and ``storage_writer``."""
LOAD: Seam = (state_dict_loader, "_load_state_dict")
"""Behind ``load`` and ``load_state_dict``; takes ``planner`` and ``storage_reader``."""
ASYNC_EXECUTORS: tuple[Seam, ...] = (
    (state_dict_saver, "_ThreadBasedAsyncCheckpointExecutor"),
    (state_dict_saver, "_ProcessBasedAsyncCheckpointExecutor"),
)
"""Behind ``async_save``: classes whose ``execute_save`` takes ``planner``."""
HUGGING_FACE_DATA = {"fqn_to_index_mapping", "shard_index"}
"""What ``HuggingFaceStorageWriter`` puts into a plan's ``storage_data``."""
ASYNC_THREAD = "AsyncCheckpointExecutor"
"""How the names of the threads begin in which ``async_save`` calls ``save``."""


PLAIN_TYPES = torch.Tensor, torch.nn.Parameter, torch.nn.Buffer
"""Types of tensors without behaviour of their own; most tensors, so they are tested first."""


_recorded_meshes: dict[DeviceMesh, None] = {}
"""Equal meshes once, in the order in which they were made."""


def record_meshes() -> None:
    """Record each ``DeviceMesh`` that this process makes from now on, and keep it.

    Slicing and flattening make one, too. The initialiser stays replaced.
    """
    initialize: Any = DeviceMesh.__init__

    @wraps(initialize)
    def initialize_and_record(mesh: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        initialize(mesh, *args, **kwargs)
        _recorded_meshes.setdefault(mesh)

    setattr(DeviceMesh, "__init__", initialize_and_record)  # noqa: B010 (mypy)


def recorded_meshes() -> list[DeviceMesh]:
    """Return the meshes that have been made since ``record_meshes`` was called; else none."""
    return list(_recorded_meshes)


def are_plain(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether tensors are nothing but elements in memory, which any write may change."""
    return all(
        [
            type(tensor) is torch.Tensor
            and not (tensor.requires_grad or tensor.is_quantized or tensor.is_inference())
            and not (tensor.is_neg() or tensor.is_conj())
            for tensor in tensors
        ]
    )


def copy_all(
    targets: list[torch.Tensor], values: tuple[torch.Tensor, ...], *, is_plain: bool
) -> None:
    """Copy each value into its target; thousands of plain ones in a third less time.

    Args:
        targets: The targets.
        values: One per target, of its shape; none is negated.
        is_plain: The result of ``are_plain`` for the targets.
    """
    if is_plain:
        torch._foreach_copy_(targets, values)
        return
    for target, value in zip(targets, values, strict=True):
        copy_into(target, value)


def copy_into(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value into a target.

    Across dtypes, torch 2.13 ignores that a tensor is negated lazily. A view of an inference tensor
    cannot be written, not even after ``detach()``.
    """
    value = value.resolve_neg()
    if target.is_neg():
        value = value.to(target.dtype)
    if target.is_inference():
        target = target.detach()
    target.copy_(value)


def is_dtensor_like(value: Any) -> bool:
    """Whether ``value`` is a DTensor, or has the attributes that this package uses of one."""
    if type(value) in PLAIN_TYPES:
        return False
    return isinstance(value, DTensor) or (
        not isinstance(value, torch.Tensor | ShardedTensor)
        and all(hasattr(value, name) for name in ("to_local", "device_mesh", "placements", "shape"))
    )


def has_hooks(value: Any) -> bool:
    """Whether ``value`` creates its own write items for DCP (``__create_write_items__``)."""
    if isinstance(value, DTensor):
        return hasattr(value._local_tensor, "__create_write_items__")
    own = hasattr(value, "__create_write_items__")
    return own or (type(value) not in PLAIN_TYPES and isinstance(value, ShardedTensor))


def is_made_of_others(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a wrapper of others, as of codes and scales; a DTensor is one, too."""
    return hasattr(tensor, "__tensor_flatten__")


def components(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a wrapper of others consists of."""
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # type: ignore[attr-defined]


def is_on_meta(value: Any) -> bool:
    """Whether a value is a tensor without memory; of a ``ShardedTensor``, any of its shards."""
    if type(value) is DTensor:  # as its local tensor, which says so in a quarter of the time
        value = value._local_tensor
    if type(value) not in PLAIN_TYPES and isinstance(value, ShardedTensor):
        return any([shard.tensor.is_meta for shard in value.local_shards()])
    return bool(getattr(value, "is_meta", False))


Facts = tuple[torch.Tensor, Any, tuple[Any, ...], torch.Size]
"""The local tensor, mesh, placements and shape of a DTensor; a plain tensor has no mesh."""


def facts_of(value: Any) -> Facts:
    """Return the facts of a tensor or DTensor-like; the local tensor is not a copy."""
    if type(value) is DTensor:
        # A plan reads thousands of tensors: the properties would double its time.
        spec, local = value._spec, value._local_tensor
        if type(local) is torch.Tensor and spec.tensor_meta is not None:
            return local, spec.mesh, spec.placements, spec.tensor_meta.shape
    if not is_dtensor_like(value):
        return value, None, (), value.shape
    with torch.no_grad():
        local = value.to_local()
    wait = getattr(local, "wait", None)
    local = local if wait is None else wait()
    return local, value.device_mesh, tuple(value.placements), torch.Size(value.shape)


def storage_key(tensor: torch.Tensor) -> int | None:
    """Return a number that tensors of one storage have in common, also without elements.

    Only tensors that live at the same time are compared by it.

    Returns:
        None for a tensor without a storage, as a wrapper subclass and a sparse one.
    """
    try:
        return int(tensor.untyped_storage()._cdata)
    except RuntimeError:
        return None


RANK = "_rank"
"""The attribute of a saved ``DeviceMesh`` that has its rank."""

SPEC = "_spec"
"""The attribute of a saved DTensor that has its mesh and placements."""


def set_up_by_torch(kind: Any, ours: Any, state_dict: dict[str, Any]) -> Any:
    """Return torch's planner, set up with the options of ours and a state dict.

    Its walk for ``ShardedTensor``s is left out where it would change nothing: in a flat state dict
    without any.
    """
    stock = kind(flatten_state_dict=ours.flatten_state_dict, flatten_sharded_tensors=False)
    stock.set_up_planner(state_dict)
    types = set(map(type, stock.state_dict.values()))
    has_sharded = any([issubclass(value_type, ShardedTensor) for value_type in types])
    if ours.flatten_sharded_tensors and (has_sharded or not ours.flatten_state_dict):
        stock.flatten_sharded_tensors = True
        stock.set_up_planner(state_dict)
    return stock


def without_class(data: Any) -> Any:
    """Return a tensor of a subclass with ordinary elements as a plain tensor.

    Tensors with their class are stored in a way that no reader accepts.
    """
    kind = type(data)
    has_class = kind not in (torch.Tensor, torch.nn.Parameter) and isinstance(data, torch.Tensor)
    if has_class and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return data.as_subclass(torch.Tensor)
    return data


_REHEARSED: ContextVar[tuple[int, int] | None] = ContextVar("rehearsed", default=None)


@contextmanager
def rehearsed(rank: int, size: int) -> Iterator[None]:
    """Be a rank of a world that does not run, in this thread."""
    token = _REHEARSED.set((rank, size))
    try:
        yield
    finally:
        _REHEARSED.reset(token)


def global_rank() -> int:
    """Return this process's rank; 0 without a process group."""
    if (rehearsed_rank := _REHEARSED.get()) is not None:
        return rehearsed_rank[0]
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes; 1 without a process group."""
    if (rehearsed_rank := _REHEARSED.get()) is not None:
        return rehearsed_rank[1]
    return dist.get_world_size() if dist.is_initialized() else 1


def root_mesh(mesh: Any) -> Any:
    """Return the mesh that a mesh was sliced from; the mesh itself if it does not tell."""
    return mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh


def named_axes(meshes: Iterable[Any]) -> dict[str, tuple[int, int]]:
    """Return ``{name: (position, size)}`` of the axes of meshes and of their root meshes."""
    axes: dict[str, tuple[int, int]] = {}
    meshes = list(meshes)
    for mesh in (*map(root_mesh, meshes), *meshes):
        coordinate = mesh.get_coordinate()
        if coordinate is not None and mesh.mesh_dim_names:
            axes.update(
                zip(mesh.mesh_dim_names, zip(coordinate, mesh.shape, strict=True), strict=True)
            )
    return axes


def agreeing_device(process_group: dist.ProcessGroup | None) -> torch.device:
    """Return the device whose tensors the ranks of a process group send to each other."""
    # Such as "cpu:gloo,cuda:nccl".
    config = dist.get_backend_config(process_group).split(",")
    backends = dict(device_backend.split(":") for device_backend in config)
    accelerator = torch.accelerator.current_accelerator()
    # Gloo takes a GPU's tensors in some collectives, but cannot send them to one rank.
    if accelerator is not None and backends.get(accelerator.type, "gloo") != "gloo":
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


def logged_where_torch_drops_it(read_metadata: Callable[..., T]) -> Callable[..., T]:
    """Return a reader's ``read_metadata`` that logs its errors where a load drops them.

    Before torch 2.13 a load raises "metadata is None" in place of any such error.
    """
    if TorchVersion(torch.__version__) >= "2.13":
        return read_metadata

    @wraps(read_metadata)
    def logged(*args: Any, **kwargs: Any) -> T:
        try:
            return read_metadata(*args, **kwargs)
        except Exception as error:
            logging.getLogger(read_metadata.__module__).error("%s", error)
            raise

    return logged


def cpu_tensors(
    items: list[WriteItem],
    nbytes_of: Callable[[WriteItem], int],
    resolve: Callable[[WriteItem], Any],
    *,
    threads: int,
    ahead_nbytes: int,
) -> Iterator[tuple[torch.Tensor, WriteItem]]:
    """Yield the tensors of ``items`` on the CPU.

    With an accelerator and one thread, as in torch's writer, copies to the CPU overlap with
    writing, and the smallest tensors come first.
    """
    backend = getattr(torch, torch._C._get_privateuse1_backend_name(), None)
    accelerated = torch.cuda.is_available() or (backend is not None and backend.is_available())
    if threads > 1 or not accelerated or ahead_nbytes <= 0:
        return ((resolve(item).detach().cpu(), item) for item in items)
    loader: Any = _OverlappingCpuLoader(resolve, inflight_threshhold=ahead_nbytes)
    for item in items:
        loader.add(nbytes_of(item), item)
    loader.start_loading()
    return loader.values()  # type: ignore[no-any-return]


def check_opens(stream: Any) -> None:
    """Open a zip file as ``torch.load`` does, and find its entries.

    Raises:
        RuntimeError: Torch refuses it.
    """
    reader: Any = torch._C.PyTorchFileReader(stream)
    for name in reader.get_all_records():
        reader.get_record_offset(name)
