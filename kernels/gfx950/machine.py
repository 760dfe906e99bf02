"""Running a kernel: workgroups in shuffled batches, waves grouped by program counter, barriers, and the run's result.

With hazards on, the waves of a workgroup run in separate streams whose turns are drawn from the seed, so that no two of
them are ever in lock-step; without, all of a batch's waves run together.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mxgate.kernels.gfx950 import memory
from mxgate.kernels.gfx950.hazards import Access, Finding, HazardError, Judge, LdsShadow, Recorder, StoreShadow
from mxgate.kernels.gfx950.memory import Memory, gather, scatter, union
from mxgate.kernels.gfx950.mfma import FORMS, MODELS
from mxgate.kernels.gfx950.plan import BRANCHES, Entry, Plan, Program, program
from mxgate.kernels.gfx950.state import SCALAR_BASE, Array, Waves, spread
from mxgate.kernels.gfx950.text import LDS_LIMIT, SCC, Argument, Instruction, Kernel, one_line

LIMIT = 50_000_000
MEMORY = 3 << 27  # bytes of registers, LDS and shadows that a batch may take
BATCH = 1024  # workgroups that run together: they share the cost of a step and of decoding what several of them read
UNWRITTEN = 0xFF  # LDS before anything wrote it: NaN in every format
# Told of each access as it is issued: "load" or "store" with device addresses, "lds" with addresses in the workgroup's
# LDS; the instruction, the waves, addresses [W, 64], the lanes that make the access [W, 64], and a lane's bytes.
Observer = Callable[[str, Instruction, Waves, Array, Array, int], None]


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """NumPy's own OpenBLAS on one thread: on products this small more threads only get in one another's way.

    Other BLAS libraries (macOS Accelerate, a distribution's) are left as they are.
    """
    for path in sorted((Path(np.__file__).parent.parent / "numpy.libs").glob("*openblas*")):
        library = ctypes.CDLL(str(path))
        for suffix in ("64_", ""):
            get = getattr(library, f"scipy_openblas_get_num_threads{suffix}", None)
            put = getattr(library, f"scipy_openblas_set_num_threads{suffix}", None)
            if get is not None and put is not None:
                before = int(get())
                put(1)
                try:
                    yield
                finally:
                    put(before)
                return
    yield


class RunError(ValueError):
    """The kernel cannot be run as asked: arguments, launch shape, or the instruction limit. Names the line where
    there is one."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


@dataclass(frozen=True)
class RunResult:
    """findings: hazards, empty for a clean run. executed: how many waves ran each instruction (int64, by index)."""

    kernel: Kernel
    findings: tuple[Finding, ...]
    executed: Array
    waves: int
    model: str
    seed: int

    @property
    def instructions(self) -> int:
        """Wave-instructions executed."""
        return int(self.executed.sum())

    @property
    def flops(self) -> int:
        """Multiply-adds of the matrix core, two operations each."""
        work = [
            2 * FORMS[i.base].rows ** 2 * FORMS[i.base].k if i.base in FORMS else 0 for i in self.kernel.instructions
        ]
        return int((self.executed * np.array(work, np.int64)).sum())

    def check(self) -> None:
        """Raise HazardError when there are findings."""
        if self.findings:
            raise HazardError(f"{self.kernel.name}: {len(self.findings)} hazards, the first: {self.findings[0]}")


class Machine:
    """The state of one run that instructions reach through their waves."""

    def __init__(
        self, kernel: Kernel, mem: Memory, scratch: int, waves_each: int, lds_bytes: int, hazards: bool, seed: int
    ) -> None:
        self.kernel, self.memory, self.scratch, self.waves_each = kernel, mem, scratch, waves_each
        self.random = np.random.default_rng(seed)
        self.found = Recorder()
        self.clock = 1
        self.lds_bytes = (lds_bytes + 15) // 16 * 16
        self.lds_granule, store_granule = _granules(kernel) if hazards else (16, 16)
        self.stores = StoreShadow(mem.bytes.size, store_granule) if hazards else None
        self.hazards = hazards
        self.observe: Observer | None = None
        self.shadow: LdsShadow | None = None
        self.lds = np.empty(0, np.uint8)
        self.since = np.zeros(0, np.int32)

    def workgroup_bytes(self) -> int:
        """Bytes a workgroup takes while it runs: registers, LDS, and each granule's shadow (12 and 4 a wave)."""
        k = self.kernel
        registers = (k.vgprs + k.agprs) * 256 * self.waves_each
        shadow = self.lds_bytes // self.lds_granule * (12 + 4 * self.waves_each) if self.hazards else 0
        return registers + self.lds_bytes + shadow + 1

    def start(self, workgroups: int) -> None:
        """Fresh LDS for a batch."""
        size = max(self.lds_bytes, 16) * workgroups
        if self.lds.size != size:
            self.lds = np.empty(size, np.uint8)
        self.lds.fill(UNWRITTEN)
        self.clock = 1
        self.since = np.full(workgroups, 1, np.int32)
        if self.hazards and self.lds_bytes:
            self.shadow = LdsShadow(workgroups, self.lds_bytes, self.waves_each, self.lds_granule)

    def report(
        self, kind: str, inst: Instruction, st: Waves, bad: Array, address: Array | int | None, detail: str
    ) -> None:
        if self.hazards:
            self.found.report(kind, inst, st, bad, address, detail)

    def judge(self, inst: Instruction) -> Judge:
        return Judge(self.found, inst, self.kernel)

    # ---- LDS: an access is a payload (absolute addresses, data, active lanes, issue time, interval's begin)
    def lds_access(
        self, inst: Instruction, st: Waves, address: Array, size: int, data: Array | None
    ) -> tuple[Any, ...]:
        self.clock += 1
        active = None if st.full else st.mask.copy()
        address = spread(address, (st.n, 64))
        inside = address if active is None else address[active]
        bits = union(inside) if inside.size else 0
        if bits < 0 or (bits + size > self.lds_bytes and int(inside.max()) + size > self.lds_bytes):
            good = (address >= 0) & (address + size <= self.lds_bytes)
            bad = ~good & st.mask
            self.report("lds-out-of-bounds", inst, st, bad, address, f"the workgroup has {self.lds_bytes} bytes")
            active = good & st.mask
        if self.observe is not None:
            self.observe("lds", inst, st, address, st.mask if active is None else active, size)
        if active is not None:
            address = np.where(active, address, 0)
        address = address + (st.wg * self.lds_bytes)[:, None]
        if self.shadow is None:
            return address, data, active, None, None
        return address, data, active, np.full(st.n, self.clock, np.int32), self.since[st.wg]

    def lds_read(self, inst: Instruction, st: Waves, payload: Any, size: int) -> tuple[Array, Array | None]:
        address, _, active, issued, since = payload
        self.clock += 1
        if self.shadow is not None:
            self.shadow.on_read(self.judge(inst), st, Access(address, active, size, issued, since), self.clock)
        if not self.lds_bytes:
            return np.zeros((st.n, 64, max(size // 4, 1)), np.uint32), active
        return gather(self.lds, address, size), active

    def lds_write(self, inst: Instruction, st: Waves, payload: Any, size: int, dma: bool) -> None:
        address, data, active, issued, since = payload
        self.clock += 1
        if not self.lds_bytes:
            return
        if self.shadow is not None:

            def same() -> Array:
                now, new = gather(self.lds, address, size), data
                if size < 4:
                    keep = np.uint32((1 << 8 * size) - 1)
                    now, new = now & keep, new & keep
                equal: Array = (now == new).all(-1)
                return equal

            access = Access(address, active, size, issued, since, dma if active is None else None)
            self.shadow.on_write(self.judge(inst), st, access, self.clock, dma, same)
        if active is None and size == 16 and not union(address) & 15:
            rows = address[:, 0] >> 4
            words = np.ascontiguousarray(data).view(np.complex128)[..., 0]
            if dma and not (rows & 63).any() and self.lds.size % 1024 == 0:
                self.lds.view(np.complex128).reshape(-1, 64)[rows >> 6] = words
            else:
                self.lds.view(np.complex128)[address >> 4] = words
            return
        if active is not None:
            address, data = address[active], data[active]
            if not len(address):
                return
        if size % 4 == 0 and not union(address) & 3:
            words = self.lds.view(np.uint32)
            for k in range(size // 4):
                words[(address >> 2) + k] = data[..., k]
        else:
            scatter(self.lds, address.ravel(), data.reshape(address.size, -1), size)

    def lds_atomic(self, inst: Instruction, st: Waves, payload: Any, fn: Any) -> None:
        address, data, active, issued, since = payload
        self.clock += 1
        if self.shadow is not None:
            nothing = np.ones((st.n, 64), bool)  # atomics may meet, so they are recorded and not judged
            access = Access(address, active, 4, issued, since)
            self.shadow.on_write(self.judge(inst), st, access, self.clock, False, lambda: nothing)
        lanes = np.argwhere(np.ones((st.n, 64), bool) if active is None else active)
        lanes = lanes[self.random.permutation(len(lanes))]
        words = self.lds.view(np.uint32)
        while len(lanes):
            w, lane = lanes[:, 0], lanes[:, 1]
            at = address[w, lane] >> 2
            _, first = np.unique(at, return_index=True)
            words[at[first]] = fn(words[at[first]], data[w[first], lane[first], 0])
            rest = np.ones(len(lanes), bool)
            rest[first] = False
            lanes = lanes[rest]


def _granules(kernel: Kernel) -> tuple[int, int]:
    """(LDS, device memory): the narrowest access the kernel makes to each, in bytes."""
    lds, stores = [16], [16]
    for i in kernel.instructions:
        n = memory.ds_bytes(i.base)
        if n is not None:
            lds.append(4 if n == 12 else n)
        if "lds" in i.modifiers or "_lds_" in i.base:
            lds.append(16 if i.base.endswith("dwordx4") else 4)
        if "_store_" in i.base:
            form = i.base.split("_store_")[1]
            wide = memory.WIDTHS.get(form, 4)
            stores.append(memory.STORE_NARROW[form][0] if form in memory.STORE_NARROW else 4 if wide == 12 else wide)
    return min(lds), min(stores)


# ------------------------------------------------------------------------------------- arguments
Value = Any  # an array (a device buffer), an int or float of the argument's size, its raw bytes, or a Packed


@dataclass(frozen=True, eq=False)
class Packed:
    """An argument's bytes with device addresses among them. pointers: where in the bytes, and whither: a device buffer
    (as an array among the arguments) and a byte offset into it."""

    content: bytes
    pointers: Mapping[int, tuple[Array, int]]


def _explicit(kernel: Kernel) -> tuple[Argument, ...]:
    return tuple(a for a in kernel.arguments if not a.kind.startswith("hidden_"))


def _pairs(kernel: Kernel, args: Sequence[Value] | Mapping[int, Value]) -> list[tuple[Argument, Value]]:
    if isinstance(args, Mapping):
        known = {a.offset: a for a in kernel.arguments}
        out = []
        for offset, value in sorted(args.items()):
            content = value.content if isinstance(value, Packed) else value
            size = 8 if isinstance(value, np.ndarray) else len(content) if isinstance(content, bytes) else 0
            a = known.get(offset) or Argument(offset, size, "by_value", "")
            if not a.size:
                raise RunError(
                    f"kernel {kernel.name}: no argument at offset {offset}, and a number's size is not known there"
                )
            out.append((a, value))
        return out
    wanted = _explicit(kernel)
    if len(args) != len(wanted):
        raise RunError(f"kernel {kernel.name}: expected {len(wanted)} arguments, found {len(args)}")
    return list(zip(wanted, args, strict=True))


def _buffers(value: Value) -> list[Array]:
    """The device buffers that an argument points to."""
    if isinstance(value, Packed):
        return [array for array, _ in value.pointers.values()]
    return [value] if isinstance(value, np.ndarray) else []


def _encode(kernel: Kernel, a: Argument, value: Value, address: Callable[[Array], int]) -> bytes:
    where = f"kernel {kernel.name}: argument at offset {a.offset}"
    if isinstance(value, np.ndarray):
        if a.size != 8:
            raise RunError(f"{where} holds {a.size} bytes, an array needs 8")
        return address(value).to_bytes(8, "little")
    if isinstance(value, Packed):
        content = bytearray(value.content)
        for at, (array, offset) in value.pointers.items():
            content[at : at + 8] = (address(array) + offset).to_bytes(8, "little")
        value = bytes(content)
    if isinstance(value, bytes):
        if len(value) != a.size:
            raise RunError(f"{where} holds {a.size} bytes, found {len(value)}")
        return value
    if isinstance(value, (float, np.floating)):
        kind = {2: np.float16, 4: np.float32, 8: np.float64}.get(a.size)
        if kind is None:
            raise RunError(f"{where} holds {a.size} bytes, which no float has")
        return bytes(kind(value).tobytes())
    if isinstance(value, (int, np.integer)):
        bits = 8 * a.size
        if not -(1 << (bits - 1)) <= int(value) < (1 << bits):
            raise RunError(f"{where}: {value} does not fit {a.size} bytes")
        return (int(value) & ((1 << bits) - 1)).to_bytes(a.size, "little")
    raise RunError(f"{where}: expected an array, a number or bytes, found {type(value).__name__}")


Three = tuple[int, int, int]
_HIDDEN: dict[str, Callable[[Three, Three], int]] = {
    "hidden_block_count_x": lambda g, b: g[0],
    "hidden_block_count_y": lambda g, b: g[1],
    "hidden_block_count_z": lambda g, b: g[2],
    "hidden_group_size_x": lambda g, b: b[0],
    "hidden_group_size_y": lambda g, b: b[1],
    "hidden_group_size_z": lambda g, b: b[2],
    "hidden_grid_dims": lambda g, b: 3 if g[2] * b[2] > 1 else 2 if g[1] * b[1] > 1 else 1,
}


def _three(x: int | Sequence[int], what: str) -> tuple[int, int, int]:
    values = (x,) if isinstance(x, int) else tuple(int(v) for v in x)
    if not 1 <= len(values) <= 3 or any(v < 1 for v in values):
        raise RunError(f"{what} must be one to three positive numbers, found {x}")
    a, b, c = (*values, 1, 1)[:3]
    return a, b, c


def run(
    kernel: Kernel,
    args: Sequence[Value] | Mapping[int, Value],
    grid: int | Sequence[int],
    block: int | Sequence[int] | None = None,
    *,
    seed: int = 0,
    hazards: bool = True,
    model: str = "exact-rne",
    limit: int = LIMIT,
    dynamic_lds: int = 0,
    batch: int = BATCH,
    observe: Observer | None = None,
) -> RunResult:
    """Run a kernel on a grid of workgroups; arrays among `args` are device buffers and hold what the kernel stored.

    args: one value an explicit argument, or a mapping from kernarg offset to value. An array (C-contiguous) is an
    allocation of its own and passes its address; the same array twice is one allocation; Packed puts addresses inside
    an argument. grid: workgroups; block: work items (default: what the kernel requires). limit: instructions a wave
    may execute. observe: is told of every access. Raises RunError and TextError.
    """
    if model not in MODELS:
        raise RunError(f"unknown arithmetic model {model!r}, expected one of {', '.join(MODELS)}")
    groups = _three(grid, "grid")
    items = _three(block if block is not None else kernel.workgroup_size or 256, "block")
    if kernel.workgroup_size is not None and items != kernel.workgroup_size:
        raise RunError(f"kernel {kernel.name} requires a block of {kernel.workgroup_size}, found {items}")
    threads = items[0] * items[1] * items[2]
    if threads > 1024:
        raise RunError(f"a block has at most 1024 work items, found {threads}")
    if kernel.lds_bytes + dynamic_lds > LDS_LIMIT:
        raise RunError(f"{kernel.lds_bytes + dynamic_lds} bytes of LDS, a compute unit has {LDS_LIMIT}")
    pairs = _pairs(kernel, args)
    arrays: list[Array] = []
    for v in (v for _, value in pairs for v in _buffers(value)):
        if not v.flags.c_contiguous:
            raise RunError(f"kernel {kernel.name}: a device buffer must be C-contiguous")
        if not any(v is x for x in arrays):
            arrays.append(v)
    waves_each = (threads + 63) // 64
    total = groups[0] * groups[1] * groups[2]
    lanes = total * waves_each * 64
    # Compilers read kernel arguments in wide loads that end past the last one, inside its cache line.
    kernarg_bytes = (max(kernel.kernarg_bytes, 1) + 63) // 64 * 64
    mem = Memory([x.nbytes for x in arrays] + [kernarg_bytes, 64, kernel.scratch_bytes * lanes])
    for k, x in enumerate(arrays):
        mem.bytes[mem.starts[k] : mem.ends[k]] = x.reshape(-1).view(np.uint8)
    n = len(arrays)
    kernarg = np.zeros(kernarg_bytes, np.uint8)

    def address(array: Array) -> int:
        return next(mem.address(k) for k, x in enumerate(arrays) if x is array)

    for a, v in pairs:
        if a.offset + a.size > kernel.kernarg_bytes:
            raise RunError(
                f"argument at {a.offset} of {a.size} bytes ends past the {kernel.kernarg_bytes} bytes of kernargs"
            )
        kernarg[a.offset : a.offset + a.size] = np.frombuffer(_encode(kernel, a, v, address), np.uint8)
    for a in kernel.arguments:
        if a.kind in _HIDDEN and not isinstance(args, Mapping):
            value = _HIDDEN[a.kind](groups, items)
            kernarg[a.offset : a.offset + a.size] = np.frombuffer(_encode(kernel, a, value, address), np.uint8)
    mem.bytes[mem.starts[n] : mem.ends[n]] = kernarg
    packet = np.zeros(64, np.uint8)
    packet[4:10] = np.array(items, np.uint16).view(np.uint8)
    packet[12:24] = np.array([g * b for g, b in zip(groups, items, strict=True)], np.uint32).view(np.uint8)
    mem.bytes[mem.starts[n + 1] : mem.ends[n + 1]] = packet
    machine = Machine(kernel, mem, mem.starts[n + 2], waves_each, kernel.lds_bytes + dynamic_lds, hazards, seed)
    machine.observe = observe
    code = program(kernel, hazards, model)
    for p in code.plans.values():
        p.executions = 0
    launch = _Launch(machine, code, groups, items, mem.address(n), mem.address(n + 1), kernarg, limit)
    order = machine.random.permutation(total)
    batch = max(1, min(batch, MEMORY // machine.workgroup_bytes()))
    with one_blas_thread(), np.errstate(all="ignore"):  # lanes that are off hold noise
        for at in range(0, total, batch):
            launch.batch(order[at : at + batch])
    for k, x in enumerate(arrays):
        held, now = x.reshape(-1).view(np.uint8), mem.bytes[mem.starts[k] : mem.ends[k]]
        if x.flags.writeable and not np.array_equal(held, now):  # memory that may not be written stays untouched
            held[:] = now
    executed = np.zeros(len(kernel.instructions), np.int64)
    for p in code.plans.values():
        executed[p.instructions] += p.executions
    return RunResult(kernel, machine.found.findings(), executed, total * waves_each, model, seed)


class _Launch:
    def __init__(
        self,
        machine: Machine,
        code: Program,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        kernarg: int,
        packet: int,
        kernarg_bytes: Array,
        limit: int,
    ) -> None:
        self.m, self.code, self.grid, self.block = machine, code, grid, block
        self.kernarg, self.packet, self.kernarg_bytes, self.limit = kernarg, packet, kernarg_bytes, limit
        self.pool: dict[tuple[int, int], Array] = {}

    def _waves(self, ids: Array, stream: int, wg: Array, slot: Array) -> Waves:
        """Waves as the dispatcher starts them: garbage in every register but those the descriptor asks for."""
        k, d = self.m.kernel, self.m.kernel.descriptor
        n, planes = len(wg), max(k.vgprs + k.agprs, 1)
        registers = self.pool.get((stream, n))
        if registers is None:
            registers = self.pool[stream, n] = np.empty((planes, n, 64), np.uint32)
        registers[...] = self.m.random.integers(0, 1 << 32, (planes, 1, 1), dtype=np.uint32)
        scalars = np.empty((128, n), np.uint32)
        scalars[...] = self.m.random.integers(0, 1 << 32, (128, 1), dtype=np.uint32)
        st = Waves(self.m, registers, scalars, wg, ids[wg], slot)
        st.stream, st.queues = stream, Entry()
        known = st.initialised
        linear = slot[:, None] * 64 + np.arange(64)
        x, y, z = self.block
        packed = (linear % x) | (linear // x % y) << 10 | (linear // (x * y)) << 20
        st.r[0][...] = packed
        known[0] = True
        at = 0

        def put(values: Sequence[Any]) -> None:
            nonlocal at
            for v in values:
                st.s[at][:] = v
                known[SCALAR_BASE + at] = True
                at += 1

        def wide(v: int) -> list[int]:
            return [v & 0xFFFFFFFF, v >> 32]

        for name, value in (
            ("private_segment_buffer", [0, 0, 0, 0]),
            ("dispatch_ptr", wide(self.packet)),
            ("queue_ptr", [0, 0]),
            ("kernarg_segment_ptr", wide(self.kernarg)),
            ("dispatch_id", [0, 0]),
            ("flat_scratch_init", [0, 0]),
            ("private_segment_size", [k.scratch_bytes]),
        ):
            if d.get("user_sgpr_" + name):
                put(value)
        words = d.get("user_sgpr_kernarg_preload_length", 0)
        if words:
            first = d.get("user_sgpr_kernarg_preload_offset", 0)
            padded = np.concatenate([self.kernarg_bytes, np.zeros(4 * (first + words), np.uint8)])
            put(list(padded[: len(padded) // 4 * 4].view(np.uint32)[first : first + words]))
        gid = ids[wg]
        gx, gy, _ = self.grid
        for axis, value in (("x", gid % gx), ("y", gid // gx % gy), ("z", gid // (gx * gy))):
            if d.get("system_sgpr_workgroup_id_" + axis):
                put([value])
        st.s[126][:], st.s[127][:] = 0xFFFFFFFF, 0xFFFFFFFF
        known[[SCALAR_BASE + 126, SCALAR_BASE + 127]] = True
        threads = x * y * z
        if threads % 64:
            live = linear < threads
            bits = np.packbits(live, axis=1, bitorder="little").view(np.uint32)
            st.s[126][:], st.s[127][:] = bits[:, 0], bits[:, 1]
            st.exec_changed()
        known[SCALAR_BASE + SCC] = False
        return st

    def batch(self, ids: Array) -> None:
        """Run some workgroups to their end."""
        m, n, each = self.m, len(ids), self.m.waves_each
        m.start(n)
        slots = m.random.permuted(np.tile(np.arange(each), (n, 1)), axis=1)
        if m.hazards:
            ready = [self._waves(ids, s, np.arange(n), slots[:, s]) for s in range(each)]
        else:
            ready = [self._waves(ids, 0, np.repeat(np.arange(n), each), slots.ravel())]
        parked: list[Waves] = []
        alive, arrived = np.full(n, each), np.zeros(n, np.int64)
        while ready or parked:
            if not ready:
                st = parked[0]
                raise RunError(f"workgroup {int(st.gid[0])}: waves wait at a barrier that the others never reach")
            st = ready.pop(int(m.random.integers(len(ready))))
            state, other = self._advance(st)
            if other is not None:
                ready.append(other)
            if state == "ready":
                ready.append(st)
                continue
            if state == "barrier":
                np.add.at(arrived, st.wg, 1)
                parked.append(st)
            else:
                np.add.at(alive, st.wg, -1)
            done = (arrived == alive) & (arrived > 0)
            if done.any():
                m.clock += 1
                m.since[done] = m.clock
                arrived[done] = 0
                freed, parked = _release(parked, done)
                ready += freed

    def _advance(self, st: Waves) -> tuple[str, Waves | None]:
        """Run a group until it ends, parks at a barrier, or takes both ways of a branch."""
        code, hazards = self.code, self.m.hazards
        while True:
            if st.plan is None:
                st.plan, st.part = code.plan(st.pc, st.queues), 0
                st.careful = hazards and not _surely_known(st, st.plan)
                st.plan.executions += st.n
                st.executed += len(st.plan.instructions)
            p = st.plan
            for op in (p.checked if st.careful else p.ops)[st.part]:
                op(st)
            st.part += 1
            if st.part < len(p.ops):
                return "barrier", None
            if hazards and not st.careful:
                st.initialised[p.written] = True
            st.plan, st.queues = None, p.exit
            control = p.control
            if st.executed > self.limit:
                line = code.kernel.instructions[int(p.instructions[-1])].line
                raise RunError(
                    f"line {line}: a wave has executed more than {self.limit} instructions: does the kernel end?"
                )
            if control is None:
                st.pc = p.following
                continue
            name = control.base
            if name == "s_endpgm":
                return "ended", None
            target = code.kernel.labels[control.operands[0].text]
            if name == "s_branch":
                st.pc = target
                continue
            taken = np.broadcast_to(BRANCHES[name](st), (st.n,))
            if taken.all():
                st.pc = target
            elif not taken.any():
                st.pc = p.following
            else:
                few = taken if 2 * int(taken.sum()) <= st.n else ~taken
                other = st.split(few)
                other.pc, st.pc = (target, p.following) if few is taken else (p.following, target)
                return "ready", other


def _surely_known(st: Waves, p: Plan) -> bool:
    """Whether no register can be read in a block before it was written, so that nothing needs a look."""
    known = st.initialised
    return bool(known[p.exposed].all() and ((st.full and not p.changes_exec) or known[p.written].all()))


def _release(parked: list[Waves], done: Array) -> tuple[list[Waves], list[Waves]]:
    """Waves of the finished workgroups, in groups as large as their state allows, and those that still wait."""
    freed: list[Waves] = []
    still: list[Waves] = []
    for st in parked:
        go = done[st.wg]
        if go.all():
            freed.append(st)
        elif go.any():
            freed.append(st.split(go))
            still.append(st)
        else:
            still.append(st)
    merged: dict[tuple[Any, ...], Waves] = {}
    for st in freed:
        key = (st.stream, id(st.plan), st.part, st.careful)
        merged[key] = Waves.merge(merged[key], st) if key in merged else st
    return list(merged.values()), still
