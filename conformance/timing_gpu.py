"""Timing on a GPU: every variant in one process, interleaved, sustained, and beside torch's BF16 product.

A variant runs for `seconds` of back-to-back launches with no synchronisation between them, then the next one; the order
rotates from pass to pass. Clock, power and energy are read from NVML with every variant. Operands are random codes and
scales, never zeros, and padding holds NaN.

Asked for ablations it also times the variants of a build that leave a part out, to tell what that part costs in time
and energy. Their results are wrong by intent: they are never judged, and nothing but their cost is told. A build offers
them as an attribute of its callable, `ablations`: callables by what they do without.

Before the first pass and after the last one a sample of every expert's output is held against the exact oracle, and
between them the whole output must keep its bytes, and the operands theirs. It runs in a process of its own, with a
request as JSON on standard input: a kernel that crashes or poisons the context costs that process, which has said what
was at work, and the others are timed in another one.
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mxgate import oracle
from mxgate.conformance.case import Case
from mxgate.kernels.build import BLOCK, OPS, Build, build_from
from mxgate.kernels.tensors import to_array
from mxgate.oracle.bound import outside, round_to
from mxgate.oracle.quantize import MXArray

# The working directory is no place to import from.
_PATH = "import sys; sys.path[:] = filter(None, sys.path); "
_START = _PATH + "from mxgate.conformance.timing_gpu import main; main(sys.argv[1])"
# N, K, experts and mean tokens of an expert: the 16B and 671B models' expert layers.
SHAPES: Mapping[str, tuple[int, int, int, int]] = MappingProxyType(
    {"16b": (1408, 2048, 8, 24480), "671b-up": (4096, 7168, 32, 8072), "671b-down": (7168, 2048, 32, 8072)}
)
DEVICE = "cuda"  # as torch calls it
BASE = "bf16"  # the name of torch's product
CHUNKS = 16  # samples of a pass, each the mean of a sixteenth of its calls
SAMPLE = 32  # rows and columns of an expert's output that are held against the oracle
SLACK = 96  # tokens by which the buffer is longer
# Bytes of a copy, rows of a matrix, seconds: what the device's two ceilings are measured with.
COPIED, SIDE, LOOK = 1 << 31, 8192, 0.3
FLUSHED = 1 << 29  # bytes written between two calls with --flush: ten times the second-level cache


def _ramp(experts: int, mean: int, unit: int) -> tuple[int, ...]:
    """Group sizes from half the mean to 1.5 times it."""
    return tuple(unit * round(mean * (0.5 + i / max(1, experts - 1)) / unit) for i in range(experts))


def _skewed(experts: int, mean: int) -> tuple[int, ...]:
    """One expert in four with twice the mean, the others with what is left."""
    rest = (mean * experts - experts // 4 * 2 * mean) // (experts - experts // 4)
    return tuple(BLOCK * round((2 * mean if i % 4 == 0 else rest) / BLOCK) for i in range(experts))


ROUTINGS: Mapping[str, Callable[[int, int], tuple[int, ...]]] = MappingProxyType(
    {
        "uniform": lambda experts, mean: (BLOCK * round(mean / BLOCK),) * experts,
        "ramp": lambda experts, mean: _ramp(experts, mean, 256),
        # The same with every inner boundary moved by 32 tokens: aligned to a scale block and to nothing larger.
        "shift32": lambda experts, mean: (
            _ramp(experts, mean, 256)[0] + BLOCK,
            *_ramp(experts, mean, 256)[1:-1],
            _ramp(experts, mean, 256)[-1] - BLOCK,
        ),
        "skew2": _skewed,
    }
)


def case_of(op: str, shape: str, routing: str) -> Case:
    """The problem of a name: production size, e4m3fn, bfloat16 out."""
    n, k, experts, mean = SHAPES[shape]
    sizes = ROUTINGS[routing](experts, mean)
    return Case(op, shape, routing, "random", n, k, sizes, sum(sizes) + SLACK)


@dataclass(frozen=True)
class GpuTiming:
    """One variant, in seconds of a call: median, 10th and 90th percentile of the samples, over `calls` calls.

    ratio: BF16's median over this one's. joules: of a call. clock: MHz, watts: means while it ran; None where they
    could not be read. refused: why there is no time. ablation: which part a variant of the build leaves out; it has no
    TFLOP/s and no ratio.
    """

    build: str
    ablation: str | None = None
    median: float = 0.0
    low: float = 0.0
    high: float = 0.0
    calls: int = 0
    tflops: float = 0.0
    ratio: float | None = None
    joules: float | None = None
    clock: float | None = None
    watts: float | None = None
    refused: str | None = None


def time_on_gpu(
    builds: Sequence[Build], case: Case, *, seconds: float, passes: int, flush: bool, ablate: bool, limit: float
) -> dict[str, Any]:
    """Run the timing in a process of its own. Its document: timings, the device's two ceilings, versions, the device.

    A build that ends the process has no time, and another process times the others. Raises RuntimeError with the last
    words of a process that failed by itself, or took longer than `limit` seconds.
    """
    request = {
        "builds": [asdict(b) for b in builds],
        "case": {"op": case.op, "shape": case.shape, "routing": case.routing},
        "seconds": seconds,
        "passes": passes,
        "flush": flush,
        "ablate": ablate,
    }
    refused: dict[str, str] = {}
    while True:
        found, why = _process({**request, "refused": refused}, limit)
        if "timings" in found:
            return found
        at = found.get("at", "")
        if at in ("", BASE, *refused):
            raise RuntimeError(f"the timing process failed: {why}")
        refused[at] = f"ended the timing process: {why}"


def _process(request: Mapping[str, Any], limit: float) -> tuple[dict[str, Any], str]:
    """What the process left in its file, and its last words. Raises RuntimeError past `limit` seconds."""
    with tempfile.NamedTemporaryFile(prefix="mxgate-") as answer:
        try:
            done = subprocess.run(
                [sys.executable, "-c", _START, answer.name],
                input=json.dumps(request),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            at = _read(answer.name).get("at")
            where = f": {at} was at work" if at else ""
            raise RuntimeError(f"the timing process did not end within {limit:g} s{where}") from None
        found = _read(answer.name)
    said = done.stderr.strip().splitlines()
    exited = f"exit {done.returncode}" if done.returncode >= 0 else f"killed by signal {-done.returncode}"
    return found, found.get("why") or (said[-1] if said and done.returncode >= 0 else exited)


def _read(path: str) -> dict[str, Any]:
    try:
        return dict(json.loads(Path(path).read_bytes()))
    except ValueError:
        return {}


# ---------------------------------------------------------------------------------------------------------------------
# The process itself


class _Meter:
    """Clock, power and energy of the GPU, read by NVML in a thread; without NVML it knows nothing."""

    def __init__(self) -> None:
        self._clocks: list[float] = []
        self._watts: list[float] = []
        self._stop = threading.Event()
        self.handle: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            import torch

            # torch's device 0, which CUDA_VISIBLE_DEVICES may have chosen among several.
            uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
            self.handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            self._nvml = pynvml
            pynvml.nvmlDeviceGetTotalEnergyConsumption(self.handle)  # not every GPU counts it
        except Exception:  # no package, no driver, or another vendor's: the figures are left out
            self.handle = None

    def energy(self) -> float | None:
        """Joules since the driver was loaded."""
        return None if self.handle is None else self._nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1e3

    def __enter__(self) -> _Meter:
        self._clocks, self._watts = [], []
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while self.handle is not None and not self._stop.wait(0.02):
            self._clocks.append(self._nvml.nvmlDeviceGetClockInfo(self.handle, self._nvml.NVML_CLOCK_SM))
            self._watts.append(self._nvml.nvmlDeviceGetPowerUsage(self.handle) / 1e3)

    @property
    def means(self) -> tuple[float | None, float | None]:
        return tuple(statistics.fmean(x) if x else None for x in (self._clocks, self._watts))  # type: ignore[return-value]


def _planes(shape: tuple[int, ...], axis: int, used: int | None, generator: Any) -> tuple[Any, Any]:
    """Random finite e4m3fn codes and scales 2^-3 .. 2^3 along `axis`; past `used` rows or columns NaN and 0xFF."""
    import torch

    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE, generator=generator)
    codes = torch.where(codes & 0x7F == 0x7F, 0x38, codes)
    blocks = tuple(size // BLOCK if i == axis else size for i, size in enumerate(shape))
    scales = torch.randint(124, 131, blocks, dtype=torch.uint8, device=DEVICE, generator=generator)
    if used is not None and axis == len(shape) - 1 and len(shape) == 2:
        codes[:, used:], scales[:, used // BLOCK :] = 0x7F, 0xFF
    return codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu)


def _operands(case: Case) -> tuple[Any, ...]:
    import torch

    generator = torch.Generator(DEVICE).manual_seed(case.seed % (1 << 63))
    offsets = torch.tensor(np.cumsum(case.sizes), dtype=torch.int32, device=DEVICE)
    m, n, k, experts = case.buffer, case.n, case.k, case.experts
    if case.op == "wgrad":
        planes = [_planes((rows, m), 1, case.tokens, generator) for rows in (n, k)]
    else:
        wide, axis = k if case.op == "forward" else n, OPS[case.op].contraction[1]
        planes = [_planes((m, wide), 1, None, generator), _planes((experts, n, k), axis, None, generator)]
        tokens, scales = planes[0]
        tokens.view(torch.uint8)[case.tokens :], scales.view(torch.uint8)[case.tokens :] = 0x7F, 0xFF
    return (*planes[0], *planes[1], offsets)


def _baseline(case: Case) -> Callable[[], Any]:
    """torch's grouped product of random normal bfloat16 operands of the same shapes."""
    import torch

    from mxgate.kernels import torch_cuda

    generator = torch.Generator(DEVICE).manual_seed(case.seed % (1 << 63))

    def normal(*shape: int) -> Any:
        return torch.randn(shape, device=DEVICE, generator=generator, dtype=torch.bfloat16)

    offsets = torch.tensor(np.cumsum(case.sizes), dtype=torch.int32, device=DEVICE)
    m, n, k = case.buffer, case.n, case.k
    if case.op == "wgrad":
        dy_t, x_t = normal(n, m), normal(k, m)
        return lambda: torch_cuda.bf16_wgrad(dy_t, x_t, offsets)
    w = normal(case.experts, n, k)
    tokens = normal(m, k if case.op == "forward" else n)
    product = torch_cuda.bf16_forward if case.op == "forward" else torch_cuda.bf16_dgrad
    return lambda: product(tokens, w, offsets)


def _wrong(build: Build, case: Case, operands: tuple[Any, ...], out: Any) -> str | None:
    """What a sample of every expert's output says against the exact oracle, or None where all of it is inside."""
    import ml_dtypes
    import torch

    generator = np.random.default_rng(case.seed)
    a, a_scales, b, b_scales, _ = operands
    fp8, e8m0, bf16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, ml_dtypes.bfloat16
    starts = np.cumsum((0, *case.sizes))
    for g, size in enumerate(case.sizes):
        if not size:
            continue
        t0, t1 = int(starts[g]), int(starts[g]) + size
        rows = np.sort(generator.choice(case.n if case.op == "wgrad" else size, SAMPLE, replace=False))
        wide = {"forward": case.n, "dgrad": case.k, "wgrad": case.k}[case.op]
        columns = np.sort(generator.choice(wide, SAMPLE, replace=False))
        i, j = (torch.from_numpy(x).to(DEVICE) for x in (rows, columns))
        if case.op == "wgrad":
            s = slice(t0 // BLOCK, t1 // BLOCK)
            x_codes, y_codes = (t.view(torch.uint8)[:, t0:t1] for t in (a, b))
            x_bytes, y_bytes = (t.view(torch.uint8)[:, s] for t in (a_scales, b_scales))
            sides = (x_codes[i], x_bytes[i], y_codes[j], y_bytes[j])
            got, ends, axis = out[g][i][:, j], np.array([size], np.int32), 1
        else:
            i = i + t0
            w, w_scales = b[g].view(torch.uint8), b_scales[g].view(torch.uint8)
            picked = (w[j], w_scales[j]) if case.op == "forward" else (w[:, j], w_scales[:, j])
            sides = (a.view(torch.uint8)[i], a_scales.view(torch.uint8)[i], picked[0][None], picked[1][None])
            got, ends, axis = out[i][:, j], np.array([SAMPLE], np.int32), OPS[case.op].contraction[1]
        x = MXArray(to_array(sides[0]).view(fp8), to_array(sides[1]).view(e8m0), 1, "e4m3fn")
        y = MXArray(to_array(sides[2]).view(fp8), to_array(sides[3]).view(e8m0), axis, "e4m3fn")
        answer = getattr(oracle, case.op)(x, y, ends)
        lo, hi = answer.interval(build.accumulator, bf16)
        bad = outside(to_array(got).reshape(lo.shape), lo, hi)
        if bad.any():
            at = np.argwhere(bad)[0][-2:]
            value = float(round_to(answer.value, bf16).reshape(-1, SAMPLE)[tuple(at)])
            shown = float(to_array(got).reshape(-1, SAMPLE)[tuple(at)])
            return (
                f"{int(bad.sum())} of {bad.size} sampled elements of expert {g} are outside the interval of "
                f"{build.accumulator}: row {rows[at[0]]}, column {columns[at[1]]} is {shown:g}, expected {value:g}"
            )
    return None


def _sustained(call: Callable[[], Any], seconds: float, flush: Any) -> tuple[list[float], int]:
    """(samples in seconds a call, calls) of back-to-back calls; with `flush` each call is timed by itself."""
    import torch

    def event() -> Any:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    first, last = event(), event()
    first.record()
    for _ in range(3):
        call()
    last.record()
    last.synchronize()
    calls = max(CHUNKS, int(seconds * 1e3 / max(first.elapsed_time(last) / 3, 1e-3)))
    if flush is not None:
        pairs = [(event(), event()) for _ in range(calls)]
        for start, stop in pairs:
            flush.zero_()
            start.record()
            call()
            stop.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) / 1e3 for start, stop in pairs], calls
    each = -(-calls // CHUNKS)
    marks = [event()]
    marks[0].record()
    for _ in range(CHUNKS):
        for _ in range(each):
            call()
        marks.append(event())
        marks[-1].record()
    torch.cuda.synchronize()
    pairs = list(itertools.pairwise(marks))
    return [start.elapsed_time(stop) / 1e3 / each for start, stop in pairs], each * CHUNKS


def _dense() -> float:
    """FLOP a second of the product of two random bfloat16 matrices of 8192 x 8192."""
    import torch

    generator = torch.Generator(DEVICE).manual_seed(0)
    a, b = (
        torch.randn(SIDE, SIDE, device=DEVICE, generator=generator, dtype=torch.float32).bfloat16() for _ in range(2)
    )
    samples, _ = _sustained(lambda: torch.matmul(a, b), LOOK, None)
    return 2 * SIDE**3 / statistics.median(samples)


def _bandwidth() -> float:
    """Bytes a second, read and written together, of copying 2 GiB."""
    import torch

    source = torch.empty(COPIED, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    samples, _ = _sustained(lambda: target.copy_(source), LOOK, None)
    return 2 * source.numel() / statistics.median(samples)


def traffic(case: Case, wide: bool = False) -> float:
    """Bytes that a product moves if it reads each operand once and writes its result once: MXFP8's, or bfloat16's."""
    m, n, k, experts = case.tokens, case.n, case.k, case.experts
    read, written = {
        "wgrad": (m * (n + k), experts * n * k),
        "forward": (m * k + experts * n * k, m * n),
        "dgrad": (m * n + experts * n * k, m * k),
    }[case.op]
    return 2.0 * written + read * (2.0 if wide else 1 + 1 / BLOCK)


def _same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether tensors have the same bytes."""
    import torch

    return all(
        a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(left, right, strict=True)
    )


def _restore(operands: Sequence[Any], given: Sequence[Any]) -> None:
    for t, before in zip(operands, given, strict=True):
        t.copy_(before)


def _attempt(call: Callable[[], Any], report: Callable[[str], object]) -> tuple[Any, str | None]:
    """What a call gives, and why it gives nothing, in words. A GPU that is past use then is reported, and raises."""
    import torch

    try:
        found = call()
        torch.cuda.synchronize()
        return found, None
    except Exception as error:
        why = f"raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    try:
        torch.cuda.synchronize()
    except Exception:
        report(why)
        raise
    return None, why


def measure(
    request: Mapping[str, Any], at: Callable[[str, str | None], object] = lambda name, why: None
) -> dict[str, Any]:
    """The document of time_on_gpu, in this process.

    request: as time_on_gpu makes it; refused: what ended a process before, and how. at: told what is at work ("" for
    our own), and why it gives nothing where that ends this process.
    """
    import torch
    import triton

    builds = [build_from(record) for record in request["builds"]]
    case = case_of(**request["case"])
    operands = _operands(case)
    flush = torch.empty(FLUSHED, dtype=torch.uint8, device=DEVICE) if request["flush"] else None
    refused: dict[str, str] = dict(request["refused"])
    calls: dict[str, Callable[[], Any]] = {BASE: _baseline(case)}
    kept: dict[str, Any] = {}
    given = [t.clone() for t in operands]
    ablated: dict[str, tuple[str, str]] = {}  # build and part, by name

    def attempt(name: str, call: Callable[[], Any]) -> Any:
        """What a call of a build gives, or None and the build is refused."""
        at(name, None)
        found, why = _attempt(call, lambda why: at(name, why))
        at("", None)
        if why is not None:
            refused[name] = why
            _restore(operands, given)
        return found

    for build in builds:
        calls[build.id] = calls[BASE]
        if build.id in refused:
            continue
        function = attempt(build.id, build.load)
        if function is None:
            continue
        calls[build.id] = lambda function=function: function(*operands)  # type: ignore[misc]
        kept[build.id] = attempt(build.id, lambda name=build.id: calls[name]().clone())  # type: ignore[misc]
        if build.id in refused:
            continue
        if not _same(operands, given):
            refused[build.id] = "it changed its operands"
            _restore(operands, given)
        elif (wrong := _wrong(build, case, operands, kept[build.id])) is not None:
            refused[build.id] = f"wrong before timing: {wrong}"
        for what, variant in getattr(function, "ablations", {}).items() if request["ablate"] else ():
            name = f"{build.id}, {what}"
            ablated[name] = build.id, what
            calls[name] = lambda variant=variant: variant(*operands)  # type: ignore[misc]
    calls[BASE]()  # its first call sets things up, and would be taken for a slow one
    for name, (of, _) in ablated.items():
        if of in refused:
            refused[name] = refused[of]
        elif name not in refused:
            attempt(name, calls[name])
    meter = _Meter()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    counted: dict[str, int] = dict.fromkeys(calls, 0)
    power: dict[str, list[tuple[float | None, float | None, float | None]]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(request["passes"]):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            if name in refused:
                continue
            torch.cuda.synchronize()
            with meter:
                before = meter.energy()
                taken = attempt(name, functools.partial(_sustained, calls[name], request["seconds"], flush))
                after = meter.energy()
            if taken is None:
                continue
            found, count = taken
            joules = None if before is None or after is None else (after - before) / (count + 3)
            samples[name] += found
            counted[name] += count
            power[name].append((*meter.means, None if flush is not None else joules))
            if not _same(operands, given):
                refused[name] = "it changed its operands while it was timed"
                _restore(operands, given)
    bandwidth, dense = _bandwidth(), _dense()
    for build in builds:
        if build.id not in refused:
            out = attempt(build.id, lambda name=build.id: calls[name]().contiguous())  # type: ignore[misc]
            if build.id in refused:
                continue
            if not _same([out], [kept[build.id]]):
                refused[build.id] = "its output after timing is not what it was before"
            elif (wrong := _wrong(build, case, operands, out)) is not None:
                refused[build.id] = f"wrong after timing: {wrong}"
    if BASE in refused:
        raise RuntimeError(f"{BASE} {refused[BASE]}")
    base = statistics.median(samples[BASE])
    work = 2e-12 * case.n * case.k * case.tokens
    timings = []
    for name in names:
        of, what = ablated.get(name, (name, None))
        if (why := refused.get(of) or refused.get(name)) is not None:
            timings.append(GpuTiming(of, what, refused=why))
            continue
        low, median, high = (float(q) for q in np.percentile(samples[name], (10, 50, 90)))
        clock, watts, joules = (_mean([p[i] for p in power[name]]) for i in range(3))
        tflops, ratio = (0.0, None) if what else (work / median, base / median)
        timings.append(GpuTiming(of, what, median, low, high, counted[name], tflops, ratio, joules, clock, watts))
    m = case.tokens
    elements = {"wgrad": m * (case.n + case.k), "forward": m * case.k, "dgrad": m * case.n}[case.op]
    elements += 0 if case.op == "wgrad" else case.experts * case.n * case.k
    return {
        "case": f"{case.op}/{case.shape}/{case.routing}",
        "n": case.n,
        "k": case.k,
        "sizes": list(case.sizes),
        "skew": max(case.sizes) * case.experts / max(1, case.tokens),
        "device": torch.cuda.get_device_name(0),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "seconds": request["seconds"],
        "passes": request["passes"],
        "flush": request["flush"],
        "copy": bandwidth,
        "dense": dense,
        # FLOP a byte with ideal reuse, of MXFP8 operands and of bfloat16 ones.
        "intensity": 1e12 * work / traffic(case),
        "intensity_bf16": 1e12 * work / traffic(case, wide=True),
        # One byte read and two written for each element, then the BF16 product.
        "two_pass_limit": base / (base + 3 * elements / bandwidth),
        "timings": [asdict(t) for t in timings],
        "energy": meter.handle is not None,
        "time": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None


def main(answer: str) -> None:
    """The process: a request from standard input, the document into the file `answer`; before that what is at work."""

    def write(document: Mapping[str, Any]) -> None:
        Path(answer).write_text(json.dumps(document))

    write(measure(json.load(sys.stdin), lambda name, why: write({"at": name, "why": why})))
