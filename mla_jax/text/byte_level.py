"""The alphabet of byte-level tokenizers: each byte is written as one printable character, as in GPT-2."""

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]

BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
CHARACTERS = {byte: character for character, byte in BYTES.items()}


def to_characters(data: bytes) -> str:
    return "".join(CHARACTERS[byte] for byte in data)


def to_bytes(token: str) -> bytes:
    """The bytes of a token of the vocabulary; a token with other characters is its own text."""
    try:
        return bytes(BYTES[character] for character in token)
    except KeyError:
        return token.encode("utf-8", "replace")
