"""What runs in each rank: the user's script, with its end reported to the launcher.

    launcher --- agent --> python runner.py script train.py --lr 1
        ^                      | hello, then "failed" or "done", then end of file when the process dies
        +------ unix socket ---+

Plain torchrun shows a rank's traceback only if the script is decorated with `record`; here every script is covered.
The traceback goes into the agent's error file, in its format, and is printed once, by the launcher, above the errors
that the other ranks suffer in consequence. The socket gives the order of deaths, also of those that leave no file.

It is started by path and imports only the standard library, so that the script still decides what is imported first
and in which environment (thread counts, visible devices).
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

WATCH_VARIABLE = "ZEROSHARD_WATCH"
FATAL_STACKS = "fatal.txt"
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run `argv[2:]` as a script (`argv[1] == "script"`) or as a module (`"module"`)."""
    kind, *sys.argv = sys.argv[1:]
    _die_with_the_launcher()
    error_file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    # Left open for the life of the process: a crash in native code writes the Python stacks there.
    faulthandler.enable(file=error_file.with_name(FATAL_STACKS).open("w"))
    launcher = _greet(error_file)
    try:
        _run(kind, sys.argv[0])
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)  # the launcher passes Ctrl-C on; it is nobody's failure
    except SystemExit as stop:
        if stop.code in (None, 0):
            _tell(launcher, "done")
        else:
            _record(stop, error_file)
            _tell(launcher, "failed")
        raise
    except BaseException as error:
        _record(error, error_file)
        if not _tell(launcher, "failed"):
            _print_traceback(error)
        if sys.excepthook is not sys.__excepthook__:
            sys.excepthook(type(error), error, _user_frames(error))  # the script's own, such as a crash reporter
        sys.exit(1)
    _tell(launcher, "done")


def _die_with_the_launcher() -> None:
    """A launcher that is killed outright can't end its ranks; the kernel does it (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _greet(error_file: Path) -> socket.socket:
    launcher = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    launcher.connect(os.environ.pop(WATCH_VARIABLE))
    # A forked data loader worker that outlives its rank would hold the connection open.
    os.register_at_fork(after_in_child=launcher.close)
    hello = {
        "rank": int(os.environ["RANK"]),
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "pid": os.getpid(),
        "attempt": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        "error_file": str(error_file),
    }
    _tell(launcher, json.dumps(hello))
    return launcher


def _tell(launcher: socket.socket, line: str) -> bool:
    """Send a line; False if the launcher is gone."""
    try:
        launcher.sendall(line.encode() + b"\n")
    except OSError:
        return False
    return True


def _run(kind: str, target: str) -> None:
    own = str(Path(__file__).resolve().parent)
    first = str(Path.cwd()) if kind == "module" else str(Path(target).resolve().parent)
    # Python put this file's directory first, but not under PYTHONSAFEPATH, which forbids the script's just as well.
    if sys.path and os.path.realpath(sys.path[0]) == own:
        sys.path[0] = first
    if kind == "module":
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


def _record(error: BaseException, error_file: Path) -> None:
    """Write the error file of torch.distributed.elastic; its own writer would import torch before the script does."""
    message = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {
            "py_callstack": "".join(traceback.format_exception(type(error), error, _user_frames(error))),
            "timestamp": str(int(time.time())),
        },
    }
    partial = error_file.with_suffix(".partial")
    partial.write_text(json.dumps({"message": message}))
    partial.replace(error_file)


def _print_traceback(error: BaseException) -> None:
    traceback.print_exception(type(error), error, _user_frames(error))


def _user_frames(error: BaseException) -> TracebackType | None:
    """The traceback without the frames of this file and of runpy."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        frames = frames.tb_next
    return frames


if __name__ == "__main__":
    main()
