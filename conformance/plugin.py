"""A pytest plugin: a marked test gives a build, and becomes one test item for each case and gate.

    @pytest.mark.mxgate(op="wgrad", tier="smoke")
    def test_my_kernel():
        return "kernels/mine.py:wgrad"      # or the callable itself, or a Build

The marker takes op, and tier (default "smoke"), cases (a list of ids or patterns; default all), lineage (True for a
build that replaces another, so that this gate has items too), time_limit (seconds a launch may take) and memory_limit
(GiB). The function runs as any test does, fixtures, skips and all, in each of its items; what it returns is judged in a
child process, once for all gates of a case in one pytest process.

An item passes when its gate passes. It is skipped where the build declines the case, and where the gate has nothing to
say after all. It fails on a rejection and on whatever could not be judged, with the finding and not with our traceback.
Passing items are no certificate: `mxgate run` gives one.
"""

from __future__ import annotations

import fnmatch
import inspect
import os
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mxgate.conformance.case import Case
    from mxgate.conformance.runner import Runner
    from mxgate.conformance.verdict import CaseResult
    from mxgate.kernels.build import Build

MARK = "mxgate"
_FIXTURE = "_mxgate_item"
_USAGE = "mxgate(op, tier='smoke', cases=None, lineage=False, time_limit=60, memory_limit=8)"
_WHERE = 8


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{_USAGE}: hold the build that the test returns against every case and gate.")
    config.pluginmanager.register(_Session(), "mxgate-session")


@pytest.fixture
def _mxgate_item(request: pytest.FixtureRequest) -> Any:
    """(case, gate) of the item. Nobody asks for it; it is there because parametrize names a fixture."""
    return request.param


def _terms(mark: pytest.Mark) -> dict[str, Any]:
    """The marker's arguments, checked. Raises ValueError."""
    from mxgate.conformance.case import TIERS
    from mxgate.kernels.build import OPS

    usual = {"op": None, "tier": "smoke", "cases": None, "lineage": False, "time_limit": 60.0, "memory_limit": 8.0}
    if mark.args or (strange := sorted(set(mark.kwargs) - set(usual))):
        what = repr(mark.args[0]) if mark.args else strange[0]
        raise ValueError(f"@pytest.mark.mxgate takes no {what}; expected {_USAGE}, all of them by name")
    found = {**usual, **mark.kwargs}
    for name, known in (("op", tuple(OPS)), ("tier", TIERS)):
        if found[name] not in known:
            raise ValueError(f"@pytest.mark.mxgate: {name} is {found[name]!r}; expected one of {', '.join(known)}")
    for name in ("time_limit", "memory_limit"):
        if not (isinstance(found[name], int | float) and found[name] > 0):
            raise ValueError(f"@pytest.mark.mxgate: {name} is {found[name]!r}; expected a number above 0")
    return found


def _cases(terms: dict[str, Any]) -> list[Case]:
    from mxgate.conformance.case import case_by_id, cases

    tiers = ("smoke", "production") if terms["tier"] == "production" else (terms["tier"],)
    listed = list({case.id: case for tier in tiers for case in cases(terms["op"], tier)}.values())
    if terms["cases"] is None:
        return listed
    chosen: dict[str, Case] = {}
    for pattern in [terms["cases"]] if isinstance(terms["cases"], str) else terms["cases"]:
        matching = [case for case in listed if fnmatch.fnmatchcase(case.id, pattern)] or [case_by_id(pattern)]
        chosen.update((case.id, case) for case in matching)
    if other := next((case.id for case in chosen.values() if case.op != terms["op"]), None):
        raise ValueError(f"@pytest.mark.mxgate: case {other} is not of {terms['op']}")
    return list(chosen.values())


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Cases x gates, those of one case next to each other, as scheduling by chunks keeps them in one process."""
    mark = metafunc.definition.get_closest_marker(MARK)
    if mark is None:
        return
    from mxgate.conformance.gates import may_speak
    from mxgate.conformance.verdict import GATES

    try:
        terms = _terms(mark)
        chosen = _cases(terms)
    except ValueError as error:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: {error}") from None
    grouped = metafunc.config.pluginmanager.hasplugin("xdist")
    items = [
        pytest.param(
            (case, gate),
            id=f"{case.id}-{gate}",
            marks=[pytest.mark.xdist_group(case.id)] if grouped else [],
        )
        for case in chosen
        for gate in GATES
        if may_speak(gate, case, lineage=terms["lineage"])
    ]
    metafunc.fixturenames.append(_FIXTURE)
    metafunc.parametrize(_FIXTURE, items, indirect=True)


class _Session:
    """The runners of one pytest process, one for each set of limits, and what has been judged so far."""

    def __init__(self) -> None:
        self.runners: dict[Any, Runner] = {}
        self.judged: dict[Any, CaseResult] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        mark = pyfuncitem.get_closest_marker(MARK)
        chosen = getattr(pyfuncitem, "callspec", None)
        if mark is None or chosen is None or _FIXTURE not in chosen.params:
            return None
        terms = _terms(mark)
        case, gate = chosen.params[_FIXTURE]
        wanted = inspect.signature(pyfuncitem.obj).parameters
        returned = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted})
        build = _build(returned, terms, pyfuncitem)
        result = self._judge(build, case, terms)
        _report(build, case, gate, result)
        return True

    def _judge(self, build: Build, case: Case, terms: dict[str, Any]) -> CaseResult:
        from mxgate.conformance.child import Limits
        from mxgate.conformance.runner import Runner
        from mxgate.conformance.settings import Settings

        settings = Settings(tier=terms["tier"], limits=Limits(terms["time_limit"], terms["memory_limit"]))
        if settings.stamp not in self.runners:
            self.runners[settings.stamp] = Runner(settings)
        key = (build, case.id, settings.stamp)
        if key not in self.judged:
            self.judged[key] = self.runners[settings.stamp].examine(build, case)[0]
        return self.judged[key]

    def pytest_unconfigure(self) -> None:
        for runner in self.runners.values():
            runner.__exit__(None)
        self.runners.clear()


def _build(returned: Any, terms: dict[str, Any], item: pytest.Function) -> Build:
    """The build that a marked test means. Fails the test with one line where it means none."""
    from mxgate.kernels.build import Build, BuildError, find, outside

    op = terms["op"]
    try:
        if isinstance(returned, Build):
            build = returned
        elif isinstance(returned, str):
            build = outside(op, _beside(returned, item)) if ":" in returned else find(op, returned)
        elif callable(returned):
            build = outside(op, _target(returned))
        else:
            said = "nothing" if returned is None else f"a {type(returned).__name__}"
            raise BuildError(f"the test returned {said}; expected a callable, 'path/to/file.py:callable' or a Build")
        if build.op != op:
            raise BuildError(f"build {build.id} computes {build.op}; the marker says op={op!r}")
        if (build.replaces is not None) != terms["lineage"]:
            has = f"replaces {build.replaces}" if build.replaces else "replaces nothing"
            raise BuildError(f"build {build.id} {has}; the marker says lineage={terms['lineage']}")
    except BuildError as error:
        pytest.fail(str(error), pytrace=False)
    return build


def _beside(target: str, item: pytest.Function) -> str:
    """A path that does not lead anywhere from here is taken from the test's own folder."""
    where, _, attribute = target.rpartition(":")
    there = item.path.parent / where
    return f"{there}:{attribute}" if where.endswith(".py") and not os.path.exists(where) and there.exists() else target


def _target(function: Any) -> str:
    """Where a child finds a callable again. Raises BuildError."""
    from mxgate.kernels.build import BuildError

    name = getattr(function, "__qualname__", "")
    try:
        source = inspect.getsourcefile(function)
    except TypeError:
        source = None
    if source is None or not name.isidentifier():
        raise BuildError(
            f"a child cannot import {name or function!r}; expected a function at a module's top level, "
            "or 'path/to/file.py:callable'"
        )
    return f"{os.path.abspath(source)}:{name}"


def _report(build: Build, case: Case, gate: str, result: CaseResult) -> None:
    """Raise what pytest shows for one gate of a case."""
    from mxgate.conformance.verdict import Outcome

    if result.skipped is not None:
        pytest.skip(f"{build.id} {result.skipped}")
    outcome = result.gates.get(gate, Outcome.INCONCLUSIVE)
    if outcome is Outcome.PASS:
        return
    if outcome is Outcome.SILENT:
        pytest.skip(f"{gate} has nothing to say about {case.id}")
    pytest.fail("\n".join(_lines(build, case, gate, result)), pytrace=False)


def _lines(build: Build, case: Case, gate: str, result: CaseResult) -> Iterator[str]:
    from mxgate.conformance.verdict import Outcome
    from mxgate.kernels.build import called

    rejected = result.gates.get(gate) is Outcome.REJECT
    yield f"{'REJECT' if rejected else 'INCONCLUSIVE'} {build.id}: {gate} on {case.id}"
    for finding in [f for f in result.findings if f.gate == gate] or result.findings[:1]:
        yield finding.what
        yield from (f"  {line}" for line in finding.detail.get("extent", ()))
        yield from (f"  {line}" for line in finding.where[:_WHERE])
        if len(finding.where) > _WHERE:
            yield f"  ... {len(finding.where) - _WHERE} more lines from mxgate explain"
    others = [g for g, o in result.gates.items() if o is Outcome.REJECT and g != gate]
    if others:
        yield f"also rejected by {', '.join(others)}"
    if rejected:
        yield f"next: mxgate explain {called(build)} --case {shlex.quote(case.id)}"
