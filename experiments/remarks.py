"""What is to be said of single panels on the page: where a finding does not hold, and why."""

from __future__ import annotations

REMARKS: dict[str, str] = {}
