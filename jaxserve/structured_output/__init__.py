"""Constraints on the next token: grammars, token lists, repetition, reasoning sections."""
