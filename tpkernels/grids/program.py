"""What the ranks do in a pass, in order: exchanges beside products. Pure data, derived from a ``Method``.

Contract: a ``Program`` is a list of steps. In a step the exchanges and the work run at the same time: both read
what was there before the step. So the block for the next product travels under the present one, into a second
buffer, and partial results leave under the product after theirs. Buffers have names: "X", "W", "B", "dY" are what
the pass is given, "X@3" is the fourth block that was brought, "dW+2" a sum that began with the third product. A
buffer may be dropped after its last use (``Program.last_use``); what the executor, the byte counts and the memory
figures do is all here.

How results get home, by comparing layouts of one step with the next:

- the block stays: products are added up where they are;
- it changes, and the method has rings: the sum so far moves to the next rank and is added to there;
- it changes, and the method has none: the finished partial sums go to whom they belong to and are added there, all
  of a block's at once, or one step after another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from tpkernels.grids.features import features_needed, features_partial
from tpkernels.grids.layout import Block, Layout, Message, messages, sent_elements
from tpkernels.grids.method import Method, Pass, Sizes
from tpkernels.grids.spans import Terms, common, united, within

__all__ = ["ColumnSum", "Exchange", "Held", "Product", "Program", "Step", "backward", "forward"]


class Held(NamedTuple):
    """A buffer and where its blocks lie."""

    buffer: str
    layout: Layout


class Exchange(NamedTuple):
    """Brings the matrix from ``source`` to ``target``. ``result``: it is a sum under way, in accumulators. ``adds``:
    ``target`` has other parts of the sum, or will have: this one, which its layout's terms tell, is added to them.
    """

    operand: str
    source: Held
    target: Held
    result: bool = False
    adds: bool = False

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages of all ranks, those of a rank to itself too."""
        return messages(self.source.layout, self.target.layout)

    def sent_elements(self, sizes: Sizes) -> int:
        """Elements that travel between ranks, all ranks together."""
        return sent_elements(self.messages, *sizes.of(self.operand))


class Product(NamedTuple):
    """Adds ``left`` times ``right``, of the pass's step ``step``, to ``into``, which then lies so."""

    kind: Pass
    left: str
    right: str
    into: str
    layout: Layout
    step: int

    @property
    def operand(self) -> str:
        """What ``into`` has blocks of."""
        return self.kind.result


class ColumnSum(NamedTuple):
    """Makes ``into``, one row: the sum of the rows of ``of``. The bias's gradient."""

    of: str
    into: str
    layout: Layout

    @property
    def operand(self) -> str:
        """What ``into`` has blocks of."""
        return "dB"


Work: TypeAlias = Product | ColumnSum


class Step(NamedTuple):
    """Exchanges and work at the same time."""

    exchanges: tuple[Exchange, ...]
    work: tuple[Work, ...]


@dataclass(frozen=True, eq=False)
class Program:
    """Steps, and by operand ("Y", "dX", "X", ...) where what is wanted of them ends."""

    steps: tuple[Step, ...]
    outputs: Mapping[str, Held]
    given: frozenset[str]

    @property
    def exchanges(self) -> Iterator[Exchange]:
        """Of all steps."""
        for step in self.steps:
            yield from step.exchanges

    def sent_elements(self, sizes: Sizes) -> int:
        """Elements that travel between ranks, all ranks together: as many as are received."""
        return sum(exchange.sent_elements(sizes) for exchange in self.exchanges)

    @cached_property
    def last_use(self) -> dict[str, int]:
        """The step after which each buffer is needed no more; outputs: the number of steps."""
        uses: dict[str, int] = {}
        for number, step in enumerate(self.steps):
            for exchange in step.exchanges:
                uses[exchange.source.buffer] = uses[exchange.target.buffer] = number
            for work in step.work:
                read = (work.left, work.right) if isinstance(work, Product) else (work.of,)
                uses.update(dict.fromkeys((*read, work.into), number))
        for held in self.outputs.values():
            uses[held.buffer] = len(self.steps)
        return uses


def forward(method: Method, *, bias: bool = False, keep: bool = False) -> Program:
    """Y of X and W.

    Args:
        bias: bring the bias, cut over all ranks, to where its features are: output "B".
        keep: outputs "X" and "W" too, as they were gathered, for ``backward``'s ``held``. Where the method has
            rings X is an output in any case: it ends where WEIGHT_GRAD begins.
    Raises:
        ValueError: ``keep``, and the method gathers nothing.
    """
    if keep and not method.gathers:
        raise ValueError(f"keep: {method} gathers no whole blocks that could be kept")
    builder = _Builder(method, {"X": [_at_home(method, "X")], "W": [_at_home(method, "W")]})
    if bias:
        builder.bring_bias()
    builder.add(Pass.FORWARD)
    outputs = dict(builder.outputs)
    if keep or method.rings:
        outputs["X"] = builder.where["X"][-1]
    if keep:
        outputs["W"] = builder.where["W"][-1]
    return builder.program(outputs)


def backward(
    method: Method,
    *,
    input_grad: bool = True,
    weight_grad: bool = True,
    bias_grad: bool = False,
    held: Mapping[str, Layout] | None = None,
) -> Program:
    """dX, dW and dB of dY: those that are asked for.

    Args:
        held: operands ("X", "W") that lie otherwise than at home, and how.
    """
    there = held or {}
    where = {
        operand: [Held(operand, there.get(operand, method.home(operand)))] for operand in ("X", "W", "dY")
    }
    builder = _Builder(method, where)
    if bias_grad:
        builder.sum_columns()
    if input_grad:
        builder.add(Pass.INPUT_GRAD)
    if weight_grad:
        builder.add(Pass.WEIGHT_GRAD)
    return builder.program(builder.outputs)


def _at_home(method: Method, operand: str) -> Held:
    return Held(operand, method.home(operand))


class _Builder:
    """Puts products into steps 0, 1, ..., what they need into the step before, and what they make into the step
    after."""

    def __init__(self, method: Method, where: dict[str, list[Held]]) -> None:
        self.method = method
        self.where = where
        self.next = 0
        self.outputs: dict[str, Held] = {}
        self.exchanges: dict[int, list[Exchange]] = defaultdict(list)
        self.work: dict[int, list[Work]] = defaultdict(list)
        self.given = frozenset(held[0].buffer for held in where.values())

    def program(self, outputs: Mapping[str, Held]) -> Program:
        numbers = [*self.exchanges, *self.work]
        steps = [
            Step(tuple(self.exchanges[number]), tuple(self.work[number]))
            for number in range(min(numbers, default=0), max(numbers, default=-1) + 1)
        ]
        return Program(tuple(steps), dict(outputs), self.given)

    def add(self, kind: Pass) -> None:
        """A whole pass."""
        result = _Result(self, kind)
        for step in range(self.method.steps):
            left = self._bring(kind.left, self.method.layout(kind, kind.left, step))
            right = self._bring(kind.right, self.method.layout(kind, kind.right, step))
            into = result.place(self.method.layout(kind, kind.result, step))
            self.work[self.next].append(Product(kind, left, right, *into, step))
            self.next += 1
        self.outputs[kind.result] = result.finish()

    def bring_bias(self) -> None:
        """The bias to every rank that has its features in Y."""
        home, needed = _at_home(self.method, "B"), Held("B@0", features_needed(self.method.home("Y")))
        self.given |= {"B"}
        if home.layout.same_places(needed.layout):
            needed = home
        else:
            self.exchanges[self.next - 1].append(Exchange("B", home, needed))
        self.outputs["B"] = needed

    def sum_columns(self) -> None:
        """The bias's gradient, from the rows that each rank has of dY."""
        layout = features_partial(self.method.home("Y"))
        made, home = Held("dB+0", layout), Held("dB", self.method.home("B"))
        self.work[self.next - 1].append(ColumnSum("dY", *made))
        if home.layout.blocks == layout.blocks:
            home = made
        else:
            self.exchanges[self.next].append(Exchange("dB", made, home, result=True))
        self.outputs["dB"] = home

    def _bring(self, operand: str, layout: Layout) -> str:
        """The buffer that has these blocks at the next product; brought in the step before it, if none has yet."""
        there = self.where[operand]
        for held in there[-1:] if self.method.rings else there:
            if held.layout.same_places(layout):
                return held.buffer
        source = there[-1] if self.method.rings else there[0]
        number = sum(exchange.operand == operand for some in self.exchanges.values() for exchange in some)
        brought = Held(f"{operand}@{number}", layout)
        self.exchanges[self.next - 1].append(Exchange(operand, source, brought))
        there.append(brought)
        return brought.buffer


class _Result:
    """Where a pass's products are added up, and how the sums get home."""

    def __init__(self, builder: _Builder, kind: Pass) -> None:
        self.builder, self.name = builder, kind.result
        method = builder.method
        self.rings = method.rings
        self.path: Sequence[Layout] = (*method.sums.get(self.name, ()), method.home(self.name))
        self.now: Held | None = None  # sums so far; its terms are what they have
        self.sent: list[Layout] = []  # of what went to the first layout of the path
        self.made = 0

    def place(self, partial: Layout) -> Held:
        """Where the next product, whose result lies so, is to be added, and what is there then."""
        self.made += 1
        if self.now is None:
            self.now = self._fresh(partial)
        elif self.now.layout.same_places(partial):
            self.now = Held(self.now.buffer, _added(self.now.layout, partial))
        elif self.rings:
            moved = self._fresh(_moved(self.now.layout, partial))
            self._exchange(self.builder.next, self.now, moved)  # beside the product, which is added to it
            self.now = Held(moved.buffer, _added(moved.layout, partial))
        else:
            self._deliver()
            self.now = self._fresh(partial)
        return self.now

    def finish(self) -> Held:
        """Sends what is still to be sent, and returns where the result is, at home."""
        held = self._deliver()
        if self.sent:  # each addend once
            for position, block in enumerate(held.layout.blocks):
                parts = [sent.blocks[position] for sent in self.sent]
                have = united(span for part in parts if part is not None for span in part.terms)
                assert block is None or have == block.terms, "addends are missing"
        for hop, layout in enumerate(self.path[1:], 1):
            final = Held(self._name(hop), layout)
            self._exchange(self.builder.next + hop, held, final)
            held = final
        return held

    def _deliver(self) -> Held:
        """Finished sums to the first layout of the path: to those whose block they are of."""
        assert self.now is not None
        first = self.path[0]
        source, self.now = self.now, None
        if source.layout.blocks == first.blocks:
            return source
        final = Held(self._name(0), _addends(source.layout, first))
        self.sent.append(final.layout)
        pairs = zip(final.layout.blocks, first.blocks, strict=True)
        adds = any(sent is not None and sent != whole for sent, whole in pairs)
        self._exchange(self.builder.next, source, final, adds)
        return Held(final.buffer, first)

    def _exchange(self, number: int, source: Held, target: Held, adds: bool = False) -> None:
        self.builder.exchanges[number].append(Exchange(self.name, source, target, result=True, adds=adds))

    def _name(self, hop: int) -> str:
        return self.name if hop == len(self.path) - 1 else f"{self.name}/{hop}"

    def _fresh(self, layout: Layout) -> Held:
        return Held(f"{self.name}+{self.made - 1}", layout)


def _addends(source: Layout, target: Layout) -> Layout:
    """``target`` with the parts of its sums that ``source`` has."""

    def block(wanted: Block) -> Block | None:
        holders = source.holders.get((wanted.rows, wanted.columns)) or [
            holder
            for (rows, columns), several in source.holders.items()
            if common(rows, wanted.rows) and common(columns, wanted.columns)
            for holder in several
        ]
        there = {_terms(source, holder) for holder in holders if within(_terms(source, holder), wanted.terms)}
        terms = united(span for some in there for span in some)
        return wanted._replace(terms=terms) if terms else None

    return Layout(target.grid, tuple(b and block(b) for b in target.blocks))


def _terms(layout: Layout, position: int) -> Terms:
    return layout.block(position).terms


def _added(sums: Layout, partial: Layout) -> Layout:
    """The sums with what the products of one more step add to them."""
    return sums.partial(lambda p: united((*_terms(sums, p), *_terms(partial, p))))


def _moved(sums: Layout, places: Layout) -> Layout:
    """The sums, unchanged, where ``places`` has their rectangles: those of the nearest holder, since data-parallel
    copies have sums of their own rows."""

    def terms(position: int) -> Terms:
        holders = sums.holders[places.block(position)[:2]]
        return _terms(sums, min(holders, key=lambda p: sums.grid.distance(p, position)))

    return places.partial(terms)
