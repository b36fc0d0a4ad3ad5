"""PyTorch's CUDA caching allocator under default settings, block by block, without a GPU.

Segments are bought from the device (``cudaMalloc``), cut into blocks, and kept when their blocks are freed. A request
is rounded to 512 bytes and served by the smallest free block of its pool and stream that holds it, the lowest address
among equals; a large block is cut only where more than 1 MiB would be left over, so an uncut remainder counts as
allocated. A segment and every block cut from it belong to the stream it was bought on; only where the device is full
are the free segments of all streams given back.

Source: pytorch/pytorch c10/cuda/CUDACachingAllocator.cpp (``round_size``, ``get_free_block``, ``should_split``,
``get_allocation_size``, ``try_merge_blocks``, ``release_cached_blocks``). Not modelled: expandable segments, private
pools of CUDA graphs, ``max_split_size``, ``roundup_power2_divisions`` and garbage collection, all off by default; and
``record_stream``, which keeps a freed block until another stream is done with it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import NamedTuple

BLOCK_BYTES = 512  # every block is a multiple of it
SMALL_BYTES = 2**20  # the largest request served by the small pool; the largest remainder left uncut in the large one
SMALL_SEGMENT_BYTES = 2 * 2**20
LARGE_SEGMENT_BYTES = 20 * 2**20
LARGE_REQUEST_BYTES = 10 * 2**20  # from here on a request gets a segment of its own
SEGMENT_ROUNDING_BYTES = 2 * 2**20

_ADDRESS_BITS = 48
_ADDRESS_MASK = (1 << _ADDRESS_BITS) - 1


class OutOfMemoryError(Exception):
    """A request that the device cannot serve even after every cached segment was freed.

    Attributes
    ----------
    requested_bytes : int
        What was asked for.
    allocated_bytes, reserved_bytes : int
        What the allocator held then.
    limit_bytes : int
        The most that it may reserve.
    stream : int
        The stream on which it was asked for.
    """

    def __init__(
        self, requested_bytes: int, allocated_bytes: int, reserved_bytes: int, limit_bytes: int, stream: int = 0
    ) -> None:
        super().__init__(
            f"{requested_bytes} bytes asked, {allocated_bytes} allocated, {reserved_bytes} of {limit_bytes} reserved"
        )
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.limit_bytes = limit_bytes
        self.stream = stream


class Block(NamedTuple):
    """A piece of a segment.

    requested_bytes: 0 if free. state: ``active_allocated`` or ``inactive``, as torch's snapshots say.
    """

    address: int
    bytes: int
    requested_bytes: int
    state: str


class SegmentState(NamedTuple):
    """A segment, the result of one ``cudaMalloc``, and its blocks.

    pool: ``small`` or ``large``. blocks: by address; they cover the segment whole.
    """

    address: int
    bytes: int
    stream: int
    pool: str
    blocks: tuple[Block, ...]


class SegmentEvent(NamedTuple):
    """A segment bought (``segment_alloc``) or given back (``segment_free``)."""

    action: str
    address: int
    bytes: int
    stream: int


def segment_bytes(block_bytes: int) -> int:
    """The segment bought where no free block holds a block of ``block_bytes``.

    >>> [segment_bytes(n) // 2**20 for n in (512, 2**20, 2**20 + 512, 10 * 2**20, 21 * 2**20)]
    [2, 2, 20, 10, 22]
    """
    if block_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < LARGE_REQUEST_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-block_bytes // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES


class DeviceAddresses:
    """The addresses at which the device puts segments.

    The first HOLE_BYTES go side by side upwards; then the driver hands out reservations of a multiple of 32 MiB, each
    below the last, and a segment that fits into what an earlier one left of its reservation goes there. Only the order
    matters, and only where free blocks of equal size compete; it moved a peak by at most 0.2 % in recorded steps.
    Fitted to the segment addresses of recorded steps; a process with other libraries loaded has other holes.
    """

    HOLE_BYTES = 448 * 2**20
    RESERVATION_BYTES = 32 * 2**20
    TOP = 2**46

    def __init__(self) -> None:
        self._next_in_hole = self.TOP
        self._lowest = self.TOP
        self._gaps: list[tuple[int, int]] = []  # (bytes, address), sorted

    def place(self, size_bytes: int) -> int:
        """The address of a new segment."""
        address = self._next_in_hole
        if address + size_bytes <= self.TOP + self.HOLE_BYTES:
            self._next_in_hole += size_bytes
            return address
        index = bisect_left(self._gaps, (size_bytes, 0))
        if index < len(self._gaps):
            gap_bytes, address = self._gaps.pop(index)
        else:
            gap_bytes = -(-size_bytes // self.RESERVATION_BYTES) * self.RESERVATION_BYTES
            self._lowest -= gap_bytes
            address = self._lowest
        if gap_bytes > size_bytes:
            insort(self._gaps, (gap_bytes - size_bytes, address + size_bytes))
        return address

    def give_back(self, address: int, size_bytes: int) -> None:
        """Make the room of a released segment available again."""
        insort(self._gaps, (size_bytes, address))


class CachingAllocator:
    """The allocator of one device.

    Parameters
    ----------
    limit_bytes : int, optional
        The most it may reserve: device memory less what the context and others hold. None: no limit.
    place : callable, optional
        Gives the address of a new segment from its bytes, where the true addresses are known (a recording). Default:
        :class:`DeviceAddresses`.

    Attributes
    ----------
    allocated_bytes, reserved_bytes : int
        Of blocks handed out (uncut remainders included), and of segments.
    peak_allocated_bytes, peak_reserved_bytes : int
        The largest since the start or :meth:`reset_peaks`.
    retries : int
        Times the device had no room and every cached segment was given back, which waits for the whole device.
    segment_log : list of SegmentEvent
        What was bought and given back, in order.

    Examples
    --------
    >>> allocator = CachingAllocator()
    >>> address = allocator.allocate(3 * 2**20)
    >>> allocator.allocated_bytes, allocator.reserved_bytes
    (3145728, 20971520)
    """

    def __init__(self, limit_bytes: int | None = None, place: Callable[[int], int] | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.retries = 0
        self.segment_log: list[SegmentEvent] = []
        self._addresses = DeviceAddresses()
        self._place = self._addresses.place if place is None else place
        self._segments: dict[int, tuple[int, int]] = {}  # address: bytes, stream
        self._free_blocks: dict[int, tuple[list[int], list[int]]] = {}  # stream: sorted (bytes, address) keys by pool
        self._free_bytes: dict[int, int] = {}  # first byte of a free block: its bytes
        self._free_start: dict[int, int] = {}  # byte after a free block: its first
        self._held: dict[int, tuple[int, int, int]] = {}  # address: bytes, requested bytes, stream

    def allocate(self, requested_bytes: int, stream: int = 0) -> int:
        """The address of a block that holds ``requested_bytes``, from the pool of ``stream`` (the current one).

        Raises
        ------
        OutOfMemoryError
            If the device has no room even after the cached segments were given back.
        """
        size = (requested_bytes + 511) & -512 or BLOCK_BYTES
        pools = self._free_blocks.get(stream)
        if pools is None:
            pools = self._free_blocks[stream] = ([], [])
        small = size <= SMALL_BYTES
        free_blocks = pools[0] if small else pools[1]
        index = bisect_left(free_blocks, size << _ADDRESS_BITS)
        if index < len(free_blocks):
            key = free_blocks.pop(index)
            block_bytes = key >> _ADDRESS_BITS
            address = key & _ADDRESS_MASK
            del self._free_bytes[address]
            del self._free_start[address + block_bytes]
        else:
            block_bytes = segment_bytes(size)
            address = self._buy_segment(block_bytes, stream, requested_bytes)
        remainder = block_bytes - size
        if remainder > SMALL_BYTES or (small and remainder):
            start = address + size
            insort(free_blocks, remainder << _ADDRESS_BITS | start)
            self._free_bytes[start] = remainder
            self._free_start[address + block_bytes] = start
            block_bytes = size
        self._held[address] = (block_bytes, requested_bytes, stream)
        self.allocated_bytes += block_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return address

    def free(self, address: int) -> None:
        """Return the block at ``address`` to the pool of its own stream, at once.

        That is what torch does unless ``record_stream`` named another stream, which is not modelled.
        """
        block_bytes, _, stream = self._held.pop(address)
        self.allocated_bytes -= block_bytes
        self._return_block(address, block_bytes, stream)

    def empty_cache(self) -> None:
        """Wait for the device and give every wholly free segment back to it."""
        for address, (size, stream) in list(self._segments.items()):
            if self._free_bytes.get(address) == size:
                self._take_free(address, size, stream)
                del self._segments[address]
                self.reserved_bytes -= size
                self.segment_log.append(SegmentEvent("segment_free", address, size, stream))
                self._addresses.give_back(address, size)

    def reset_peaks(self) -> None:
        """Start the peaks again from what is held now (``torch.cuda.reset_peak_memory_stats``)."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def block_bytes(self, address: int) -> int:
        """Size of the block handed out at ``address``."""
        return self._held[address][0]

    def segments(self) -> tuple[SegmentState, ...]:
        """Every segment with its blocks, by address."""
        return tuple(self._segment_state(address) for address in sorted(self._segments))

    def _buy_segment(self, size: int, stream: int, requested_bytes: int) -> int:
        if self.limit_bytes is not None and self.reserved_bytes + size > self.limit_bytes:
            self.retries += 1
            self.empty_cache()
            if self.reserved_bytes + size > self.limit_bytes:
                raise OutOfMemoryError(
                    requested_bytes, self.allocated_bytes, self.reserved_bytes, self.limit_bytes, stream
                )
        address = self._place(size)
        self._segments[address] = (size, stream)
        self.segment_log.append(SegmentEvent("segment_alloc", address, size, stream))
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return address

    def _return_block(self, address: int, block_bytes: int, stream: int) -> None:
        free_blocks = self._free_blocks[stream][block_bytes > SMALL_BYTES]
        end = address + block_bytes
        if address not in self._segments:
            start = self._free_start.pop(address, -1)
            if start >= 0:
                size = address - start
                del free_blocks[bisect_left(free_blocks, size << _ADDRESS_BITS | start)]
                address = start
        if end not in self._segments:
            size = self._free_bytes.pop(end, 0)
            if size:
                del free_blocks[bisect_left(free_blocks, size << _ADDRESS_BITS | end)]
                end += size
        size = end - address
        self._free_bytes[address] = size
        self._free_start[end] = address
        insort(free_blocks, size << _ADDRESS_BITS | address)

    def _take_free(self, address: int, size: int, stream: int) -> None:
        small, large = self._free_blocks[stream]
        free_blocks = small if size <= SMALL_SEGMENT_BYTES else large
        del free_blocks[bisect_left(free_blocks, size << _ADDRESS_BITS | address)]
        del self._free_bytes[address], self._free_start[address + size]

    def _segment_state(self, address: int) -> SegmentState:
        size, stream = self._segments[address]
        blocks, position = [], address
        while position < address + size:
            block = self._block_at(position)
            blocks.append(block)
            position += block.bytes
        return SegmentState(address, size, stream, "small" if size == SMALL_SEGMENT_BYTES else "large", tuple(blocks))

    def _block_at(self, address: int) -> Block:
        if address in self._held:
            return Block(address, *self._held[address][:2], "active_allocated")
        return Block(address, self._free_bytes[address], 0, "inactive")
