"""Operations that are larger than one request to the kernel, and which part of them the kernel is given next."""

from __future__ import annotations

from tiered.bytes.device.in_flight import InFlight

__all__ = ["MOST_REQUESTS", "Requests"]

MOST_REQUESTS = 64
"""How many parts of large operations the kernel may have at a time."""

_MOST_OVERTAKEN = 8


class Requests:
    """Large operations that the kernel has only in part. At most ``depth`` of their parts are with the kernel.

    Operations go in the order of their class, then in that of ``add``. An operation lets at most eight later ones
    overtake it, so that each makes progress. One thread uses it.
    """

    def __init__(self) -> None:
        self.depth = 1
        self._waiting: list[InFlight] = []
        self._num_with_kernel = 0  # parts
        self._num_writing = 0  # of those, writes

    @property
    def num_waiting(self) -> int:
        """How many operations have bytes that the kernel was never given."""
        return len(self._waiting)

    @property
    def can_start(self) -> bool:
        """Whether ``take`` has a part, unless it is a write that waits for calm to end."""
        return bool(self._waiting) and self._num_with_kernel < self.depth

    def add(self, flight: InFlight, request_nbytes: int) -> None:
        """Let ``take`` hand out ``flight`` in parts of at most ``request_nbytes``."""
        flight.request_nbytes = request_nbytes
        flight.left = flight.nbytes
        place = len(self._waiting)
        while place and self._lets_pass(self._waiting[place - 1], flight):
            place -= 1
        if place < len(self._waiting):
            self._waiting[place].num_overtaken += 1
        self._waiting.insert(place, flight)

    def take(self, now: float, *, is_calm: bool) -> InFlight | None:
        """Return the part that the kernel is given next, which is with the kernel then; None: nothing may start.

        While writes are calm (``is_calm``) one part of a write is with the kernel, and reads behind it go on.
        """
        if self._num_with_kernel >= self.depth:
            return None
        for place, whole in enumerate(self._waiting):
            is_write = whole.operation.is_write
            if is_calm and is_write and self._num_writing:
                continue
            part = whole.next_part(now)
            if whole.given == whole.nbytes:
                del self._waiting[place]
            self._num_with_kernel += 1
            self._num_writing += is_write
            return part
        return None

    def end(self, part: InFlight) -> InFlight | None:
        """Take back ``part``, which the kernel has ended; return its operation when that has ended with it.

        After an error the kernel is given no more of the operation.
        """
        whole = part.whole
        assert whole is not None, f"{part.operation!r} was never cut"
        self._num_with_kernel -= 1
        self._num_writing -= whole.operation.is_write
        whole.moved += part.moved
        whole.left -= part.nbytes
        if whole.operation.error is not None and whole.given < whole.nbytes:
            whole.left -= whole.nbytes - whole.given
            whole.given = whole.nbytes
            self._waiting.remove(whole)
        return None if whole.left else whole

    def _lets_pass(self, flight: InFlight, later: InFlight) -> bool:
        return later.io_class < flight.io_class and flight.num_overtaken < _MOST_OVERTAKEN
