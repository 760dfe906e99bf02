"""mxgate list: the tables that the code runs on."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from mxgate.conformance.commands import common
from mxgate.kernels.build import OPS, registry
from mxgate.kernels.installed import installed

LISTS = ("builds", "cases", "gates", "faults", "formats", "profiles", "accumulators")


def options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "listing",
        nargs="?",
        choices=list(LISTS),
        metavar="WHAT",
        help=f"{', '.join(LISTS)} (default: how many of each)",
    )
    sub.add_argument("--op", choices=list(OPS), help="builds, cases and faults of this op alone")
    sub.add_argument("--tier", choices=common.TIERS, default="smoke", help="cases of this tier (default smoke)")
    common.as_json(sub)


def command(args: argparse.Namespace) -> int:
    from mxgate.conformance import report as text

    wanted = [args.listing] if args.listing else list(LISTS)
    found = {what: _listing(what, args.op, args.tier) for what in wanted}
    for note in installed()[1] if "builds" in wanted else ():
        print(f"mxgate: note: {note}", file=sys.stderr)
    if args.json:
        common.print_json({"command": "list", **found})
        return 0
    to = text.console()
    if not args.listing:
        text.table(to, ["what", "how many"], [[what, str(len(rows))] for what, rows in found.items()], ["how many"])
        to.print("\nmxgate list WHAT shows them")
        return 0
    rows = found[args.listing]
    if rows:
        numbers = [name for name, value in rows[0].items() if isinstance(value, int | float)]
        # Of the same op as the build that replaces it.
        cells = [[str(v).rpartition("/")[2] if name == "replaces" else str(v) for name, v in r.items()] for r in rows]
        text.table(to, list(rows[0]), cells, numbers)
    return 0


def _listing(what: str, op: str | None, tier: str) -> list[dict[str, Any]]:
    from mxgate import oracle
    from mxgate.conformance.case import cases, own_cases
    from mxgate.conformance.verdict import GATES

    if what == "builds":
        return [
            {"build": b.id, "device": b.device, "formats": _formats(b.formats), "align": b.group_alignment,
             "accumulator": b.accumulator, "replaces": b.replaces or "", "needs": b.missing() or ""}
            for b in registry().values()
            if op in (None, b.op)
        ]  # fmt: skip
    if what == "cases":
        return [
            {"case": c.id, "n": c.n, "k": c.k, "tokens": c.tokens, "buffer": c.buffer, "experts": c.experts}
            for c in (*cases(op, tier), *own_cases((b for b in registry().values() if op in (None, b.op)), tier))
        ]
    if what == "gates":
        from mxgate.conformance import gates

        return [
            {"gate": gate, "mandatory for": _builds(gate), "demands": _first_line(gates.GATE_FUNCTIONS[gate])}
            for gate in GATES
        ]  # fmt: skip
    if what == "faults":
        from mxgate.kernels.faults import FAULTS

        return [
            {"fault": f.build.id, "gate": f.gate, "kind": f.kind, "what": f.what}
            for f in FAULTS
            if op in (None, f.build.op)
        ]
    if what == "formats":
        return [
            {"format": f.name, "emax": f.emax, "mantissa": f.mantissa_bits, "max": f.max_finite,
             "nan": " ".join(f"0x{code:02x}" for code in f.nan_codes), "tag": f.tag or "-"}
            for f in oracle.FORMATS.values()
        ]  # fmt: skip
    if what == "profiles":
        return [
            {"profile": p.name, "rule": p.rule, "formats": _formats(p.formats), "peer": p.peer}
            for p in oracle.PROFILES.values()
        ]
    return [
        {"accumulator": a.name, "bits": a.bits or "exact", "step": a.step, "verified": "yes" if a.verified else "no",
         "false alarms": f"{odds:.0e} an element" if (odds := a.failure_probability(1)) else "none",
         "source": a.source}
        for a in oracle.ACCUMULATORS.values()
    ]  # fmt: skip


def _builds(gate: str) -> str:
    """Of what builds a gate must have passed before they are accepted."""
    from mxgate.conformance.verdict import MANDATORY

    ops = [op for op, gates in MANDATORY.items() if gate in gates]
    if ops:
        return "every op" if len(ops) == len(OPS) else "GEMMs"
    return {"lineage": "replacements", "graph": "builds for a GPU"}[gate]


def _formats(names: Sequence[str]) -> str:
    fnuz = ("e4m3fnuz", "e5m2fnuz")
    for group, members in (("fp8", ("e4m3fn", "e5m2", *fnuz)), ("fnuz", fnuz)):
        if set(names) >= set(members):
            names = [group, *(n for n in names if n not in members)]
    return ",".join(names)


def _first_line(function: Any) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0]
