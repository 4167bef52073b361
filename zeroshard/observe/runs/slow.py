"""Why a run is slow: the ranks that keep the others waiting, each with its cause; then what slows all of them down.

A rank is named where it needs more than the others, in the median of all steps or in a few by much; the component that
grew says where, and tokens, processor time and the system's counters say why. Hardware is told last: a rank that only
computes longer, of as many tokens, with a processor for itself, has more to do or a slower processor, and a
measurement (`zeroshard doctor`) has to tell these apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median

from zeroshard.observe.host import BETWEEN, DATA, DISK, GARBAGE, UPDATE
from zeroshard.observe.runs.compare import Comparison
from zeroshard.observe.runs.components import OWN, Component, collective_seconds
from zeroshard.observe.runs.findings import Cause, Finding, ms, step_numbers
from zeroshard.observe.runs.log import Run

STEADY, STEADY_LEAST = 0.10, 1e-3
"""Share of a step, and seconds, that a rank needs more than the others in the median of steps before it is named."""
RARE, RARE_LEAST, RARE_COUNT, RARE_LOST = 0.5, 5e-3, 3, 0.05
"""The same of single steps, how many there have to be, and which share of the run they have to take."""
CLEAR, CLEAR_LEAST, CLEAR_COUNT = 0.2, 3e-3, 10
"""The same before a rank is said to compute longer without any other cause."""
_MORE_TOKENS = 1.15
_QUEUED, _BLOCKED, _FAULTS = 0.4, 0.5, 8.0
_DATA, _GARBAGE, _DISK, _SCRIPT, _SAVING, _EXPOSED = 0.15, 0.05, 0.25, 0.3, 0.15, 0.4
_SLOW_LINK, _LEAST_PAYLOAD, _LINK_COUNT = 100e6, 32 << 10, 10
"""Bytes per second below which a link is called slow, of collectives whose payload is at least so many bytes, in so
many steps."""
_CURES = {
    Cause.TOKENS: "Give all ranks as many, by packing or by sorting sequences by length",
    Cause.GARBAGE: "Call gc.freeze() after the start, collect between steps on all ranks at once, or raise "
    "gc.set_threshold",
    Cause.DATA: "More workers (num_local_io_workers), prefetching, or a faster place for the data",
    Cause.SCRIPT: "Look at what the script does between step() and forward: a loader of its own, logging, evaluation",
    Cause.BLOCKED: "Its main thread is neither computing nor ready to: look for files, sockets, locks or sleeps in the "
    "model's code",
    Cause.PROCESSOR: "Look at top on its node; bind ranks to cores, and leave one to other programs",
    Cause.MEMORY: "Pages are read from disk again: its node is short of memory, or the data is mapped and not cached",
    Cause.DISK: "zeroshard doctor --nvme FOLDER measures the folder",
    Cause.SLOWER: "Its tokens are as many and it has its processor for itself: either the model does more there, or "
    "the processor is slower; zeroshard doctor on its node and on another one tells",
}


def slowness(runs: Mapping[int, Run]) -> Iterator[Finding]:
    """What makes the run slow, the costliest first."""
    compared = Comparison(runs)
    if not compared.numbers or not compared.usual:
        return
    found = [*_late_ranks(compared), *_of_all(compared, runs[min(runs)])]
    yield from sorted(found, key=lambda one: -one.lost)


def _late_ranks(compared: Comparison) -> Iterator[Finding]:
    if len(compared.sides) < 2:
        return
    for rank in compared.sides:
        excess = compared.excess(rank)
        steps = list(range(len(excess)))
        steady = median(excess) > max(STEADY * compared.usual, STEADY_LEAST)
        if not steady:
            steps = [place for place in steps if excess[place] > max(RARE * compared.usual, RARE_LEAST)]
        lost = sum(max(excess[place], 0.0) for place in steps)
        if steady or (len(steps) >= RARE_COUNT and lost > RARE_LOST * compared.total):
            found = _late_rank(compared, rank, steps, lost, steady=steady)
            clear = len(steps) >= CLEAR_COUNT and lost / len(steps) > max(CLEAR * compared.usual, CLEAR_LEAST)
            if found.cause is not Cause.SLOWER or clear:
                yield found


def _late_rank(compared: Comparison, rank: int, steps: Sequence[int], lost: float, *, steady: bool) -> Finding:
    grown = compared.grown(rank, steps)
    where = max((one for one in grown if compared.is_own(one)), key=lambda one: grown[one])
    cause, why = _cause(compared, rank, steps, where, grown)
    more = lost / len(steps)
    numbers = [compared.numbers[place] for place in steps]
    when = f"in a step of {ms(compared.usual)}" if steady else f"in {len(steps)} steps ({step_numbers(numbers)})"
    text = (
        f"rank {rank} keeps the others waiting: it needs {ms(more)} more than they do {when}, "
        f"most of it in {_in_words(where)}. The cause is {cause}{why}. {_CURES[cause]}"
    )
    return Finding(cause, text, rank, lost)


def _in_words(component: Component) -> str:
    part, kind = component
    names = {
        OWN: "{} itself",
        GARBAGE: "collections of garbage in {}",
        DATA: "the loader, {}",
        DISK: "waits for the disk in {}",
        UPDATE: "waits for the update on the processor in {}",
    }
    return names[kind].format("the time between steps" if part == BETWEEN else f"the {part}")


def _cause(
    compared: Comparison, rank: int, steps: Sequence[int], where: Component, grown: Mapping[Component, float]
) -> tuple[Cause, str]:
    """The cause, and the figures that tell it."""
    part, kind = where
    if kind == GARBAGE:
        return Cause.GARBAGE, ""
    if kind == DATA:
        return Cause.DATA, ""
    disk = compared.more(rank, "disk", steps)
    if kind == DISK or (kind == UPDATE and disk > 0.4 * grown[where]):
        return Cause.DISK, f": {ms(max(disk, grown[where]))} a step more are waited for it"
    own = sum(max(seconds, 0.0) for (_, what), seconds in grown.items() if what == OWN)
    queued, busy = compared.queued(rank, steps), compared.busy(rank, steps)
    if queued > _QUEUED * own:
        return Cause.PROCESSOR, f": its main thread is ready and has none for {ms(queued)} a step more"
    blocked = own - compared.more(rank, "queued", steps) - busy
    faults = compared.more(rank, "faults", steps)
    if faults > _FAULTS and blocked > 0.3 * own:
        return Cause.MEMORY, f": {faults:.0f} pages a step more have to be read from a disk"
    if part == BETWEEN:
        return Cause.SCRIPT, ""
    if blocked > _BLOCKED * own and not compared.on_device:  # a host that is ahead of its device is blocked, too
        return Cause.BLOCKED, f": {ms(blocked)} of it are spent off the processor"
    tokens = compared.tokens(rank, steps)
    if tokens is not None and tokens[0] > _MORE_TOKENS * tokens[1]:
        return Cause.TOKENS, f": {tokens[0]:.0f} in a step, where the others have {tokens[1]:.0f}"
    return Cause.SLOWER, ""


def _of_all(compared: Comparison, run: Run) -> Iterator[Finding]:
    """What takes the time of all ranks alike."""
    common, mean, count = compared.common(), compared.mean, len(compared.numbers)
    for kind, cause, share in ((DATA, Cause.DATA, _DATA), (GARBAGE, Cause.GARBAGE, _GARBAGE)):
        seconds = sum(spent for (_, what), spent in common.items() if what == kind)
        if seconds > share * mean:
            text = f"all ranks wait {ms(seconds)} of a step of {ms(mean)} for {cause}. {_CURES[cause]}"
            yield Finding(cause, text, None, seconds * count)
    seconds = common.get((BETWEEN, OWN), 0.0)
    if seconds > _SCRIPT * mean:
        text = f"{ms(seconds)} of a step of {ms(mean)} pass in {Cause.SCRIPT}, on all ranks. {_CURES[Cause.SCRIPT]}"
        yield Finding(Cause.SCRIPT, text, None, seconds * count)
    yield from _disk(compared, common)
    yield from _link(compared, run)
    saved = sum(run.saves)
    if saved > _SAVING * (compared.total + saved) and saved / len(run.saves) > compared.usual:
        text = (
            f"{len(run.saves)} saves of checkpoints kept training for {ms(saved / len(run.saves))} each, "
            f"{saved / (compared.total + saved):.0%} of the time. Save in the background "
            '("checkpoint": {"async": true}), less often, or to a faster disk'
        )
        yield Finding(Cause.SAVING, text, None, saved)


def _disk(compared: Comparison, common: Mapping[Component, float]) -> Iterator[Finding]:
    mean, count = compared.mean, len(compared.numbers)
    waited = sum(spent for (_, what), spent in common.items() if what == DISK)
    behind = min(compared.figure(rank, "disk", range(count)) for rank in compared.sides)
    waited += min(behind, sum(spent for (_, what), spent in common.items() if what == UPDATE))
    if waited > _DISK * mean:
        text = f"all ranks wait {ms(waited)} of a step of {ms(mean)} for {Cause.DISK}. {_CURES[Cause.DISK]}"
        yield Finding(Cause.DISK, text, None, waited * count)


def _link(compared: Comparison, run: Run) -> Iterator[Finding]:
    if len(compared.sides) < run.ranks or len(compared.numbers) < _LINK_COUNT:
        return  # the first steps of a run wait for ranks that still load and compile
    exposed, nbytes, calls = median(compared.exposed()), sum(run.sent.values()), sum(run.calls.values())
    if exposed < _EXPOSED * compared.usual or not calls:
        return
    if nbytes / calls >= _LEAST_PAYLOAD and nbytes / exposed < _SLOW_LINK:
        text = (
            f"even the rank that comes last waits {ms(exposed)} of a step of {ms(compared.usual)} in collectives: "
            f"{nbytes / 1e6:.1f} MB in {calls} calls, {nbytes / exposed / 1e6:.1f} MB/s. The cause is {Cause.LINK}: "
            "look which interface is used (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME) and who else uses it; zeroshard "
            "doctor measures it"
        )
        yield Finding(Cause.LINK, text, None, exposed * len(compared.numbers))


def mean_imbalance(compared: Comparison) -> float:
    """Mean seconds of a step that ranks wait in collectives for the slowest rank, beyond the exchange itself."""
    if not compared.numbers:
        return 0.0
    waits = [fmean(map(collective_seconds, side.components)) for side in compared.sides.values()]
    return max(fmean(waits) - fmean(compared.exposed()), 0.0)
