"""What a run leaves in its folder: run and report write it; report, explain and minimize read it."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mxgate.conformance.commands import common
from mxgate.conformance.commands.usage import UsageError


def finish(report: Any, out: Path, as_json: bool, device: str | None = None, html: Path | None = None) -> int:
    """Write run.json, junit.xml, the certificates and an HTML report, and print the verdicts; of emulated builds alone
    also what they take for granted."""
    from mxgate.conformance import certificate
    from mxgate.conformance import report as text

    plan = {
        "stamp": report.settings.stamp,
        "tier": report.settings.tier,
        "gates": list(report.settings.gates),
        "limits": asdict(report.settings.limits),
        "builds": [asdict(b) for b in report.builds],
        "fingerprints": {result.build: result.fingerprint for result in report.results},
        "cases": [c.id for c in report.cases],
        "files": sorted({str(Path(c.source).resolve()) for c in report.cases if c.source}),
    }
    (out / "run.json").write_text(json.dumps(plan, indent=1) + "\n")
    (out / "junit.xml").write_bytes(text.junit(report))
    written = certificate.write_all(report, out / "certificates")
    if as_json:
        common.print_json(text.document(report, {"out": str(out), "certificates": [str(path) for path in written]}))
    else:
        to = text.console()
        text.print_run(report, to, assumptions=device == "emu")
        certificates = f", {len(written)} certificate{'s' * (len(written) > 1)}" if written else ""
        to.print(f"wrote {out}/results.jsonl, junit.xml{certificates}")
    if html is not None:
        _write_html(report, html, out)
    return int(report.exit_code)


def check_html(path: Path | None) -> None:
    """UsageError, before any work, where no HTML report can be written."""
    if path is None:
        return
    common.check_writable(path)
    for name in ("jinja2", "matplotlib"):
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"--html needs {name}, which is not installed: pip install 'mxgate[report]'")


def _write_html(report: Any, path: Path, out: Path) -> None:
    from mxgate.conformance import html, machine_code
    from mxgate.conformance import report as text

    ledgers = machine_code.ledgers(report.builds, report.settings.limits, common.STATE / "figures.json")
    with text.Watch("report") as step:
        html.write(report, path, ledgers=ledgers, timings=out / "timings.jsonl", watch=step)


def read_plan(folder: Path) -> dict[str, Any]:
    """What run.json says, its builds as records. Raises UsageError."""
    from mxgate.conformance.child import Limits
    from mxgate.conformance.verdict import GATES
    from mxgate.kernels.build import build_from

    try:
        plan = json.loads((folder / "run.json").read_bytes())
        plan["builds"] = [build_from(record) for record in plan["builds"]]
        plan["limits"] = Limits(**plan["limits"])
        plan.setdefault("fingerprints", {})
        plan.setdefault("files", [])
        sound = (
            all(isinstance(text, str) for text in (plan["stamp"], *plan["cases"], *plan["files"]))
            and all(isinstance(limit, int | float) and limit > 0 for limit in asdict(plan["limits"]).values())
            and plan["tier"] in common.TIERS
            and bool(plan["gates"])
            and isinstance(plan["fingerprints"], dict)
            and set(plan["gates"]) <= set(GATES)
            and not any(os.sep in build.name for build in plan["builds"])  # a name is part of a file name
        )
        if sound:
            return dict(plan)
    except (FileNotFoundError, NotADirectoryError):
        what = "is a file; expected a folder with" if folder.is_file() else "holds no run: expected"
        raise UsageError(f"{folder} {what} run.json and results.jsonl, as `mxgate run` writes") from None
    except OSError as error:
        raise UsageError(f"{folder / 'run.json'} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise UsageError(
        f"{folder / 'run.json'} is not what `mxgate run` writes (damaged, or another version's); run it again"
    )


def last_run() -> Path | None:
    try:
        return Path((common.STATE / "last-run").read_text())
    except OSError:
        return common.STATE if (common.STATE / "run.json").exists() else None
