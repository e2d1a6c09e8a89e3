"""Token ids as text, by the tokenizer that a store keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dflash_pipeline.store.reader import Store

Decode = Callable[[Sequence[int]], str]


def decoder_of(store: Store) -> Decode | None:
    """Ids to text, special tokens included; None where the tokenizer is missing or broken."""
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(store.files()["tokenizer.json"].decode())
    except Exception:
        # the Rust library raises what it likes, and text is a help here, never a need
        return None
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
