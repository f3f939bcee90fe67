"""The rules: values in, verdicts out. Pure: no clock, no storage, no service."""

from phalanx.monitor.rules.policy import Action, Policy
from phalanx.monitor.rules.verdict import Kind, Verdict

__all__ = ["Action", "Kind", "Policy", "Verdict"]
