"""Tokens of prompts and sequences, the symbols that stand for them, and the names that are made of them."""
