"""The data that another process needs to attach a block store, and its protobuf form (`proto/common.proto`)."""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.geometry import KvGeometry, StoreSlice
from alignedserve.proto import common_pb2

HOST = "host"
CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class StoreHandle:
    """A block store by name, place and shape. `common.proto` documents the fields.

    `kind` "host": in `segment` of the node agent at `agent_socket`, blocks beginning at `offset_bytes`; an empty
    `segment` is memory of one process, which no other can attach. `kind` "cuda": on `device`, by `device_handle`.
    `parts`: it consists of these stores (`transfer.parted`); place and kind are those of the first.
    """

    store_id: str
    kind: str
    geometry: KvGeometry
    slice: StoreSlice
    capacity_blocks: int
    node_id: str = ""
    agent_socket: str = ""
    segment: str = ""
    offset_bytes: int = 0
    device: str = "cpu"
    device_handle: bytes = b""
    memory: str = ""
    parts: tuple[StoreHandle, ...] = ()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this store, that is, of its slice, not of the whole model."""
        return slice_block_bytes(self.geometry, self.slice)

    def to_proto(self) -> common_pb2.StoreHandle:
        return common_pb2.StoreHandle(
            store_id=self.store_id,
            kind=self.kind,
            node_id=self.node_id,
            agent_socket=self.agent_socket,
            segment=self.segment,
            offset_bytes=self.offset_bytes,
            capacity_blocks=self.capacity_blocks,
            geometry=geometry_to_proto(self.geometry),
            layer_begin=self.slice.layer_begin,
            layer_end=self.slice.layer_end,
            head_begin=self.slice.head_begin,
            head_end=self.slice.head_end,
            device=self.device,
            device_handle=self.device_handle,
            memory=self.memory,
            parts=[part.to_proto() for part in self.parts],
        )

    @classmethod
    def from_proto(cls, message: common_pb2.StoreHandle) -> StoreHandle:
        return cls(
            store_id=message.store_id,
            kind=message.kind,
            geometry=geometry_from_proto(message.geometry),
            slice=StoreSlice(message.layer_begin, message.layer_end, message.head_begin, message.head_end),
            capacity_blocks=message.capacity_blocks,
            node_id=message.node_id,
            agent_socket=message.agent_socket,
            segment=message.segment,
            offset_bytes=message.offset_bytes,
            device=message.device,
            device_handle=message.device_handle,
            memory=message.memory,
            parts=tuple(cls.from_proto(part) for part in message.parts),
        )


def slice_block_bytes(geometry: KvGeometry, part: StoreSlice) -> int:
    """Bytes of the `part` of one block."""
    layers, heads = part.shape
    return geometry.block_bytes // (geometry.layers * geometry.kv_heads) * layers * heads


def geometry_to_proto(geometry: KvGeometry) -> common_pb2.Geometry:
    return common_pb2.Geometry(
        model=geometry.model,
        dtype=geometry.dtype,
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        block_size=geometry.block_size,
    )


def geometry_from_proto(message: common_pb2.Geometry) -> KvGeometry:
    return KvGeometry(
        model=message.model,
        dtype=message.dtype,
        layers=message.layers,
        kv_heads=message.kv_heads,
        head_dim=message.head_dim,
        block_size=message.block_size,
    )
