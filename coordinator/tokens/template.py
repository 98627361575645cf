"""A model's chat template: Jinja2 in a sandbox, with what templates of Hugging Face's models count on.

A template is a program of whoever made the model, so it is held to bounds: it reaches no Python object, changes
nothing, stops at a deadline that every turn of its loops and every call looks at, and writes no more than
MOST_CHARS. Source of what templates may use: transformers, `utils/chat_template_utils.py`.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from coordinator.core.errors import BadRequest

from .folder import DEFAULT

MOST_CHARS: Final = 1 << 26
_MOST_REPEATED: Final = 1 << 20
_MOST_EXPONENT: Final = 64
_SHOWN_CHARS: Final = 200
_WITH_TOOLS: Final = "tool_use"
_BOUNDED: Final = "bounded"


class ChatTemplate:
    """The templates of one model, compiled.

    Args:
        sources: templates by name; `default` is for most, `tool_use`, if it is there, for requests with tools.
        tokens: special tokens by name, which templates write.
        clock: monotonic time in seconds.

    Raises:
        ValueError: a template is no Jinja2, in a sentence.
    """

    def __init__(
        self, sources: Mapping[str, str], tokens: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._environment = _Sandbox(clock)
        self._tokens = dict(tokens)
        try:
            self._templates = {name: self._environment.from_string(text) for name, text in sources.items()}
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is faulty: line {error.lineno}: {error.message}") from error

    def render(self, given: Mapping[str, object], *, deadline_s: float) -> str:
        """Write the prompt of a chat; takes its time, so not on an event loop.

        Args:
            given: `messages`, `tools`, `add_generation_prompt` and whatever else the template reads.
            deadline_s: monotonic time.

        Raises:
            BadRequest: the template refuses, fails, has not ended at the deadline or writes too much.
        """
        template = self._chosen(with_tools=bool(given.get("tools")))
        try:
            with self._environment.until(deadline_s):
                return _bounded(template.generate({**self._tokens, **given}))
        except jinja2.TemplateRuntimeError as error:
            raise BadRequest("the model's chat template fails with these messages", detail=str(error)) from error
        except jinja2.TemplateError as error:
            words = " ".join(str(error.message).split())[:_SHOWN_CHARS]
            raise BadRequest(f"the model's chat template refuses these messages: {words}") from error
        except BadRequest:
            raise
        except Exception as error:  # a template may fail in any way that Python can
            detail = f"{type(error).__name__}: {error}"
            raise BadRequest("the model's chat template fails with these messages", detail=detail) from error

    def _chosen(self, *, with_tools: bool) -> jinja2.Template:
        name = _WITH_TOOLS if with_tools and _WITH_TOOLS in self._templates else DEFAULT
        if name not in self._templates:
            raise BadRequest("this model has no chat template: use /v1/completions")
        return self._templates[name]


def _bounded(parts: Iterable[str]) -> str:
    written: list[str] = []
    size = 0
    for part in parts:
        size += len(part)
        if size > MOST_CHARS:
            raise BadRequest("the model's chat template makes too long a prompt of these messages")
        written.append(part)
    return "".join(written)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja2 as transformers sets it up, with a deadline for each thread that renders."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self._clock = clock
        self._turn = threading.local()
        self.filters["tojson"] = _tojson
        self.filters[_BOUNDED] = self.bounded
        del self.globals["lipsum"]  # writes as much as it is asked for, and never looks at the clock
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def until(self, deadline_s: float) -> "_Deadline":
        """The scope of one rendering in this thread."""
        return _Deadline(self._turn, deadline_s)

    def look(self) -> None:
        """Raise BadRequest where the time of this thread's rendering is over."""
        if self._clock() > self._turn.deadline_s:
            raise BadRequest("the model's chat template takes too long with these messages")

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call of a template: of macros too, which may recurse."""
        self.look()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Multiplication and powers, whose results may be of any size."""
        if operator == "**":
            allowed = not isinstance(right, int) or abs(right) <= _MOST_EXPONENT
        else:
            sized, count = (right, left) if isinstance(left, int) else (left, right)
            allowed = not isinstance(sized, str | list | tuple) or len(sized) * int(count) <= _MOST_REPEATED
        if not allowed:
            raise BadRequest("the model's chat template makes too large a value of these messages")
        return super().call_binop(context, operator, left, right)

    def _generate(self, source: nodes.Template, *given: Any, **more: Any) -> str:
        """Let every loop look at the clock."""
        for loop in list(source.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, _BOUNDED, [], [], None, None, lineno=loop.lineno)
            loop.iter.set_environment(self)
        return super()._generate(source, *given, **more)

    @jinja2.pass_context  # so that it is never worked out when the template is compiled
    def bounded(self, _context: Any, items: Iterable[Any]) -> Iterator[Any]:
        """The items of a loop."""
        for item in items:
            self.look()
            yield item


class _Deadline:
    """Gives one thread a deadline for as long as it renders."""

    def __init__(self, turn: threading.local, deadline_s: float) -> None:
        self._turn = turn
        self._deadline_s = deadline_s

    def __enter__(self) -> None:
        self._turn.deadline_s = self._deadline_s

    def __exit__(self, *_error: object) -> None:
        del self._turn.deadline_s


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it only holds its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Nothing but what stands inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - transformers' signature
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 - the same
) -> str:
    """Unlike Jinja2's own, leaves `<`, `>`, `&` and quotes as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 - templates mean the local date
