"""`zeroshard doctor`: measures the machine, so that the planner need not assume its rates.

    always          host memory (an add over all threads), disk (written and read without the page cache), and which
                    code would run an optimizer's step on the host
    with --nvme     folders for state on disk: rates of zeroshard's reader and writer and of plain system calls, and the
                    time of a step with state there
    with a GPU      device memory copy, PCIe both ways, sustained matrix products, and how fast the host issues kernels
    with several    all-gathers of 1 to 512 MiB, from which latency and rate are fitted

It prints versions, figures and what is set up badly (surroundings.py), and saves the shares of the peaks that the
planner computes with. A model's kernels are slower than a plain copy: the planner's share for elementwise kernels is
0.73 of the copy's, as on the H100 that it was fitted on.
"""

from __future__ import annotations

import mmap
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from zeroshard.errors import PlanError, UsageError
from zeroshard.nvme.measure import DiskRates, measure_disk
from zeroshard.optim.host.choose import available_kernel
from zeroshard.planner.machine.calibration import Calibration
from zeroshard.planner.machine.fabric import measure_gathers
from zeroshard.planner.machine.hardware import Efficiency, find_gpu
from zeroshard.planner.machine.host_speed import launch_seconds
from zeroshard.planner.machine.surroundings import notes, versions

GIB, MIB = 2**30, 2**20
COPY_TO_ELEMENTWISE, COPY_TO_UPDATE, COPY_TO_NORM = 0.73, 0.98, 0.69
"""Shares of a plain copy's rate that the planner's classes of kernels reach, measured on an H100."""
HOST_NUMEL = 2**25
"""Elements of each tensor in the measured add on the host."""
PRODUCT = 8192
"""Rows and columns of the matrices that are multiplied."""
ADAM_NBYTES = 12
"""Bytes of a parameter's float32 master weight and two moments."""
PARAM_NBYTES = 2
"""Bytes of a parameter in 16 bits."""
SUSTAINED = 1.0
"""Seconds of matrix products, after which a card has its working temperature and clock."""

app = typer.Typer(help="Measure this machine for the planner.", add_completion=False, pretty_exceptions_enable=False)


@app.command()
def doctor(
    save: Annotated[Path | None, typer.Option(help="Write a calibration for zeroshard plan --calibration.")] = None,
    folder: Annotated[Path, typer.Option(help="Where the disk is measured.")] = Path("."),
    disk_mib: Annotated[int, typer.Option(min=16, help="Size of the file that is written and read, MiB.")] = 1024,
    nvme: Annotated[
        list[str] | None, typer.Option(help="A folder for state on disk, to measure; several are striped over.")
    ] = None,
    nvme_mib: Annotated[int, typer.Option(min=144, help="Bytes that are written and read there, MiB.")] = 4096,
) -> None:
    """Measure host memory, disk, and what GPUs there are."""
    found = measure_machine(folder, disk_mib * MIB, tuple(nvme or ()), nvme_mib * MIB)
    lines = [("versions", versions()), *found.measured.items(), *(("note", text) for text in notes())]
    for name, text in lines:
        typer.echo(f"{name:18} {text}")
    if save is not None:
        found.save(save)
        typer.echo(f"saved to {save}")


def measure_machine(folder: Path, disk_bytes: int, nvme: tuple[str, ...] = (), nvme_bytes: int = 0) -> Calibration:
    """Measure everything that this machine has; folders for state on disk (`nvme`), if given, instead of `folder`."""
    efficiency: dict[str, float] = {}
    measured: dict[str, str] = {}
    rate = host_memory_rate()
    efficiency["host_memory_rate"] = rate
    measured["host memory"] = f"{rate / 1e9:.1f} GB/s (add, {torch.get_num_threads()} threads)"
    measured["host optimizer"] = str(available_kernel())
    if nvme:
        rates = measure_disk(nvme, nvme_bytes)
        efficiency["disk_rate"] = rates.both
        measured.update(_disk_figures(rates))
    else:
        written, read, direct = disk_rates(folder, disk_bytes)
        efficiency["disk_rate"] = min(written, read)
        how = "past the cache" if direct else "through the cache: this file system has no direct I/O"
        measured["disk"] = f"{written / 1e9:.2f} GB/s written, {read / 1e9:.2f} read, {how}"
    machine, gpu = platform.processor() or platform.machine(), ""
    if torch.cuda.is_available():
        machine = torch.cuda.get_device_name(0)
        gpu = _device(machine, efficiency, measured)
    else:
        measured["GPU"] = "none: device memory, PCIe and collectives are not measured"
    return Calibration(machine, gpu, efficiency, measured)


def _disk_figures(rates: DiskRates) -> dict[str, str]:
    """The rates of folders for state on disk, in words."""
    plain = f"{rates.plain_written / 1e9:.2f} GB/s written, {rates.plain_read / 1e9:.2f} read"
    shares = f"{rates.written / rates.plain_written:.2f} and {rates.read / rates.plain_read:.2f} of that are reached"
    seconds = rates.step_seconds(ADAM_NBYTES * 10**9)
    more = rates.parameter_seconds(PARAM_NBYTES * 10**9)
    return {
        "state on disk": f"{rates.written / 1e9:.2f} GB/s written, {rates.read / 1e9:.2f} read, {rates.both / 1e9:.2f} "
        f"both at once ({rates.name})",
        "plain direct I/O": f"{plain}; {shares}",
        "a step there": f"{seconds:.1f} s for Adam's state of 1e9 parameters ({ADAM_NBYTES} bytes each, read and "
        "written), shared by the ranks of this machine; the next forward runs meanwhile",
        "parameters there too": f"{more:.1f} s more for 1e9 parameters of {PARAM_NBYTES} bytes, read for forward and "
        "backward and written once; fewer where the device keeps units from forward to backward",
    }


def host_memory_rate() -> float:
    """Bytes per second of an add over all threads: two reads and a write."""
    left, right = torch.ones(HOST_NUMEL), torch.ones(HOST_NUMEL)
    left.add_(right)
    return 3 * left.nbytes / _best(lambda: left.add_(right), 5)


def disk_rates(folder: Path, nbytes: int) -> tuple[float, float, bool]:
    """Bytes per second written and read in blocks of 16 MiB, and whether direct I/O left the page cache out.

    Raises:
        UsageError: nothing can be written there.
    """
    block = mmap.mmap(-1, 16 * MIB)  # page-aligned, as direct I/O wants it
    count = max(1, nbytes // len(block))
    try:
        handle, name = tempfile.mkstemp(dir=folder, prefix=".zeroshard-doctor-")
    except OSError as error:
        raise UsageError(f"--folder {folder}: {error.strerror or error}") from error
    os.close(handle)
    try:
        file, direct = _open_direct(name)
        try:
            began = time.perf_counter()
            for _ in range(count):
                os.write(file, block)
            os.fsync(file)
            written = time.perf_counter() - began
            if not direct:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.lseek(file, 0, os.SEEK_SET)
            began = time.perf_counter()
            for _ in range(count):
                os.readv(file, [block])
            read = time.perf_counter() - began
        finally:
            os.close(file)
    finally:
        os.unlink(name)
        block.close()
    total = count * 16 * MIB
    return total / written, total / read, direct


def _open_direct(name: str) -> tuple[int, bool]:
    try:
        return os.open(name, os.O_RDWR | getattr(os, "O_DIRECT", 0)), hasattr(os, "O_DIRECT")
    except OSError:  # tmpfs and some network file systems have none
        return os.open(name, os.O_RDWR), False


def _device(name: str, efficiency: dict[str, float], measured: dict[str, str]) -> str:
    """Measure the first card, and all-gathers if there are several; returns the name of the planner's profile of it."""
    copy, up, down, products = device_copy_rate(), *pcie_rates(), product_rate()
    measured["device memory"] = f"{copy / 1e9:,.0f} GB/s (copy, read and written)"
    measured["PCIe"] = f"{up / 1e9:.1f} GB/s up, {down / 1e9:.1f} down, pinned"
    measured["matrix products"] = f"{products / 1e12:,.0f} TFLOP/s sustained, {PRODUCT} cubed, bf16"
    launch = launch_seconds(torch.device("cuda", 0))
    measured["host"] = f"{1e6 * launch:.1f} us to issue a kernel of a model"
    # The engine's own Python was measured on one host; another host is assumed to be faster by the same factor as for
    # issuing kernels.
    slower = launch / Efficiency.host_launch
    efficiency.update(host_launch=launch, host_operation=slower * Efficiency.host_operation)
    try:
        gpu = find_gpu(name)
    except PlanError as error:
        measured["profile"] = f"none: {error}"
        return ""
    share = copy / gpu.hbm
    efficiency.update(
        elementwise=share * COPY_TO_ELEMENTWISE,
        update=share * COPY_TO_UPDATE,
        norm=share * COPY_TO_NORM,
        pcie=min(up, down) / gpu.pcie_rate,
        products=products / (gpu.bf16_flops or gpu.fp16_flops),
    )
    if torch.cuda.device_count() > 1:
        fabric = measure_gathers(torch.cuda.device_count())
        efficiency.update(collective_latency=fabric.latency, link=fabric.rate / gpu.link_rate)
        measured["all-gather"] = ", ".join(f"{mib} MiB {rate / 1e9:.0f} GB/s" for mib, rate in fabric.rates.items())
    return gpu.name


def device_copy_rate() -> float:
    """Bytes per second read and written by a copy of 1 GiB on the card."""
    source = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * GIB / _best(lambda: target.copy_(source), 10)


def pcie_rates() -> tuple[float, float]:
    """Bytes per second of pinned copies up to the card, and down."""
    host = torch.empty(GIB // 4, dtype=torch.uint8).pin_memory()
    device = torch.empty_like(host, device="cuda")
    up = _best(lambda: device.copy_(host, non_blocking=True), 5)
    down = _best(lambda: host.copy_(device, non_blocking=True), 5)
    return host.nbytes / up, host.nbytes / down


def product_rate() -> float:
    """Flops per second of large matrix products in 16 bits, over a second."""
    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    left = torch.randn(PRODUCT, PRODUCT, device="cuda", dtype=dtype)
    right = torch.randn(PRODUCT, PRODUCT, device="cuda", dtype=dtype)
    count = max(3, int(SUSTAINED / _best(lambda: left @ right, 3)))
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        _ = left @ right
    torch.cuda.synchronize()
    return 2 * PRODUCT**3 * count / (time.perf_counter() - began)


def _best(run: Callable[[], object], times: int) -> float:
    """Seconds of one call, the shortest of several after one to warm up."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else _nothing
    run()
    best = float("inf")
    for _ in range(times):
        synchronize()
        began = time.perf_counter()
        run()
        synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def _nothing() -> None:
    """Stands for torch.cuda.synchronize on a machine without a GPU."""
