"""Cases of ranks that begin again after an abandoned step, and that tell each other the end of a commit."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from tests.ranks.processes import case
from tiered.errors import DeviceError, RankLostError, StepAbandonedError, UsageError
from tiered.ranks.group import Group
from tiered.ranks.ranks import Ranks

__all__: list[str] = []


def joined(deadline_s: float = 20.0) -> Ranks:
    group = Group.of(None, deadline_s=deadline_s)
    assert isinstance(group, Group)
    ranks = Ranks(group)
    ranks.comm_thread.end_first_step()
    return ranks


def gathered(ranks: Ranks) -> bool:
    """Return whether a gather has the right bytes."""
    whole = torch.zeros(ranks.world << 16, dtype=torch.uint8)
    whole.view(ranks.world, -1)[ranks.rank] = ranks.rank + 1
    ranks.comm_thread.gather("u", whole).wait()
    return whole.view(ranks.world, -1).amin(1).tolist() == list(range(1, ranks.world + 1))


@case
def begin_again(send: Any, *, kind: str) -> dict[str, Any]:
    """Leave the ranks in the state that ``kind`` says, twice; have them rejoin, and gather."""
    ranks, errors, owners = joined(), list[str](), 0
    for _ in range(2):
        whole = torch.zeros(ranks.world << 16, dtype=torch.uint8)
        try:
            if kind == "departed":
                ranks.agreement.agree("that" if ranks.rank == 1 else "this")
            elif kind != "calm" and ranks.rank == 1:
                if kind == "in the middle":  # the others have agreed on it, and wait for this one's bytes
                    ranks.comm_thread.gather("v", whole, ready=_fail).wait()
                ranks.abandon(ValueError("no such batch"), "the loop")
            elif kind != "calm":
                ticket = ranks.comm_thread.gather("v", whole)
                if kind != "unheard":
                    ticket.wait()
        except (StepAbandonedError, UsageError, ValueError) as error:
            errors.append(f"{type(error).__name__}: {error}")
        ranks.rejoin("store.rollback()")
        owners += len(ranks.comm_thread._quarantined)
        assert gathered(ranks)
    num_done = ranks.comm_thread.statistics().num_collectives
    ranks.comm_thread.close()
    return {"errors": errors, "beginnings": ranks.num_beginnings, "owners": owners, "done": num_done}


def _fail() -> None:
    raise ValueError("no such batch")


@case
def begin_again_without_one(send: Any) -> str:
    """Rank 1 abandons the step and closes; the others would begin again."""
    ranks = joined()
    if ranks.rank == 1:
        ranks.abandon(ValueError("no such batch"), "the loop")
        ranks.comm_thread.close()
        return ""
    try:
        ranks.rejoin("store.rollback()")
    except RankLostError as error:
        return str(error)
    finally:
        ranks.comm_thread.close()
    raise AssertionError("they have begun again")


@case
def tell_in_commit(send: Any, *, kind: str, deadline_s: float = 20.0) -> dict[str, Any]:
    """Tell each other a message of a commit, with rank 1 doing what ``kind`` says; return what came, or the error."""
    ranks, num_looks = joined(deadline_s), [0]

    def look() -> None:
        num_looks[0] += 1

    if ranks.rank == 1:
        if kind == "dies":
            os._exit(9)
        if kind == "closes":
            ranks.comm_thread.close()
            return {}
        if kind == "late":
            time.sleep(2 * deadline_s)
        if kind == "abandons":
            ranks.abandon(ValueError("no such batch"), "the loop")
            time.sleep(0.4)
    begun = time.monotonic()
    try:
        told = ranks.tell_in_commit(bytes([65 + ranks.rank]) * 512, look)
        return {"told": [chr(each[0]) for each in told], "looks": num_looks[0]}
    except DeviceError as error:
        return {"error": f"{type(error).__name__}: {error}", "after_s": time.monotonic() - begun}
    finally:
        ranks.comm_thread.close()
