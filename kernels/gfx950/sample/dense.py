"""MXFP8 C[M, N] = A[M, K] B[N, K]^T in float32, the smallest kernel with everything that can go wrong between waves.

A workgroup of 4 waves makes a 64 x 64 tile, a wave 32 x 32 of it. Both operands stream through two LDS buffers: while
one 128-wide step is multiplied, buffer loads fill the other. M and N are multiples of 64, K of 128; scales are
row-major bytes [rows, K / 32]. `sync` says how a step waits for its buffer, and all but "right" are wrong on purpose:

right       wait for the fills and for one's own reads, then meet the other waves
no-wait     meet, but never wait for the fills
short       wait for all fills but the last
no-barrier  wait, but never meet
late-wait   meet first, wait afterwards: one's own fills are there, the others' may not be
uncovered   wait and meet before the fills are issued, so that the meeting does not cover them

(No postponed annotations here: FlyDSL reads the annotations of its kernels and structs as objects.)
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import llvm
from flydsl.expr import as_ir_value, const_expr, gpu, range_constexpr, rocdl
from flydsl.expr.typing import T
from flydsl.expr.typing import Vector as Vec

SYNC = ("right", "no-wait", "short", "no-barrier", "late-wait", "uncovered")
TILE, STEP = 64, 128
PLANE = TILE * STEP  # bytes of one operand of one step
FILLS = 4  # 16-byte fills a lane issues for a step


def _value(x):
    return x if isinstance(x, ir.Value) else as_ir_value(x)


def _buffer(address, nbytes):
    """A raw buffer descriptor with exact bounds."""
    pointer = llvm.IntToPtrOp(ir.Type.parse("!llvm.ptr"), _value(address)).result
    flags = _value(fx.Int32(0x27000))
    kind = ir.Type.parse("!llvm.ptr<8>")
    return rocdl.MakeBufferRsrcOp(kind, pointer, _value(fx.Int16(0)), _value(nbytes), flags).result


def _lds(address):
    return llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), _value(address))


def _statement(text):
    llvm.inline_asm(res=None, operands_=[], asm_string=text, constraints="", has_side_effects=True)


def build(sync: str = "right", asynchronous: bool = True):
    """The launch function for one way to wait and one form of the LDS fills."""
    name = f"dense_{sync.replace('-', '_')}_{'async' if asynchronous else 'sync'}"

    @fx.struct
    class Shared:
        raw: fx.Array[fx.Uint8, 4 * PLANE, 16]

    @flyc.kernel(name=name, known_block_size=[256, 1, 1])
    def kernel(
        a: fx.Int64, b: fx.Int64, sa: fx.Int64, sb: fx.Int64, c: fx.Int64, m: fx.Int32, n: fx.Int32, k: fx.Int32
    ):
        shared = fx.Int32(fx.ptrtoint(fx.SharedAllocator().allocate(Shared).peek().raw.ptr))
        thread = fx.Int32(gpu.thread_id("x"))
        lane = thread % fx.Int32(64)
        wave = fx.Int32(rocdl.readfirstlane(T.i32, _value(thread // fx.Int32(64))))
        row0 = fx.Int32(gpu.block_id("y")) * fx.Int32(TILE)
        col0 = fx.Int32(gpu.block_id("x")) * fx.Int32(TILE)
        blocks = k // fx.Int32(32)
        operands = []
        for data, scales, rows, first in ((a, sa, m, row0), (b, sb, n, col0)):
            size = fx.Int64(rows) * fx.Int64(k)
            operands.append((_buffer(data, size), _buffer(scales, size // fx.Int64(32)), first))
        out = _buffer(c, fx.Int64(m) * fx.Int64(n) * fx.Int64(4))

        def fill(step, half):
            """Every lane brings 2 x 16 bytes of each operand; the 16-byte column is turned by the row against bank
            conflicts."""
            for side, (data, _, first) in enumerate(operands):
                for i in range_constexpr(FILLS // 2):
                    piece = fx.Int32(i * 256) + thread
                    row = piece // fx.Int32(8)
                    column = ((piece % fx.Int32(8)) ^ (row % fx.Int32(8))) * fx.Int32(16)
                    source = (first + row) * k + step * fx.Int32(STEP) + column
                    target = shared + half * fx.Int32(2 * PLANE) + fx.Int32(side * PLANE + i * 4096)
                    target = _lds(target + wave * fx.Int32(1024))
                    if const_expr(asynchronous):
                        rocdl.raw_ptr_buffer_load_async_lds(
                            data, target, _value(fx.Int32(16)), _value(source), _value(fx.Int32(0)), _value(fx.Int32(0))
                        )
                    else:
                        zero = _value(fx.Int32(0))
                        rocdl.raw_ptr_buffer_load_lds(
                            data, target, _value(fx.Int32(16)), _value(source), zero, zero, zero
                        )

        group, line = lane // fx.Int32(16), lane % fx.Int32(16)
        parts = (wave // fx.Int32(2), wave % fx.Int32(2))

        def fragment(side, part, i, half):
            """16 rows of an operand as the scaled MFMA wants them: two runs of 16 bytes, 64 apart."""
            row = part * fx.Int32(32) + fx.Int32(i * 16) + line
            base = shared + half * fx.Int32(2 * PLANE) + fx.Int32(side * PLANE) + row * fx.Int32(STEP)
            runs = []
            for r in range_constexpr(2):
                at = base + ((group + fx.Int32(4 * r)) ^ (row % fx.Int32(8))) * fx.Int32(16)
                runs.append(Vec(llvm.LoadOp(T.vec(4, T.i32), _lds(at), alignment=16).result))
            return _value(runs[0].shuffle(runs[1], list(range(8))))

        def scale(side, part, i, step):
            _, scales, first = operands[side]
            row = first + part * fx.Int32(32) + fx.Int32(i * 16) + line
            at = row * blocks + step * fx.Int32(4) + group
            byte = rocdl.raw_ptr_buffer_load(T.i8, scales, _value(at), _value(fx.Int32(0)))
            return llvm.ZExtOp(T.i32, byte).result

        before, after = {
            "right": ("s_waitcnt vmcnt(0) lgkmcnt(0)", ""),
            "no-wait": ("s_waitcnt lgkmcnt(0)", ""),
            "short": ("s_waitcnt vmcnt(5) lgkmcnt(0)", ""),  # four scale loads are younger than the last fill
            "no-barrier": ("s_waitcnt vmcnt(0) lgkmcnt(0)", ""),
            "late-wait": ("s_waitcnt lgkmcnt(0)", "s_waitcnt vmcnt(0)"),
            "uncovered": ("s_waitcnt vmcnt(0) lgkmcnt(0)", ""),
        }[sync]

        def meet():
            _statement(before)
            if const_expr(sync != "no-barrier"):
                _statement("s_barrier")
            if const_expr(after != ""):
                _statement(after)

        kind = T.vec(4, T.f32)
        zeros = [_value(Vec.filled(4, 0.0, fx.Float32)) for _ in range(4)]
        fill(fx.Int32(0), fx.Int32(0))
        state = zeros
        for step, carried in range(fx.Int32(0), k // fx.Int32(STEP), fx.Int32(1), init=zeros):
            step = fx.Int32(step)
            state = [_value(s) for s in carried]
            half = step % fx.Int32(2)
            rocdl.sched_barrier(0)  # the order of the loads is what the wait counts are about
            scales = [[scale(side, parts[side], i, step) for i in range(2)] for side in range(2)]
            rocdl.sched_barrier(0)
            if const_expr(sync == "uncovered"):
                meet()
                fill(step, half)
            else:
                meet()
                fill(step + fx.Int32(1), fx.Int32(1) - half)
            pieces = [[fragment(side, parts[side], i, half) for i in range(2)] for side in range(2)]
            for i in range_constexpr(2):
                for j in range_constexpr(2):
                    state[2 * i + j] = rocdl.mfma_scale_f32_16x16x128_f8f6f4(
                        kind, [pieces[0][i], pieces[1][j], state[2 * i + j], 0, 0, 0, scales[0][i], 0, scales[1][j]]
                    )
            carried = yield state
        for i in range_constexpr(2):
            for j in range_constexpr(2):
                values = Vec(_value(carried[2 * i + j]), (4,), fx.Float32)
                for r in range_constexpr(4):
                    row = row0 + parts[0] * fx.Int32(32) + fx.Int32(i * 16 + r) + group * fx.Int32(4)
                    column = col0 + parts[1] * fx.Int32(32) + fx.Int32(j * 16) + line
                    at = (row * n + column) * fx.Int32(4)
                    rocdl.raw_ptr_buffer_store(_value(values[r]), out, _value(at), _value(fx.Int32(0)))

    @flyc.jit
    def launch(
        a: fx.Int64, b: fx.Int64, sa: fx.Int64, sb: fx.Int64, c: fx.Int64, m: fx.Int32, n: fx.Int32, k: fx.Int32,
        stream: fx.Stream,
    ):  # fmt: skip
        kernel(a, b, sa, sb, c, m, n, k).launch(
            grid=(n // fx.Int32(TILE), m // fx.Int32(TILE), 1), block=(256, 1, 1), stream=stream
        )

    return launch
