"""Which API families serve a path, and whose error shape an unserved path gets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from urllib.parse import unquote

from coordinator.core.errors import UnknownPath, WrongMethod
from coordinator.core.ports import Route

from .bodies import Body
from .family import Family

_NO_PARAMS: Mapping[str, str] = MappingProxyType({})
_KEPT = ("/", "//")  # a slash less would make another path of these
_NOT_SERVED = "this path is not served here"


@dataclass(frozen=True, slots=True)
class Match:
    """What a method and a path mean.

    Attributes:
        families: those that serve it; more than one: the body tells which (`choose`).
        operation: what they do there, see `core.ports.Route`.
        params: values of the template's names, percent-decoded.
    """

    families: tuple[Family, ...]
    operation: str
    params: Mapping[str, str]


Methods = dict[str, Match]


@dataclass(slots=True)
class _Step:
    """One segment on the way down the templates: literal next steps, or one for any segment (or all the rest)."""

    next: "dict[str, _Step]" = field(default_factory=dict)
    any: "_Step | None" = None
    name: str = ""
    takes_rest: bool = False
    methods: Methods = field(default_factory=dict)


class RouteTable:
    """Finds the families of a path: plain paths by one look-up, templates segment by segment.

    Paths come without query and still percent-encoded. One slash at the end is ignored, HEAD is served wherever GET is.
    A template's `{name}` takes one segment, `{*name}` at its end all that is left, slashes included.

    Args:
        families: the first one's error shape is for paths that are nobody's.

    Raises:
        ValueError: two families give one method and path different operations.
    """

    def __init__(self, families: Sequence[Family]) -> None:
        self._default = families[0]
        self._plain: dict[str, Methods] = {}
        self._root = _Step()
        self._prefixes = [(prefix, family) for family in families for prefix in family.prefixes]
        for family in families:
            for route in family.routes:
                methods = self._methods_of(route)
                _add(methods, route.method, family, route)
                if route.method == "GET":
                    _add(methods, "HEAD", family, route)

    def match(self, method: str, path: str) -> Match:
        """Say who serves a request, and what it asks for.

        Raises:
            UnknownPath: nobody serves the path.
            WrongMethod: the path is served, but not with this method.
        """
        path = _trimmed(path)
        methods = self._plain.get(path)
        if methods is not None:
            return _of_method(methods, method)
        step, params = self._walk(path)
        found = _of_method(step.methods, method)
        return Match(found.families, found.operation, params)

    def family_of(self, path: str) -> Family:
        """Whose error shape a path gets, whether it is served or not."""
        methods = self._plain.get(_trimmed(path))
        if methods is not None:
            return next(iter(methods.values())).families[0]
        return next((family for prefix, family in self._prefixes if path.startswith(prefix)), self._default)

    def _methods_of(self, route: Route) -> Methods:
        if "{" not in route.template:
            return self._plain.setdefault(route.template, {})
        step = self._root
        for segment in route.template[1:].split("/"):
            if not segment.startswith("{"):
                step = step.next.setdefault(segment, _Step())
                continue
            name = segment[1:-1].removeprefix("*")
            step.any = step.any or _Step(name=name, takes_rest=segment.startswith("{*"))
            step = step.any
        return step.methods

    def _walk(self, path: str) -> tuple[_Step, Mapping[str, str]]:
        step, params = self._root, {}
        segments = path[1:].split("/")
        for i, segment in enumerate(segments):
            literal = step.next.get(segment)
            if literal is not None:
                step = literal
                continue
            if step.any is None or not segment:
                raise UnknownPath(_NOT_SERVED)
            step = step.any
            if step.takes_rest:
                params[step.name] = unquote("/".join(segments[i:]))
                break
            params[step.name] = unquote(segment)
        if not path.startswith("/") or not step.methods:
            raise UnknownPath(_NOT_SERVED)
        return step, params


def choose(match: Match, path: str, body: Body) -> Family:
    """The family that a body is of; where none claims it the first one, whose `parse` then says what is wrong."""
    families = match.families
    if len(families) == 1:
        return families[0]
    return next((family for family in families if family.claims(path, body)), families[0])


def _add(methods: Methods, method: str, family: Family, route: Route) -> None:
    earlier = methods.get(method)
    if earlier is None:
        methods[method] = Match((family,), route.operation, _NO_PARAMS)
        return
    if earlier.operation != route.operation:
        raise ValueError(f"{method} {route.template} is {earlier.operation} and {route.operation} at once")
    methods[method] = Match((*earlier.families, family), route.operation, _NO_PARAMS)


def _of_method(methods: Methods, method: str) -> Match:
    found = methods.get(method)
    if found is None:
        allow = ", ".join(methods)
        raise WrongMethod(f"this path takes {allow}", allow=allow)
    return found


def _trimmed(path: str) -> str:
    return path[:-1] if path.endswith("/") and path not in _KEPT else path
