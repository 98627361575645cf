"""One model's tokenizer: text to ids, ids to text, messages to a prompt."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeVar

from coordinator.core.errors import BadRequest, DeadlineExceeded

from .decoding import (
    BYTE_FALLBACK,
    BYTE_LEVEL,
    Pieces,
    Scheme,
    byte_level_piece,
    fallback_piece,
    scheme_of,
)
from .detokenizer import MOST_HELD, ByteFallbackText, ByteLevelText, Detokenizer, WindowText
from .folder import NEEDS, ModelFolder, missing_extra, read_folder
from .messages import plain_messages

if TYPE_CHECKING:
    import tokenizers

T = TypeVar("T")

SHORT_CHARS: Final = 1024  # a quarter of a millisecond; a thread costs half of that
MOST_CHARS: Final = 4 << 20  # the library takes up to 200 bytes for each while it works
RENDER_S: Final = 5.0
WAIT_S: Final = 120.0  # for a thread; long texts take about a second for each 4 MB
_NOTHING: Mapping[str, object] = MappingProxyType({})


class Tokenizer:
    """Tokenizer and chat template of one folder; serves any number of requests at once.

    Attributes:
        eos_ids: tokens that end a generation, by generation_config.json and tokenizer_config.json.
        special_ids: tokens that are markers and no text.
        highest_id: of all tokens, added ones included; there may be ids below it that no token has.
    """

    def __init__(self, library: "tokenizers.Tokenizer", folder: ModelFolder, pool: Executor | None) -> None:
        from .template import ChatTemplate  # noqa: PLC0415 - jinja2 comes with the extra

        self._library = library
        self._pool = pool
        self._scheme: Scheme = scheme_of(folder.decoder)
        self._template = ChatTemplate(folder.templates, folder.tokens)
        added = library.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, shown in added.items() if shown.special)
        eos = library.token_to_id(folder.tokens["eos_token"]) if "eos_token" in folder.tokens else None
        self.eos_ids = folder.eos_ids | ({eos} if eos is not None else frozenset())
        self.highest_id = max(library.get_vocab(with_added_tokens=True).values(), default=-1)
        self._bytes = [self._pieces(byte_level_piece, hidden, b"") for hidden in (frozenset[int](), self.special_ids)]
        self._mixed = [self._pieces(self._fallback, hidden, None) for hidden in (frozenset[int](), self.special_ids)]

    @classmethod
    def load(cls, folder: Path, pool: Executor | None = None) -> "Tokenizer":
        """Read a folder; takes a second for a large vocabulary, so not while requests wait.

        Args:
            folder: with tokenizer.json and, if there are any, the files beside it (`folder.ModelFolder`).
            pool: where long texts and chat templates are worked on; None: the event loop's own threads.

        Raises:
            ValueError: it cannot be used, or the extra packages are missing, in a sentence.
        """
        if missing_extra():
            raise ValueError(NEEDS)
        # each of its batches holds one text here: threads of its own, one for each core, would have nothing to do
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import tokenizers  # noqa: PLC0415 - comes with the extra

        content = read_folder(folder)
        try:
            library = tokenizers.Tokenizer.from_buffer(content.tokenizer)
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{folder}/tokenizer.json cannot be used: {error}") from error
        library.no_truncation()
        library.no_padding()
        try:
            return cls(library, content, pool)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; a long one is worked on in a thread.

        Args:
            text: as it came.
            special: whether the tokenizer's own marks (a BOS token, say) are put around it.

        Raises:
            BadRequest: it has more than MOST_CHARS characters.
            DeadlineExceeded: no thread has done it within WAIT_S.
        """
        if len(text) <= SHORT_CHARS:
            return self._encode(text, special=special)
        if len(text) > MOST_CHARS:
            raise BadRequest(
                f"the prompt has {len(text)} characters, and at most {MOST_CHARS} characters are tokenized here: "
                "a longer one must be a list of token ids"
            )
        return await self._in_thread(lambda: self._encode(text, special=special))

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of whole sequences of tokens: what a detokenizer makes of them."""
        text = self.detokenizer(skip_special=skip_special)
        return text.push(ids) + text.end()

    async def text(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The same, with many tokens in a thread; raises DeadlineExceeded as `encode`."""
        if len(ids) <= SHORT_CHARS:
            return self.decode(ids, skip_special=skip_special)
        return await self._in_thread(lambda: self.decode(ids, skip_special=skip_special))

    def token_text(self, token_id: int) -> str:
        """One token as it looks inside of a text, for log probabilities; half a character becomes U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The same as bytes, which put together make up the text even where tokens cut characters in two."""
        if self._scheme.kind == BYTE_LEVEL:
            return self._bytes[False][token_id]
        if self._scheme.kind == BYTE_FALLBACK:
            piece = self._mixed[False][token_id]
            if isinstance(piece, str):
                return piece.encode()
            return b"" if piece is None else bytes((piece,))
        if not self._known(token_id):
            return b""
        once = self._decode([token_id])
        twice = self._decode([token_id, token_id])  # the second one is not at the beginning of a text
        return (twice[len(once) :] if twice.startswith(once) and len(twice) > len(once) else once).encode()

    def detokenizer(self, prompt_ids: Sequence[int] = (), *, skip_special: bool = True) -> Detokenizer:
        """The text of the tokens that follow a prompt, as they come.

        Args:
            prompt_ids: what stands before them, where anything does: the space before a first word is kept then.
            skip_special: whether special tokens are left out.
        """
        before = self._last_shown(prompt_ids, skip_special=skip_special)
        if self._scheme.kind == BYTE_LEVEL:
            text = ByteLevelText(self._bytes[skip_special])
            if before:
                text.push(before)
            return text
        if self._scheme.kind == BYTE_FALLBACK:
            mixed = ByteFallbackText(self._mixed[skip_special], self._scheme.strip)
            if before:
                mixed.push(before)
                mixed.continues()
            return mixed
        shown = self._shown if skip_special else self._known
        return WindowText(self._decode, shown, holds=self._scheme.from_bytes, before=before)

    async def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[object] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, object] = _NOTHING,
    ) -> str:
        """The prompt of a chat, by the model's template; encode it with `special=False`, its marks are in it.

        Args:
            messages: as the client sent them.
            tools: the same.
            add_generation_prompt: whether the beginning of the assistant's answer is put at the end.
            extra: what else the template may read (`chat_template_kwargs`).

        Raises:
            BadRequest: there is no template, it refuses these messages, or it takes too long.
            DeadlineExceeded: no thread has done it within WAIT_S.
        """
        given = {
            **extra,
            "messages": plain_messages(messages),
            "tools": tools or None,
            "documents": extra.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        return await self._in_thread(lambda: self._template.render(given, deadline_s=time.monotonic() + RENDER_S))

    # --- inside

    def _encode(self, text: str, *, special: bool) -> list[int]:
        # a batch, be it of one text: `encode` keeps the interpreter's lock while it works, and so stops every thread
        encode = self._library.encode_batch_fast
        try:
            (encoded,) = encode([text], add_special_tokens=special)
        except TypeError:  # half of a surrogate pair, which JSON may hold and no text can
            (encoded,) = encode([text.encode("utf-8", "replace").decode()], add_special_tokens=special)
        return list(encoded.ids)

    def _decode(self, ids: list[int]) -> str:
        return str(self._library.decode(ids, skip_special_tokens=False))

    def _known(self, token_id: int) -> bool:
        return self._mixed[False][token_id] is not None

    def _shown(self, token_id: int) -> bool:
        return token_id not in self.special_ids and self._known(token_id)

    def _last_shown(self, ids: Sequence[int], *, skip_special: bool) -> list[int]:
        found: list[int] = []
        for token in reversed(ids):
            if self._shown(token) if skip_special else self._known(token):
                found.append(token)
                if len(found) == MOST_HELD:
                    break
        return found[::-1]

    def _fallback(self, token: str) -> str | int | None:
        return fallback_piece(self._scheme, token)

    def _pieces(self, make: Callable[[str], T], hidden: frozenset[int], nothing: T) -> Pieces[T]:
        return Pieces(make, self._library.id_to_token, hidden, nothing)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(WAIT_S):
                return await loop.run_in_executor(self._pool, work)
        except TimeoutError:
            raise DeadlineExceeded("tokenizer") from None
