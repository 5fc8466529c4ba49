# SPDX-License-Identifier: Apache-2.0
"""One operation at a time, in one process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class Turns:
    """Lets the threads of the process that made it run operations one after another.

    The lock is taken by a plain `with`, and the owner is set by an assignment inside it: a signal handler that raises
    can then come at no point that leaves the lock held.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self._process = os.getpid()

    def belong_here(self) -> bool:
        """Whether this is the process that made them. (A forked child may have got the lock in its locked state.)"""
        return os.getpid() == self._process

    def run(self, operation: Callable[[], Result]) -> Result:
        """Runs the operation when its turn has come. One from a signal handler amid another is refused."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "this trainer belongs to the process that was forked, and its session cannot be used here: call "
                "export_state() in the parent before the fork, then load_state_dict() of that state in the child"
            )
        thread = threading.get_ident()
        if self._owner == thread:
            raise RuntimeError("the trainer is in the middle of a call: a signal handler cannot use it now")
        with self._lock:
            try:
                self._owner = thread
                return operation()
            finally:
                self._owner = 0
