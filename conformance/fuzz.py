"""Damaged files against the two readers of files from elsewhere: tensors (recorded calls too) and machine code.

    python -m mxgate.conformance.fuzz [--minutes 10] [--seed 0]

Every input is a committed file, or an earlier input, with a few mutations drawn from the seed and the input's number.
What a reader may do with it: accept it, or raise the error it documents, with one printable line. Anything else is a
finding: another exception, a message of several lines, a crash, seconds of work, memory without measure, tensors that
the reference parser reads otherwise. An input whose answer nobody gave before, numbers and names aside, is mutated
further: that leads from the outermost checks to those behind them, and costs nothing.

Tensors are read, looked through for recorded calls, and made into operands; machine code is parsed, bound to what
instructions mean and run, for up to 1500 instructions of each wave of one workgroup. The summary counts inputs by how
far they came: refused at once (StoreError, TextError), `tensors` without calls that are any, `calls`; a `kernel` that
did not run to its end, `run`.

Findings are written to the folder and counted once for each place in the source. Exit code 1 if there are any.
Not found here: what is accepted and wrong in a way that the reference parser shares, or that the emulator's hazard
checks, the gates and the mutants of `mxgate faults --isa` are for.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import lzma
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from mxgate.conformance import data, recorded
from mxgate.conformance.case import captured, case_by_id
from mxgate.fixtures import CAPTURED, GOLDEN, store
from mxgate.fixtures.store import StoreError
from mxgate.kernels import gfx950
from mxgate.kernels.flydsl.compile import FIXTURES as ISA
from mxgate.kernels.gfx950 import plan
from mxgate.kernels.gfx950.text import MODIFIERS

SECONDS = 10.0  # of CPU that one input may take; of time on the clock, SLEEP
SLEEP = 120.0
MEMORY = 512 << 20  # bytes of address space that one input may take
LONGEST = 500  # characters of a message, the file's path aside
INSTRUCTIONS = 1500  # that a wave of a mutated kernel may execute
DEEP = 2000  # levels of nesting, more than Python's stack has
KEPT = 500  # inputs with an answer of their own that are mutated further

Mutation = Callable[[bytes, random.Random], bytes]


class WrongError(AssertionError):
    """A reader accepted what it should not have, or said no in a way that it should not have."""


class SlowError(BaseException):
    """Beyond SECONDS. No Exception: what is being read may catch those."""


@dataclass(frozen=True)
class Target:
    """A reader under test. read: path -> its answer in words. Raises what counts as a finding."""

    name: str
    suffix: str
    files: tuple[bytes, ...]
    mutations: tuple[Mutation, ...]
    read: Callable[[Path], str]


@dataclass
class Tally:
    """What was seen of a target. findings: by place in the source, the first message and where the input lies."""

    inputs: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    answers: Counter[str] = field(default_factory=Counter)
    findings: dict[str, str] = field(default_factory=dict)
    pool: list[bytes] = field(default_factory=list)


# ---------------------------------------------------------------------------------------------------------------------
# The readers


def refused(error: Exception, path: Path) -> str:
    """The error's message without numbers, names and the path. WrongError unless it is one clear line."""
    message = str(error).removeprefix(f"{path}: ")
    if not message.isprintable() or not 10 < len(message) <= LONGEST:
        raise WrongError(f"{type(error).__name__} with a message of {len(message)} characters: {message!r:.300}")
    plain = re.sub(r"'[^']*'|`[^`]*`|\[[^]]*\]|\([^)]*\)|0x[0-9a-fA-F]+|-?\d+(\.\d+)?", "#", message)
    return f"{type(error).__name__}: {plain[:100]}"


def read_tensors(path: Path) -> str:
    try:
        tensors, notes = store.read(path)
    except StoreError as error:
        return refused(error, path)
    parsed = dict(safetensors.deserialize(path.read_bytes()))  # type: ignore[no-untyped-call]
    ours = {name: (list(a.shape), a.tobytes()) for name, a in tensors.items()}
    if ours != {name: (entry["shape"], bytes(entry["data"])) for name, entry in parsed.items()}:
        raise WrongError("other tensors than the reference parser's")
    if store.metadata(path) != notes:
        raise WrongError("metadata alone is not the metadata that comes with the tensors")
    try:
        cases = recorded.cases(path)
    except StoreError as error:
        return f"tensors; {refused(error, path)}"
    for case in cases:
        for variant in data.variants(case):
            data.operands(case, variant)
    data._planes.cache_clear()
    return f"calls: {sorted({(c.op, c.family, c.formats, c.out_dtype, 0 in c.sizes) for c in cases})}"


def read_machine_code(path: Path) -> str:
    content = path.read_bytes()
    text = content.decode(errors="replace")
    draw = random.Random(zlib.crc32(content))
    named = re.findall(r"\.amdhsa_kernel\s+(\S+)", text) if draw.random() < 0.9 else []
    try:
        kernel = gfx950.parse(text, named[0] if named else None)
    except gfx950.TextError as error:
        return refused(error, path)
    words = np.array([0, 32, 64, 96, 96, 160, 192, 256] * 64, np.int32)
    arguments: list[Any] = []
    for a in kernel.arguments:
        if not a.kind.startswith("hidden_"):
            arguments.append(words.copy() if a.size == 8 else draw.choice([1, 32, 64, 4096]) if a.size == 4 else b"")
    try:
        result = gfx950.run(kernel, arguments, 1, hazards=draw.random() < 0.5, limit=INSTRUCTIONS)
    except (gfx950.TextError, gfx950.RunError) as error:
        return f"kernel; {refused(error, path)}"
    return f"run: {sorted({finding.kind for finding in result.findings})}"


# ---------------------------------------------------------------------------------------------------------------------
# Mutations of bytes

JUNK = (
    b"\xff\xff\xff\xff", b"\0\0\0\0", b"9999", b'"",[', b"-1,0", b"null", b"NaN", b"\x1b[2J", b"\xe2\x80\xa8", b"\xc3",
    b"\r\n",
)  # fmt: skip


def flip(content: bytes, rng: random.Random) -> bytes:
    out = bytearray(content)
    for _ in range(rng.choice((1, 1, 4)) if out else 0):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def remove(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + content[at + rng.randrange(1, 65) :]


def duplicate(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + content[at : at + rng.randrange(1, 257)] + content[at:]


def overwrite(content: bytes, rng: random.Random) -> bytes:
    at, junk = rng.randrange(len(content) + 1), rng.choice(JUNK)
    return content[:at] + junk + content[at + rng.choice((0, len(junk))) :]


BYTES: tuple[Mutation, ...] = (flip, cut, remove, duplicate, overwrite)


# ---------------------------------------------------------------------------------------------------------------------
# Mutations of a safetensors file

NUMBERS = (0, 1, 2, 31, 32, 33, 255, -1, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63))
STRANGE: tuple[Any, ...] = (
    *NUMBERS, 1.5, 1e300, True, None, "", "8", [], {}, [0], ["x"], {"a": 1}, "F8_E4M3", "\x1b[2J\n",
)  # fmt: skip
Entries = dict[str, Any]


def number(rng: random.Random) -> Any:
    return rng.choice(NUMBERS) if rng.random() < 0.7 else rng.choice(STRANGE)


def _shape(header: Entries, name: str, rng: random.Random) -> None:
    shape = header[name]["shape"]
    at = rng.randrange(len(shape) + 1)
    shape[at : at + rng.randrange(2)] = [number(rng)] * rng.choice((1, 1, 1, 2, 40))


def _turn(header: Entries, name: str, rng: random.Random) -> None:
    """Another shape of as many elements: what gets past the size check."""
    shape = header[name]["shape"]
    rng.shuffle(shape)
    for i in range(1, len(shape)):
        if rng.random() < 0.5 and isinstance(shape[i], int) and isinstance(shape[0], int):
            shape[0], shape[i] = shape[0] * shape[i], 1


def _nothing(header: Entries, name: str, rng: random.Random) -> None:
    """No bytes at all, under a shape with a zero in it: large dimensions beside it cost the file nothing."""
    shape = header[name]["shape"]
    shape[:] = [number(rng) for _ in shape]
    if shape:
        shape[rng.randrange(len(shape))] = 0


def _offsets(header: Entries, name: str, rng: random.Random) -> None:
    offsets = header[name]["data_offsets"]
    offsets[rng.randrange(2)] = rng.choice((number(rng), offsets[0] + rng.choice((-8, -1, 1, 8)), offsets[1]))


def _tag(header: Entries, name: str, rng: random.Random) -> None:
    header[name]["dtype"] = rng.choice((*store.TAGS, "F4", "f32", *STRANGE))


def _rename(header: Entries, name: str, rng: random.Random) -> None:
    others = (*header, "", "__metadata__", "call.x", "../x", "a\nb", "\ud800", "x" * 5000)
    header[rng.choice(others)] = header.pop(name)


def _drop(header: Entries, name: str, rng: random.Random) -> None:
    del header[name]


def _overlap(header: Entries, name: str, rng: random.Random) -> None:
    header[f"{name}.again"] = dict(header[name])


def _field(header: Entries, name: str, rng: random.Random) -> None:
    header[name][rng.choice((*header[name], "more"))] = rng.choice(STRANGE)


def _entry(header: Entries, name: str, rng: random.Random) -> None:
    header[name] = rng.choice(STRANGE)


def _swap(header: Entries, name: str, rng: random.Random) -> None:
    other, what = rng.choice(list(header)), rng.choice(("dtype", "shape", "data_offsets"))
    header[name][what], header[other][what] = header[other][what], header[name][what]


def _calls(header: Entries, name: str, rng: random.Random) -> None:
    """What the metadata says of recorded calls."""
    notes = header["__metadata__"]
    calls = json.loads(notes["calls"])
    chosen = calls[rng.choice(list(calls))]
    known = ("forward", "dgrad", "wgrad", "quantize", "float16", "float32", "bfloat16", "special", "recorded")
    chosen[rng.choice(("op", "out_dtype", "family", "more"))] = rng.choice((*known, *STRANGE))
    notes["calls"] = rng.choice((json.dumps(calls), json.dumps(calls), json.dumps(rng.choice(STRANGE)), "[" * DEEP))


def _notes(header: Entries, name: str, rng: random.Random) -> None:
    notes = header.setdefault("__metadata__", {})
    header["__metadata__"] = rng.choice((rng.choice(STRANGE), {**notes, f"mxgate.carrier:{name}": "e2m1"}, {"a": DEEP}))


EDITS: tuple[Callable[[Entries, str, random.Random], None], ...] = (
    _shape, _shape, _turn, _nothing, _offsets, _offsets, _tag, _tag, _rename, _drop, _overlap, _field, _entry, _swap,
    _swap, _calls, _calls, _notes,
)  # fmt: skip


def parts(content: bytes) -> tuple[bytes, bytes]:
    """(header, data) of a file, as far as its length tells."""
    end = 8 + min(int.from_bytes(content[:8], "little"), len(content))
    return content[8:end], content[end:]


def joined(header: bytes, rest: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + rest


def edit_header(content: bytes, rng: random.Random) -> bytes:
    """A header that says something else, still JSON; now and then with the tensors laid end to end again, as far as
    their sizes make sense, so that the lie is met further in."""
    text, rest = parts(content)
    try:
        header = json.loads(text)
        names = [name for name in header if name != "__metadata__"]
        rng.choice(EDITS)(header, rng.choice(names), rng)
        if rng.random() < 0.5:
            rest = repacked(header, rest)
        return joined(json.dumps(header).encode("utf-8", "surrogatepass"), rest)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError):
        return flip(content, rng)  # an earlier mutation has left nothing to edit


def repacked(header: Entries, rest: bytes) -> bytes:
    """New offsets for every tensor, and bytes enough for them where that is not absurd."""
    end = 0
    for name, entry in header.items():
        if name != "__metadata__":
            size = store.TAGS[entry["dtype"]].itemsize
            for n in entry["shape"]:
                size *= int(n) if n < 1 << 22 else 0
            if not 0 <= size < 1 << 22:
                return rest
            entry["data_offsets"] = [end, end + size]
            end += size
    return (rest * (end // max(len(rest), 1) + 1))[:end]


def edit_text(content: bytes, rng: random.Random) -> bytes:
    """A header that JSON's grammar allows in part, or not at all: names twice, NaN, numbers and nesting without end."""
    text, rest = parts(content)
    pieces = [m.span() for m in re.finditer(rb'"[^"]*":\{[^{}]*\},?|-?\d+|"[^"]*"', text)]
    if not pieces:
        return overwrite(content, rng)
    start, end = rng.choice(pieces)
    piece = text[start:end]
    other = rng.choice((
        piece + piece, b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"-0", b"007", b"1.0", b'"\\u0000"', b'"\\ud800"',
        b"[" * DEEP, b'{"a":' * DEEP, b'{"' + b"x" * 100_000 + b'":0}', b"\xff", b" " * 1000 + piece, b"",
    ))  # fmt: skip
    return joined(text[:start] + other + text[end:], rest)


def edit_data(content: bytes, rng: random.Random) -> bytes:
    """Another integer, NaN, or byte where values lie: offsets are among them."""
    text, rest = parts(content)
    at = rng.randrange(0, max(len(rest) - 3, 1)) & ~3
    word = rng.choice((b"\xff" * 4, b"\0" * 4, b"\x7f" * 4, (rng.choice(NUMBERS) & 0xFFFFFFFF).to_bytes(4, "little")))
    return joined(text, rest[:at] + word + rest[at + 4 :])


TENSORS: tuple[Mutation, ...] = (*BYTES, *(edit_header,) * 8, edit_text, edit_text, edit_data, edit_data)


# ---------------------------------------------------------------------------------------------------------------------
# Mutations of machine code

_TOKEN = re.compile(r"[^\s,]+")
# fmt: off
IMMEDIATES = (
    "0", "1", "-1", "63", "64", "65535", "65536", "0xffffffff", "4294967296", "-2147483649", "1.0", "-0.5",
    "0.15915494", "1e5", "3.4e39", "1.0e99999", "010", "0x", "-", "--1", "0b1", "9" * 5000,
)
REGISTERS = (
    "v0", "v255", "v511", "v512", "v99999999999", "a0", "s0", "s101", "s127", "s128", "s200", "v[0:1]", "v[1:0]",
    "v[3]", "v[0:3", "v[0:99999999]", "s[0:99999999]", "s[100:130]", "s[126:127]", "s[127:128]", "vcc", "exec", "m0",
    "scc", "off", "null", "xnack_mask", "q7", "-v1", "|v2|", "-|v1|", "abs(v1)", "sext(v1)", "neg(neg(v1))",
)
VALUES = (
    "", "0", "1", "3", "15", "16", "64", "4095", "-1", "65536", "99999999999", "0xf", "[0,1]", "[1,1,1]", "[2]", "[]",
    "[0,0,0,0,0,0,0,0]", "BYTE_0", "BYTE_9", "WORD_1", "DWORD", "swizzle(SWAP,8)", "swizzle(QUAD_PERM,9,9,9,9)",
)
# fmt: on
MNEMONICS = tuple(sorted(plan.mnemonics()))


def lines_of(content: bytes) -> list[str]:
    return content.decode("utf-8", "surrogateescape").split("\n")


def encoded(lines: Sequence[str]) -> bytes:
    return "\n".join(lines).encode("utf-8", "surrogateescape")


def on_line(change: Callable[[str, list[str], random.Random], str], kind: str = "") -> Mutation:
    """A change of one line: of those that hold `kind`, if there are any."""

    def mutate(content: bytes, rng: random.Random) -> bytes:
        lines = lines_of(content)
        places = [i for i, line in enumerate(lines) if kind in line and line.strip()] or range(len(lines))
        at = rng.choice(places)
        lines[at] = change(lines[at], lines, rng)
        return encoded(lines)

    return mutate


def _token(line: str, rng: random.Random, other: Callable[[str], str], first: int = 1) -> str:
    """The line with one token, not the first ones, changed."""
    tokens = list(_TOKEN.finditer(line))[first:]
    if not tokens:
        return line + other("")
    m = rng.choice(tokens)
    return line[: m.start()] + other(m[0]) + line[m.end() :]


def _operand(line: str, lines: list[str], rng: random.Random) -> str:
    """An operand of another line."""
    donors = _TOKEN.findall(rng.choice(lines))[1:] or ["v0"]
    return _token(line, rng, lambda old: rng.choice(donors))


def _register(line: str, lines: list[str], rng: random.Random) -> str:
    def other(old: str) -> str:
        digits = list(re.finditer(r"\d+", old))
        if digits and rng.random() < 0.5:
            m = rng.choice(digits)
            return old[: m.start()] + str(int(m[0][:9]) + rng.choice((-1, 1, 2, 64, 500))) + old[m.end() :]
        return rng.choice(REGISTERS)

    return _token(line, rng, other)


def _immediate(line: str, lines: list[str], rng: random.Random) -> str:
    return _token(line, rng, lambda old: rng.choice(IMMEDIATES))


def _modifier(line: str, lines: list[str], rng: random.Random) -> str:
    name, value = rng.choice(list(MODIFIERS)), rng.choice(VALUES)
    return f"{line} {name}:{value}" if value else f"{line} {name}"


def _mnemonic(line: str, lines: list[str], rng: random.Random) -> str:
    suffix = rng.choice(("", "", "", "_e32", "_e64", "_dpp", "_sdwa"))
    return re.sub(r"\S+", lambda m: rng.choice(MNEMONICS) + suffix, line, count=1)


def _fewer(line: str, lines: list[str], rng: random.Random) -> str:
    """One operand less, or one more."""
    head, comma, _ = line.rpartition(",")
    return head if comma and rng.random() < 0.5 else f"{line}, {rng.choice(REGISTERS)}"


def _value(line: str, lines: list[str], rng: random.Random) -> str:
    """Another value of a directive or of a row of metadata."""
    return _token(line, rng, lambda old: rng.choice((*map(str, NUMBERS), *IMMEDIATES, "x", "''", "[1", "{}", "- 1")))


def _indent(line: str, lines: list[str], rng: random.Random) -> str:
    return rng.choice(("", " ", "      ", "- ", "  - - ", "\t")) + line.lstrip()


def _label(line: str, lines: list[str], rng: random.Random) -> str:
    return rng.choice(("", line + line, "1:", ":", line.replace(":", ""), ".LBB9_9:", "1: 1: 1:" + line))


def delete_lines(content: bytes, rng: random.Random) -> bytes:
    lines = lines_of(content)
    at = rng.randrange(len(lines))
    del lines[at : at + rng.choice((1, 1, 1, 2, 10, 200))]
    return encoded(lines)


def move_lines(content: bytes, rng: random.Random) -> bytes:
    """Some lines somewhere else, or there as well."""
    lines = lines_of(content)
    at, to, many = rng.randrange(len(lines)), rng.randrange(len(lines)), rng.choice((1, 1, 2, 10))
    some = lines[at : at + many]
    if rng.random() < 0.5:
        del lines[at : at + many]
    lines[to:to] = some
    return encoded(lines)


def nest(content: bytes, rng: random.Random) -> bytes:
    """Nesting without end, in the metadata or in an operand."""
    lines = lines_of(content)
    starts = [i for i, line in enumerate(lines) if "amdhsa.kernels" in line]
    if starts and rng.random() < 0.7:
        deep = [f"{' ' * i}a:" for i in range(DEEP)] if rng.random() < 0.5 else ["  " + "- " * DEEP + "a: 1"]
        lines[starts[0] : starts[0]] = deep
        return encoded(lines)
    open_ = rng.choice(("(", "[", "-", "|", "abs("))
    return on_line(lambda line, _, rng: _token(line, rng, lambda old: open_ * DEEP + old))(encoded(lines), rng)


CODE: tuple[Mutation, ...] = (
    *BYTES,
    delete_lines,
    delete_lines,
    move_lines,
    move_lines,
    nest,
    *(on_line(change, "\t") for change in (_operand, _operand, _register, _register, _immediate, _modifier, _fewer)),
    *(on_line(_mnemonic, kind) for kind in ("\tv_", "\ts_", "\tds_", "\tbuffer", "\t")),
    *(on_line(change, kind) for change in (_immediate, _modifier) for kind in ("offset", "s_waitcnt", "v_mfma", "sel")),
    *(on_line(_value, kind) for kind in (".amdhsa_", ".amdhsa_", "    .", "workgroup", "offset", "      - ")),
    on_line(_indent, "    ."),
    on_line(_label, ":"),
)


# ---------------------------------------------------------------------------------------------------------------------
# The targets


def _recordings(folder: Path) -> Iterator[bytes]:
    """Recorded calls, in MXFP8 as minimize writes them and in bfloat16 as a capture does."""
    path = folder / "recording.safetensors"
    for id in ("forward/64x96/ramp1.5/signature", "dgrad/96x64/empties/normal", "wgrad/64x96/shift32/special"):
        case = case_by_id(id)
        recorded.save(path, "call", case, data.operands(case).arrays)
        yield path.read_bytes()
    layer = {name: captured("early")[f"moe0.up.{name}"] for name in ("x", "dy", "w", "offsets")}
    turned = {"dy_t": layer["dy"].T, "x_t": layer["x"].T, "offsets": layer["offsets"]}
    for op, given in (("forward", {n: layer[n] for n in ("x", "w", "offsets")}), ("wgrad", turned)):
        calls = json.dumps({"call000": {"op": op, "step": 3, "index": 0}})
        store.save(path, {f"call000.{name}": a for name, a in given.items()}, {"calls": calls})
        yield path.read_bytes()
    path.unlink()


def targets(folder: Path) -> tuple[Target, ...]:
    """The two readers with the committed files. folder: for scratch files."""
    files = sorted([*GOLDEN.glob("*.safetensors"), *CAPTURED.glob("*.safetensors")])
    # Calls lie deeper than tensors, and few files have any: they are drawn as often as all others together. A large
    # kernel takes as long as ten small ones, and has little that they have not.
    calls = tuple(_recordings(folder))
    tensors = (*(path.read_bytes() for path in files), *calls * (len(files) // len(calls)))
    packed = sorted([*ISA.glob("*.s.xz"), *Path(gfx950.__file__).parent.glob("sample/*.s.xz")])
    kernels = [lzma.decompress(path.read_bytes()) for path in packed]
    code = tuple(text for text in kernels for _ in range(1 + max(map(len, kernels)) // len(text)))
    return (
        Target("tensors", ".safetensors", tensors, TENSORS, read_tensors),
        Target("machine code", ".s", code, CODE, read_machine_code),
    )


# ---------------------------------------------------------------------------------------------------------------------
# The loop


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """SlowError beyond the limits of time, MemoryError beyond those of memory; a hang that takes no signal ends the
    process with a trace."""
    ticking: tuple[int, ...] = (signal.ITIMER_PROF, signal.ITIMER_REAL)

    def late(*_: object) -> None:
        raise SlowError

    before = [signal.signal(number, late) for number in (signal.SIGPROF, signal.SIGALRM)]
    space = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, space[1]))
    for timer, seconds in zip(ticking, (SECONDS, SLEEP), strict=True):
        signal.setitimer(timer, seconds)
    faulthandler.dump_traceback_later(2 * SLEEP, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        for timer in ticking:
            signal.setitimer(timer, 0)
        resource.setrlimit(resource.RLIMIT_AS, space)
        for number, old in zip((signal.SIGPROF, signal.SIGALRM), before, strict=True):
            signal.signal(number, old)


def ours(filename: str) -> bool:
    """Whether a source file is the project's, not Python's nor a package's."""
    path, root = Path(filename).resolve(), Path(__file__).resolve().parents[1]
    parts = path.relative_to(root).parts if path.is_relative_to(root) else ("",)
    return parts[0] in ("conformance", "fixtures", "kernels", "oracle")


def examine(target: Target, tally: Tally, content: bytes, path: Path) -> None:
    """Read one input and count what became of it."""
    path.write_bytes(content)
    began = time.process_time()
    try:
        with limited():
            answer = target.read(path)
    except (Exception, SlowError) as error:
        frame = [frame for frame in traceback.extract_tb(error.__traceback__) if ours(frame.filename)][-1]
        at = f"{Path(frame.filename).name}:{frame.lineno}"
        # What is slow is interrupted anywhere.
        place = "SlowError" if isinstance(error, SlowError) else f"{type(error).__name__} at {at}"
        answer = place
        if place not in tally.findings:
            kept = path.with_name(f"finding-{target.name.replace(' ', '-')}-{tally.inputs}{target.suffix}")
            kept.write_bytes(content)
            tally.findings[place] = f"{type(error).__name__} at {at}: {str(error)[:200]!r} on {kept}"
    spent = time.process_time() - began
    tally.seconds, tally.slowest = tally.seconds + spent, max(tally.slowest, spent)
    if answer not in tally.answers and len(tally.pool) < KEPT:
        tally.pool.append(content)
    tally.answers[answer] += 1
    tally.inputs += 1
    path.unlink()


def mutated(target: Target, tally: Tally, seed: int) -> bytes:
    """The next input: a file or an earlier input, with some mutations."""
    rng = random.Random(f"{seed}/{target.name}/{tally.inputs}")
    pool = tally.pool if tally.pool and rng.random() < 0.5 else target.files
    content = rng.choice(pool)
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3, 8))):
        content = rng.choice(target.mutations)(content, rng)
    return content


def fuzz(
    chosen: Sequence[Target],
    seed: int,
    folder: Path,
    more: Callable[[Target, Mapping[str, Tally]], bool],
    told: Callable[[str], None] = lambda line: None,
) -> dict[str, Tally]:
    """Damaged inputs for every target in turn, the one that has had least time first, as long as `more` says so.

    folder: where inputs and findings go. told: hears of every finding at once.
    """
    tallies = {target.name: Tally() for target in chosen}
    while left := [target for target in chosen if more(target, tallies)]:
        target = min(left, key=lambda t: tallies[t.name].seconds)
        tally = tallies[target.name]
        before = len(tally.findings)
        examine(target, tally, mutated(target, tally, seed), folder / f"input-{tally.inputs}{target.suffix}")
        for finding in list(tally.findings.values())[before:]:
            told(f"{target.name}: {finding}")
    return tallies


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mxgate.conformance.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, metavar="N", help="on the clock (default 10)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the mutations (default 0)")
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="mxgate-fuzz-"))
    print(f"inputs and findings go to {folder}", flush=True)
    end = time.monotonic() + 60 * args.minutes
    found = fuzz(
        targets(folder), args.seed, folder, lambda *_: time.monotonic() < end, lambda line: print(line, flush=True)
    )
    for name, tally in found.items():
        stages: Counter[str] = Counter()
        for answer, count in tally.answers.items():
            stages[re.split("[:;]", answer)[0]] += count
        print(
            f"{name}: {tally.inputs} inputs in {tally.seconds:.0f} s of CPU, the slowest {tally.slowest:.2f} s; "
            f"{', '.join(f'{count} {stage}' for stage, count in stages.most_common())}; "
            f"{len(tally.answers)} different answers, {len(tally.findings)} findings"
        )
    findings = sum(len(tally.findings) for tally in found.values())
    if not findings:
        folder.rmdir()
    return int(findings > 0)


if __name__ == "__main__":
    sys.exit(main())
