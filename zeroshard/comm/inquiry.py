"""Investigates a wait that takes too long: collects every rank's answer, then decides what is wrong, if anything.

    answers ──> two ranks issued different operations ──> divergence
           ├──> a rank left or died, others wait for it ──> that rank is gone ├──> a rank's process lives but is silent
           ──> busy (a C call holds the interpreter lock): keep waiting ├──> no answer and no sign of life           ──>
           unreachable ├──> a rank stays in a collective of torch.distributed that needs the waiting one  ──> both would
           wait forever └──> a rank's log is shorter                 ──> slow: keep waiting

It runs in the watchdog thread of the one rank that judges an alarm. The alternative, every rank judging for itself,
gives as many error texts as ranks and reads the square of their number from the store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from zeroshard.comm.board import Answer, Board, Verdict
from zeroshard.comm.divergence import behind, explain, find_divergence, name_ranks
from zeroshard.comm.oplog import LogTail


@dataclass
class Inquiry:
    """The answers that the judging rank has collected; call `poll`, then `verdict`.

    Attributes:
        before: the user's collective in which each rank was at the last inquiry of this rank.
    """

    board: Board
    number: int
    rank: int
    world_size: int
    waiting_for: str
    own: LogTail
    answers: dict[int, Answer] = field(default_factory=dict)
    left: dict[int, Answer] = field(default_factory=dict)
    dead: dict[int, str] = field(default_factory=dict)
    before: dict[int, str] = field(default_factory=dict)

    def poll(self) -> None:
        """Read what has come in since."""
        for rank in self.silent():
            answer = self.board.answer_of(self.number, rank)
            if answer is not None:
                self.answers[rank] = answer
                continue
            last = self.board.left(rank)
            if last is not None:
                self.left[rank] = last
                continue
            process = self.board.process_of(rank)
            if process is not None and process.is_dead_here():
                self.dead[rank] = str(process)

    def silent(self) -> list[int]:
        """Ranks of which nothing is known yet."""
        known = {self.rank, *self.answers, *self.left, *self.dead}
        return [rank for rank in range(self.world_size) if rank not in known]

    def tails(self) -> dict[int, LogTail]:
        """The log of every rank that from_others it."""
        from_others = {rank: answer.tail for rank, answer in {**self.answers, **self.left}.items()}
        return {self.rank: self.own, **from_others}

    def divergence(self) -> Verdict | None:
        """The verdict if two ranks issued different operations."""
        found = find_divergence(self.tails())
        return None if found is None else Verdict(explain(found), True, self._readers())

    def verdict(self, *, connection_lost: bool) -> Verdict | None:
        """The verdict after all answers that can come; None if every rank may only be slow.

        A rank that left although it issued as much as this one may have sent its part already, so it is blamed only
        when the operation failed (`connection_lost`).
        """
        diverged = self.divergence()
        if diverged is not None:
            return diverged
        where = f"while rank {self.rank} waited for {self.waiting_for} (operation {self.own.count} of its log)"
        if self.dead:
            processes = ", ".join(self.dead.values())
            return self._gone(f"{name_ranks(self.dead)} died ({processes}) {where}. Its own output says why.")
        early = {r: a for r, a in self.left.items() if connection_lost or a.tail.count < self.own.count}
        if early:
            first = min(early)
            last = early[first].tail.operations
            after = f"after {last[-1]} (operation {early[first].tail.count})" if last else "before any collective"
            return self._gone(
                f"{name_ranks(early)} left {after} {where}. "
                "All ranks must run the same number of steps and close together."
            )
        unreachable = [rank for rank in self.silent() if not self._lives_here(rank)]
        if unreachable:
            return self._gone(
                f"{name_ranks(unreachable)} is dead or unreachable: no answer came {where}. "
                "Look at its own output and at the network."
            )
        stuck = {rank: place for rank, place in self.in_user_collective().items() if self.before.get(rank) == place}
        if stuck:
            return Verdict(
                f"{name_ranks(stuck)} waits for all ranks in {next(iter(stuck.values()))} {where}: each waits for the "
                "other, forever. All ranks must run the same forwards (generate and evaluate too) and the same "
                "collectives in the same order.",
                True,
                self._readers(),
            )
        return None

    def in_user_collective(self) -> dict[int, str]:
        """The ranks that this one waits for and that are in a collective of the user's."""
        late = {r: a for r, a in self.answers.items() if a.tail.count < self.own.count and a.waiting_for is None}
        return {
            rank: answer.in_user_collective for rank, answer in late.items() if answer.in_user_collective is not None
        }

    def slow(self) -> str:
        """Which ranks the others wait for, and where they are, when nothing is wrong but time."""
        late = behind(self.tails())
        parts = [f"rank {rank} last issued {last if last is not None else 'nothing'}" for rank, last in late.items()]
        parts += [f"rank {rank} is alive but does not answer (its interpreter is busy)" for rank in self.silent()]
        return "; ".join(parts) or "all ranks have issued it, so it is the transfer that takes long"

    def _lives_here(self, rank: int) -> bool:
        process = self.board.process_of(rank)
        return process is not None and process.is_alive_here()

    def _gone(self, text: str) -> Verdict:
        return Verdict(text, False, self._readers())

    def _readers(self) -> int:
        return self.world_size - len(self.dead) - len(self.left) - len(self.silent())


def inquire(inquiry: Inquiry, *, patient: Callable[[], bool], connection_lost: bool) -> Verdict | None:
    """Poll as long as `patient()` (which waits a moment) and something is unknown; the verdict, if there is one."""
    while True:
        inquiry.poll()
        verdict = inquiry.divergence()
        if verdict is not None or not inquiry.silent():
            break
        if not patient():
            break
    return inquiry.verdict(connection_lost=connection_lost)
