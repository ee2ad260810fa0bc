"""What ranks say of each other, signed with a token of their run.

The store of `torch.distributed` asks nobody who they are: whoever reaches its port may write any key. So each rank
signs what it writes, with a secret that never passes through the store (HMAC, RFC 2104, over SHA-256), and ignores
what is not signed. The key is signed along with the value, so that one cannot pass for another.

The token is in the environment, which other users of the machine cannot read. `launch` makes one for each run.
Where ranks are started otherwise, as by torchrun, give all of them the same:
`export MESHWEAVE_RUN_TOKEN=$(openssl rand -hex 16)`. Without it nothing is signed, and whoever reaches the store
is believed.
"""

from __future__ import annotations

import hmac
import os
import secrets

TOKEN_VARIABLE = "MESHWEAVE_RUN_TOKEN"
"""The environment variable that holds the token of a run."""

_NUM_DIGITS = 32  # of the signature, hexadecimal: 128 bits


def new_token() -> str:
    """Return a new token for a run, 128 random bits in hexadecimal."""
    return secrets.token_hex(16)


def sign(key: str, text: str) -> str:
    """Return the value to store under `key`: "<signature> <text>", or `text` alone where the run has no token.

    What is no Unicode in it, as in some names of files, is escaped, for a store does not take that.
    """
    text = text.encode(errors="backslashreplace").decode()
    token = os.environ.get(TOKEN_VARIABLE)
    return f"{_signature(token, key, text)} {text}" if token else text


def verify(key: str, value: bytes) -> str | None:
    """Return the text in a `value` that `sign` made for `key`; None where this run's token did not sign it.

    Where this run has no token, return the whole value as text.
    """
    text = value.decode(errors="replace")
    token = os.environ.get(TOKEN_VARIABLE)
    if not token:
        return text
    signature, _, text = text.partition(" ")
    is_ours = hmac.compare_digest(signature.encode(), _signature(token, key, text).encode())
    return text if is_ours else None


def _signature(token: str, key: str, text: str) -> str:
    message = f"{len(key)} {key}{text}".encode(errors="surrogatepass")
    return hmac.digest(token.encode(), message, "sha256").hex()[:_NUM_DIGITS]
