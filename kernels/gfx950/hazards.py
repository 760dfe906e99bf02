"""What a run can find wrong: one record a finding, and the shadows that see it.

Time is one counter of the batch. An LDS access occupies [issue, complete], where it completes at the wait that covers
it (or at the end of the wave). Two accesses of different waves are ordered only by a barrier: the first must be
complete before the barrier and the second issued after it. So an access conflicts with one recorded at or after the
time its own barrier interval began. Which wave the emulator runs first does not matter: the later to complete sees
the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mxgate.kernels.gfx950.state import SCALAR_BASE, Array, Waves
from mxgate.kernels.gfx950.text import SCC, Instruction, Kernel

KINDS = {
    "register-before-wait": "a register is read before the wait for its load",
    "register-overwritten": "a register is overwritten while a load into it is outstanding",
    "register-uninitialised": "a register is read in a lane that never wrote it",
    "matrix-result-early": "an MFMA result is touched before its wait states have passed",
    "lds-race": "two waves touch an LDS word with no barrier between them and one of them writes",
    "lds-dma-in-flight": "an LDS word is touched while an asynchronous load into it is outstanding",
    "lds-read-overtaken": "an LDS-DMA may overwrite a word whose read was never waited for",
    "lds-uninitialised": "an LDS word is read that nothing wrote",
    "lds-out-of-bounds": "an LDS address lies past the workgroup's allocation",
    "store-out-of-bounds": "a store that its descriptor permits lies outside every allocation",
    "load-out-of-bounds": "a load that its descriptor permits lies outside every allocation",
    "workgroups-collide": "two workgroups store to one address",
}


@dataclass(frozen=True)
class Finding:
    """The first lane in which a hazard of one kind was seen at one instruction, and how many lanes saw it in all.

    address: a byte offset in LDS, a device address, a register number, or None.
    """

    kind: str
    line: int
    instruction: str
    workgroup: int
    wave: int
    lane: int
    address: int | None
    detail: str
    count: int

    def __str__(self) -> str:
        where = "" if self.address is None else f" at {self.address:#x}"
        return (
            f"{self.kind}: line {self.line} `{self.instruction}` workgroup {self.workgroup} wave {self.wave} "
            f"lane {self.lane}{where}: {self.detail} ({self.count} lanes)"
        )


class HazardError(RuntimeError):
    """Kernels gave an answer, but one that the hardware need not give."""


class Recorder:
    """Findings by (kind, line, detail's kind): the first is kept whole, the rest are counted."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, int], Finding] = {}

    def report(
        self, kind: str, inst: Instruction, st: Waves, bad: Array, address: Array | int | None, detail: str
    ) -> None:
        """bad: bool[W, 64] (or broadcastable). address broadcasts to it."""
        bad = np.broadcast_to(bad, (st.n, 64))
        count = int(bad.sum())
        key = (kind, inst.index)
        old = self.found.get(key)
        if old is not None:
            self.found[key] = Finding(**{**old.__dict__, "count": old.count + count})
            return
        wave, lane = (int(x) for x in np.argwhere(bad)[0])
        at = None if address is None else int(np.broadcast_to(address, bad.shape)[wave, lane])
        self.found[key] = Finding(
            kind, inst.line, inst.text, int(st.gid[wave]), int(st.slot[wave]), lane, at, detail, count
        )

    def findings(self) -> tuple[Finding, ...]:
        return tuple(sorted(self.found.values(), key=lambda f: (f.line, f.kind)))


def register_name(number: int, kernel: Kernel) -> str:
    if number >= SCALAR_BASE:
        index = number - SCALAR_BASE
        return {106: "vcc_lo", 107: "vcc_hi", 124: "m0", 126: "exec_lo", 127: "exec_hi", SCC: "scc"}.get(
            index, f"s{index}"
        )
    return f"v{number}" if number < kernel.vgprs else f"a{number - kernel.vgprs}"


class Access(NamedTuple):
    """One LDS access of a group: absolute byte addresses [W, 64], active lanes or None for all, its bytes a lane,
    when each wave issued it ([W]), and when the barrier interval of its workgroup had begun at that time ([W])."""

    address: Array
    active: Array | None
    size: int
    issued: Array
    since: Array
    row: bool | None = None  # lane l's address is lane 0's plus l * size


class Judge(NamedTuple):
    """Where a shadow reports, and for which instruction."""

    found: Recorder
    inst: Instruction
    kernel: Kernel


class LdsShadow:
    """Who last wrote and read each granule of LDS, over the workgroups of a batch.

    A granule is the narrowest access of the kernel (so nothing is lost), made finer when an access is not aligned to
    it.
    """

    def __init__(self, workgroups: int, nbytes: int, waves: int, granule: int) -> None:
        self.granule, self.nbytes, self.waves = granule, nbytes, waves
        n = workgroups * nbytes // granule
        self.written = np.zeros(n, np.int32)  # time of the last write, 0: never
        # Its writer (wave | is DMA << 5 | instruction << 6), and the time of the last write by a wave other than that
        # one.
        self.writer = np.zeros((n, 2), np.int32)
        self.read = np.zeros((n, waves), np.int32)  # time each wave's last read of it completed

    def _refine(self, granule: int) -> None:
        k = self.granule // granule
        self.written, self.writer, self.read = (np.repeat(x, k, axis=0) for x in (self.written, self.writer, self.read))
        self.granule = granule

    def _granules(self, a: Access) -> list[Array]:
        g = self.granule
        if g > 1 and (a.size % g or (a.address & (g - 1)).any()):
            fine = 4 if g > 4 and a.size % 4 == 0 and not (a.address & 3).any() else 1
            self._refine(fine)
            g = fine
        first = a.address if g == 1 else a.address >> (g.bit_length() - 1)
        return [first] if a.size == g else [first + k for k in range(a.size // g)]

    def on_read(self, to: Judge, st: Waves, a: Access, now: int) -> None:
        since = a.since[:, None]
        for idx in self._granules(a):
            written: Array = self.written.take(idx)
            low: Array = written if a.active is None else written[a.active]
            if not low.size:
                continue
            if int(low.min()) == 0:
                self._report(to, "lds-uninitialised", st, a, written == 0, "nothing wrote it")
            if bool((written >= since).any()):
                self._conflicts(to, st, a, self.writer[idx], written, False)
            mine = idx * self.waves + st.slot[:, None]
            self.read.reshape(-1)[mine if a.active is None else mine[a.active]] = now

    def on_write(self, to: Judge, st: Waves, a: Access, now: int, dma: bool, same: Callable[[], Array]) -> None:
        """same() answers bool[W, 64]: whether the bytes written are those already there (that is no race)."""
        record = np.int32(dma << 5 | to.inst.index << 6)
        me, since = st.slot[:, None], a.since[:, None]
        for idx in self._granules(a):
            # A full wave's DMA lands on 64 granules in a row: whole rows of the tables, much quicker to move.
            row = a.row is not None and a.size == self.granule and not (idx[:, 0] & 63).any()
            at = idx[:, 0] >> 6 if row else idx

            def table(x: Array, row: bool = row) -> Array:
                return x.reshape(-1, 64, *x.shape[1:]) if row and len(x) % 64 == 0 else x

            if row and len(self.written) % 64:
                row, at = False, idx
            written, seen, pair = table(self.written)[at], table(self.read)[at], table(self.writer)[at]
            if bool((written >= since).any()):
                self._conflicts(to, st, a, pair, written, dma, ~same())
            if bool((seen >= since[..., None]).any()):
                self._overtaken(to, st, a, seen, dma, ~same())
            who = pair[..., 0]
            pair[..., 1] = np.where(who & 31 == me, pair[..., 1], written)
            pair[..., 0] = me | record
            if a.active is not None:
                at, pair = idx[a.active], pair[a.active]
            table(self.written)[at] = now
            table(self.writer)[at] = pair

    def _conflicts(
        self, to: Judge, st: Waves, a: Access, pair: Array, written: Array, dma: bool, differs: Array | None = None
    ) -> None:
        """Against earlier writes: of other waves in this barrier interval, and of this wave's own outstanding DMA."""
        me, since = st.slot[:, None], a.since[:, None]
        wave, by_dma = pair[..., 0] & 31, (pair[..., 0] >> 5) & 1 == 1
        other = pair[..., 1]
        race = (written >= since) & (wave != me) & (written > 0)
        race |= (wave == me) & (other >= since) & (other > 0)
        # A wave's LDS operations run in order, and so do its DMAs; one of each kind does not.
        own = (wave == me) & (written > a.issued[:, None]) & (by_dma != dma)
        if differs is not None:
            race, own = race & differs, own & differs
        for bad, kind in (
            (race & by_dma, "lds-dma-in-flight"),
            (race & ~by_dma, "lds-race"),
            (own, "lds-dma-in-flight"),
        ):
            if a.active is not None:
                bad = bad & a.active
            if bad.any():
                w, lane = np.argwhere(bad)[0]
                line = to.kernel.instructions[int(pair[w, lane, 0]) >> 6].line
                text = f"written by wave {int(wave[w, lane])} at line {line} with no barrier after its wait"
                self._report(to, kind, st, a, bad, text)

    def _overtaken(self, to: Judge, st: Waves, a: Access, seen: Array, dma: bool, differs: Array) -> None:
        """Against earlier reads: of other waves in this barrier interval, and of this wave's own outstanding ones."""
        for wave in range(self.waves):
            time, mine = seen[..., wave], st.slot[:, None] == wave
            bad = (time >= a.since[:, None]) & (time > 0) & differs & ~mine
            self._report(
                to,
                "lds-read-overtaken" if dma else "lds-race",
                st,
                a,
                bad,
                f"wave {wave} reads it with no barrier between",
            )
            if dma:
                own = (time > a.issued[:, None]) & differs & mine
                self._report(to, "lds-read-overtaken", st, a, own, "its read was issued before and waited for after")

    def _report(self, to: Judge, kind: str, st: Waves, a: Access, bad: Array, detail: str) -> None:
        if a.active is not None:
            bad = bad & a.active
        if bad.any():
            to.found.report(kind, to.inst, st, bad, a.address - (st.wg * self.nbytes)[:, None], detail)


class StoreShadow:
    """Which workgroup stored each granule of device memory; a granule is the kernel's narrowest store."""

    def __init__(self, nbytes: int, granule: int) -> None:
        self.granule = granule
        self.owner = np.zeros(nbytes // granule + 1, np.int32)

    def on_store(self, to: Judge, st: Waves, address: Array, ok: Array | None, size: int, base: int) -> None:
        """address: arena offsets [W, 64] of `size` bytes a lane, stored where ok (None: everywhere)."""
        a = address if ok is None else address[ok]
        while self.granule > 1 and (size % self.granule or (a & (self.granule - 1)).any()):
            self.owner, self.granule = np.repeat(self.owner, 2), self.granule // 2
        gid = (st.gid + 1).astype(np.int32)[:, None]
        gid = gid if ok is None else np.broadcast_to(gid, address.shape)[ok]
        first = a >> (self.granule.bit_length() - 1)
        for k in range(size // self.granule):
            old = self.owner.take(first + k)
            self.owner[first + k] = gid
            now = self.owner.take(first + k)  # another workgroup of this very group of waves may have written over it
            bad = ((old != 0) & (old != gid)) | (now != gid)
            if bad.any():
                full = np.zeros(address.shape, bool)
                full[... if ok is None else ok] = bad
                who = int(np.where(now != gid, now, old)[bad][0]) - 1
                to.found.report(
                    "workgroups-collide", to.inst, st, full, address + base, f"workgroup {who} stored there too"
                )
