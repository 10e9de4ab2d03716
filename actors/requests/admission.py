"""Admission: a request takes a permit before anything is awaited for it, or is refused."""

from __future__ import annotations

from actors.protocol.requests import QueueFull
from actors.requests.drain_rate import DrainRate
from telemetry.metrics.histogram import Histogram

__all__ = ["AdmissionControl", "Permit", "max_per_tenant"]

_RETRY_AFTER = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 90.0, 120.0)


def max_per_tenant(bound: int, tenants: int) -> int:
    """How much of ``bound`` one of so many tenants may hold while the others hold nothing."""
    return bound - (tenants - 1) * _share(bound, tenants)


def _share(bound: int, tenants: int) -> int:
    """What is kept for a tenant: half of all, in equal parts; the other half is first come, first served."""
    return bound // (2 * tenants) if tenants > 1 else 0


class Permit:
    """The right of one request to be served. ``tokens``: of its prompt, plus what its log-probabilities count as.

    Release it exactly once.
    """

    __slots__ = ("choices", "open", "tenant", "tokens")

    def __init__(self, choices: int, tokens: int, tenant: str) -> None:
        self.choices = choices
        self.tokens = tokens
        self.tenant = tenant
        self.open = True


class _Holding:
    """What the live requests of a tenant hold."""

    __slots__ = ("sequences", "tokens")

    def __init__(self) -> None:
        self.sequences = 0
        self.tokens = 0


class AdmissionControl:
    """Counts sequences and prompt tokens of all live requests.

    ``max_sequences`` and ``max_tokens`` bound them (None: no bound). With several ``tenants`` half of each bound is
    kept for them in equal parts, so that none can take all; the other half is first come, first served. Tenants
    beyond that number share with those present. ``busy_from``: sequences with which the engine works at
    its full rate. Refusals carry the seconds after which that rate should have made room.
    """

    def __init__(
        self, *, max_sequences: int, max_tokens: int | None, tenants: int = 1, busy_from: int | None = None
    ) -> None:
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self._tenants = tenants
        self._busy_from = max_sequences if busy_from is None else min(busy_from, max_sequences)
        self._holdings: dict[str, _Holding] = {}
        self._drain = {"sequences": DrainRate(), "tokens": DrainRate()}
        self.sequences = 0
        self.tokens = 0
        self.refusals = {"sequences": 0, "tokens": 0}  # requests, by the bound they met
        self.retry_after_seconds = Histogram(_RETRY_AFTER)  # that refusals carried

    def admit(self, choices: int, tokens: int, now: float, tenant: str = "") -> Permit:
        """A permit, or QueueFull. ``tokens`` may be an estimate; :meth:`resize` sets it right after encoding."""
        kept_sequences, kept_tokens = self._kept_for_others(tenant)
        over = self.sequences + kept_sequences + choices - self._max_sequences
        if over > 0:
            held = f"The server holds {self.sequences} of at most {self._max_sequences} sequences"
            raise self._refusal("sequences", held, kept_sequences, choices, over, now)
        if self._max_tokens is not None and self.tokens:
            over = self.tokens + kept_tokens + tokens - self._max_tokens
            if over > 0:
                held = f"The server holds {self.tokens} of at most {self._max_tokens} prompt tokens"
                raise self._refusal("tokens", held, kept_tokens, tokens, over, now)
        self._observe(now)
        holding = self._holdings.setdefault(tenant, _Holding())
        holding.sequences += choices
        holding.tokens += tokens
        self.sequences += choices
        self.tokens += tokens
        return Permit(choices, tokens, tenant)

    @property
    def max_choices(self) -> int:
        """The most sequences of one request: more would be refused however long its client waits."""
        return max_per_tenant(self._max_sequences, self._tenants)

    @property
    def refused(self) -> int:
        """Requests refused."""
        return sum(self.refusals.values())

    def resize(self, permit: Permit, tokens: int) -> None:
        """Replace the estimate of a permit's prompt tokens by their number."""
        if permit.open:
            self.tokens += tokens - permit.tokens
            self._holdings[permit.tenant].tokens += tokens - permit.tokens
            permit.tokens = tokens

    def release(self, permit: Permit, now: float) -> None:
        """Release the permit; a second time does nothing."""
        if not permit.open:
            return
        permit.open = False
        self._observe(now, permit)
        self.sequences -= permit.choices
        self.tokens -= permit.tokens
        holding = self._holdings[permit.tenant]
        holding.sequences -= permit.choices
        holding.tokens -= permit.tokens
        if not holding.sequences:
            del self._holdings[permit.tenant]

    def _kept_for_others(self, tenant: str) -> tuple[int, int]:
        """Sequences and tokens that are kept for other tenants and that they do not hold yet."""
        present = len(self._holdings) + (tenant not in self._holdings)
        tenants = max(self._tenants, present)
        if tenants == 1:
            return 0, 0
        sequences, tokens = _share(self._max_sequences, tenants), _share(self._max_tokens or 0, tenants)
        absent = tenants - present
        kept_sequences, kept_tokens = absent * sequences, absent * tokens
        for name, holding in self._holdings.items():
            if name != tenant:
                kept_sequences += max(sequences - holding.sequences, 0)
                kept_tokens += max(tokens - holding.tokens, 0)
        return kept_sequences, kept_tokens

    def _observe(self, now: float, ended: Permit | None = None) -> None:
        busy = self.sequences >= self._busy_from or (
            self._max_tokens is not None and self.tokens >= self._max_tokens // 2
        )
        self._drain["sequences"].observe(now, ended.choices if ended is not None else 0, busy=busy)
        self._drain["tokens"].observe(now, ended.tokens if ended is not None else 0, busy=busy)

    def _refusal(self, bound: str, held: str, kept: int, units: int, over: int, now: float) -> QueueFull:
        self._observe(now)
        wait = self._drain[bound].promise(units, over, now)
        self.refusals[bound] += 1
        self.retry_after_seconds.add(wait)
        why = f"{held}, and keeps {kept} for other API keys" if kept else held
        return QueueFull(f"{why}. Try again in {wait:.0f} s.", retry_after=wait)
