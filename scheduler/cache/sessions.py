"""The conversations whose last request has ended here, and how likely each goes on.

A conversation is found again by its chain: the digest of the last indexed block of its last request. A name, if its
requests have one, finds it also where the chat template has written its history anew. All of this is in the process
only: a successor learns again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from alignedserve.scheduler.cache.returns import EVEN, UNKNOWN, ReturnTimes

MOST_SESSIONS = 1 << 14
MOST_NOTES = 1 << 14
LOOKED_BACK = 512  # blocks: a conversation's next message is hardly longer


@dataclass(slots=True)
class Session:
    """A conversation between two of its requests: `block` is its last block, `blocks` their number.

    `digests`: of the last blocks that a next request may go on from: of the prompt, and of the answer.
    """

    request_id: str
    digests: list[bytes]
    block: int
    blocks: int
    turns: int
    ended_s: float
    kind: str = UNKNOWN
    name: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """What the gateway says of a request: how it ended, the name of its conversation or "", and when it came."""

    kind: str
    name: str
    began_s: float


class Sessions:
    """For one thread. `clock`: seconds, monotonic. `digest_bytes`: the length of a block's chained digest."""

    def __init__(self, clock: Callable[[], float], digest_bytes: int) -> None:
        self._digest_bytes = digest_bytes
        self.returns = ReturnTimes()
        self.clock = clock
        self._by_digest: dict[bytes, Session] = {}
        self._by_request: OrderedDict[str, Session] = OrderedDict()  # the one that ended longest ago first
        self._by_name: dict[str, Session] = {}
        self._open: OrderedDict[str, int] = OrderedDict()  # requests that go on with a conversation: its turns so far
        self._notes: OrderedDict[str, Note] = OrderedDict()  # of requests that are still held

    def __len__(self) -> int:
        return len(self._by_request)

    def __iter__(self) -> Iterator[Session]:
        """Those that ended last come first."""
        return reversed(self._by_request.values())

    def came_back(self, request_id: str, digests: bytes | bytearray, begin: int, end: int) -> int:
        """A request's blocks `begin .. end - 1` have these chained digests, be they cached or not.

        Only the last LOOKED_BACK of them are looked at. Returns how many of its first blocks its conversation had
        before; 0 if it goes on with none.
        """
        if not self._by_digest:
            return 0
        first, size = max(begin, end - LOOKED_BACK), self._digest_bytes
        for at in range((end - 1) * size, (first - 1) * size, -size):
            session = self._by_digest.get(bytes(digests[at : at + size]))
            if session is not None and session.request_id != request_id:
                self._return(session, self.clock())
                self._open[request_id] = session.turns
                _bound(self._open)
                return at // size + 1
        return 0

    def note(self, request_id: str, note: Note) -> Session | None:
        """The gateway says how a request ended. Returns its session if its blocks are ranked already."""
        session = self._by_request.get(request_id)
        if session is None:
            self._notes[request_id] = note
            _bound(self._notes)
        elif session.kind == UNKNOWN:
            self._take(session, note)
        return session

    def ended(self, request_id: str, digest: bytes, block: int, blocks: int) -> float:
        """A request's first `blocks` blocks become cached; `digest`: of the last, `block`. Returns their `chance`."""
        session = self._by_request.get(request_id)
        if session is None:
            turns = self._open.pop(request_id, 0) + 1
            session = Session(request_id, [digest], block, blocks, turns, self.clock())
            self._by_request[request_id] = session
            if (note := self._notes.pop(request_id, None)) is not None:
                self._take(session, note)
            while len(self._by_request) > MOST_SESSIONS:
                self._forget(next(iter(self._by_request.values())))
        elif digest not in session.digests:
            self._reach(session, digest, block, blocks)
        self._by_digest[digest] = session
        return self.chance(session)

    def chance(self, session: Session) -> float:
        """How likely the session's blocks are used again while they are cached, as a multiple of an even chance."""
        return self.returns.chance(session.kind, session.turns) / EVEN

    # ---- internal

    def _take(self, session: Session, note: Note) -> None:
        """An earlier request of the same name has come back with this one, if its blocks did not show it."""
        if note.name:
            before = self._by_name.get(note.name)
            if before is not None and before is not session:
                self._return(before, note.began_s)
                session.turns = max(session.turns, before.turns + 1)
            session.name = note.name
            self._by_name[note.name] = session
        session.kind = note.kind
        self.returns.ended(note.kind, session.turns)

    def _reach(self, session: Session, digest: bytes, block: int, blocks: int) -> None:
        """The request's answer is cached too, or its prompt after its answer. The longer one's digest comes last."""
        if blocks > session.blocks:
            session.digests[1:], gone = [digest], session.digests[1:]
            session.block, session.blocks = block, blocks
        else:
            session.digests[:-1], gone = [digest], session.digests[:-1]
        self._unlink(session, gone)

    def _unlink(self, session: Session, digests: Iterable[bytes]) -> None:
        for digest in digests:
            if self._by_digest.get(digest) is session:
                del self._by_digest[digest]

    def _return(self, session: Session, now_s: float) -> None:
        self._forget(session)
        if session.kind != UNKNOWN:
            self.returns.returned(session.kind, session.turns, now_s - session.ended_s)

    def _forget(self, session: Session) -> None:
        self._unlink(session, session.digests)
        self._by_request.pop(session.request_id, None)
        if session.name and self._by_name.get(session.name) is session:
            del self._by_name[session.name]


def _bound(entries: OrderedDict[str, Any]) -> None:
    while len(entries) > MOST_NOTES:
        entries.popitem(last=False)
