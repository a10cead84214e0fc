"""What a target raises where an input breaks a rule that no exception shows."""

__all__ = ["BrokenRuleError"]


class BrokenRuleError(Exception):
    """Two ways of reading one input do not agree."""
