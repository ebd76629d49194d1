"""The compiled half of requests.py: it serves the ring for as long as nothing happens that Python must know of.

So the drive does not wait for the interpreter, be it cold or held by a busy thread, and moving a gigabyte in large
operations takes 0.34 to 0.45 of the CPU time that it takes in operations of a block each (bench/results).
"""

from __future__ import annotations

import functools
import logging
import time
from typing import Any

import numpy as np

from tiered.bytes.device.requests import (
    ADDRESS,
    ENDED,
    FILE,
    FIRST_TAG,
    FREE,
    GIVEN,
    HEAD,
    INDEX,
    LEFT,
    LENGTH,
    MOST,
    NBYTES,
    NEXT_WAITING,
    NUM_ENDED,
    NUM_FREE,
    NUM_KEPT,
    NUM_SUBMITTED,
    NUM_WAITING,
    OFFSET,
    OPCODE,
    OWNER,
    REQUEST,
    REQUESTS,
    ROW,
    ROWS,
    START,
    TAIL,
    WAITING,
)  # fmt: skip
from tiered.bytes.device.ring import ENTER, FIXED_FILE, GETEVENTS, PRIVATE_EXPEDITED, WAIT, system_call
from tiered.bytes.kernel import Call, compile_kernel, give_back_compiler

__all__ = ["compiled_loop"]

_SIGNATURE = "int64 int64 int64 int64 int64 int64 uint32* uint32* uint32* int64* int64* int64*"
_MOST_ENDED = 256  # requests, in one turn of the loop: then Python looks whether anything is overdue
_log = logging.getLogger("tiered")


@functools.cache
def compiled_loop() -> Call | None:
    """Return the loop, for Ring.lend; blocks for half a second to two, once per process. None where numba fails.

    Thread-safe: of two calls at once both may compile.
    """
    begun_s = time.monotonic()
    try:
        loop = compile_kernel(_serve, _SIGNATURE, result="int64")
    except Exception as error:  # numba's, llvmlite's, the loader's: whatever it is, Python serves the ring
        reason = (str(error).strip() or repr(error)).partition("\n")[0]
        _log.warning("large operations take more CPU time: the loop that serves them cannot be compiled: %s", reason)
        return None
    give_back_compiler()
    _log.debug("the loop that serves large operations was compiled in %.1f s", time.monotonic() - begun_s)
    return loop


def _serve(
    fd: int, sq_mask: int, cq_mask: int, membarrier: int, wait: int, wait_nbytes: int,
    sq_tail: Any, cq_head: Any, cq_tail: Any, sqes: Any, cqes: Any, table: Any,
) -> int:  # fmt: skip
    """Submit, wait, and go on, until a request has to be seen by Python; 0, or -1 when the last system call failed.

    Then everything that may be with the kernel is, and completions that are not those of whole requests are untouched.
    ``wait`` is the address of what io_uring_enter is told of its wait, of ``wait_nbytes``; ``membarrier`` the number of
    that call where loads are reordered, else 0. The rings' words are uint32, submissions 8 and completions 2 int64.
    """
    tail, num_submitted, head = table[TAIL], table[NUM_SUBMITTED], table[HEAD]
    is_due = False
    num_ended = 0
    result = 0
    while result >= 0:
        num_new = 0
        while table[NEXT_WAITING] < table[NUM_WAITING] and table[NUM_FREE] > table[NUM_KEPT]:
            if num_new == 2:  # of more, the kernel would make one request of neighbours
                num_new = 0
                sq_tail[0] = np.uint32(tail)
                result = system_call(ENTER, fd, tail - num_submitted, 0, GETEVENTS, 0, 0)
                if result < 0:
                    break
                num_submitted += result
            row = table[WAITING + table[NEXT_WAITING]]
            base = ROWS + row * ROW
            start = table[base + GIVEN]
            length = min(table[base + MOST], table[base + NBYTES] - start)
            table[NUM_FREE] -= 1
            number = table[FREE + table[NUM_FREE]]
            request = REQUESTS + number * REQUEST
            table[request + OWNER], table[request + START], table[request + LENGTH] = row, start, length
            table[base + GIVEN] = start + length
            if start + length == table[base + NBYTES]:
                table[NEXT_WAITING] += 1
            place = (tail & sq_mask) * 8
            sqes[place] = table[base + OPCODE] | (FIXED_FILE << 8) | (table[base + FILE] << 32)
            sqes[place + 1] = table[base + OFFSET] + start
            sqes[place + 2] = table[base + ADDRESS] + start
            sqes[place + 3] = length
            sqes[place + 4] = FIRST_TAG + number
            sqes[place + 5] = table[base + INDEX]
            tail += 1
            num_new += 1
        if result < 0:
            break
        sq_tail[0] = np.uint32(tail)
        if is_due:
            if tail != num_submitted:
                result = system_call(ENTER, fd, tail - num_submitted, 0, GETEVENTS, 0, 0)
                num_submitted += max(result, 0)
            break
        result = system_call(ENTER, fd, tail - num_submitted, 1, WAIT, wait, wait_nbytes)
        if result < 0:
            break
        num_submitted += result
        last = np.int64(cq_tail[0])
        if membarrier:
            system_call(membarrier, PRIVATE_EXPEDITED, 0, 0, 0, 0, 0)
        while head != last:
            entry = (head & cq_mask) * 2
            number = cqes[entry] - FIRST_TAG
            if number < 0:
                is_due = True
                break
            request = REQUESTS + number * REQUEST
            length = table[request + LENGTH]
            if cqes[entry + 1] & 0xFFFFFFFF != length:
                is_due = True
                break
            head = (head + 1) & 0xFFFFFFFF
            table[FREE + table[NUM_FREE]] = number
            table[NUM_FREE] += 1
            base = ROWS + table[request + OWNER] * ROW
            table[base + LEFT] -= length
            if table[base + LEFT] == 0:
                table[ENDED + table[NUM_ENDED]] = table[request + OWNER]
                table[NUM_ENDED] += 1
                is_due = True
            num_ended += 1
        is_due = is_due or num_ended >= _MOST_ENDED
        cq_head[0] = np.uint32(head)
    table[TAIL], table[NUM_SUBMITTED], table[HEAD] = tail, num_submitted, head
    return min(result, 0)
