"""What runs in each rank: the user's script, with its end reported to the launcher.

    launcher --- agent --> python runner.py script train.py --lr 1
        ^                      | hello, then how it ended, then end of file when the process dies
        +------ unix socket ---+

Plain torchrun shows a rank's traceback only if the script is decorated with `record`; here every script is covered.
The traceback goes into the agent's error file, in its format, and is printed once, by the launcher, above the errors
that the other ranks suffer in consequence. The socket gives the order of deaths, also of those that leave no file.

A script that was told to stop and has saved leaves with status 75 (PREEMPTED). The agent would take that for a failure
and restart it, so to the agent it has ended well, and the launcher hears "preempted". A script says "saves" on the same
socket, which LINE_VARIABLE names, when it wants SIGTERM as a request.

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
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType

WATCH_VARIABLE = "ZEROSHARD_WATCH"
CORES_VARIABLE = "ZEROSHARD_CORES"
LINE_VARIABLE = "ZEROSHARD_LINE"
RESTART_VARIABLE = "ZEROSHARD_RESTART"
PREEMPTED = 75
FATAL_STACKS = "fatal.txt"
SAVING_THREAD = "checkpoint "
"""How the names of threads begin that write a checkpoint."""
_THREADS_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run `argv[2:]`: `argv[1]` says whether that is a script, a module or a program."""
    _die_with_the_launcher()
    _bind()
    kind, *sys.argv = sys.argv[1:]
    error_file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    # Left open for the life of the process: a crash in native code writes the Python stacks there.
    faulthandler.enable(file=error_file.with_name(FATAL_STACKS).open("w"))
    launcher = _greet(error_file)
    try:
        _run(kind, sys.argv[0])
    except KeyboardInterrupt as error:
        _record(error, error_file)
        _tell(launcher, "interrupted")  # the launcher passes Ctrl-C on, and knows whether it did
        _end_in_time(128 + signal.SIGINT)
        sys.exit(128 + signal.SIGINT)
    except SystemExit as stop:
        if stop.code == PREEMPTED and _tell(launcher, "preempted"):
            sys.exit(0)
        if stop.code in (None, 0):
            _tell(launcher, "done")
        else:
            _record(stop, error_file)
            _tell(launcher, "failed")
            _end_in_time(stop.code if isinstance(stop.code, int) else 1)
        raise
    except _ProgramError as error:
        _write_error(str(error), "", error_file)
        _tell(launcher, "failed")
        sys.exit(error.code)
    except BaseException as error:
        _record(error, error_file)
        if not _tell(launcher, "failed"):
            _print_traceback(error)
        if sys.excepthook is not sys.__excepthook__:
            sys.excepthook(type(error), error, _user_frames(error))  # the script's own, such as a crash reporter
        _end_in_time()
        sys.exit(1)
    _tell(launcher, "done")


def _die_with_the_launcher() -> None:
    """A launcher that is killed outright can't end its ranks; the kernel does it (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _bind() -> None:
    """Keep to the cores that `--bind-cores` gave this rank; under numactl, which starts this file anew, if it is there.

    numactl keeps the process: its number, its parent and what the kernel sends it at the parent's death.
    """
    text = os.environ.pop(CORES_VARIABLE, None)
    if text is None:
        return
    mine = json.loads(text)[int(os.environ["LOCAL_RANK"])]
    os.sched_setaffinity(0, mine["cores"])
    if mine["numactl"] is not None:
        cores, nodes = (",".join(str(number) for number in mine[what]) for what in ("cores", "nodes"))
        # One node can be preferred; several are shared by turns, or an allocation would fill the first.
        memory = f"--preferred={nodes}" if len(mine["nodes"]) == 1 else f"--interleave={nodes}"
        words = [mine["numactl"], f"--physcpubind={cores}", memory, sys.executable, "-u", __file__, *sys.argv[1:]]
        os.execv(words[0], words)


def _greet(error_file: Path) -> socket.socket:
    # The agent, which does not restart, says 0 to both.
    restarts = os.environ.pop(RESTART_VARIABLE).split()
    os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"] = restarts
    launcher = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    launcher.connect(os.environ.pop(WATCH_VARIABLE))
    # A forked data loader worker that outlives its rank would hold the connection open.
    os.register_at_fork(after_in_child=launcher.close)
    # With the number of this process, for whoever inherits the variable has not inherited the connection.
    os.environ[LINE_VARIABLE] = f"{os.getpid()}:{launcher.fileno()}"
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
    if kind == "program":
        _run_program()
    elif kind == "module":
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


def _run_program() -> None:
    """Run `sys.argv` as a process of its own and end as it ended: a signal that ends it ends this one."""
    code = subprocess.Popen(sys.argv, preexec_fn=_die_with_the_launcher).wait()
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    if code:
        raise _ProgramError(f"{sys.argv[0]}: exit code {code}", code)


class _ProgramError(Exception):
    """A program that ended with another exit code than 0; it has printed why itself."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def _end_in_time(code: int = 1) -> None:
    """Of a process that failed, don't let threads of the script keep it for good: its peers would wait for it.

    Python waits for all threads that are no daemons before it ends. One that writes a checkpoint is waited for.
    """

    def watch() -> None:
        end = time.monotonic() + _THREADS_SECONDS
        while time.monotonic() < end or any(name.startswith(SAVING_THREAD) for name in _keepers()):
            time.sleep(0.1)
        names = ", ".join(repr(name) for name in _keepers()) or "what runs at exit"
        print(
            f"zeroshard: rank {os.environ['RANK']} has failed and is ended now: {names} kept it for "
            f"{_THREADS_SECONDS:.0f} s longer. Make such threads daemons",
            file=sys.stderr,
            flush=True,
        )
        os._exit(code)

    threading.Thread(target=watch, name="end-in-time", daemon=True).start()


def _keepers() -> list[str]:
    """Names of the threads for which Python waits."""
    main_thread = threading.main_thread()
    return [thread.name for thread in threading.enumerate() if not (thread.daemon or thread is main_thread)]


def _record(error: BaseException, error_file: Path) -> None:
    """Write the error file of torch.distributed.elastic; its own writer would import torch before the script does."""
    stack = "".join(traceback.format_exception(type(error), error, _user_frames(error)))
    _write_error(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, stack, error_file)


def _write_error(summary: str, stack: str, error_file: Path) -> None:
    message = {"message": summary, "extraInfo": {"py_callstack": stack, "timestamp": str(int(time.time()))}}
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
