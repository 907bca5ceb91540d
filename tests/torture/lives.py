"""A process that is started, perhaps killed, and looked at afterwards."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from typing import TextIO


def life(child: Callable[[TextIO], None], delay: float | None) -> bool:
    """Run `child` in a process of its own, kill it `delay` seconds after it says "ready"; True if it said "finished".

    Forked, because importing torch takes seconds. This process must not run a backward pass itself: autograd's threads
    would not survive the fork.
    """
    end, start = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(end)
            with os.fdopen(start, "w") as out:
                child(out)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(start)
    with os.fdopen(end) as out:
        ready = out.readline() == "ready\n"
        if ready and delay is not None:
            time.sleep(delay)
            os.kill(pid, signal.SIGKILL)
        finished = "finished" in out.read()
    _, status = os.waitpid(pid, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if not ready or not (finished or killed):
        raise RuntimeError("the child failed by itself; its error is above")
    return finished
