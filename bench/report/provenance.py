"""Where numbers come from: card, versions, commit, clocks; and what makes a run suspicious."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..environment import NO_MULTICAST
from ..records import Footer, Header, Results, Row

__all__ = ["card", "clocks_seen", "commit", "facts", "provenance", "warnings"]

_CLOCK_TOLERANCE = 0.05
_IDLE = 0x01  # clocks of an idle card say nothing
# NVML's reasons for lower clocks that are neither idling nor the power cap that every busy card meets.
_SLOWED = {
    0x08: "hardware slow-down",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}


def card(env: Mapping[str, Any]) -> str:
    """Name of the GPU, or of the processor where none was measured."""
    return str(env.get("gpu") or env.get("cpu") or "unknown device")


def commit(env: Mapping[str, Any]) -> str:
    """Short commit, with "(dirty)" if files had been changed."""
    name = str(env.get("commit") or "")[:9]
    return f"{name} (dirty)" if name and env.get("dirty") else name


_FACTS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "card": card,
    "cards": lambda env: env.get("gpus"),
    "driver": lambda env: env.get("driver"),
    "torch": lambda env: env.get("torch"),
    "CUDA": lambda env: env.get("cuda"),
    "NCCL": lambda env: env.get("nccl"),
    "Python": lambda env: env.get("python"),
    "tpkernels": lambda env: env.get("tpkernels"),
    "commit": commit,
    "date": lambda env: env.get("date"),
    "multicast": lambda env: "off" if env.get("device") == "cuda" and _no_multicast(env) else None,
}


def facts(headers: Sequence[Header]) -> list[tuple[str, str]]:
    """Label and value of what there is to know of the environment; where runs differ, the values are joined."""
    found = []
    for label, get in _FACTS.items():
        values = dict.fromkeys(str(v) for h in headers if (v := get(h.env)))
        if values:
            found.append((label, ", ".join(values)))
    return found


def clocks_seen(rows: Sequence[Row]) -> str:
    """Lowest and highest clock of the multiprocessors while rows were measured, "" if it was not read."""
    clocks = [float(c) for row in rows if isinstance(c := row.extra.get("sm_mhz"), (int, float)) and c > 0]
    if not clocks:
        return ""
    low, high = min(clocks), max(clocks)
    return f"{low:.0f} MHz" if round(low) == round(high) else f"{low:.0f} to {high:.0f} MHz"


def provenance(headers: Sequence[Header]) -> str:
    """One line for a caption: card, torch, NCCL, commit."""
    shown = dict(facts(headers))
    parts = [shown.get("card", "")]
    parts += [f"{label} {shown[label]}" for label in ("torch", "NCCL", "commit") if label in shown]
    return ", ".join(p for p in parts if p)


def warnings(results: Results) -> list[str]:
    """Sentences on what makes the numbers doubtful; results of one card."""
    found = []
    dirty = dict.fromkeys(commit(h.env) for h in results.headers if h.env.get("dirty"))
    if dirty:
        found.append(f"Measured with uncommitted changes: {', '.join(dirty)}.")
    for name in ("torch", "nccl", "driver"):
        versions = sorted({str(h.env[name]) for h in results.headers if h.env.get(name)})
        if len(versions) > 1:
            found.append(f"Runs differ in {name}: {', '.join(versions)}.")
    commits = sorted({str(h.env["commit"]) for h in results.headers if h.env.get("commit")})
    if len(commits) > 1:
        found.append(f"Runs differ in the commit: {', '.join(commits)}.")
    for header in results.headers:
        if header.env.get("device") == "cuda" and not _no_multicast(header.env):
            found.append(
                f"Run {header.run} ({header.suite}): multicast through the switch was not turned off."
            )
    found += _interrupted(results)
    found += [s for h in results.headers for s in _clocks(h, _footer(results, h))]
    statuses = Counter(row.status for row in results.latest())
    if statuses["failed"]:
        found.append(f"{statuses['failed']} measurements gave a wrong result and are marked FAILED.")
    doubtful = ", ".join(f"{statuses[s]} {s}" for s in ("timeout", "crashed", "error") if statuses[s])
    if doubtful:
        found.append(f"Not measured: {doubtful}; the tables give the reasons.")
    return found


def _footer(results: Results, header: Header) -> Footer | None:
    return next((f for f in results.footers if f.run == header.run), None)


def _no_multicast(env: Mapping[str, Any]) -> bool:
    """True also where there was no other GPU to multicast to."""
    off = env.get("multicast") or {}
    return (env.get("world") or 1) == 1 or all(off.get(name) == value for name, value in NO_MULTICAST.items())


def _interrupted(results: Results) -> list[str]:
    """Runs that did not come to their end, unless a later run of the same suite did."""
    ended = {f.run for f in results.footers if f.complete}
    found = []
    for i, header in enumerate(results.headers):
        resumed = any(h.suite == header.suite and h.run in ended for h in results.headers[i + 1 :])
        if header.run not in ended and not resumed:
            found.append(f"Run {header.run} ({header.suite}) is not complete: --resume measures the rest.")
    return found


def _clocks(header: Header, footer: Footer | None) -> list[str]:
    """Whether clocks changed, or heat or power slowed a card down, by what was read before and after."""
    before = _states(header.env.get("before"))
    after = _states(footer.after if footer else None)
    found = []
    for i, (a, b) in enumerate(zip(before, after, strict=False)):
        first, last = a.get("sm_mhz"), b.get("sm_mhz")
        idle = any(int(s.get("throttle_reasons") or 0) & _IDLE for s in (a, b))
        if not idle and first and last and abs(last / first - 1) > _CLOCK_TOLERANCE:
            found.append(f"GPU {i} from {first:.0f} to {last:.0f} MHz")
    sentences = [
        f"Run {header.run} ({header.suite}): clocks changed between beginning and end: {', '.join(found)}."
    ]
    sentences = sentences if found else []
    for state, when in [(s, "before") for s in before] + [(s, "after") for s in after]:
        bits = int(state.get("throttle_reasons") or 0)
        reasons = [name for bit, name in _SLOWED.items() if bits & bit]
        if reasons:
            text = (
                f"Run {header.run} ({header.suite}): a card was slowed down {when} it ({', '.join(reasons)})."
            )
            if text not in sentences:
                sentences.append(text)
    return sentences


def _states(value: Any) -> list[Mapping[str, Any]]:
    """States of the GPUs from what header or footer hold: a list of them, or a dictionary with one."""
    if isinstance(value, Mapping):
        value = next((v for v in value.values() if isinstance(v, list)), [])
    return [v for v in value or [] if isinstance(v, Mapping)]
