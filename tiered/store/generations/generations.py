"""Generations: the order of things in commit, rollback, resume and the last commit of close.

The state that rides along (registered objects, the caller's state) and the guards, which are asked first, are here.
commit.py makes bytes durable. A committed key whose bytes are damaged is found in streaming.py and dropped here, if
the caller named it and it is damaged now.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from tiered.errors import DeadlineError, TieredError, UsageError
from tiered.store.format.root import Root
from tiered.store.generations.commit import Attempt, Committer
from tiered.store.generations.registry import Registry, committed_state, encode_user_state
from tiered.store.lifetime.opening import Parts
from tiered.store.residency.residency import Residency
from tiered.store.values.streaming import StreamedValues
from tiered.store.waiting.calling_thread import this_thread
from tiered.store.waiting.deferred_seal import Producers

__all__ = ["Generations", "drop_damaged"]


_log = logging.getLogger("tiered")


class Generations:
    """The commits of one store. Without a catalog (``durable=False``) there are none, and asking for one raises.

    One call at a time seals or rolls back. Guards and registered objects are called without the store's lock.
    """

    def __init__(self, working_set: Residency, parts: Parts, root: Root, producers: Producers) -> None:
        self.guards: list[Callable[[str], None]] = []
        self.returning: list[Callable[[], AbstractContextManager[None]]] = []  # around the load of a committed state
        self.producers = producers
        self._working_set = working_set
        self._refusals = working_set.refusals
        self._committer = None if parts.catalog is None else Committer(working_set, parts, parts.catalog, root)
        self._user_text = encode_user_state(committed_state(root.state)[0])  # order: it checks the text
        self.registry = Registry(root.state)
        self._confirmation = parts.confirmation
        self._root = root
        self._turn = threading.RLock()  # reentrant: loading a state may ask for one of these again
        self.withheld_for = ""  # why a close must not commit, as a guard has said

    @property
    def root(self) -> Root:
        """The root of the last committed generation."""
        return self._root if self._committer is None else self._committer.root

    @property
    def num_commits(self) -> int:
        return 0 if self._committer is None else self._committer.num_commits

    @property
    def catalog_write_bytes(self) -> int:
        return 0 if self._committer is None else self._committer.catalog_write_bytes

    def commit(self, state: Mapping[str, Any] | None, *, wait: bool) -> int:
        """Seal, start to flush, and return the generation's number.

        Without ``wait`` a busy producer seals at the end of its work. Registered objects are encoded now either way.
        """
        committer = self._ready("commit")
        with committer.attempt(self.registry.steps()) as attempt:
            self._ask("commit")
            with self._turn:
                return self._commit(committer, attempt, state, wait=wait)

    def _commit(self, committer: Committer, attempt: Attempt, state: Mapping[str, Any] | None, *, wait: bool) -> int:
        self._working_set.await_seal()
        user_text = self._user_text if state is None else encode_user_state(state)
        text = self.registry.encode(user_text)
        committer.measure(text)  # order: before anything is sealed, or announced

        def seal() -> int:
            with self._working_set.mark:
                generation = committer.start(text, attempt)
                self._user_text = user_text
                return generation

        with self._working_set.mark:
            producer = None if wait else self.producers.busy_one()
            generation = 0 if producer is None else committer.defer(seal, producer, attempt)
            if generation:
                return generation
            self.producers.finish_all()
        return seal()

    def refuse_company(self, operation: str) -> None:
        """Raise UsageError unless the store is as it was opened: nothing registered, guarded or changed."""
        self._ready(operation)
        self.wait()
        if self.registry or self.guards or self._working_set.has_changes:
            raise UsageError(
                f"{operation}: something is registered, or has changed since generation"
                f" {self._working_set.generation}; open the store for this alone"
            )

    def commit_as_is(self, text: str | None = None) -> int:
        """Seal the keys as they are with ``text``, or exactly that of the last commit, and start to flush."""
        with self._turn, self._working_set.mark:
            committer = self._ready("commit")
            with committer.attempt(self.registry.steps()) as attempt:
                return committer.start(self.root.state if text is None else text, attempt)

    def take_over(self, text: str) -> None:
        """Commit the keys as they are with ``text``, the state of another set of ranks; wait until it is durable."""
        self.commit_as_is(text)
        self.wait()
        self._user_text = encode_user_state(committed_state(text)[0])
        self.registry.carry(text)

    def wait(self) -> None:
        """Wait for the running commit, sealed or about to be, and raise if it failed."""
        with self._working_set.mark:
            self._working_set.await_seal()
            if self._committer is not None:
                self._committer.wait()
        self._refusals.refuse()

    def roll_back(self) -> None:
        """Return to the last sealed generation, all that is registered included."""
        committer = self._ready("rollback")
        self._ask("rollback")
        with self._turn:
            self.wait()
            user, registered = committed_state(committer.root.state)
            if self.registry and not committer.root.generation:
                raise UsageError("rollback: nothing was committed yet, so what is registered has no state to return to")
            self.registry.check(registered, committer.root.generation)
            self._return(committer, user)
            self._load(registered)

    def resume(self) -> dict[str, Any]:
        """Load the last committed generation into all that is registered; return the caller's state."""
        committer = self._ready("resume")
        self._ask("resume")
        with self._turn:
            self.wait()
            if not committer.root.generation:
                return {}
            user, registered = committed_state(committer.root.state)
            self.registry.check(registered, committer.root.generation)
            if self._working_set.has_changes:
                self._return(committer, user)
            self._load(registered)
            return user

    def _return(self, committer: Committer, user: Mapping[str, Any]) -> None:
        """Return to the bytes and the states of the last sealed generation."""
        with self._working_set.mark:
            committer.roll_back()
            self._user_text = encode_user_state(user)
            self.registry.carry(committer.root.state)

    def _load(self, registered: Mapping[str, Any]) -> None:
        with ExitStack() as stack:
            for returning in self.returning:
                stack.enter_context(returning())
            self.registry.load(registered)

    def drop_state(self, name: str) -> None:
        """Leave the state committed under ``name`` out of the next commit."""
        self._ready("drop_state")
        with self._turn:
            self.registry.drop(name)

    def finish(self, *, commit: bool) -> Exception | None:
        """Close: ask the guards, commit the changes if that is wanted; return why it did not happen."""
        failure: Exception | None = None
        try:
            with self._working_set.condition:
                self._working_set.forget_failure()  # order: before the guards, which use the store
                self._working_set.condition.notify_all()  # who waits looks whether a mark stays
            failure = self._end_all()
            if self._committer is not None:
                self._committer.wait()
            if self._committer is not None and this_thread() not in self._refusals.told and failure is None:
                self._refusals.refuse()
                if commit and not self._refusals.is_read_only:
                    self._commit_last(self._committer)
            elif commit and self._committer is not None and failure is not None:
                self._confirmation.is_to_commit_at_end(False, failure)  # order: or the others would wait for this one
        except Exception as error:  # of any kind: the store closes
            failure = failure or error
        with self._working_set.condition:  # order: not after an interrupt; a close that comes again has it all to do
            self._working_set.is_ending = True  # order: a change that comes later is told that it is too late
        self.report_dropped()
        try:
            if failure is None and self._committer is not None:
                self._committer.wait()  # order: no other can be sealed by now; one that another thread has sealed ends
        except DeadlineError as error:
            failure = error
        if isinstance(failure, torch.AcceleratorError):  # every call of this process fails from here on
            generation = self._working_set.generation
            reason = str(failure).partition("\n")[0]
            _log.error("closed at generation %d, since the compute device has failed for good: %s", generation, reason)
            failure = None
        # Order: last, for what a mark stays for is said once to each thread.
        return None if self._working_set.mark.reason and this_thread() in self._refusals.told else failure

    def _commit_last(self, committer: Committer) -> None:
        """Commit what has changed, here or in any store that shares the generations, and wait for it."""
        if self.withheld_for:
            _log.warning("%s", self.withheld_for)
        has_changes = not self.withheld_for and not self._end_unchanged()
        if self._confirmation.is_to_commit_at_end(has_changes, None):
            with committer.attempt(self.registry.steps()) as attempt:
                text = self.registry.encode(self._user_text)
                committer.measure(text)
                committer.start(text, attempt, is_last=True)
            self.wait()

    def _end_unchanged(self) -> bool:
        """Take no more changes, unless there are some to commit; return whether that is so."""
        with self._working_set.condition:
            if not self._refusals.is_read_only:
                self._working_set.take_learned()
            self._working_set.is_ending |= not self._working_set.has_changes
            return self._working_set.is_ending

    def report_dropped(self) -> bool:
        """Log the changes that are in no commit; return whether there are any."""
        refusal = self._working_set.mark.refusal()
        if refusal is not None:  # nobody can count them
            _log.warning("the changes since generation %d are dropped: %s", self._working_set.generation, refusal)
        return refusal is None and self._working_set.report_dropped()

    def _ready(self, operation: str) -> Committer:
        self._working_set.check(writing=operation != "resume")
        self.producers.refuse_nested_calls()  # order: before anything is given up, or waited for
        if self._committer is None:
            raise UsageError(f"{operation}() on a store with durable=False, which has no commits")
        self._working_set.await_seal()
        return self._committer

    def _ask(self, word: str) -> None:
        for guard in list(self.guards):
            guard(word)

    def _end_all(self) -> Exception | None:
        """Settle, then ask every guard, even if one fails: each may have something to give back.

        Returns the first error.
        """
        failure: Exception | None = self._working_set.mark.refusal()
        ends: list[Callable[[], None]] = []
        if failure is None:
            ends.append(self._working_set.await_seal)
        if failure is None and self._committer is not None:
            ends.append(self._committer.wait)  # order: guards compare with the committed generation
        for end in ends + [functools.partial(guard, "close") for guard in self.guards]:
            try:
                end()
            except Exception as error:
                failure = failure or error
        return failure

    def finish_at_exit(self) -> None:
        """End an unclosed store with the process: let a sealed generation become durable, and log what is lost."""
        try:
            self.wait()
        except TieredError as error:
            _log.error("the process ends before generation %d is durable: %s", self._working_set.generation, error)
        self.report_dropped()


# -- damage ------------------------------------------------------------------------------------------------------------


def drop_damaged(
    working_set: Residency, streams: StreamedValues, generations: Generations, keys: Iterable[str]
) -> None:
    """Drop ``keys`` in a commit of their own; see ``Store.drop_damaged``."""
    if isinstance(keys, str):
        raise TypeError(f"drop_damaged: expected several keys, got the text {keys!r}; pass [{keys!r}]")
    names = list(dict.fromkeys(keys))
    working_set.check(writing=True)
    generations.refuse_company("drop_damaged")
    unknown = [name for name in names if not working_set.is_shown(name)]
    if unknown:
        raise UsageError(f"drop_damaged: the store has no key {_listed(unknown)}; nothing was dropped")
    damaged = {error.key for error in streams.verify(names).errors}
    sound = [name for name in names if name not in damaged]
    if sound:
        raise UsageError(
            f"drop_damaged: {_listed(sound)} {'is' if len(sound) == 1 else 'are'} not damaged, every byte is what was "
            "written; nothing was dropped. Only what verify reports can be dropped: delete sound keys with del"
        )
    if names:
        working_set.delete(names)
        generations.commit_as_is()
        generations.wait()


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
