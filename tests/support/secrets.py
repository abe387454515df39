"""Planted token ids and a planted salt, and a search for them in anything that is written."""

from __future__ import annotations

TOKENS = tuple(1_234_500_001 + 7_919 * number for number in range(40))
"""Large enough that no length, slot or time looks like one of them."""
SALT = "the-planted-salt-of-a-tenant"


def forms(tokens: tuple[int, ...]) -> dict[bytes, str]:
    """How a token id looks where it is written: packed either way, in decimal, in hex."""
    found: dict[bytes, str] = {}
    for token in tokens:
        little, big = token.to_bytes(4, "little"), token.to_bytes(4, "big")
        found |= {little: "packed", big: "packed", str(token).encode(): "decimal"}
        found |= {little.hex().encode(): "hex", big.hex().encode(): "hex", f"{token:x}".encode(): "hex"}
    return found


FORMS = forms(TOKENS) | {SALT.encode(): "salt"}
PLANES = [bytes(token >> shift & 255 for token in TOKENS[:8]) for shift in (0, 8)]
"""Token ids of a column by bytes of equal weight, as compression orders them."""


def betrayed(content: bytes) -> set[str]:
    """In which forms there is anything of a prompt, or a salt."""
    found = {form for bytes_, form in FORMS.items() if bytes_ in content}
    return found | {"planes" for plane in PLANES if plane in content}
