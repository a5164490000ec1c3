"""What a run measures, in which processes and in which order: pure functions of options and of what is known already.

A :class:`Job` is the work of one set of rank processes. A suite gives one for its variants and one for each isolated
variant; what is left after a crash is a job again.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from .errors import BenchError, check_known
from .records import Row, Status
from .suite import Case, Options, Suite, Variant

__all__ = [
    "Item",
    "Job",
    "Profile",
    "Selection",
    "Settings",
    "Strikes",
    "blank_row",
    "measured",
    "plan",
    "short_of_memory",
    "without",
]

Key = tuple[str, str, str, int, str]  # of a row


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        quick, rounds: see :meth:`bench.measure.Budget.make`.
        time_limit: seconds without a sign of life after which a rank counts as hung.
        deadline: time.time() after which no case is begun; 0 for none.
        commit: recorded where git cannot tell.
    """

    quick: bool = False
    rounds: int = 0
    time_limit: float = 120.0
    deadline: float = 0.0
    commit: str = ""


@dataclass(frozen=True)
class Profile:
    """A profile in place of measurements: which profiler, how many calls, into which folder; which kernels (ncu)."""

    kind: Literal["kineto", "nsys", "ncu"]
    steps: int
    out: str
    kernel: str = ""


@dataclass(frozen=True)
class Item:
    """A case and the variants whose rows are wanted.

    ``companion``: the baseline, where it runs beside them without a row of its own.
    """

    case: str
    dtype: str
    variants: tuple[str, ...]
    companion: str = ""

    @property
    def runs(self) -> tuple[str, ...]:
        """All variants that run."""
        return (self.companion, *self.variants) if self.companion else self.variants


@dataclass(frozen=True)
class Job:
    """The work of one set of rank processes."""

    suite: str
    options: Options
    items: tuple[Item, ...]
    isolated: str = ""  # the variant that the processes are for
    settings: Settings = field(default_factory=Settings)
    profile: Profile | None = None

    def to_json(self) -> dict[str, Any]:
        """For the rank processes."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Job:
        """The inverse of :meth:`to_json`."""
        options: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in data["options"].items()
        }
        items = tuple(Item(**{**item, "variants": tuple(item["variants"])}) for item in data["items"])
        profile = Profile(**data["profile"]) if data["profile"] else None
        return cls(
            data["suite"], Options(**options), items, data["isolated"], Settings(**data["settings"]), profile
        )


@dataclass(frozen=True)
class Selection:
    """Which cases (patterns with wildcards, or parts of names) and variants; empty for all."""

    cases: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()


def plan(
    suite: Suite, options: Options, selection: Selection, done: Collection[Key], settings: Settings
) -> list[Job]:
    """The jobs of a suite in one world, without what is ``done``: the main one, then the isolated variants.

    Raises:
        BenchError: an unknown variant, a pattern that meets no case, and what the suite finds wrong in the options.
    """
    variants = _select_variants(suite, options, selection)
    cases = _select_cases(suite.cases(options), selection.cases)
    baseline = suite.baseline(options)
    if baseline in selection.skip:
        baseline = None

    def items(names: Sequence[str]) -> tuple[Item, ...]:
        found = []
        for case in cases:
            left = tuple(
                name
                for name in names
                if suite.applies(case, name, options)
                and (suite.name, case.name, case.dtype, options.world, name) not in done
            )
            beside = baseline and baseline not in left and suite.applies(case, baseline, options)
            if left:
                found.append(Item(case.name, case.dtype, left, baseline if baseline and beside else ""))
        return tuple(found)

    jobs = [Job(suite.name, options, items([v.name for v in variants if not v.isolated]), "", settings)]
    for variant in variants:
        if variant.isolated:
            jobs.append(Job(suite.name, options, items([variant.name]), variant.name, settings))
    return [job for job in jobs if job.items]


def _select_variants(suite: Suite, options: Options, selection: Selection) -> list[Variant]:
    """In the suite's order; the baseline is always among them unless it is skipped."""
    known = suite.variants(options)
    names = [v.name for v in known]
    for name in (*selection.variants, *selection.skip):
        check_known(f"variant of {suite.name}", name, names)
    wanted = {*selection.variants, suite.baseline(options)} if selection.variants else set(names)
    return [v for v in known if v.name in wanted - set(selection.skip)]


def _select_cases(cases: Sequence[Case], patterns: Sequence[str]) -> list[Case]:
    if not patterns:
        return list(cases)
    found = [case for case in cases if any(_matches(case.name, pattern) for pattern in patterns)]
    if not found:
        names = [case.name for case in cases]
        near = difflib.get_close_matches(patterns[0], names, n=1, cutoff=0.3)
        meant = f" The nearest is {near[0]!r}." if near else ""
        raise BenchError(
            f"case: none of {len(cases)} cases matches {' or '.join(map(repr, patterns))}; --list shows them.{meant}"
        )
    return found


def _matches(name: str, pattern: str) -> bool:
    if any(c in pattern for c in "*?["):
        return fnmatch.fnmatchcase(name.lower(), pattern.lower())
    return pattern.lower() in name.lower()


def measured(rows: Sequence[Row], *, retry: bool, baselines: Collection[tuple[str, str]] = ()) -> set[Key]:
    """Keys that a resumed run leaves out; with ``retry`` not those that were wrong, hung, crashed or raised.

    ``baselines``: suite and variant of what is measured twice; it is not done while the second row is missing.
    """
    again: tuple[Status, ...] = ("failed", "timeout", "crashed", "error") if retry else ()
    done = {row.key for row in rows if row.status not in again and not (retry and _struck_out(row))}
    twice = {(*row.key[:4], row.partner) for row in rows if row.role == "noise"}
    return done - {
        row.key
        for row in rows
        if (row.suite, row.variant) in baselines and _timed(row) and row.key not in twice
    }


def _timed(row: Row) -> bool:
    """As one call, and so twice if it is the baseline."""
    return row.status == "ok" and row.best is not None and "calls" in row.extra


_STRUCK_OUT = "ended its processes twice before"


def _struck_out(row: Row) -> bool:
    return row.status == "skipped" and _STRUCK_OUT in row.reason


_NO_MEMORY = ("out of memory", "outofmemory", "not enough memory", "alloc_failed")


def short_of_memory(reason: str) -> bool:
    """Whether a row's reason says so: a matter of the case's size, not of the variant."""
    return any(words in reason.lower() for words in _NO_MEMORY)


@dataclass
class Strikes:
    """Counts how often a variant ended its processes; after the second time it is not tried again.

    For lack of memory does not count: smaller cases may fit.
    """

    counts: dict[str, int] = field(default_factory=dict)
    limit: int = 2

    def add(self, variant: str, reason: str) -> None:
        """One more."""
        if short_of_memory(reason):
            return
        self.counts[variant] = self.counts.get(variant, 0) + 1

    def out(self) -> list[str]:
        """The variants that are not tried again."""
        return [name for name, count in self.counts.items() if count >= self.limit]

    @property
    def reason(self) -> str:
        """Of the rows that are not measured therefore."""
        return f"{_STRUCK_OUT} in this run (--resume --retry tries again)"


def without(
    items: Iterable[Item], finished: Collection[tuple[str, str]], culprit: tuple[str, str, str] | None
) -> list[Item]:
    """What is left to do: ``items`` without the finished cases (name, dtype) and without the culprit.

    Args:
        culprit: (case, dtype, variant) that ended the processes; an empty variant means the whole case. A companion
            that did so is left out of that case.
    """
    left = []
    for item in items:
        if (item.case, item.dtype) in finished:
            continue
        if culprit is not None and culprit[:2] == (item.case, item.dtype):
            if not culprit[2]:
                continue
            item = _drop(item, culprit[2])
        if item.variants:
            left.append(item)
    return left


def _drop(item: Item, variant: str) -> Item:
    companion = "" if item.companion == variant else item.companion
    return replace(item, variants=tuple(v for v in item.variants if v != variant), companion=companion)


def blank_row(
    suite: Suite, case: Case, variant: str, options: Options, status: Status = "ok", reason: str = ""
) -> Row:
    """A row of a case and variant without measurement."""
    role = next(v.role for v in suite.variants(options) if v.name == variant)
    return Row(
        suite=suite.name,
        case=case.name,
        op=case.op,
        variant=variant,
        role=role,
        status=status,
        reason=reason,
        shape_set=case.shape_set,
        dtype=case.dtype,
        world=options.world,
        params=dict(case.params),
        flops=case.flops,
        bytes=case.bytes,
    )
