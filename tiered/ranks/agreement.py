"""Agreement: every phase that can fail on one rank ends in one, so that all ranks go on or raise the same error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tiered.errors import RankLostError, StepAbandonedError, TieredError
from tiered.ranks.comm_thread import CommThread

__all__ = ["CLASSES", "Agreement", "is_raised_by_all", "raised_by_all"]

_NBYTES = 512  # of an outcome: (whether it failed, its text)
_FAILED, _DONE = b"!", b"."
_BY_ALL = "is_raised_by_all"
_USUAL = (ValueError, TypeError, MemoryError)


class Agreement:
    """The ends of phases: each rank tells its outcome, and no rank returns before all have.

    All ranks return the same outcomes, or raise an error of the same class and text, which names the ranks that
    failed. It owns nothing; collectives go through the comm thread, in its order.
    """

    __slots__ = ("_comm_thread",)

    def __init__(self, comm_thread: CommThread) -> None:
        self._comm_thread = comm_thread

    def agree(self, word: str, outcome: str = "", *, failure: Exception | None = None) -> tuple[str, ...]:
        """Return the outcomes of all ranks for the phase ``word``, in their order; blocks for all ranks.

        ``failure`` is this rank's error, which stands in place of an outcome. ``outcome`` has at most 511 bytes in
        UTF-8. Raises ValueError for a longer one; an error of the class of the first rank's that failed (TieredError
        where that is none of tiered's or a usual one); RankLostError, StepAbandonedError, UsageError.
        """
        if len(outcome.encode()) >= _NBYTES:
            raise ValueError(f"agreement on {word!r}: expected an outcome of at most {_NBYTES - 1} bytes")
        text = _FAILED + _text(failure) if failure is not None else _DONE + outcome.encode()
        payload = text[:_NBYTES].ljust(_NBYTES, b"\0")
        told = self._comm_thread.agree(word, payload).wait()
        failed = [(rank, _plain(each[1:])) for rank, each in enumerate(told) if each[:1] == _FAILED]
        if failed:
            raise raised_by_all(_error(word, failed)) from failure
        return tuple(_plain(each[1:]) for each in told)

    @contextmanager
    def phase(self, word: str) -> Iterator[None]:
        """``with agreement.phase("open"):`` ends the block with an agreement: an error on one rank is one on all.

        Agreements inside of the block have the same ``word``: so it does not matter how far a rank has come that fails.
        Where the block ends by an interrupt, or by what another rank has done, the error goes on at once; the other
        ranks are told that this one has abandoned the phase. The error of an agreement in the block goes on as it is.
        """
        try:
            yield
        except (RankLostError, StepAbandonedError):
            raise
        except Exception as failure:
            if is_raised_by_all(failure):
                raise
            self.agree(word, failure=failure)
        except BaseException as interrupt:
            self._comm_thread.abandon(f"{type(interrupt).__name__} in {word}")
            raise
        else:
            self.agree(word)


def raised_by_all(error: Exception) -> Exception:
    """Return ``error``, which all ranks are about to raise: a phase around it has nothing to tell."""
    vars(error)[_BY_ALL] = True
    return error


def is_raised_by_all(error: BaseException) -> bool:
    """Return whether all ranks raise ``error``."""
    return _BY_ALL in vars(error)


def _text(failure: Exception) -> bytes:
    return f"{type(failure).__name__}\n{failure}".encode(errors="replace")


def _plain(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="ignore")  # a cut may have struck inside a letter


def _error(word: str, failed: Sequence[tuple[int, str]]) -> Exception:
    """Return the error that all ranks raise for the ranks and texts of ``failed``."""
    parts = [(rank, *text.partition("\n")) for rank, text in failed]
    name = parts[0][1]
    message = "; ".join(
        f"rank {rank}: {text if name in CLASSES else f'{name}: {text}'}" for rank, name, _, text in parts
    )
    return CLASSES.get(name, TieredError)(f"{word} failed on {len(failed)} of the ranks: {message}")


def _classes(base: type[Exception]) -> dict[str, type[Exception]]:
    """Return ``base`` and the classes below it by their names."""
    below = [found for each in base.__subclasses__() for found in _classes(each).items()]
    return {base.__name__: base, **dict(below)}


CLASSES = _classes(TieredError) | {each.__name__: each for each in _USUAL}
"""The errors that all ranks raise where one does, by the names of their classes."""
