"""What tools ask of a `jax.Array` beyond its value: where it is, how large, whether it lives. Answered by the parts."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import jax
import jax.tree_util as jtu

from eformer._jax import avals


class ImplicitShard(NamedTuple):
    """What one device holds of an implicit array."""

    device: Any
    data: Any
    replica_id: int


class Placement:
    """Methods and properties that an implicit array answers for all its parts together."""

    def _parts(self) -> list[jax.Array]:
        return [leaf for leaf in jtu.tree_leaves(self) if isinstance(leaf, jax.Array)]

    def delete(self) -> None:
        """Free the device memory of the stored arrays at once. The array cannot be used afterwards."""
        for part in self._parts():
            part.delete()

    def is_deleted(self) -> bool:
        return any(part.is_deleted() for part in self._parts())

    @property
    def device(self) -> Any:
        """The device that holds it, or the sharding of what it stores first where there are several."""
        parts = self._parts()
        return parts[0].device if parts else None

    def to_device(self, device: Any, *, stream: Any = None) -> Any:
        """A copy with all its parts on another device, or split as a sharding of the array itself says."""
        if isinstance(device, jax.sharding.NamedSharding) and hasattr(self, "with_sharding"):
            return self.with_sharding(device)  # pyright: ignore[reportAttributeAccessIssue]
        if stream is not None:
            raise ValueError(f"stream={stream!r} is not supported; leave it out.")
        return split_as(jtu.tree_map(lambda part: jax.device_put(part, device), self), None)

    @property
    def is_fully_addressable(self) -> bool:
        return all(part.is_fully_addressable for part in self._parts())

    @property
    def is_fully_replicated(self) -> bool:
        return all(part.is_fully_replicated for part in self._parts())

    @property
    def committed(self) -> bool:
        return all(part.committed for part in self._parts())

    @property
    def addressable_shards(self) -> list[ImplicitShard]:
        """What every device of this process holds, packed."""
        leaves, treedef = jtu.tree_flatten(self)
        shards = zip(*(leaf.addressable_shards for leaf in leaves), strict=True)
        parts = [(s[0], treedef.unflatten([x.data for x in s])) for s in shards]
        return [ImplicitShard(first.device, split_as(data, None), first.replica_id) for first, data in parts]

    def addressable_data(self, index: int) -> Any:
        return self.addressable_shards[index].data

    def on_device_size_in_bytes(self) -> int:
        return sum(map(avals.bytes_on_device, self._parts()))

    def copy_to_host_async(self) -> None:
        for part in self._parts():
            part.copy_to_host_async()

    def __dlpack__(self, **options: Any) -> NoReturn:
        raise BufferError(
            f"{self!r} is stored as {len(self._parts())} packed arrays, and DLPack hands over one dense buffer. Give "
            "materialize() of it, or one of the arrays it stores."
        )

    def __dlpack_device__(self) -> NoReturn:
        self.__dlpack__()


def split_as(q: Any, sharding: jax.sharding.NamedSharding | None) -> Any:
    """`q` after its parts were split so, or put on one device (None): types that remember how they are split say it."""
    keyed, aux = q.tree_flatten_with_keys()
    alike = [sharding is None or getattr(child, "shape", None) == q.shape for _, child in keyed]
    pairs = zip((child for _, child in keyed), alike, strict=True)
    children = [split_as(child, sharding) if same and isinstance(child, Placement) else child for child, same in pairs]
    q = q.tree_unflatten(aux, children)
    return q.replaced(sharding=sharding) if hasattr(q, "replaced") else q
