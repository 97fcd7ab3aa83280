"""What was compared with which limit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One value that must be at most its limit; `name` says of what."""

    name: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether it is; NaN is not."""
        return self.value <= self.limit

    def to_record(self) -> dict[str, str | float | bool]:
        """Return plain values."""
        return {
            "name": self.name,
            "value": self.value,
            "limit": self.limit,
            "passed": self.passed,
        }
