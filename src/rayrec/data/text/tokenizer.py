"""Tokenizers: a HuggingFace folder, a byte-level BPE trained on a text, or one token per character.
Never loads from a hub.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, final

import numpy as np

from rayrec import storage
from rayrec.config import InputError
from rayrec.humanize import one_line
from rayrec.imports import require

TOKENIZER: Final = "tokenizer.json"
CONFIG: Final = "tokenizer_config.json"
END_OF_TEXT: Final = "<|endoftext|>"
MIN_BPE_SIZE: Final = 257
"""Minimum vocabulary size of a byte-level BPE: every byte, and the end-of-text token."""
_FILES: tuple[str, ...] = (
    TOKENIZER,
    CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
)
"""Tokenizer files that are read from a folder."""
_CONFIG: Final = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
}

Files = Mapping[str, bytes]
"""Tokenizer file contents by name, including tokenizer.json and tokenizer_config.json."""


@final
class TextTokenizer:
    """Tokenizer that converts text to ids and back."""

    def __init__(self, files: Files, name: str) -> None:
        """Load the tokenizer. `name` identifies it in errors. Raises InputError if tokenizer.json
        cannot be read.
        """
        require("tokenizers", extra="language")
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_str(files[TOKENIZER].decode())
            config = json.loads(files[CONFIG])
        except Exception as error:  # tokenizers has no exception class.
            raise InputError(
                f"{name}: not a tokenizer, or of another version ({one_line(error)})"
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._name = name
        end = config.get("eos_token")
        text = end.get("content") if isinstance(end, dict) else end
        self.end_token: int | None = self._tokenizer.token_to_id(text) if text else None
        """End-of-text token id. None if there is no such token."""
        self.vocabulary_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        """Exclusive upper bound of token ids."""
        self.hash = hashlib.sha256(files[TOKENIZER] + repr(self.end_token).encode()).hexdigest()[
            :16
        ]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Smallest dtype for every id."""
        return np.dtype("<u2" if self.vocabulary_size <= 1 << 16 else "<u4")

    def encode(self, text: str) -> np.ndarray:
        """Encode a text into ids [n], without special tokens around it. Raises InputError if it has
        no token for a character.
        """
        try:
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        except Exception as error:  # tokenizers has no exception class.
            vocabulary = self._tokenizer.get_vocab()
            unknown = sorted({character for character in text if character not in vocabulary})[:5]
            raise InputError(
                f"{self._name}: cannot tokenise the text ({one_line(error)}), possibly because of "
                f"the characters {unknown}"
            ) from None
        return np.array(encoding.ids, self.dtype)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decode ids into text, without special tokens."""
        return str(self._tokenizer.decode(list(map(int, ids))))


def load_tokenizer(folder: str) -> TextTokenizer:
    """Load the tokenizer in a folder, local or at a URL. Raises InputError if it is not found."""
    return TextTokenizer(read_tokenizer(folder), folder)


def read_tokenizer(folder: str) -> Files:
    """Read a HuggingFace tokenizer folder, local or at a URL, and convert it to the fast format if
    needed. Raises InputError if no tokenizer is found or it has no fast format.
    """
    names = set(storage.list_folder(folder))
    files = {
        name: storage.read_bytes(storage.join(folder, name)) for name in _FILES if name in names
    }
    if not files:
        raise InputError(
            f"{folder}: tokenizer not found. Use a folder with tokenizer.json, bytes_bpe or "
            "characters."
        )
    if TOKENIZER not in files:
        files = _convert(files, folder)
    return {CONFIG: _json(_CONFIG), **files}


def _convert(files: Files, folder: str) -> dict[str, bytes]:
    """Convert a tokenizer in an older format: vocab.json and merges.txt, vocab.txt, or a
    sentencepiece model.
    """
    require("transformers", extra="language")
    from transformers import AutoTokenizer

    with storage.Scratch("tokenizer") as before, storage.Scratch("tokenizer") as after:
        write_tokenizer(files, before)
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                before, local_files_only=True, trust_remote_code=False, use_fast=True
            )
        except Exception as error:  # Depends on the files.
            raise InputError(
                f"{folder}: transformers cannot load the tokenizer ({one_line(error)})"
            ) from None
        if not tokenizer.is_fast:
            raise InputError(
                f"{folder}: tokenizer has no fast format (tokenizer.json). Convert it with "
                "transformers."
            )
        tokenizer.save_pretrained(after)
        return {
            name: storage.read_bytes(os.path.join(after, name))
            for name in _FILES
            if name in os.listdir(after)
        }


def write_tokenizer(files: Files, folder: str) -> None:
    """Write the files into a folder, local or at a URL, tokenizer.json last."""
    for name in sorted(files, key=lambda name: (name == TOKENIZER, name)):
        storage.write_bytes(storage.join(folder, name), files[name])


def bytes_bpe(texts: Iterable[str], vocabulary_size: int) -> Files:
    """Train a byte-level BPE tokenizer, as for GPT-2. The same texts give the same bytes with any
    number of threads.
    """
    require("tokenizers", extra="language")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [END_OF_TEXT]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        initial_alphabet=alphabet,
        special_tokens=special,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    ends = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    return {TOKENIZER: tokenizer.to_str(pretty=True).encode(), CONFIG: _json({**_CONFIG, **ends})}


def characters(alphabet: Iterable[str]) -> Files:
    """Build a tokenizer with one token per known character, in code point order. It rejects other
    characters.
    """
    require("tokenizers", extra="language")
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: number for number, character in enumerate(sorted(alphabet))}
    # Not in vocabulary: rejects.
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return {TOKENIZER: tokenizer.to_str(pretty=True).encode(), CONFIG: _json(_CONFIG)}


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
