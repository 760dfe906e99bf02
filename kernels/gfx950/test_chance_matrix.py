"""Kernels of matrix instructions drawn by chance, beside a model in plain integers that shares no code with what runs.

Forms, formats, operands that waves share, rectangles, registers that are reused, accumulators that vector instructions
touch, EXEC, barriers in the middle, branches and loops that split waves: what registers hold at the end is the model's,
to the bit, with hazards on and off, in any batches and order, and nothing is found. Not covered: which NaN a NaN is,
results of fp8 or 16 bits as operands, and what silicon does.
"""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import numpy as np
import pytest

from mxgate.kernels.gfx950 import mfma, parse, run
from mxgate.kernels.gfx950.state import Array
from mxgate.kernels.gfx950.test_text import assembly

NAN, INFINITY = 0x7FC00000, 0x7F800000
# exponent and mantissa bits, bias, whether the highest exponent is special and how
FORMATS = {
    "fp8": (4, 3, 7, "nan"), "bf8": (5, 2, 15, "ieee"), "fp6": (2, 3, 1, ""), "bf6": (3, 2, 3, ""),
    "fp4": (2, 1, 1, ""), "f16": (5, 10, 15, "ieee"), "bf16": (8, 7, 127, "ieee"), "f32": (8, 23, 127, "ieee"),
}  # fmt: skip
CODES = {"fp8": 0, "bf8": 1, "fp6": 2, "bf6": 3, "fp4": 4}
UNIT = {f: bias + m - 1 for f, (_, m, bias, _) in FORMATS.items()}  # a code is a whole number of 2**-UNIT
BITS = {f: 1 + e + m for f, (e, m, _, _) in FORMATS.items()}

FORMS: dict[str, tuple[int, int, str, str]] = {}  # rows, k, formats ("": the instruction's modifiers say)
for _r, _k in ((16, 128), (32, 64)):
    FORMS |= {f"v_mfma_{s}f32_{_r}x{_r}x{_k}_f8f6f4": (_r, _k, "", "") for s in ("scale_", "")}
for _r, _k in ((16, 32), (32, 16)):
    FORMS |= {f"v_mfma_f32_{_r}x{_r}x{_k}_{f}": (_r, _k, f, f) for f in ("f16", "bf16")}
    FORMS |= {f"v_mfma_f32_{_r}x{_r}x{_k}_{f}_{g}": (_r, _k, f, g) for f in ("fp8", "bf8") for g in ("fp8", "bf8")}
FORMS |= {"v_mfma_f32_16x16x4_f32": (16, 4, "f32", "f32"), "v_mfma_f32_32x32x2_f32": (32, 2, "f32", "f32")}
SCALABLE = [name for name in FORMS if "f8f6f4" in name]


INLINE = {0.0: "0", 1.0: "1.0", -2.0: "-2.0", 1 / (2 * math.pi): "0.15915494"}


# ------------------------------------------------------------------------------------- the model
def element(code: int, fmt: str) -> tuple[int, float | None]:
    """A code as a whole number of 2**-UNIT, or what it is instead."""
    e_bits, m_bits, _, kind = FORMATS[fmt]
    sign, e, m = code >> (e_bits + m_bits), code >> m_bits & ((1 << e_bits) - 1), code & ((1 << m_bits) - 1)
    if e == (1 << e_bits) - 1:
        if kind == "nan" and m == (1 << m_bits) - 1:
            return 0, math.nan
        if kind == "ieee":
            return 0, math.nan if m else -math.inf if sign else math.inf
    n = m if e == 0 else (m | 1 << m_bits) << (e - 1)
    return -n if sign else n, None


def rounded(n: int, unit: int) -> int:
    """The float32 bits of n * 2**unit, to nearest even."""
    if n == 0:
        return 0
    last = max(abs(n).bit_length() + unit - 24, -149)
    shift = last - unit
    m = abs(n) << max(-shift, 0) >> max(shift, 0)
    if shift > 0:
        rest, half = abs(n) & ((1 << shift) - 1), 1 << (shift - 1)
        m += rest > half or (rest == half and m & 1)
    return min(((last + 149) << 23) + m, INFINITY) | (0x80000000 if n < 0 else 0)


def cut(n: int) -> int:
    """24 leading bits."""
    shift = max(abs(n).bit_length() - 24, 0)
    return (abs(n) >> shift << shift) * (1 if n > 0 else -1)


Operand = tuple[Array, dict[tuple[int, int], float]]  # object[rows, k], and what is not finite


def operand(words: Array, fmt: str, rows: int, k: int, scales: Array | None) -> Operand:
    """Registers uint32[n, 64] and scale bytes [64] as whole numbers of 2**-(UNIT + 127)."""
    bits, groups, lane_bits = BITS[fmt], 64 // rows, 32 * len(words)
    out, special = np.zeros((rows, k), object), {}
    for lane in range(64):
        g, row = divmod(lane, rows)
        register = sum(int(w) << 32 * i for i, w in enumerate(words[:, lane]))
        for i in range(lane_bits // bits):
            runs = bits == 8 and len(words) == 8
            at = i // 16 * 16 * groups + 16 * g + i % 16 if runs else lane_bits // bits * g + i
            n, instead = element(register >> bits * i & ((1 << bits) - 1), fmt)
            scale = 127 if scales is None else int(scales[rows * (at // 32) + row])
            if scale == 255:
                n, scale, instead = 0, 0, math.nan
            out[row, at] = n << scale
            if instead is not None:
                special[row, at] = instead
    return out, special


def not_finite(a: Operand, b: Operand, row: int, column: int) -> float:
    """The sum of the products that are not finite, 0 without."""
    total = 0.0
    for k in range(a[0].shape[1]):
        if (row, k) in a[1] or (column, k) in b[1]:
            x = a[1].get((row, k), float(np.sign(a[0][row, k])))
            total += x * b[1].get((column, k), float(np.sign(b[0][column, k])))
    return total


class Matrix(NamedTuple):
    """One instruction. Numbers of registers (accumulation registers begin at DATA), c also float32 bits; scales:
    register and byte of A and B."""

    name: str
    fa: str
    fb: str
    a: int
    b: int
    d: int
    c: int | float
    scales: tuple[int, int, int, int]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Registers of A, B and D."""
        rows, k, _, _ = FORMS[self.name]
        return rows * k // 64 * BITS[self.fa] // 32, rows * k // 64 * BITS[self.fb] // 32, rows * rows // 64


def multiply(m: Matrix, v: Array, model: str, seen: dict[Any, Any]) -> Array:
    """uint32[n, 64] from all registers uint32[PLANES, 64]. seen: operands and products met before."""
    rows, k, _, _ = FORMS[m.name]
    na, nb, n = m.sizes
    keys = []
    for at, size, fmt, s, byte in ((m.a, na, m.fa, *m.scales[:2]), (m.b, nb, m.fb, *m.scales[2:])):
        scales = (v[s] >> np.uint32(8 * byte)).astype(np.uint8) if "scale" in m.name else None
        keys.append((v[at : at + size].tobytes(), fmt, rows, k, None if scales is None else scales.tobytes()))
        if keys[-1] not in seen:
            seen[keys[-1]] = operand(v[at : at + size], fmt, rows, k, scales)
    a, b = seen[keys[0]], seen[keys[1]]
    groups = [slice(g, g + 16) for g in range(0, k, 16)] if model == "cdna3-like" else [slice(0, k)]
    if (keys[0], keys[1], model) not in seen:
        seen[keys[0], keys[1], model] = [a[0][:, g].dot(b[0][:, g].T) for g in groups]
    products, unit = seen[keys[0], keys[1], model], -(UNIT[m.fa] + UNIT[m.fb] + 254)
    low = min(unit, -149)
    rows_a, rows_b = {r for r, _ in a[1]}, {r for r, _ in b[1]}
    out = np.zeros((n, 64), np.uint32)
    for register in range(n):
        for lane in range(64):
            row, column = 256 // rows * (register // 4) + 4 * (lane // rows) + register % 4, lane % rows
            c = int(v[m.c + register, lane]) if isinstance(m.c, int) else int(np.float32(m.c).view(np.uint32))
            whole, instead = element(c, "f32")
            special = not_finite(a, b, row, column) if row in rows_a or column in rows_b else 0.0
            special += instead or 0.0
            if special != 0:
                out[register, lane] = NAN if math.isnan(special) else INFINITY | (special < 0) << 31
                continue
            total = whole << (-149 - low)
            for p in products:
                term = p[row, column] << (unit - low)
                total = cut(total + cut(term)) if model == "cdna3-like" else total + term
            out[register, lane] = rounded(total, low)
    return out


# ------------------------------------------------------------------------------------- programs
# Registers v0.. hold two A operands, two B operands, four of scales and accumulators, then the accumulation registers.
A_AT, B_AT, SCALES, SUMS, DATA, PLANES = (0, 8), (16, 24), (32, 33, 34, 35), 36, 72, 120
Body = list[
    Any
]  # Matrix, or ("mov", to, from), ("exec", mask), ("barrier",), ("if", bit, Body, Body), ("loop", bit, Body)


def name(register: int, n: int = 1) -> str:
    kind, i = ("v", register) if register < DATA else ("a", register - DATA)
    return f"{kind}{i}" if n == 1 else f"{kind}[{i}:{i + n - 1}]"


def draw_matrix(rng: random.Random, main: str, formats: tuple[str, ...], flows: bool) -> Matrix:
    form = main if rng.random() < 0.8 else rng.choice(SCALABLE if flows else list(FORMS))
    _, _, fa, fb = FORMS[form]
    few = FORMS[form][0] == 16

    def accumulator() -> int:
        if few:
            return rng.choice([DATA + 4 * rng.randrange(6), DATA + 2 * rng.randrange(20), SUMS + 4 * rng.randrange(8)])
        return rng.choice([DATA, DATA + 16, DATA + 32, DATA + 8, SUMS, SUMS + 16])

    d = accumulator()
    c = rng.choice([d, d, d, *(accumulator() for _ in range(3)), *INLINE])
    a, b = rng.choice(A_AT), rng.choice(B_AT)
    if flows and rng.random() < 0.2:  # a result as operand
        a = SUMS + 4 * rng.randrange(6)
    scales = (rng.choice(SCALES), rng.randrange(4), rng.choice(SCALES), rng.randrange(4))
    return Matrix(form, fa or rng.choice(formats), fb or rng.choice(formats), a, b, d, c, scales)


def draw_other(rng: random.Random, flows: bool) -> tuple[Any, ...]:
    if rng.random() < 0.3:
        return "exec", rng.choice([(1 << 64) - 1, (1 << 64) - 1, rng.getrandbits(64), 0])
    if rng.random() < 0.4:  # an operand register is used again
        return "mov", rng.randrange(16), rng.randrange(SUMS, DATA) if flows else rng.randrange(32)
    x, y = rng.randrange(SUMS, DATA), rng.randrange(DATA, PLANES)
    return rng.choice([("mov", x, y), ("mov", y, x), ("mov", x, rng.randrange(SUMS, DATA))])


def draw_body(rng: random.Random, main: str, formats: tuple[str, ...], flows: bool, depth: int = 0) -> Body:
    def straight() -> Body:
        often = rng.choice([0.1, 0.3, 0.6])
        steps = range(rng.randrange(1, 5))
        return [
            draw_other(rng, flows) if rng.random() < often else draw_matrix(rng, main, formats, flows) for _ in steps
        ]

    out: Body = straight()
    for _ in range(rng.randrange(1, 3)):
        way = rng.random()
        if depth < 2 and way < 0.35:
            inner = [draw_body(rng, main, formats, flows, depth + 1) for _ in range(2)]
            out.append(("if", rng.randrange(16), inner[0], inner[1] if rng.random() < 0.5 else []))
        elif depth < 1 and way < 0.55:
            out.append(("loop", 16 + rng.randrange(8), draw_body(rng, main, formats, flows, depth + 1)))
        elif depth < 1 and way < 0.8:
            out.append(("barrier",))
        out += straight()
    return out


class Writer:
    """A body as text, with the wait states that results need before anything but their own chain touches them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.recent: set[tuple[int, int]] = set()  # result registers (first, number)
        self.labels = 0

    def settle(self, *touched: tuple[int, int]) -> None:
        """touched: runs of registers (first, number); none stands for all."""
        if not touched or any(x < d + n and d < x + k for x, k in touched for d, n in self.recent):
            self.lines += ["s_nop 15", "s_nop 4"]
            self.recent = set()

    def label(self) -> str:
        self.labels += 1
        return f".L{self.labels}"

    def write(self, body: Body) -> None:
        for step in body:
            if isinstance(step, Matrix):
                self.matrix(step)
            elif step[0] == "exec":
                self.lines += [
                    f"s_mov_b32 exec_lo, {step[1] & 0xFFFFFFFF:#x}",
                    f"s_mov_b32 exec_hi, {step[1] >> 32:#x}",
                ]
            elif step[0] == "mov":
                self.settle((step[1], 1), (step[2], 1))
                kinds = (step[1] < DATA, step[2] < DATA)
                move = {(True, False): "v_accvgpr_read_b32", (False, True): "v_accvgpr_write_b32"}
                self.lines.append(f"{move.get(kinds, 'v_mov_b32_e32')} {name(step[1])}, {name(step[2])}")
            elif step[0] == "barrier":
                self.lines.append("s_barrier")
            elif step[0] == "if":
                other, end = self.label(), self.label()
                self.settle()
                self.lines += [f"s_bitcmp1_b32 s40, {step[1]}", f"s_cbranch_scc0 {other}"]
                self.write(step[2])
                self.settle()
                self.lines += [f"s_branch {end}", f"{other}:"]
                self.write(step[3])
                self.settle()
                self.lines.append(f"{end}:")
            else:
                top = self.label()
                self.settle()
                self.lines += [f"s_bfe_u32 s44, s40, {1 << 16 | step[1]:#x}", "s_add_u32 s44, s44, 1", f"{top}:"]
                self.write(step[2])
                self.settle()
                self.lines += ["s_sub_u32 s44, s44, 1", "s_cmp_lg_u32 s44, 0", f"s_cbranch_scc1 {top}"]

    def matrix(self, m: Matrix) -> None:
        na, nb, n = m.sizes
        self.settle((m.a, na), (m.b, nb))
        if isinstance(m.c, int) and self.recent - {(m.c, n)}:
            mine = self.recent & {(m.c, n)}
            self.recent -= mine
            self.settle((m.c, n))
            self.recent |= mine
        c = name(m.c, n) if isinstance(m.c, int) else INLINE[m.c]
        line = f"{m.name} {name(m.d, n)}, {name(m.a, na)}, {name(m.b, nb)}, {c}"
        if "scale" in m.name:
            x, p, y, q = m.scales
            line += f", v{x}, v{y} op_sel:[{p & 1},{q & 1},0] op_sel_hi:[{p >> 1},{q >> 1},0]"
        self.lines.append(line + (f" cbsz:{CODES[m.fa]} blgp:{CODES[m.fb]}" if m.name in SCALABLE else ""))
        self.recent.add((m.d, n))


OPEN = """
s_load_dwordx4 s[12:15], s[0:1], 0x0
s_load_dwordx2 s[16:17], s[0:1], 0x10
v_lshrrev_b32_e32 v73, 6, v0
v_readfirstlane_b32 s20, v73
v_and_b32_e32 v72, 63, v0
v_lshlrev_b32_e32 v72, 4, v72
s_mul_i32 s21, s2, {waves}
s_add_u32 s20, s20, s21
s_lshl_b32 s21, s20, 2
s_waitcnt lgkmcnt(0)
s_load_dword s40, s[16:17], s21
s_mul_i32 s22, s20, {nbytes}
s_mov_b32 s4, s12
s_and_b32 s5, s13, 0xffff
s_mov_b32 s8, s14
s_and_b32 s9, s15, 0xffff
s_mov_b32 s6, 0x7fffffff
s_mov_b32 s10, 0x7fffffff
s_mov_b32 s7, 0x27000
s_mov_b32 s11, 0x27000
"""


def kernel_of(body: Body, waves: int) -> str:
    """Each wave loads its registers from the first buffer, runs, and stores them to the second; s40 is its word of the
    third."""
    writer, quads = Writer(), range(0, PLANES, 4)
    writer.write(body)
    writer.settle()
    move = "buffer_{} {}, v72, s[{}], s23 offen\ns_add_u32 s23, s23, 1024"
    load = [move.format("load_dwordx4", name(q, 4), "4:7") for q in quads]
    store = [move.format("store_dwordx4", name(q, 4), "8:11") for q in quads]
    begin, wait = "s_mov_b32 s23, s22", "s_waitcnt vmcnt(0) lgkmcnt(0)"
    end = ["s_mov_b64 exec, -1", begin, *store, "s_endpgm"]
    text = "\n".join([OPEN.format(waves=waves, nbytes=PLANES * 256), begin, *load, wait, *writer.lines, *end])
    return assembly(text, args=(8, 8, 8), vgprs=76, agprs=PLANES - DATA, block=64 * waves)


def interpret(body: Body, v: Array, exec_: Array, word: int, model: str, seen: dict[Any, Any]) -> None:
    """One wave, in place."""
    for step in body:
        if isinstance(step, Matrix):
            v[step.d : step.d + step.sizes[2]] = multiply(step, v, model, seen)
        elif step[0] == "exec":
            exec_[:] = [step[1] >> lane & 1 for lane in range(64)]
        elif step[0] == "mov":
            v[step[1]] = np.where(exec_, v[step[2]], v[step[1]])
        elif step[0] == "if":
            interpret(step[2] if word >> step[1] & 1 else step[3], v, exec_, word, model, seen)
        elif step[0] == "loop":
            for _ in range(1 + (word >> step[1] & 1)):
                interpret(step[2], v, exec_, word, model, seen)


def draw_operand(rng: np.random.Generator, main: str, special: bool, flows: bool) -> Array:
    """uint32[8, 64]"""
    fmt = FORMS[main][2]
    words: Array
    if fmt in ("bf16", "f32"):
        middle = rng.integers(100, 150, (8, 64, 2), dtype=np.uint32) << (7 if fmt == "bf16" else 23)
        x = middle ^ rng.integers(0, 128, (8, 64, 2), dtype=np.uint32) ^ (rng.integers(0, 2, (8, 64, 2)) << 15)
        words = x[..., 0] if fmt == "f32" else x[..., 0] | x[..., 1] << 16
    else:
        octets = rng.integers(0, 256, (8, 64, 4), dtype=np.uint8)
        if rng.random() < 0.3:  # few and round: sums meet ties
            octets = rng.choice(np.array([0, 0x38, 0xB8, 0x40, 0x30], np.uint8), (8, 64, 4))
        if not (special or flows):
            octets[octets & 0x7C == 0x7C] ^= 0x40  # NaN and infinity
        words = octets.view(np.uint32)[..., 0]
    words = words.astype(np.uint32)
    if rng.random() < 0.4:
        words[:, np.arange(64) % 16 >= rng.integers(17)] = 0  # rows past the end of a matrix
    elif rng.random() < 0.3:
        words[:, rng.random(64) < 0.5] = 0
    return words


def draw_registers(seed: int, waves: int, main: str, special: bool, flows: bool) -> Array:
    """uint32[waves, PLANES, 64]; waves have few different operands."""
    rng = np.random.default_rng(seed)
    v = np.zeros((waves, PLANES, 64), np.uint32)
    kinds, middle, spread = (
        int(rng.choice([1, 2, 3])),
        int(rng.choice([64, 100, 127, 150])),
        int(rng.choice([0, 3, 24])),
    )
    for at in (*A_AT, *B_AT):
        v[:, at : at + 8] = np.array([draw_operand(rng, main, special, flows) for _ in range(kinds)])[
            rng.integers(kinds, size=waves)
        ]
    for at in SCALES:
        low = middle - spread + rng.integers(-3, 4)
        s = rng.integers(low, low + 2 * spread + 1, (kinds, 64, 4)).astype(np.uint8)
        s.reshape(kinds, 4, 16, 4)[:, rng.random(4) < 0.3] = 0
        if special:
            s[rng.integers(kinds), rng.integers(64), rng.integers(4)] = 0xFF
        v[:, at] = s.view(np.uint32)[rng.integers(kinds, size=waves), :, 0]
    c = np.ldexp(rng.integers(-3, 4, (kinds, PLANES, 64)), rng.integers(-30, 30, (kinds, 1, 1))).astype(np.float32)
    v[:, SUMS:] = c.view(np.uint32)[rng.integers(kinds, size=waves), SUMS:]
    return v


@pytest.mark.parametrize("seed", range(12))
def test_any_kernel_of_matrix_instructions(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    flows, special, model = seed % 3 == 0, seed % 3 == 1, ("exact-rne", "cdna3-like")[seed % 4 == 3]
    # Small enough that few waves fill the room for operands, and are looked at for what they share.
    monkeypatch.setattr(mfma, "ROOM", rng.choice([50000, 200000, 1 << 22]))
    monkeypatch.setattr(mfma, "FEW", rng.choice([2, 16]))
    formats = rng.choice([("fp8",), ("bf8",), ("fp8", "bf8"), ("fp8", "fp4"), ("bf6", "fp6")])
    main = rng.choice(SCALABLE if flows or rng.random() < 0.5 else list(FORMS))
    body = draw_body(rng, main, ("fp4", "fp6", "bf6") if flows else formats, flows)
    each, grid = rng.choice([1, 2, 4]), rng.choice([1, 2, 5])
    waves = each * grid
    start = draw_registers(seed, waves, main, special, flows)
    words = np.array([rng.getrandbits(32) for _ in range(waves)], np.uint32)
    want, seen = start.copy(), dict[Any, Any]()
    for v, word in zip(want, words.tolist(), strict=True):
        interpret(body, v, np.ones(64, bool), word, model, seen)
    kernel = parse(kernel_of(body, each))
    given = start.reshape(waves, PLANES // 4, 4, 64).swapaxes(2, 3).copy()
    for hazards, batch in ((True, 1024), (False, 1024), (False, 2)):
        out = np.zeros_like(given)
        r = run(kernel, [given, out, words], grid, seed=rng.randrange(99), hazards=hazards, model=model, batch=batch)
        assert not r.findings, str(r.findings[0])
        got = out.swapaxes(2, 3).reshape(want.shape)
        got[:, SUMS:] = np.where(np.isnan(got[:, SUMS:].view(np.float32)), NAN, got[:, SUMS:])
        wrong = np.argwhere(got != want)
        assert not len(wrong), (wrong[0], hex(got[tuple(wrong[0])]), hex(want[tuple(wrong[0])]), len(wrong))
