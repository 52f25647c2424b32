"""Tokenizers as files: a HuggingFace tokenizer's folder, a byte-level BPE learnt from a text, or one token a character.

Nothing is looked for on a hub: what a tokenizer needs lies in its folder.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, final

import numpy as np

from rayrec import storage
from rayrec.config import InputError
from rayrec.imports import require

TOKENIZER: Final = "tokenizer.json"
CONFIG: Final = "tokenizer_config.json"
END_OF_TEXT: Final = "<|endoftext|>"
LEAST_BPE: Final = 257
"""Of a byte-level BPE: every byte, and the end of a text."""
_FILES: tuple[str, ...] = (
    TOKENIZER, CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt",
    "spiece.model", "tokenizer.model", "sentencepiece.bpe.model", "chat_template.jinja",
)  # fmt: skip
"""What a tokenizer's folder may hold that belongs to it."""
_CONFIG: Final = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}

Files = Mapping[str, bytes]
"""A tokenizer's files by name; tokenizer.json and tokenizer_config.json are among them."""


@final
class TextTokenizer:
    """Turns text into ids and back."""

    def __init__(self, files: Files, name: str) -> None:
        """`name`: what errors call it. Raises InputError for a tokenizer.json that cannot be read."""
        require("tokenizers", extra="language")
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_str(files[TOKENIZER].decode())
            config = json.loads(files[CONFIG])
        except Exception as error:  # tokenizers raises no kind of its own
            raise InputError(f"{name}: not a tokenizer, or of another version ({_line(error)})") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._name = name
        end = config.get("eos_token")
        text = end.get("content") if isinstance(end, dict) else end
        self.end_token: int | None = self._tokenizer.token_to_id(text) if text else None
        """Id of what ends a text, where there is such a token."""
        self.vocabulary_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        """Ids are below it."""
        self.hash = hashlib.sha256(files[TOKENIZER] + repr(self.end_token).encode()).hexdigest()[:16]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest type that holds every id."""
        return np.dtype("<u2" if self.vocabulary_size <= 1 << 16 else "<u4")

    def encode(self, text: str) -> np.ndarray:
        """The ids (n,) of a text, without special tokens around it. Raises InputError for what it has no token for."""
        try:
            (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        except Exception as error:  # tokenizers raises no kind of its own
            known = self._tokenizer.get_vocab()
            unknown = sorted({character for character in text if character not in known})[:5]
            raise InputError(
                f"{self._name}: cannot tokenise the text ({_line(error)}); it may be the characters {unknown}"
            ) from None
        return np.array(found.ids, self.dtype)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids, special tokens left out."""
        return str(self._tokenizer.decode(list(map(int, ids))))


def load_tokenizer(folder: str) -> TextTokenizer:
    """The tokenizer in a folder, local or at a URL. Raises InputError where there is none."""
    return TextTokenizer(read_tokenizer(folder), folder)


def read_tokenizer(folder: str) -> Files:
    """The files of a HuggingFace tokenizer's folder, local or at a URL, brought to the form of the fast tokenizers.

    Raises InputError where there is none, or one that has no such form.
    """
    there = set(storage.list_folder(folder))
    files = {name: storage.read_bytes(storage.join(folder, name)) for name in _FILES if name in there}
    if not files:
        raise InputError(f"{folder}: holds no tokenizer; give a folder with tokenizer.json, bytes_bpe or characters")
    if TOKENIZER not in files:
        files = _converted(files, folder)
    return {CONFIG: _json(_CONFIG), **files}


def _converted(files: Files, folder: str) -> dict[str, bytes]:
    """Of a tokenizer in the older form of vocab.json and merges.txt, vocab.txt, or a sentencepiece model."""
    require("transformers", extra="language")
    from transformers import AutoTokenizer

    with storage.Scratch("tokenizer") as before, storage.Scratch("tokenizer") as after:
        write_tokenizer(files, before)
        try:
            found = AutoTokenizer.from_pretrained(before, local_files_only=True, trust_remote_code=False, use_fast=True)
        except Exception as error:  # anything, by what is in the folder
            raise InputError(f"{folder}: no tokenizer that transformers can load ({_line(error)})") from None
        if not found.is_fast:
            raise InputError(f"{folder}: a tokenizer without a fast form (tokenizer.json); convert it with transformers")
        found.save_pretrained(after)
        return {name: storage.read_bytes(os.path.join(after, name)) for name in _FILES if name in os.listdir(after)}


def write_tokenizer(files: Files, folder: str) -> None:
    """Writes the files into a folder, local or at a URL; tokenizer.json last."""
    for name in sorted(files, key=lambda name: (name == TOKENIZER, name)):
        storage.write_bytes(storage.join(folder, name), files[name])


def copy_tokenizer(source: str, folder: str) -> None:
    """Copies a tokenizer, and only what belongs to it, from one folder into another."""
    write_tokenizer(read_tokenizer(source), folder)


def bytes_bpe(texts: Iterable[str], vocabulary_size: int) -> Files:
    """A byte-level BPE, as GPT-2's, learnt from texts; the same texts give the same bytes on any number of threads."""
    require("tokenizers", extra="language")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    ends = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    return {TOKENIZER: tokenizer.to_str(pretty=True).encode(), CONFIG: _json({**_CONFIG, **ends})}


def characters(known: Iterable[str]) -> Files:
    """One token for each of these characters, in the order of their code points; others it refuses."""
    require("tokenizers", extra="language")
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: number for number, character in enumerate(sorted(known))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))  # which is none, and so it refuses
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return {TOKENIZER: tokenizer.to_str(pretty=True).encode(), CONFIG: _json(_CONFIG)}


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
