"""Constraints on the next token: grammars, bad words, thinking budgets."""
