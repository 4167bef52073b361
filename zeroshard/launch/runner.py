"""Runs in each rank: the user's script, and a record of its end for the launcher.

    launcher --- agent --> python runner.py script train.py --lr 1
        ^                      | started.json, error.json, saves, preempted
        +---- one directory ---+

torchrun shows a rank's traceback only if the script is decorated with `record`; here this works for every script. The
traceback is written into the agent's error file, in its format, and the launcher prints it once, above the errors of
other ranks that follow from it.

A script that was told to stop and has saved ends with status 75 (PREEMPTED), which the agent would take for a failure.
So this process ends with status 0 then, and writes a file for the launcher. A script that handles SIGTERM as a request
to save writes a file, too, into the directory that FILES_VARIABLE names.

This file is started by its path and imports only the standard library, so that the script decides what is imported
first and in which environment (thread counts, visible devices).
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType

FILES_VARIABLE = "ZEROSHARD_RANK_FILES"
"""The directory of the ranks' files; for the script the number of its process and a colon stand before it."""
CORES_VARIABLE = "ZEROSHARD_CORES"
SOCKET_VARIABLE = "ZEROSHARD_NODE"
RESTART_VARIABLE = "ZEROSHARD_RESTART"
PREEMPTED = 75
# Names of a rank's files, after the number of its process and a dot.
STARTED_FILE, SAVES_FILE, PREEMPTED_FILE = "started.json", "saves", "preempted"
FATAL_STACKS = "fatal.txt"
SAVING_THREAD = "checkpoint "
"""The names of threads that write a checkpoint begin with this."""
_THREADS_SECONDS = 60.0
_REPORT_AFTER_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the target `argv[2]` with the arguments after it; `argv[1]` is 'script', 'module' or 'program'."""
    _die_with_the_launcher()
    _buffer_by_line()
    _bind_cores()
    kind, *sys.argv = sys.argv[1:]
    error_file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    # Open until the process ends: at a crash of native code the Python stacks are written there.
    faulthandler.enable(file=error_file.with_name(FATAL_STACKS).open("w"))
    files = _write_start(error_file)
    _set_path(kind, sys.argv[0])
    try:
        if SOCKET_VARIABLE in os.environ:
            _await_round(kind)
        _run(kind, sys.argv[0])
    except KeyboardInterrupt as error:
        _record(error, error_file)
        _exit_within_limit(128 + signal.SIGINT)
        sys.exit(128 + signal.SIGINT)
    except SystemExit as stop:
        if stop.code == PREEMPTED:
            # Others may have ended before, and the agent tells the rest to stop: this rank has saved already.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (files / f"{os.getpid()}.{PREEMPTED_FILE}").touch()
            sys.exit(0)
        if stop.code not in (None, 0):
            _record(stop, error_file)
            _exit_within_limit(stop.code if isinstance(stop.code, int) else 1)
        raise
    except _ProgramError as error:
        _write_error(str(error), "", error_file)
        sys.exit(error.code)
    except BaseException as error:
        _record(error, error_file)
        if sys.excepthook is not sys.__excepthook__:
            sys.excepthook(type(error), error, _user_frames(error))  # the script's own, such as a crash reporter
        _exit_within_limit()
        sys.exit(1)


def _die_with_the_launcher() -> None:
    """Let the kernel end this process when the launcher is killed and can't do it itself (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _buffer_by_line() -> None:
    """Buffer output by lines, so that each line is one write.

    The agent starts ranks unbuffered, so that no output is lost or late. But a `print` of several words would be
    several writes, and output of other ranks could come between them.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _bind_cores() -> None:
    """Bind this process to the cores that `--bind-cores` gave this rank."""
    text = os.environ.pop(CORES_VARIABLE, None)
    if text is not None:
        os.sched_setaffinity(0, json.loads(text)[int(os.environ["LOCAL_RANK"])])


def _write_start(error_file: Path) -> Path:
    """Write a file that says that this rank has started; returns the directory of the ranks' files."""
    # The agent, which does not restart, sets both to 0.
    restart, most = os.environ.pop(RESTART_VARIABLE).split()
    os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"] = restart, most
    files = Path(os.environ[FILES_VARIABLE])
    # With the number of this process, since its children inherit the variable, but may not write for it.
    os.environ[FILES_VARIABLE] = f"{os.getpid()}:{files}"
    start = {
        "rank": int(os.environ["RANK"]),
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "pid": os.getpid(),
        "restart": int(restart),
        "error_file": str(error_file),
    }
    _write(files / f"{os.getpid()}.{STARTED_FILE}", start)
    return files


def _await_round(kind: str) -> None:
    """In an elastic job: wait at the node's gate for this process's rank and the number of ranks.

    What takes long is done before, since other ranks wait from then on.
    """
    if kind != "program":
        from zeroshard.elastic.preload import start_device

        start_device(int(os.environ["LOCAL_RANK"]))
    from zeroshard.elastic.place import await_place

    await_place()


def _set_path(kind: str, target: str) -> None:
    """Set `sys.path[0]` as if Python had been started with the script."""
    own = str(Path(__file__).resolve().parent)
    first = str(Path.cwd()) if kind == "module" else str(Path(target).resolve().parent)
    # Python has put this file's directory first, unless PYTHONSAFEPATH is set, which excludes the script's, too.
    if sys.path and os.path.realpath(sys.path[0]) == own:
        sys.path[0] = first


def _run(kind: str, target: str) -> None:
    if kind == "program":
        _run_program()
    elif kind == "module":
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


def _run_program() -> None:
    """Run `sys.argv` as a child process, and end like it: with its exit code or by its signal."""
    code = subprocess.Popen(sys.argv, preexec_fn=_die_with_the_launcher).wait()
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    if code:
        raise _ProgramError(f"{sys.argv[0]}: exit code {code}", code)


class _ProgramError(Exception):
    """A program ended with an exit code other than 0; it has printed the reason itself."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def _exit_within_limit(code: int = 1) -> None:
    """End this process, which has failed, even if threads of the script don't end: other ranks would wait for it.

    Before it ends Python waits for all threads that are no daemons. A thread that writes a checkpoint may finish.
    """

    def watch() -> None:
        time.sleep(_REPORT_AFTER_SECONDS)
        rank = f"zeroshard: rank {os.environ['RANK']} has failed"
        names = ", ".join(map(repr, _blocking_threads())) or "what runs at exit"
        print(f"{rank}; it ends when {names} has ended", file=sys.stderr, flush=True)
        end = time.monotonic() + _THREADS_SECONDS
        while time.monotonic() < end or any(name.startswith(SAVING_THREAD) for name in _blocking_threads()):
            time.sleep(0.1)
        names = ", ".join(map(repr, _blocking_threads())) or "what runs at exit"
        print(
            f"{rank} and is ended now: {names} kept it for {_THREADS_SECONDS:.0f} s longer. Make such threads daemons",
            file=sys.stderr,
            flush=True,
        )
        os._exit(code)

    threading.Thread(target=watch, name="end-in-time", daemon=True).start()


def _blocking_threads() -> list[str]:
    """Names of the threads for which Python waits before it ends."""
    main_thread = threading.main_thread()
    return [thread.name for thread in threading.enumerate() if not (thread.daemon or thread is main_thread)]


def _record(error: BaseException, error_file: Path) -> None:
    """Write the error file of torch.distributed.elastic, whose own function would import torch before the script."""
    stack = "".join(traceback.format_exception(type(error), error, _user_frames(error)))
    _write_error(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, stack, error_file)


def _write_error(summary: str, stack: str, error_file: Path) -> None:
    message = {"message": summary, "extraInfo": {"py_callstack": stack, "timestamp": str(int(time.time()))}}
    _write(error_file, {"message": message})


def _write(path: Path, value: object) -> None:
    """Write a JSON file under another name and rename it, so that a reader sees all of it."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value))
    partial.replace(path)


def _user_frames(error: BaseException) -> TracebackType | None:
    """The traceback without the frames of this file and of runpy."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        frames = frames.tb_next
    return frames


if __name__ == "__main__":
    main()
