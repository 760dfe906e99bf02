"""ISA text -> a decoded kernel: instructions, labels and the launch facts of its descriptor and metadata.

The text is what LLVM prints for amdgcn (`.s`, code object v5/v6). Nothing is skipped in silence: an operand, a
modifier or a directive inside the kernel that is not understood raises TextError, which names the mnemonic and the
line.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

LDS_LIMIT = 160 * 1024
REGISTER_LIMIT = 512
DEPTH = 32  # of metadata; LLVM's has 4 levels
LONGEST = 400  # characters of a message

# What a descriptor may say: bytes, registers, and the words of preloaded arguments. Scratch is what a wave's size
# register can state, 13 bits of 256 dwords, for 64 lanes.
LIMITS = {
    "group_segment_fixed_size": LDS_LIMIT,
    "private_segment_fixed_size": (1 << 13) * 1024 // 64,
    "kernarg_size": 1 << 16,
    "next_free_vgpr": REGISTER_LIMIT,
    "accum_offset": REGISTER_LIMIT,
    "next_free_sgpr": 128,
    "user_sgpr_kernarg_preload_length": 15,
    "user_sgpr_kernarg_preload_offset": 15,
}


def one_line(message: str) -> str:
    """A message with text from a file in it, safe to print: on one line, and not long."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message[: 2 * LONGEST])
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 3]}..."


class TextError(ValueError):
    """The text is not a gfx950 kernel this machine can run; the message names the line."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand. kind: v a s (index, count), const (value), label / name (text), off (absent address)."""

    kind: str
    index: int = 0
    count: int = 1
    value: int | float = 0
    neg: bool = False
    abs: bool = False
    sext: bool = False
    text: str = ""


Modifier = int | str | bool | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One decoded line. base is the mnemonic without its encoding suffix (_e32, _e64, _dpp, _sdwa)."""

    index: int
    line: int
    text: str
    mnemonic: str
    base: str
    encoding: str
    operands: tuple[Operand, ...]
    modifiers: Mapping[str, Modifier]

    def error(self, what: str) -> TextError:
        return TextError(f"line {self.line}: {self.mnemonic}: {what}: `{self.text}`")


@dataclass(frozen=True, slots=True)
class Argument:
    """One kernel argument of the metadata: bytes `offset .. offset + size` of the kernarg segment."""

    offset: int
    size: int
    kind: str
    name: str


@dataclass(frozen=True, eq=False)
class Kernel:
    """A decoded kernel. Counts are registers a lane (vgpr, agpr) or a wave (sgpr) holds; sizes are bytes."""

    name: str
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]
    vgprs: int
    agprs: int
    sgprs: int
    lds_bytes: int
    scratch_bytes: int
    kernarg_bytes: int
    arguments: tuple[Argument, ...]
    workgroup_size: tuple[int, int, int] | None
    vgpr_spills: int
    sgpr_spills: int
    descriptor: Mapping[str, int] = field(repr=False)


# The hardware's inline float constants; a literal float is the nearest float32.
INLINE_FLOATS = {
    "0.5": 0.5,
    "1.0": 1.0,
    "2.0": 2.0,
    "4.0": 4.0,
    "0.15915494": 0.15915494309189532,
    "0.15915494309189532": 0.15915494309189532,
    "0.15915494309189535": 0.15915494309189532,
}
SPECIAL = {
    "flat_scratch": (102, 2),
    "xnack_mask": (104, 2),
    "vcc": (106, 2),
    "vcc_lo": (106, 1),
    "vcc_hi": (107, 1),
    "m0": (124, 1),
    "exec": (126, 2),
    "exec_lo": (126, 1),
    "exec_hi": (127, 1),
}
SCC = 128  # an SGPR number of its own, so that one table serves reads and writes
M0, EXEC, VCC = 124, 126, 106

# name -> how its value is written. A name not here is an error, and each instruction says which of these it takes.
MODIFIERS = {
    **dict.fromkeys(("offen", "idxen", "lds", "glc", "slc", "nt", "sc0", "sc1", "clamp", "gds"), "flag"),
    **dict.fromkeys(("row_mirror", "row_half_mirror"), "flag"),
    **dict.fromkeys(("offset", "offset0", "offset1", "cbsz", "abid", "blgp", "mul", "div", "bitop3"), "int"),
    **dict.fromkeys(("row_shl", "row_shr", "row_ror", "row_newbcast", "row_bcast"), "int"),
    **dict.fromkeys(("wave_shl", "wave_shr", "wave_rol", "wave_ror", "row_mask", "bank_mask", "bound_ctrl"), "int"),
    **dict.fromkeys(("dst_sel", "dst_unused", "src0_sel", "src1_sel"), "name"),
    **dict.fromkeys(("op_sel", "op_sel_hi", "neg_lo", "neg_hi", "quad_perm"), "list"),
}

# As many digits as there can be a use for: Python refuses to convert very many, and is slow with many. An integer with
# a leading zero would be octal; LLVM prints none.
_REGISTER = re.compile(r"^([vas])(?:(\d{1,4})|\[(\d{1,4})(?::(\d{1,4}))?\])$", re.ASCII)
_NUMBER = re.compile(r"^-?(?:0[xX][0-9a-fA-F]{1,16}|0|[1-9]\d{0,19})$", re.ASCII)
_FLOAT = re.compile(r"^-?\d{1,40}\.\d{0,40}(?:[eE][-+]?\d{1,3})?$", re.ASCII)
_SUFFIX = re.compile(r"_(e32|e64|e64_dpp|dpp|sdwa)$")
_LABEL = re.compile(r"^([.\w$]+):(.*)$")
_BRANCH = re.compile(r"^s_(branch|cbranch_\w+)$")


def _split(text: str, separator: str) -> list[str]:
    """Split at `separator` outside brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "[(":
            depth += 1
        elif c in "])":
            depth -= 1
        elif depth == 0 and c == separator:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return [p for p in parts if p] if separator == " " else parts


def operand(text: str) -> Operand | None:
    """One operand's text, or None where it is not one."""
    body, neg, absolute, sext = text, False, False, False
    while True:
        if body.startswith("-") and not (_NUMBER.match(body) or _FLOAT.match(body)):
            neg, body = not neg, body[1:]
        elif body.startswith("|") and body.endswith("|") and len(body) > 2:
            absolute, body = True, body[1:-1]
        elif (m := re.match(r"^(abs|neg|sext)\((.*)\)$", body)) is not None:
            absolute, neg, sext = absolute or m[1] == "abs", neg ^ (m[1] == "neg"), sext or m[1] == "sext"
            body = m[2]
        else:
            break
    m = _REGISTER.match(body)
    if m is not None:
        first = int(m[2] if m[2] is not None else m[3])
        last = int(m[4]) if m[4] is not None else first
        if last < first or (m[1] == "s" and last >= SCC):
            return None
        return Operand(m[1], first, last - first + 1, 0, neg, absolute, sext, text)
    if body in SPECIAL:
        return Operand("s", *SPECIAL[body], 0, neg, absolute, sext, text)
    if body in ("scc", "src_scc"):
        return Operand("s", SCC, 1, 0, neg, absolute, sext, text)
    if body in ("off", "null"):
        return Operand("off", count=0, text=text)
    if _NUMBER.match(body):
        return Operand("const", value=int(body, 0), neg=neg, abs=absolute, sext=sext, text=text)
    if _FLOAT.match(body):
        sign, digits = (-1.0, body[1:]) if body.startswith("-") else (1.0, body)
        value = sign * INLINE_FLOATS.get(digits, float(digits))
        if abs(value) == float("inf"):
            return None
        return Operand("const", value=value, neg=neg, abs=absolute, sext=sext, text=text)
    if re.match(r"^[A-Za-z_.$][\w.$]*(\(.*\))?$", body):
        return Operand("name", text=text)
    return None


_GROUPS = (1, 2, 4, 8, 16, 32)  # lanes that a swizzle's name may speak of


def _swizzle(value: str) -> int | None:
    """The assembler's names for ds_swizzle_b32 patterns: swizzle(SWAP,8) and its like, as the offset they encode."""
    m = re.match(r"^swizzle\((\w+),(.*)\)$", value)
    if m is None:
        return None
    kind, rest = m[1], [x.strip().strip('"') for x in m[2].split(",")]
    if kind == "BITMASK_PERM" and len(rest) == 1 and re.match(r"^[01pi]{5}$", rest[0]):
        masks = [sum(1 << (4 - k) for k, c in enumerate(rest[0]) if c in chosen) for chosen in ("pi", "1", "i")]
        return masks[0] | masks[1] << 5 | masks[2] << 10
    if not all(re.match(r"^\d{1,2}$", x, re.ASCII) for x in rest):
        return None
    n = [int(x) for x in rest]
    if kind == "QUAD_PERM" and len(n) == 4 and max(n) < 4:
        return 0x8000 | n[0] | n[1] << 2 | n[2] << 4 | n[3] << 6
    if kind == "BROADCAST" and len(n) == 2 and n[0] in _GROUPS and n[1] < n[0]:
        return (32 - n[0]) | n[1] << 5
    if kind in ("SWAP", "REVERSE") and len(n) == 1 and n[0] in _GROUPS and (kind == "REVERSE" or n[0] < 32):
        return 31 | (n[0] if kind == "SWAP" else n[0] - 1) << 10
    return None


def _modifier(token: str) -> tuple[str, Modifier] | None:
    name, colon, value = token.partition(":")
    form = MODIFIERS.get(name)
    if name == "offset" and value.startswith("swizzle("):
        code = _swizzle(value)
        return None if code is None else (name, code)
    if form == "flag" and not colon:
        return name, True
    if form == "int" and colon and _field(value):
        return name, int(value, 0)
    if form == "name" and colon:
        return name, value
    if form == "list" and value.startswith("[") and value.endswith("]"):
        items = [x.strip() for x in value[1:-1].split(",")]
        if all(map(_field, items)):
            return name, tuple(int(x, 0) for x in items)
    return None


def _field(value: str) -> bool:
    """Whether a modifier's number fits the widest field there is, 21 bits with a sign."""
    return _NUMBER.match(value) is not None and -(1 << 20) <= int(value, 0) < 1 << 20


def waits(inst_text: str) -> dict[str, Modifier] | None:
    """s_waitcnt's counters; a bare number is the gfx9 encoding. None where it cannot be read."""
    body = inst_text.split(None, 1)[1] if " " in inst_text or "\t" in inst_text else ""
    if _NUMBER.match(body):
        code = int(body, 0)
        counts = {"vmcnt": (code & 15) | ((code >> 14) & 3) << 4, "lgkmcnt": (code >> 8) & 15}
        return {k: v for k, v in counts.items() if v != {"vmcnt": 63, "lgkmcnt": 15}[k]}
    found: dict[str, Modifier] = {}
    for token in re.sub(r"[&,]", " ", body).split():
        m = re.match(r"^(vmcnt|lgkmcnt|expcnt)\((\d{1,4})\)$", token, re.ASCII)
        if m is None:
            return None
        if m[1] != "expcnt":
            found[m[1]] = int(m[2])
    return found if body else None


def instruction(text: str, line: int = 1, index: int = 0) -> Instruction:
    """Decode one line of text. TextError names the mnemonic and the line."""
    mnemonic, _, rest = text.strip().replace("\t", " ").partition(" ")
    m = _SUFFIX.search(mnemonic)
    base, encoding = (mnemonic[: m.start()], m[1]) if m else (mnemonic, "")
    if not re.match(r"^[a-z][a-z0-9_]*$", mnemonic):
        raise TextError(f"line {line}: this is not an instruction: `{text}`")
    operands: list[Operand] = []
    modifiers: dict[str, Modifier] = {}

    def make() -> Instruction:
        clean = " ".join(text.split())
        return Instruction(
            index, line, clean, mnemonic, base, encoding, tuple(operands), MappingProxyType(dict(modifiers))
        )

    if mnemonic == "s_waitcnt":
        counts = waits(text.strip())
        if counts is None:
            raise make().error("the counters cannot be read")
        modifiers.update(counts)
        return make()
    rest = rest.strip()
    pieces = _split(rest, ",") if rest else []
    tokens = pieces[:-1] + (_split(pieces[-1], " ") if pieces else [])
    for position, token in enumerate(tokens):
        last = position >= len(pieces) - 1
        found = _modifier(token) if last else None
        if found is not None:
            modifiers[found[0]] = found[1]
            continue
        got = operand(token)
        if _BRANCH.match(mnemonic) and re.match(r"^[.\w$]+$", token):
            got = Operand("name", text=token)
        if got is None or (last and position > len(pieces) - 1 and got.kind == "name"):
            kind = "modifier" if position > len(pieces) - 1 else "operand"
            raise make().error(f"unknown {kind} {token!r}")
        if position > len(pieces) - 1:
            raise make().error(f"unknown modifier {token!r}")
        operands.append(got)
    return make()


def _yaml(lines: list[str]) -> object:
    """The subset of YAML that LLVM writes for kernel metadata: nested maps and lists of scalars or maps.

    TextError for what is nested deeper than DEPTH.
    """
    rows = [(len(x) - len(x.lstrip()), x.strip()) for x in lines if x.strip() and x.strip() not in ("---", "...")]

    def scalar(x: str) -> object:
        x = x.strip()
        return int(x, 0) if _NUMBER.match(x) else x.strip("'\"")

    def block(i: int, indent: int, depth: int = 0) -> tuple[object, int]:
        if depth > DEPTH:
            raise TextError(f"the kernels' metadata is nested deeper than {DEPTH} levels: `{rows[i][1]}`")
        if rows[i][1].startswith("- ") or rows[i][1] == "-":
            items: list[object] = []
            while i < len(rows) and rows[i][0] == indent and rows[i][1].startswith("-"):
                body = rows[i][1][1:].strip()
                if re.match(r"^[.\w]+:( |$)", body):
                    rows[i] = (indent + 2, body)
                    item, i = block(i, indent + 2, depth + 1)
                else:
                    item, i = scalar(body), i + 1
                items.append(item)
            return items, i
        out: dict[str, object] = {}
        while i < len(rows) and rows[i][0] == indent and not rows[i][1].startswith("- "):
            key, _, value = rows[i][1].partition(":")
            if value.strip():
                out[key.strip()], i = scalar(value), i + 1
            elif i + 1 < len(rows) and (
                rows[i + 1][0] > indent or (rows[i + 1][0] == indent and rows[i + 1][1][:2] == "- ")
            ):
                out[key.strip()], i = block(i + 1, rows[i + 1][0], depth + 1)
            else:
                out[key.strip()], i = "", i + 1
        return out, i

    return block(0, rows[0][0])[0] if rows else {}


def _descriptors(lines: list[str]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    current: dict[str, int] | None = None
    for n, raw in enumerate(lines, 1):
        s = raw.strip()
        if s.startswith(".amdhsa_kernel"):
            parts = s.split()
            if len(parts) != 2:
                raise TextError(f"line {n}: .amdhsa_kernel needs a name: `{s}`")
            current = found.setdefault(parts[1], {})
        elif s == ".end_amdhsa_kernel":
            current = None
        elif current is not None and s.startswith(".amdhsa_"):
            parts = s.split()
            if len(parts) < 2 or not _NUMBER.match(parts[1]):
                if parts[0].removeprefix(".amdhsa_") in LIMITS:
                    raise TextError(f"line {n}: {parts[0]} must be a number: `{s}`")
                continue
            key, value = parts[0].removeprefix(".amdhsa_"), int(parts[1], 0)
            if not 0 <= value <= LIMITS.get(key, value):
                raise TextError(f"line {n}: {parts[0]} is {value}, expected 0 to {LIMITS.get(key, 'more')}: `{s}`")
            current[key] = value
    return found


def _metadata(lines: list[str]) -> dict[str, dict[str, object]]:
    start = next((i for i, x in enumerate(lines) if x.strip() == ".amdgpu_metadata"), None)
    if start is None:
        return {}
    end = next((i for i, x in enumerate(lines) if x.strip() == ".end_amdgpu_metadata"), None)
    if end is None:
        raise TextError(f"line {start + 1}: .amdgpu_metadata is never closed")
    tree = _yaml(lines[start + 1 : end])
    kernels = tree.get("amdhsa.kernels", []) if isinstance(tree, dict) else []
    if not isinstance(kernels, list):
        raise TextError(f"line {start + 1}: amdhsa.kernels is not a list")
    return {str(k.get(".name")): k for k in kernels if isinstance(k, dict)}


def _integer(meta: Mapping[str, object], key: str, default: int = 0) -> int:
    value = meta.get(key, default)
    return value if isinstance(value, int) else default


def parse(text: str, name: str | None = None) -> Kernel:
    """Decode one kernel of an ISA text (`name`, or the only one). TextError where the text is not understood."""
    lines = text.splitlines()
    descriptors = _descriptors(lines)
    if not descriptors:
        raise TextError("line 1: no .amdhsa_kernel in this text: expected LLVM's gfx950 assembly of a kernel")
    if name is None:
        if len(descriptors) > 1:
            raise TextError(f"line 1: several kernels here, name one of: {', '.join(sorted(descriptors))}")
        name = next(iter(descriptors))
    if name not in descriptors:
        raise TextError(f"line 1: no kernel {name!r} here, expected one of: {', '.join(sorted(descriptors))}")
    target = re.search(r'\.amdgcn_target\s+"([^"]*)"', text)
    if target is not None and "gfx950" not in target[1]:
        raise TextError(f"line 1: the text is for {target[1]}, expected gfx950")
    instructions, labels = _body(lines, name)
    d, meta = descriptors[name], _metadata(lines).get(name, {})
    total = d.get("next_free_vgpr", 0)
    accum = d.get("accum_offset", total)
    vgprs, agprs = min(accum, total), max(total - accum, 0)
    args = meta.get(".args", [])
    arguments = tuple(
        Argument(
            _integer(a, ".offset"), _integer(a, ".size"), str(a.get(".value_kind", "by_value")), str(a.get(".name", ""))
        )
        for a in (args if isinstance(args, list) else [])
        if isinstance(a, dict)
    )
    kernarg = d.get("kernarg_size", _integer(meta, ".kernarg_segment_size"))
    if not 0 <= kernarg <= LIMITS["kernarg_size"]:
        raise TextError(f"kernel {name}: {kernarg} bytes of arguments, expected 0 to {LIMITS['kernarg_size']}")
    for n, a in enumerate(arguments):
        if not (a.offset >= 0 < a.size and a.offset + a.size <= kernarg):
            where = f"{a.size} bytes from {a.offset} on"
            raise TextError(f"kernel {name}: argument {n} is {where}, expected some of the {kernarg} of its arguments")
    size = meta.get(".reqd_workgroup_size")
    if size is not None and not (
        isinstance(size, list) and len(size) == 3 and all(isinstance(n, int) and 1 <= n <= 1024 for n in size)
    ):
        raise TextError(f"kernel {name}: .reqd_workgroup_size is {size}, expected three numbers from 1 to 1024")
    return Kernel(
        name=name,
        instructions=instructions,
        labels=MappingProxyType(labels),
        vgprs=vgprs,
        agprs=agprs,
        sgprs=d.get("next_free_sgpr", 0),
        lds_bytes=d.get("group_segment_fixed_size", 0),
        scratch_bytes=d.get("private_segment_fixed_size", 0),
        kernarg_bytes=kernarg,
        arguments=arguments,
        workgroup_size=(size[0], size[1], size[2]) if size is not None else None,
        vgpr_spills=_integer(meta, ".vgpr_spill_count"),
        sgpr_spills=_integer(meta, ".sgpr_spill_count"),
        descriptor=MappingProxyType(d),
    )


def _body(lines: list[str], name: str) -> tuple[tuple[Instruction, ...], dict[str, int]]:
    """The kernel's instructions and labels. Numeric labels (`1:`, used as 1f and 1b) become names of their own."""
    out: list[Instruction] = []
    labels: dict[str, int] = {}
    numeric: dict[str, list[int]] = {}
    inside = False
    for n, raw in enumerate(lines, 1):
        s = raw.split(";")[0].split("//")[0].strip()
        if not inside:
            inside = s == f"{name}:"
            continue
        if s.startswith((".Lfunc_end", ".size ", ".size\t", ".section", ".end_amdhsa", ".amdhsa_kernel")):
            break
        while (m := _LABEL.match(s)) is not None:
            if m[1].isdigit():
                numeric.setdefault(m[1], []).append(len(out))
            else:
                labels[m[1]] = len(out)
            s = m[2].strip()
        if not s or s.startswith("."):
            continue
        out.append(instruction(s, n, len(out)))
    if not out:
        raise TextError(f"line 1: kernel {name!r} has a descriptor but no instructions under the label `{name}:`")
    final = []
    for inst in out:
        if _BRANCH.match(inst.mnemonic):
            if len(inst.operands) != 1:
                raise inst.error("expected one label")
            target = inst.operands[0].text
            m = re.match(r"^(\d+)([fb])$", target)
            if m is not None:
                places = [p for p in numeric.get(m[1], []) if (p > inst.index) == (m[2] == "f")]
                if places:
                    place = min(places) if m[2] == "f" else max(places)
                    labels[f"{target}@{inst.index}"] = place
                    target = f"{target}@{inst.index}"
            if target not in labels:
                raise inst.error(f"no label {target!r} in this kernel")
            if labels[target] >= len(out):
                raise inst.error(f"label {target!r} stands past the last instruction")
            changed = (Operand("name", text=target),)
            inst = Instruction(
                inst.index, inst.line, inst.text, inst.mnemonic, inst.base, inst.encoding, changed, inst.modifiers
            )
        final.append(inst)
    if final[-1].mnemonic not in ("s_endpgm", "s_branch", "s_setpc_b64", "s_trap"):
        raise final[-1].error("the kernel runs off its end: expected s_endpgm or a branch last")
    return tuple(final), labels


def float_bits(value: float) -> int:
    """The float32 bit pattern of a constant."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])
