"""Tokens of prompts and sequences, the symbols that stand for them, and the names made from them."""
