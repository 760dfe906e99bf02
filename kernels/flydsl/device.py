"""The ragged MXFP8 weight gradient for gfx950 in FlyDSL: device code of three rungs and of their helpers.

dW[g][n, k] = sum over the tokens of group g of dY^T[n, t] X^T[k, t], both operands with tokens contiguous and one E8M0
scale for 32 tokens. The token axis is the contraction, so a block's loop runs over an interval known at run time only.

Three rungs compute the same bits, because all of them feed the matrix core the same 128-token steps (counted from token
0 of the buffer, not of the group) in the same order, and blank the same things:

* simplest: a wave for 64 x 64 outputs, every lane loads its own bytes straight into registers, no LDS;
* plain: the pipelined 256 x 256 body, scales loaded a row to a lane, handed round by ds_bpermute, masked in the loop;
* shipping: the same body on scales that a kernel before it masked and laid out as the loop consumes them.

A sub-block of 32 tokens that is not the group's has both scales 0x00 and its data 0x00. The scales alone would do for
finite data; a NaN of a neighbouring group has to be kept out of the registers. The data costs the loop nothing: only
the first and the last body of a window hold foreign tokens, and those two are filled outside the loop.

Layout of the matrix instruction (16x16x128, 8-bit elements): lane 16 g + r holds row r at tokens 16 g .. 16 g + 15 and
64 + 16 g .. 64 + 16 g + 15; its scale operand's selected byte is for row r, tokens 32 g .. 32 g + 31. The result's
register q in lane 16 g + c is row 4 g + q, column c. X^T goes in as A: a lane ends with four neighbours of a row.

Nothing but layout bits is compiled in: N, K, the number of experts, the token count and the offsets are arguments.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import llvm, scf
from flydsl.expr import as_ir_value, gpu, rocdl
from flydsl.expr.typing import T, Vector

U32 = fx.Uint32
U64 = fx.Uint64

STEP = 128  # tokens one matrix instruction contracts
BODY = 2 * STEP  # tokens of one loop body
TILE = 256  # rows and columns of a block's output
QUADRANT = 128  # rows and columns of a wave's output
FRAGMENTS = QUADRANT // 16  # 16-row fragments of an operand and wave
STRIPE = TILE * STEP  # bytes of one operand in LDS for one step
FILLS = STRIPE // (4 * 64 * 16)  # 16-byte copies a lane makes for one stripe
OUT_OF_RANGE = 0x80000000  # an offset past every num_records: loads give zero, stores are dropped
RANKED = 1024  # blocks from which the order is left as it is
SCALE_BYTES = 1024  # of one body, for 128 rows of an operand, after the pre-shuffle


# ---------------------------------------------------------------- the few operations everything is made of


def raw(value: Any) -> ir.Value:
    return value if isinstance(value, ir.Value) else as_ir_value(value)


def uniform(value: Any) -> Any:
    """Say that a value is the same in every lane; without it each use costs a readfirstlane or a loop over lanes."""
    return U32(rocdl.readfirstlane(T.i32, raw(value)))


def short(value: Any) -> Any:
    """A number below 2^24, said to be so: its product with a row is then a 24-bit one, and one instruction with a sum.

    Without it the compiler takes a 64-bit multiply-add, the upper half of whose addend it leaves undefined.
    """
    return value & 0xFFFFFF


def select(condition: Any, yes: Any, no: Any) -> Any:
    return U32(raw(fx.Boolean(raw(condition)).select(yes, no)))


def minimum(a: Any, b: Any) -> Any:
    return select(a < b, a, b)


def buffer(address: Any, nbytes: Any) -> ir.Value:
    """A buffer descriptor with exact num_records: what lies past it reads as zero and is never written."""
    pointer = llvm.IntToPtrOp(ir.Type.parse("!llvm.ptr"), raw(address)).result
    flags = raw(fx.Int32((7 << 12) | (4 << 15)))
    kind = ir.Type.parse("!llvm.ptr<8>")
    return rocdl.MakeBufferRsrcOp(kind, pointer, raw(fx.Int16(0)), raw(fx.Int64(nbytes)), flags).result


def rows_of(plane: Any, skipped: Any, rows: Any, height: int, pitch: Any) -> ir.Value:
    """Rows skipped .. skipped + height - 1 of a row-major byte plane, bounded exactly. `skipped` is below `rows`."""
    return buffer(plane + U64(skipped) * U64(pitch), U64(minimum(rows - skipped, U32(height))) * U64(pitch))


def load(kind: ir.Type, source: ir.Value, offset: Any, scalar: Any = 0) -> ir.Value:
    return rocdl.raw_ptr_buffer_load(kind, source, raw(offset), raw(U32(scalar)))


def load_byte(source: ir.Value, offset: Any, scalar: Any = 0) -> Any:
    return U32(llvm.zext(T.i32, load(T.i8, source, offset, scalar)))


def pack(four: Sequence[Any]) -> Any:
    """Four bytes, the first lowest, as a word: the selector's bytes 0-3 name the second operand's, 4-7 the first's."""
    low, high = (raw(rocdl.perm_b32(raw(b), raw(a), raw(U32(0x0C0C0400)))) for a, b in (four[:2], four[2:]))
    return U32(rocdl.perm_b32(high, low, raw(U32(0x05040100))))


def words_of(value: Any, count: int) -> list[Any]:
    vector = Vector(value, (count,), fx.Uint32)
    return [U32(vector[i]) for i in range(count)]


def load_word(source: ir.Value, offset: Any) -> Any:
    return U32(load(T.i32, source, offset))


def store(value: Any, target: ir.Value, offset: Any, scalar: Any = 0) -> None:
    rocdl.raw_ptr_buffer_store(raw(value), target, raw(offset), raw(U32(scalar)))


def lds(address: Any, offset: int = 0) -> ir.Value:
    base = llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), raw(address))
    if not offset:
        return base
    return llvm.GEPOp(base.type, base, [], [offset], T.i8, None).result


def loop(
    first: Any, end: Any, step: int, init: Sequence[Any], body: Callable[[Any, list[Any]], Sequence[Any]]
) -> list[Any]:
    """for i in range(first, end, step): init = body(i, init), at run time, all of it in registers; not unrolled."""
    bound = [raw(U32(v)) for v in (first, end, step)]
    op = scf.ForOp(*bound, [raw(v) for v in init])
    op.attributes["loop_annotation"] = ir.Attribute.parse("#llvm.loop_annotation<unroll = <disable = true>>")
    with ir.InsertionPoint(op.body):
        scf.YieldOp([raw(v) for v in body(U32(op.induction_variable), list(op.inner_iter_args))])
    return list(op.results)


def branch(condition: Any, yes: Callable[[], None], no: Callable[[], None]) -> None:
    op = scf.IfOp(raw(condition), [], has_else=True)
    for region, side in zip(op.regions, (yes, no), strict=True):
        if not region.blocks:
            region.blocks.append()
        with ir.InsertionPoint(region.blocks[0]):
            side()
            scf.YieldOp([])


SCALAR = 4  # scalar instructions may cross a fence: what sets an LDS address, away from the copy that needs it


def fence(mask: int = 0) -> None:
    """Nothing is scheduled across this point."""
    rocdl.sched_barrier(mask)


def mfma(a: Any, b: Any, c: Any, a_scale: tuple[Any, int], b_scale: tuple[Any, int]) -> Any:
    """c + A B, scales given as (register, byte)."""
    operands = [a, b, c, 0, 0, a_scale[1], raw(a_scale[0]), b_scale[1], raw(b_scale[0])]
    return rocdl.mfma_scale_f32_16x16x128_f8f6f4(T.vec(4, T.f32), operands)


def mfma_in_place(a: Any, b: Any, c: Any, a_scale: tuple[Any, int], b_scale: tuple[Any, int]) -> Any:
    """The same with c pinned to accumulation registers and updated there.

    The compiler's own choice, with all 256 of them live, is a move for every second accumulator and step. It adds no
    wait states round this form: settle() before anything else reads an accumulator.
    """
    (i, j), one = (a_scale[1], b_scale[1]), "v_mfma_scale_f32_16x16x128_f8f6f4 $0, $1, $2, $0, $3, $4"
    text = f"{one} op_sel:[{i & 1},{j & 1},0] op_sel_hi:[{i >> 1},{j >> 1},0]"
    operands = [a, b, raw(a_scale[0]), raw(b_scale[0]), raw(c)]
    return llvm.inline_asm(T.vec(4, T.f32), operands, text, "=a,v,v,v,v,0", has_side_effects=False)


def settle(states: int) -> None:
    """Wait states that the compiler does not know to be needed, round mfma_in_place.

    12 from an instruction of eight passes to another kind of reader of its result; 2 from a vector instruction to a
    matrix instruction that reads its result.
    """
    fence()
    llvm.inline_asm(None, [], f"s_nop {states - 1}", "", has_side_effects=True)
    fence()


def zeros() -> ir.Value:
    return raw(Vector.filled(4, 0.0, fx.Float32))


def join(low: Any, high: Any) -> ir.Value:
    return raw(Vector(low).shuffle(Vector(high), list(range(8))))


def bf16_words(value: Any) -> ir.Value:
    """Four float32 rounded to nearest even into two words of bf16."""
    return llvm.BitcastOp(T.vec(2, T.i32), raw(Vector(value, (4,), fx.Float32).to(fx.BFloat16))).result


# ---------------------------------------------------------------- which work a block does


def span_of(offsets: ir.Value, expert: Any) -> tuple[Any, Any]:
    """First token and end of an expert's group, per lane: offsets hold the ends, the first group starts at 0."""
    at = expert << 2
    before = select(expert == 0, OUT_OF_RANGE, at - 4)
    return load_word(offsets, before), load_word(offsets, at)


def bodies(start: Any, end: Any) -> tuple[Any, Any]:
    """The window of a group in loop bodies: the first one, rounded down, and how many; never fewer than two.

    Two, because the first and the last are not filled by the loop. Whole bodies, because it is unrolled by two.
    """
    first = start >> 8
    count = ((end + (BODY - 1)) >> 8) - first
    return first, select(count < 2, 2, count)


def expert_of(slot: Any, lane: Any, offsets: ir.Value, experts: Any, blocks: Any) -> Any:
    """The expert of a slot: longest window first, or, with many blocks or more experts than lanes, the slot itself."""
    start, end = span_of(offsets, lane)
    _, count = bodies(start, end)
    key = (count << 6) | (63 - lane)  # all different; on a tie the lower index is the greater

    def count_greater(other: Any, carried: list[Any]) -> list[Any]:
        return [U32(carried[0]) + select(U32(rocdl.readlane(T.i32, raw(key), raw(other))) > key, 1, 0)]

    ranked = (experts <= 64) & (blocks < RANKED)
    (rank,) = loop(0, uniform(select(ranked, experts, 0)), 1, [U32(0)], count_greater)
    mine = rocdl.ballot(T.i64, raw((U32(rank) == slot) & (lane < experts)))
    found = U32(llvm.trunc(T.i32, llvm.intr_cttz(mine, False), []))
    return uniform(select(ranked, found, slot))


def tile_of(index: Any, down: Any, across: Any) -> tuple[Any, Any]:
    """Row and column of a block's tile: supertiles of 2 x 2, row by row; narrower ones at the lower and right edges."""
    band = index // (across << 1)
    inside = index - band * (across << 1)
    tall = down - (band << 1) > 1
    pair = inside >> select(tall, 2, 1)
    inside = inside - (pair << select(tall, 2, 1))
    wide = across - (pair << 1) > 1
    row = select(wide, inside >> 1, inside)
    return (band << 1) + row, (pair << 1) + (inside - select(wide, row << 1, row))


class Block:
    """What a block of the two pipelined rungs knows before its loop."""

    def __init__(self, offsets: Any, n: Any, k: Any, m: Any, experts: Any) -> None:
        self.n, self.k, self.m = n, k, short(m)
        thread = U32(gpu.thread_id("x"))
        self.lane = thread & 63
        self.wave = uniform(thread >> 6) & 3
        self.group, self.row = self.lane >> 4, self.lane & 15
        down, across = (n + (TILE - 1)) >> 8, (k + (TILE - 1)) >> 8
        tiles = down * across
        index = U32(gpu.block_id("x"))
        slot = index // tiles
        ends = buffer(offsets, U64(experts) * 4)
        self.expert = expert_of(slot, self.lane, ends, experts, tiles * experts)
        self.tile_n, self.tile_k = tile_of(index - slot * tiles, down, across)
        start, end = span_of(ends, self.expert)
        self.start, self.end = uniform(start), uniform(end)
        self.first, self.count = bodies(self.start, self.end)
        # The quadrant of a wave, in units of 128: rows of X^T, then rows of dY^T.
        self.half_k, self.half_n = self.wave >> 1, self.wave & 1


# ---------------------------------------------------------------- the pipelined 256 x 256 body


def swizzled(block: Block) -> tuple[Any, Any]:
    """Row inside a 16-row fragment and first token of the 16 that a lane copies.

    Rows of 128 bytes start in two places of the 64 banks only. The 16-byte chunks of row r are therefore stored in the
    order c ^ (r / 2), so that sixteen lanes reading one chunk of sixteen rows touch every bank once. The copy writes
    LDS in lane order, so it is the source that is permuted. A wave copies either the even or the odd groups of eight
    rows, which makes a lane's tokens the same in all of its copies.
    """
    row = ((block.wave & 1) << 3) + (block.lane >> 3)
    return row, ((block.lane & 7) ^ (row >> 1)) << 4


class Stripes:
    """The four LDS stripes, X^T of even and odd steps, then dY^T, with the copies into them and the reads from them."""

    def __init__(self, block: Block, x_plane: Any, dy_plane: Any, base: Any) -> None:
        self.block = block
        self.planes = (
            rows_of(x_plane, block.tile_k << 8, block.k, TILE, block.m),
            rows_of(dy_plane, block.tile_n << 8, block.n, TILE, block.m),
        )
        row, self.token = swizzled(block)
        upper = (block.wave >> 1) << 7
        # The instruction's immediate moves the source and the LDS address alike: taken off here, it spares M0 writes.
        self.sources = [(upper + i * 16 + row) * block.m + self.token - (i % 4) * 1024 for i in range(FILLS)]
        self.target = uniform(base + (block.wave << 13))
        parity, eighth = block.row >> 3, block.row & 7
        self.reads = []
        for operand, half in enumerate((block.half_k, block.half_n)):
            line = base + operand * 2 * STRIPE + (((half << 1) + parity) << 13) + (eighth << 7)
            chunk = block.group ^ (block.row >> 1)
            self.reads.append((line + (chunk << 4), line + ((chunk ^ 4) << 4)))

    def fill(self, token: Any, parity: int, operand: int, index: int, sources: list[Any]) -> None:
        """One copy of 1 KiB a wave: tokens token .. token + 127 of eight rows, straight to LDS, not waited for."""
        target = self.target + (operand * 2 + parity) * STRIPE + index // 4 * 4096
        offset = sources[index]
        rocdl.raw_ptr_buffer_load_async_lds(
            self.planes[operand], lds(target), raw(fx.Int32(16)), raw(offset), raw(token), raw(U32(index % 4 * 1024))
        )

    def bounded(self, token: Any) -> list[Any]:
        """The sources for a step that may hold foreign tokens: those come from out of range, which reads as zero."""
        ours = (token + self.token - self.block.start) < (self.block.end - self.block.start)
        return [select(ours, source, OUT_OF_RANGE) for source in self.sources]

    def read(self, parity: int, operand: int, index: int) -> ir.Value:
        """One fragment of a step: eight registers, two runs of 16 tokens."""
        low, high = (
            llvm.LoadOp(T.vec(4, T.i32), lds(at, parity * STRIPE + index * 1024), alignment=16).result
            for at in self.reads[operand]
        )
        return join(low, high)


def wait_copies(outstanding: int) -> None:
    """All but the newest copies of this wave are in LDS, and then those of the other waves."""
    fence()
    rocdl.s_waitcnt(vmcnt=outstanding)
    rocdl.s_barrier()
    fence()


def wait_reads() -> None:
    """Every wave has the current step in registers: its stripes may be overwritten."""
    fence()
    rocdl.s_waitcnt(lgkmcnt=0)
    rocdl.s_barrier()
    fence()


class Step:
    """One 128-token step of a wave's quadrant: 64 matrix instructions, 32 LDS reads, the copies of the step after next.

    The quadrant is worked in four parts of 64 x 64, and an operand's fragments fall in two halves, so that each part
    reads what a later one needs. The first halves come from the step before, which has read them under its last part:
    matrix instructions never wait for a read that was not given a part's time.
    """

    HALF = FRAGMENTS // 2

    def __init__(self, stripes: Stripes, parity: int) -> None:
        self.stripes, self.parity = stripes, parity

    def reads(self, into: list[Any], operand: int, half: int) -> list[Callable[[], None]]:
        """One action for each fragment of a half: read it and append it."""

        def one(index: int) -> None:
            into.append(self.stripes.read(self.parity, operand, index))

        return [partial(one, i) for i in range(half * self.HALF, (half + 1) * self.HALF)]

    def first_halves(self, a: list[Any], b: list[Any]) -> list[Callable[[], None]]:
        return self.reads(a, 0, 0) + self.reads(b, 1, 0)

    def run(
        self,
        acc: list[Any],
        early: Sequence[Any],
        scale: Callable[[int, int], Any],
        fills: Sequence[Callable[[], None]],
        behind: int,
        following: "Step | None",
    ) -> tuple[list[Any], list[Any]]:
        """The accumulators, and the first halves of the next step, `early` being those of this one.

        fills: actions for the third part, the copies into this step's stripes. behind: how many memory operations, the
        newest, may still be out when the next step is read.
        """
        acc = list(acc)
        a, b = list(early[: self.HALF]), list(early[self.HALF :])
        late_a: list[Any] = []
        late_b: list[Any] = []

        def part(i0: int, j0: int, actions: Sequence[Callable[[], None]]) -> None:
            """16 matrix instructions, the actions spread evenly among them."""
            todo, count = list(actions), self.HALF**2
            for at in range(count):
                while len(actions) - len(todo) < -(-(at + 1) * len(actions) // count):
                    todo.pop(0)()
                i, j = i0 * self.HALF + at // self.HALF, j0 * self.HALF + at % self.HALF
                one = i * FRAGMENTS + j
                acc[one] = mfma_in_place(a[i], b[j], acc[one], scale(0, i), scale(1, j))
                fence(SCALAR)

        part(0, 0, self.reads(b, 1, 1))
        part(0, 1, self.reads(a, 0, 1))
        if fills:
            wait_reads()
        part(1, 0, fills)
        if following is None:
            part(1, 1, [])
        else:
            wait_copies(behind)
            part(1, 1, following.first_halves(late_a, late_b))
        return acc, late_a + late_b


def gradient(block: Block, stripes: Stripes, scales: Any) -> list[Any]:
    """The whole contraction of a wave's quadrant: 64 accumulators of four registers, fragment of K major.

    Copies run two steps ahead, so a body fills the next one. Only the first and the last body of a window hold tokens
    of other groups; they are filled before and after the loop, which therefore looks at no token.
    """
    even, odd = Step(stripes, 0), Step(stripes, 1)
    origin = block.first << 8
    last = (block.first + block.count - 1) << 8
    outputs = FRAGMENTS**2

    def fills(token: Any, bounded: bool) -> list[list[Callable[[], None]]]:
        """The copies of the even and of the odd step of the body at `token`."""

        def of(parity: int) -> list[Callable[[], None]]:
            at = token + parity * STEP
            sources = stripes.bounded(at) if bounded else stripes.sources
            return [partial(stripes.fill, at, parity, o, i, sources) for o in (0, 1) for i in range(FILLS)]

        return [of(0), of(1)]

    def body(at: Any, state: list[Any], bounded: bool = False) -> list[Any]:
        acc, early, carried = state[:outputs], state[outputs : outputs + FRAGMENTS], state[outputs + FRAGMENTS :]
        pick = scales.unpack(at, carried)
        following: list[Any] = []
        even_fills, odd_fills = fills(at + BODY, bounded)
        even_fills.append(lambda: following.extend(scales.request(at + BODY)))
        acc, early = even.run(acc, early, pick(0), even_fills, 2 * FILLS + scales.requests, odd)
        acc, early = odd.run(acc, early, pick(1), odd_fills, 2 * FILLS, even)
        return acc + early + following

    carried = scales.request(origin)
    for step in fills(origin, True):
        for fill in step:
            fill()
    wait_copies(2 * FILLS)
    first_a: list[Any] = []
    first_b: list[Any] = []
    for read in even.first_halves(first_a, first_b):
        read()
    state = [zeros()] * outputs + first_a + first_b + carried
    state = loop(origin, last - BODY, BODY, state, body)
    state = body(last - BODY, state, bounded=True)
    pick = scales.unpack(last, state[outputs + FRAGMENTS :])
    acc, early = even.run(state[:outputs], state[outputs : outputs + FRAGMENTS], pick(0), [], 0, odd)
    acc, _ = odd.run(acc, early, pick(1), [], 0, None)
    settle(12)
    return acc


def write(acc: list[Any], side: int, target: ir.Value, row: Any, column: Any, k: Any, row_pitch: Any) -> None:
    """side x side fragments, rounded to bf16 in the registers: a lane writes four neighbours of a row at a time.

    Rows past N are past num_records; columns past K get an offset out of range.
    """
    line = row * short(row_pitch)
    for i in range(side):
        fence()  # a row of fragments at a time: the registers are full
        at = select(column + i * 16 < k, (line + column + i * 16) << 1, OUT_OF_RANGE)
        for j in range(side):
            store(bf16_words(acc[i * side + j]), target, at, row_pitch * (j * 32))


def output(dw: Any, expert: Any, expert_pitch: Any, skipped: Any, n: Any, height: int, row_pitch: Any) -> ir.Value:
    """An expert's rows skipped .. skipped + height - 1 of dW. Pitches are in elements."""
    return rows_of(dw + U64(expert) * expert_pitch * 2, skipped, n, height, row_pitch << 1)


class ShuffledScales:
    """Scales as the pre-shuffle left them: a 16-byte load a body and operand; the instruction selects the byte."""

    requests = 2

    def __init__(self, block: Block, x_plane: Any, dy_plane: Any, slots: Any) -> None:
        pitch = slots * SCALE_BYTES  # bytes of 128 rows
        # A group's window comes after those of the groups before it. It may start in a body which the one before it
        # touches too and be a body longer than its tokens need: two slots more for each group before it.
        self.lane, self.first = block.lane << 4, uniform(block.expert << 11)
        self.planes = []
        for plane, tile, half in ((x_plane, block.tile_k, block.half_k), (dy_plane, block.tile_n, block.half_n)):
            self.planes.append(buffer(plane + U64((tile << 1) + half) * U64(pitch), pitch))

    def request(self, token: Any) -> list[Any]:
        at = self.first + (token << 2)
        return [load(T.vec(4, T.i32), plane, self.lane, at) for plane in self.planes]

    def unpack(self, token: Any, carried: list[Any]) -> Callable[[int], Callable[[int, int], Any]]:
        words = [words_of(v, 4) for v in carried]
        return lambda step: lambda operand, tile: (words[operand][step * 2 + tile // 4], tile % 4)


class RowScales:
    """Scales as they come: each lane loads the eight of a row, and takes those it needs from the lanes that have them.

    One load for 64 rows of an operand, two words wide where rows start at a multiple of four, else byte by byte.
    """

    def __init__(self, block: Block, x_plane: Any, dy_plane: Any, wide: bool) -> None:
        self.block, self.wide = block, wide
        self.requests = 4 * (1 if wide else 8)
        pitch = block.m >> 5
        self.sources = [
            (rows_of(plane, tile << 8, rows, TILE, pitch), ((half << 7) + block.lane) * pitch, pitch << 6)
            for plane, tile, rows, half in (
                (x_plane, block.tile_k, block.k, block.half_k),
                (dy_plane, block.tile_n, block.n, block.half_n),
            )
        ]
        self.holders = [((block.row + i * 16) << 2) for i in range(4)]

    def request(self, token: Any) -> list[Any]:
        found: list[Any] = []
        for plane, line, next_rows in self.sources:
            for at in (line, line + next_rows):
                if self.wide:
                    found += words_of(load(T.vec(2, T.i32), plane, at, token >> 5), 2)
                else:
                    found += [load_byte(plane, at + i, token >> 5) for i in range(8)]
        return found

    def unpack(self, token: Any, carried: list[Any]) -> Callable[[int], Callable[[int, int], Any]]:
        if not self.wide:
            carried = [pack([U32(byte) for byte in carried[i : i + 4]]) for i in range(0, len(carried), 4)]

        def of(step: int) -> Callable[[int, int], Any]:
            first = token + step * STEP + (self.block.group << 5)
            ours = (first - self.block.start) < (self.block.end - self.block.start)
            mask, shift = select(ours, 0xFF, 0), self.block.group << 3
            table = []
            for operand in (0, 1):
                for tile in range(FRAGMENTS):
                    word = carried[operand * 4 + tile // 4 * 2 + step]
                    row = U32(rocdl.ds_bpermute(T.i32, raw(self.holders[tile % 4]), raw(word)))
                    table.append((row >> shift) & mask)
            settle(2)
            return lambda operand, tile: (table[operand * FRAGMENTS + tile], 0)

        return of


def pipelined(
    scales: Callable[[Block], Any],
    planes: tuple[Any, Any, Any, Any, Any],
    pitches: tuple[Any, Any],
    sizes: tuple[Any, Any, Any, Any],
) -> None:
    """The body of the plain and the shipping rung. planes: dY^T, X^T, offsets, dW, base of LDS; sizes: N, K, M, E."""
    dy, x, offsets, dw, base = planes
    n, k, _, _ = sizes
    block = Block(offsets, *sizes)
    target = output(dw, block.expert, pitches[0], block.tile_n << 8, n, TILE, pitches[1])
    row = (block.half_n << 7) + block.row
    column = (block.tile_k << 8) + (block.half_k << 7) + (block.group << 2)

    def compute() -> None:
        acc = gradient(block, Stripes(block, x, dy, base), scales(block))
        write(acc, FRAGMENTS, target, row, column, k, pitches[1])

    def clear() -> None:
        write([zeros()] * FRAGMENTS**2, FRAGMENTS, target, row, column, k, pitches[1])

    branch(block.start < block.end, compute, clear)


# ---------------------------------------------------------------- the simplest rung


def direct(
    planes: tuple[Any, Any, Any, Any], out: tuple[Any, Any, Any], offsets: Any, sizes: tuple[Any, Any, Any]
) -> None:
    """One wave, 64 x 64 outputs of one expert. planes: dY^T, its scales, X^T, its scales; out: dW and its two pitches.

    Every load asks for what its lane feeds to the matrix core and nothing else; what is not the group's comes from out
    of range, as zero data and scale 0x00. The loop ends with the group; an empty group's trips are none.
    """
    side = 4
    dy, dy_scales, x, x_scales = planes
    n, k, m = sizes[0], sizes[1], short(sizes[2])
    lane = U32(gpu.thread_id("x"))
    group, row = lane >> 4, lane & 15
    down, across = (n + 63) >> 6, (k + 63) >> 6
    index = U32(gpu.block_id("x"))
    expert = index // (down * across)
    index = index - expert * (down * across)
    tile_n, tile_k = index // across, index - index // across * across
    ends = buffer(offsets, (U64(expert) + 1) * 4)
    start, end = (uniform(v) for v in span_of(ends, expert))
    pitch = m >> 5
    operands = [
        [rows_of(plane, tile << 6, rows, 64, width) for plane, width in ((data, m), (scales, pitch))]
        for data, scales, rows, tile in ((x, x_scales, k, tile_k), (dy, dy_scales, n, tile_n))
    ]

    def inside(token: Any, offset: Any) -> Any:
        return select((token - start) < (end - start), offset, OUT_OF_RANGE)

    def step(token: Any, acc: list[Any]) -> list[Any]:
        fragments: list[list[Any]] = []
        for data, scales in operands:
            fragments.append([])
            for i in range(side):
                line = row + i * 16
                tokens = [token + (group << 4), token + (group << 4) + 64]
                runs = [load(T.vec(4, T.i32), data, inside(t, line * m + t)) for t in tokens]
                block = token + (group << 5)
                fragments[-1].append((join(*runs), load_byte(scales, inside(block, line * pitch + (block >> 5)))))
        (a, b), out = fragments, list(acc)
        for i in range(side):
            for j in range(side):
                out[i * side + j] = mfma(a[i][0], b[j][0], acc[i * side + j], (a[i][1], 0), (b[j][1], 0))
        return out

    acc = loop(start >> 7 << 7, end, STEP, [zeros()] * side**2, step)
    target = output(out[0], expert, out[1], tile_n << 6, n, 64, out[2])
    write(acc, side, target, row, (tile_k << 6) + (group << 2), k, out[2])


# ---------------------------------------------------------------- the kernel before the shipping one


def shuffle(block_index: Any, planes: tuple[Any, Any, Any, Any], offsets: Any, sizes: tuple[Any, ...]) -> None:
    """Scales of 128 rows and one body, a wave each, as ShuffledScales loads them. planes: dY^T's, X^T's, targets.

    Lane 16 g + r takes 16 bytes: word 2 t + q holds, for step t, rows 64 q + r, + 16, + 32, + 48 at tokens 32 g .. of
    the step. A sub-block that is not the group's gets 0x00 in both operands: alone, one 2^-127 times a large scale of
    the other is a number like any other.
    """
    n, k, m, experts, slots = sizes
    dy_scales, x_scales, dy_out, x_out = planes
    thread = U32(gpu.thread_id("x"))
    lane = thread & 63
    halves_n, halves_k = ((n + (TILE - 1)) >> 8) << 1, ((k + (TILE - 1)) >> 8) << 1
    per_slot = (halves_n + halves_k + 3) >> 2
    slot = block_index // per_slot
    half = uniform(((block_index - slot * per_slot) << 2) + (thread >> 6))
    ends = buffer(offsets, U64(experts) * 4)

    def seek(first_expert: Any, found: list[Any]) -> list[Any]:
        expert = first_expert + lane
        start, end = span_of(ends, expert)
        first, count = bodies(start, end)
        hit = (slot - first - (expert << 1) < count) & (expert < experts)
        values = (start, end, slot - (expert << 1))
        return [select(hit, new, U32(old)) for new, old in zip(values, found, strict=True)]

    found = loop(0, experts, 64, [U32(0)] * 3, seek)
    mine = rocdl.ballot(T.i64, raw(U32(found[1]) != 0))
    holder = U32(llvm.trunc(T.i32, llvm.intr_cttz(mine, False), [])) & 63
    start, end, body = (U32(rocdl.readlane(T.i32, raw(v), raw(holder))) for v in found)

    is_n = half < halves_n
    half = select(is_n, half, half - halves_n)
    rows, all_halves = select(is_n, n, k), select(is_n, halves_n, halves_k)
    source, target = (U64(fx.Boolean(raw(is_n)).select(a, b)) for a, b in ((dy_scales, x_scales), (dy_out, x_out)))
    pitch, skipped = short(m) >> 5, half << 7
    left = select(skipped < rows, minimum(rows - skipped, U32(128)), 0)
    plane = buffer(source + U64(skipped) * U64(pitch), U64(left) * U64(pitch))
    words = []
    for step in (0, 1):
        block = (body << 3) + step * 4 + (lane >> 4)
        ours = ((block << 5) - start) < (end - start)
        for q in (0, 1):
            lines = [(lane & 15) + q * 64 + i * 16 for i in range(4)]
            words.append(pack([load_byte(plane, select(ours, line * pitch + block, OUT_OF_RANGE)) for line in lines]))
    out = buffer(target, U64(all_halves) * U64(slots) * SCALE_BYTES)
    at = (half * slots + slot) * SCALE_BYTES + (lane << 4)
    store(Vector.from_elements(words, fx.Uint32), out, select(half < all_halves, at, OUT_OF_RANGE))


def clear_padding(row: Any, planes: tuple[Any, Any, Any, Any], offsets: Any, sizes: tuple[Any, ...]) -> None:
    """Zero what follows the last group in one row of each operand. planes: dY^T, its scales, X^T, its scales."""
    n, k, m, experts = sizes
    dy, dy_scales, x, x_scales = planes
    lane = U32(gpu.thread_id("x")) & 63
    end = uniform(load_word(buffer(offsets, U64(experts) * 4), (experts - 1) << 2))
    is_n = row < n
    line = U64(select(is_n, row, row - n))
    data, scales = (U64(fx.Boolean(raw(is_n)).select(a, b)) for a, b in ((dy, x), (dy_scales, x_scales)))
    present = row < n + k
    codes = buffer(data + line * U64(m), select(present, m, 0))
    bytes_ = buffer(scales + line * U64(m >> 5), select(present, m >> 5, 0))
    nothing = raw(Vector.filled(4, 0, fx.Uint32))

    def wipe(first: Any, state: list[Any]) -> list[Any]:
        store(nothing, codes, end + ((first + lane) << 4))
        return state

    def wipe_scales(first: Any, state: list[Any]) -> list[Any]:
        store(fx.Uint8(0), bytes_, (end >> 5) + first + lane)
        return state

    loop(0, (m - end) >> 4, 64, [], wipe)
    loop(0, (m - end) >> 5, 64, [], wipe_scales)


# ---------------------------------------------------------------- kernels and their launchers

ALONE = {"rocdl.waves_per_eu": 1, "rocdl.flat_work_group_size": "256,256"}  # a wave has its SIMD's registers to itself


@fx.struct
class Shared:
    stripes: fx.Array[fx.Uint8, 4 * STRIPE, 16]


def shared() -> Any:
    return U32(fx.ptrtoint(fx.SharedAllocator().allocate(Shared).peek().stripes.ptr))


@flyc.kernel(name="mxgate_wgrad_simplest", known_block_size=[64, 1, 1])
def simplest(
    dy: fx.Uint64, dy_scales: fx.Uint64, x: fx.Uint64, x_scales: fx.Uint64, offsets: fx.Uint64, dw: fx.Uint64,
    expert_pitch: fx.Uint64, row_pitch: fx.Uint32, n: fx.Uint32, k: fx.Uint32, m: fx.Uint32,
) -> None:  # fmt: skip
    direct((dy, dy_scales, x, x_scales), (dw, expert_pitch, row_pitch), offsets, (n, k, m))


def plain_body(wide: bool, dy: Any, dy_scales: Any, x: Any, x_scales: Any, offsets: Any, dw: Any, *rest: Any) -> None:
    def scales(block: Block) -> RowScales:
        return RowScales(block, x_scales, dy_scales, wide)

    pipelined(scales, (dy, x, offsets, dw, shared()), rest[:2], rest[2:])


@flyc.kernel(name="mxgate_wgrad_plain", known_block_size=[256, 1, 1])
def plain(
    dy: fx.Uint64, dy_scales: fx.Uint64, x: fx.Uint64, x_scales: fx.Uint64, offsets: fx.Uint64, dw: fx.Uint64,
    expert_pitch: fx.Uint64, row_pitch: fx.Uint32, n: fx.Uint32, k: fx.Uint32, m: fx.Uint32, experts: fx.Uint32,
) -> None:  # fmt: skip
    plain_body(True, dy, dy_scales, x, x_scales, offsets, dw, expert_pitch, row_pitch, n, k, m, experts)


@flyc.kernel(name="mxgate_wgrad_plain_bytes", known_block_size=[256, 1, 1])
def plain_bytes(
    dy: fx.Uint64, dy_scales: fx.Uint64, x: fx.Uint64, x_scales: fx.Uint64, offsets: fx.Uint64, dw: fx.Uint64,
    expert_pitch: fx.Uint64, row_pitch: fx.Uint32, n: fx.Uint32, k: fx.Uint32, m: fx.Uint32, experts: fx.Uint32,
) -> None:  # fmt: skip
    plain_body(False, dy, dy_scales, x, x_scales, offsets, dw, expert_pitch, row_pitch, n, k, m, experts)


@flyc.kernel(name="mxgate_wgrad_prepare", known_block_size=[256, 1, 1])
def prepare(
    dy: fx.Uint64, dy_scales: fx.Uint64, x: fx.Uint64, x_scales: fx.Uint64, offsets: fx.Uint64, dy_out: fx.Uint64,
    x_out: fx.Uint64, n: fx.Uint32, k: fx.Uint32, m: fx.Uint32, experts: fx.Uint32, slots: fx.Uint32,
) -> None:  # fmt: skip
    """The first blocks clear the padding, a wave to a row of N + K; the others shuffle scales."""
    index = U32(gpu.block_id("x"))
    wiped = (n + k + 3) >> 2
    row = uniform((index << 2) + (U32(gpu.thread_id("x")) >> 6))
    branch(
        index < wiped,
        lambda: clear_padding(row, (dy, dy_scales, x, x_scales), offsets, (n, k, m, experts)),
        lambda: shuffle(index - wiped, (dy_scales, x_scales, dy_out, x_out), offsets, (n, k, m, experts, slots)),
    )


@flyc.kernel(name="mxgate_wgrad_shipping", known_block_size=[256, 1, 1])
def shipping(
    dy: fx.Uint64, dy_scales: fx.Uint64, x: fx.Uint64, x_scales: fx.Uint64, offsets: fx.Uint64, dw: fx.Uint64,
    expert_pitch: fx.Uint64, row_pitch: fx.Uint32, n: fx.Uint32, k: fx.Uint32, m: fx.Uint32, experts: fx.Uint32,
    slots: fx.Uint32,
) -> None:  # fmt: skip
    def scales(block: Block) -> ShuffledScales:
        return ShuffledScales(block, x_scales, dy_scales, slots)

    pipelined(scales, (dy, x, offsets, dw, shared()), (expert_pitch, row_pitch), (n, k, m, experts))


@flyc.jit
def launch_simplest(
    dy: fx.Uint64, dy_scales: fx.Uint64, x: fx.Uint64, x_scales: fx.Uint64, offsets: fx.Uint64, dw: fx.Uint64,
    expert_pitch: fx.Uint64, row_pitch: fx.Uint32, n: fx.Uint32, k: fx.Uint32, m: fx.Uint32,
    grid: fx.Int32, stream: fx.Stream,
) -> None:  # fmt: skip
    simplest(dy, dy_scales, x, x_scales, offsets, dw, expert_pitch, row_pitch, n, k, m).launch(
        grid=(grid, 1, 1), block=(64, 1, 1), stream=stream
    )


@flyc.jit
def launch_plain(
    dy: fx.Uint64, dy_scales: fx.Uint64, x: fx.Uint64, x_scales: fx.Uint64, offsets: fx.Uint64, dw: fx.Uint64,
    expert_pitch: fx.Uint64, row_pitch: fx.Uint32, n: fx.Uint32, k: fx.Uint32, m: fx.Uint32, experts: fx.Uint32,
    grid: fx.Int32, stream: fx.Stream,
) -> None:  # fmt: skip
    plain(dy, dy_scales, x, x_scales, offsets, dw, expert_pitch, row_pitch, n, k, m, experts, value_attrs=ALONE).launch(
        grid=(grid, 1, 1), block=(256, 1, 1), stream=stream
    )


@flyc.jit
def launch_plain_bytes(
    dy: fx.Uint64, dy_scales: fx.Uint64, x: fx.Uint64, x_scales: fx.Uint64, offsets: fx.Uint64, dw: fx.Uint64,
    expert_pitch: fx.Uint64, row_pitch: fx.Uint32, n: fx.Uint32, k: fx.Uint32, m: fx.Uint32, experts: fx.Uint32,
    grid: fx.Int32, stream: fx.Stream,
) -> None:  # fmt: skip
    plain_bytes(
        dy, dy_scales, x, x_scales, offsets, dw, expert_pitch, row_pitch, n, k, m, experts, value_attrs=ALONE
    ).launch(grid=(grid, 1, 1), block=(256, 1, 1), stream=stream)


@flyc.jit
def launch_prepare(
    dy: fx.Uint64, dy_scales: fx.Uint64, x: fx.Uint64, x_scales: fx.Uint64, offsets: fx.Uint64, dy_out: fx.Uint64,
    x_out: fx.Uint64, n: fx.Uint32, k: fx.Uint32, m: fx.Uint32, experts: fx.Uint32, slots: fx.Uint32,
    grid: fx.Int32, stream: fx.Stream,
) -> None:  # fmt: skip
    prepare(dy, dy_scales, x, x_scales, offsets, dy_out, x_out, n, k, m, experts, slots).launch(
        grid=(grid, 1, 1), block=(256, 1, 1), stream=stream
    )


@flyc.jit
def launch_shipping(
    dy: fx.Uint64, dy_scales: fx.Uint64, x: fx.Uint64, x_scales: fx.Uint64, offsets: fx.Uint64, dw: fx.Uint64,
    expert_pitch: fx.Uint64, row_pitch: fx.Uint32, n: fx.Uint32, k: fx.Uint32, m: fx.Uint32, experts: fx.Uint32,
    slots: fx.Uint32, grid: fx.Int32, stream: fx.Stream,
) -> None:  # fmt: skip
    shipping(
        dy, dy_scales, x, x_scales, offsets, dw, expert_pitch, row_pitch, n, k, m, experts, slots, value_attrs=ALONE
    ).launch(grid=(grid, 1, 1), block=(256, 1, 1), stream=stream)
