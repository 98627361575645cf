"""Faulty files and the exact lines that say so."""

import pytest

from coordinator.config import ConfigError, Known, Problem, parse

ENGINES = "mindie, vllm, sglang, microserving, xllm, disaggpb, hybrid"
PAIR = "cluster:\n  instances:\n    - role: prefill\n      url: http://a:1\n    - role: decode\n      url: http://b:2\n"


def instance(line: str) -> str:
    return f"cluster:\n  instances:\n    - role: prefill\n      url: http://a:1\n      {line}\n"


def url(text: str) -> str:
    return f"cluster:\n  instances:\n    - role: prefill\n      url: {text}\n"


URL = "c.yaml:4: cluster.instances[0].url: "

FAULTY = {
    # the file as a whole
    "empty": ("", "c.yaml: the file is empty"),
    "only comments": ("# nothing\n\n", "c.yaml: the file is empty"),
    "only a document mark": ("---\n", "c.yaml: the file is empty"),
    "a list": ("- a\n", "c.yaml:1: must hold keys like 'cluster:', not a list"),
    "a text": ("\n'a'\n", "c.yaml:2: must hold keys like 'cluster:', not a single value"),
    "two documents": (
        "server: {}\n---\nserver: {}\n",
        "c.yaml:2: a second document begins; one file holds one",
    ),
    # well-formed YAML that is not read
    "alias": (
        "server: &a\n  port: 1\nlimits: *a\n",
        "c.yaml:3: limits: aliases (*name) are not read; write the value out",
    ),
    "tag": (
        "server: !!python/object/apply:os.system ['true']\n",
        "c.yaml:1: server: the tag 'python/object/apply:os.system' is not allowed",
    ),
    "key given twice": (
        "server:\n  port: 1\n  workers: 2\n  port: 3\n",
        "c.yaml:4: server.port: key given twice; the first one is in line 2",
    ),
    "section given twice": (
        "server:\n  port: 1\nlimits: {}\nserver:\n  prt: 3\n",
        "c.yaml:4: server: key given twice; the first one is in line 1",
    ),
    "a list as key": ("server:\n  ? [1]\n  : 2\n", "c.yaml:2: server: keys must be text"),
    "a number that is none": (
        "limits:\n  max_queue: 0x_\n",
        "c.yaml:2: limits.max_queue: '0x_' cannot be read as a value of type int",
    ),
    # keys
    "section with a typo": ("servr:\n  port: 1\n", "c.yaml:1: servr: unknown key; did you mean 'server'?"),
    "key with a typo": ("server:\n  prot: 1\n", "c.yaml:2: server.prot: unknown key; did you mean 'port'?"),
    "key in another letter case": ("server:\n  Port: 1\n", "c.yaml:2: server.Port: unknown key; did you mean 'port'?"),
    "key of another section": (
        "server:\n  connect_s: 1\n",
        "c.yaml:2: server.connect_s: unknown key; did you mean 'timeouts.connect_s'?",
    ),
    "key that is like none": (
        "retry:\n  zzz: 1\n",
        "c.yaml:2: retry.zzz: unknown key; known keys: max_attempts, max_recomputes",
    ),
    "odd key": (
        'retry:\n  "a\\nb": 1\n',
        "c.yaml:2: retry.'a\\nb': unknown key; known keys: max_attempts, max_recomputes",
    ),
    "mistyped required key": (
        "cluster:\n  instances:\n    - url: http://a:1\n      rolle: prefill\n",
        "c.yaml:4: cluster.instances[0].rolle: unknown key; did you mean 'role'?",
    ),
    "missing role": (
        "cluster:\n  instances:\n    - url: http://a:1\n",
        "c.yaml:3: cluster.instances[0].role: missing; this key is required",
    ),
    "missing policy of a role": (
        "scheduling:\n  policy:\n    prefill: a\n",
        "c.yaml:2: scheduling.policy.decode: missing; this key is required",
    ),
    # types
    "text for a port": (
        "server:\n  port: http\n",
        "c.yaml:2: server.port: must be a whole number, not text 'http'",
    ),
    "quoted number": (
        'server:\n  port: "80"\n',
        "c.yaml:2: server.port: must be a whole number, not text '80'; leave out the quotes: 80",
    ),
    "fraction": ("limits:\n  max_queue: 1.5\n", "c.yaml:2: limits.max_queue: must be a whole number, not 1.5"),
    "truth for a number": ("timeouts:\n  drain_s: yes\n", "c.yaml:2: timeouts.drain_s: must be a number, not true"),
    "number for text": (
        "cluster:\n  model: 7\n",
        'c.yaml:2: cluster.model: must be text, not 7; put it in quotes: "7"',
    ),
    "number for truth": (
        "server:\n  route_headers: 1\n",
        "c.yaml:2: server.route_headers: must be true or false, not 1",
    ),
    "list for a section": ("retry: [1]\n", "c.yaml:1: retry: must be a mapping of keys, not a list"),
    "mapping for a list": (
        "cluster:\n  instances:\n    a: 1\n",
        "c.yaml:2: cluster.instances: must be a list, not a mapping",
    ),
    "text for an instance": (
        "cluster:\n  instances:\n    - http://a:1\n",
        "c.yaml:3: cluster.instances[0]: must be a mapping of keys, not text 'http://a:1'",
    ),
    # ranges and choices
    "port too high": ("server:\n  port: 70000\n", "c.yaml:2: server.port: must be at most 65535, not 70000"),
    "negative limit": ("limits:\n  max_requests: -1\n", "c.yaml:2: limits.max_requests: must be at least 1, not -1"),
    "negative time": ("timeouts:\n  drain_s: -0.5\n", "c.yaml:2: timeouts.drain_s: must be at least 0, not -0.5"),
    "endless time": (
        "timeouts:\n  drain_s: .inf\n",
        "c.yaml:2: timeouts.drain_s: must be a finite number, not Infinity",
    ),
    "factor of zero": (
        "scheduling:\n  load_balance:\n    bytes_to_tokens: 0\n",
        "c.yaml:3: scheduling.load_balance.bytes_to_tokens: must be more than 0, not 0",
    ),
    "huge number": (
        f"limits:\n  max_queue: 0x{'f' * 6000}\n",
        "c.yaml:2: limits.max_queue: must be at most 1000000, not a huge number",
    ),
    "empty text": ("cluster:\n  model: ''\n", "c.yaml:2: cluster.model: must not be empty"),
    "long text": (
        f"cluster:\n  model: {'m' * 1025}\n",
        "c.yaml:2: cluster.model: must have at most 1024 characters, not 1025",
    ),
    "unknown role": (
        "cluster:\n  instances:\n    - role: decoder\n      url: http://a:1\n",
        (
            "c.yaml:3: cluster.instances[0].role: must be one of: prefill, decode, hybrid; not 'decoder'; "
            "did you mean 'decode'?"
        ),
    ),
    "unknown level": (
        "logging:\n  level: warn\n",
        "c.yaml:2: logging.level: must be one of: debug, info, warning, error; not 'warn'; did you mean 'warning'?",
    ),
    "unknown engine": (
        "cluster:\n  engine: vlm\n",
        f"c.yaml:2: cluster.engine: must be one of: {ENGINES}; or module:Class, not 'vlm'; did you mean 'vllm'?",
    ),
    "unknown engine of an instance": (
        instance("engine: nope"),
        f"c.yaml:5: cluster.instances[0].engine: must be one of: {ENGINES}; or module:Class, not 'nope'",
    ),
    "policy that is no name": (
        "scheduling:\n  policy: a b\n",
        "c.yaml:2: scheduling.policy: must be the name of a policy or module:Class, not 'a b'",
    ),
    "id with a space": (
        instance("id: a b"),
        (
            "c.yaml:5: cluster.instances[0].id: must be 1 to 128 characters out of a-z A-Z 0-9 . _ : @ + = ~ , [ ] -; "
            "not 'a b'"
        ),
    ),
    "health path": (
        "health:\n  path: health\n",
        "c.yaml:2: health.path: must be a path that begins with / and has no spaces, not 'health'",
    ),
    "listening on a URL": (
        "server:\n  host: http://a\n",
        "c.yaml:2: server.host: 'http://a' is not a host name or an IP address",
    ),
    # addresses of instances
    "URL without scheme": (
        url("10.0.0.1:9001"),
        URL + "the URL must begin with http:// or https://; did you mean 'http://10.0.0.1:9001'?",
    ),
    "URL of another scheme": (url("grpc://a:1"), URL + "the URL must begin with http:// or https://, not 'grpc://'"),
    "URL without host": (url("http://:9001"), URL + "the URL has no host"),
    "URL with port 0": (url("http://a:0"), URL + "the port 0 is not in 1..65535"),
    "URL with a high port": (url("http://a:70000"), URL + "the port 70000 is not in 1..65535"),
    "URL with a text port": (url("http://a:http"), URL + "the port 'http' is not a number"),
    "URL with a path": (url("http://a:1/v1"), URL + "the URL must end after host and port: no path, query or fragment"),
    "URL with a password": (url("http://a:b@c:1"), URL + "the URL must not hold a user name or password"),
    "URL with bare IPv6": (url("http://::1:9001"), URL + "an IPv6 address stands in brackets, like http://[::1]:9001"),
    "URL with bad IPv4": (url("http://10.0.0.300:1"), URL + "'10.0.0.300' is not an IPv4 address"),
    # between keys
    "same port twice": (
        "server:\n  port: 5\n  management_port: 5\n",
        "c.yaml:3: server.management_port: port 5 is taken by server.port",
    ),
    "port of a default": (
        "server:\n  port: 1026\n",
        "c.yaml:1: server.management_port: port 1026 is taken by server.port",
    ),
    "same id twice": (
        PAIR + "    - role: decode\n      url: http://c:3\n      id: prefill-a:1\n",
        "c.yaml:9: cluster.instances[2].id: the id 'prefill-a:1' is used twice, in line 3 and in line 9",
    ),
    "same instance twice": (
        PAIR + "    - role: decode\n      id: x\n      url: http://B:2/\n",
        "c.yaml:9: cluster.instances[2].url: the same decode instance is listed twice, in line 6 and in line 9",
    ),
}


@pytest.mark.parametrize(("text", "line"), FAULTY.values(), ids=FAULTY)
def test_faulty_file_is_told_in_one_line(text, line):
    with pytest.raises(ConfigError) as caught:
        parse(text, "c.yaml")
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{]: x", 1),
        ("a:\n  - [1,", 2),
        ("server:\n\tport: 1", 2),
        ("server:\n  host: 'open\n", 2),
        ("server:\n  port: 1\n  a: b: c\n", 3),
        ("server:\n  host: \x07\n", 2),
        ("%YAML 3.0\n---\na: 1", 1),
        ("[" * 5000, 1),
    ],
)
def test_bad_syntax_is_one_line_that_points_into_the_file(text, line):
    with pytest.raises(ConfigError) as caught:
        parse(text, "c.yaml")
    (problem,) = caught.value.problems
    assert problem.line == line
    assert problem.reason.startswith("is not YAML: ")
    assert "\n" not in str(caught.value)


def test_all_problems_come_at_once_in_the_order_of_the_file():
    text = (
        "limits:\n  max_queue: -1\nserver:\n  port: 7\n  management_port: 7\ncluster:\n  instances:\n"
        "    - role: prefil\n      url: http://a:1\n    - role: decode\n      url: http://b:1\n      id: x\n"
        "    - role: decode\n      url: http://c:1\n      id: x\n    - role: decode\n      url: http://d\n"
        "      opt: 1\n"
    )

    def refuse(engine, options):
        if "opt" in options:
            raise ValueError(f"{engine} knows no key opt")
        return options

    with pytest.raises(ConfigError) as caught:
        parse(text, "c.yaml", validate=refuse)
    assert [(problem.line, problem.path_in_file) for problem in caught.value.problems] == [
        (2, "limits.max_queue"),
        (5, "server.management_port"),
        (8, "cluster.instances[0].role"),
        (15, "cluster.instances[2].id"),
        (18, "cluster.instances[3].opt"),
    ]


def test_a_wrong_common_engine_is_told_once_and_no_engine_is_asked():
    asked = []
    with pytest.raises(ConfigError) as caught:
        parse(PAIR + "  engine: nope\n", validate=lambda engine, options: asked.append(engine))
    assert [problem.path_in_file for problem in caught.value.problems] == ["cluster.engine"]
    assert asked == []


def test_names_that_are_offered_can_be_given():
    known = Known(engines=("mine",), policies=("best", "other"))
    assert parse("cluster:\n  engine: mine\nscheduling: {policy: best}\n", known=known).cluster.engine == "mine"
    with pytest.raises(ConfigError) as caught:
        parse("scheduling:\n  policy: {prefill: bst, decode: other}\n", "c.yaml", known)
    assert str(caught.value) == (
        "c.yaml:2: scheduling.policy.prefill: must be one of: best, other; or module:Class, not 'bst'; "
        "did you mean 'best'?"
    )


def test_expansion_of_aliases_is_refused_and_cheap():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    with pytest.raises(ConfigError) as caught:
        parse("\n".join(lines))
    assert "cluster.yaml:2: a1[0]: aliases (*name) are not read; write the value out" in str(caught.value)


def test_nesting_is_bounded():
    with pytest.raises(ConfigError) as caught:
        parse(instance("opt: " + "[" * 60 + "]" * 60))
    assert [problem.reason for problem in caught.value.problems] == ["is nested too deeply"]


def test_problem_without_line_and_path():
    assert Problem("", None, "wrong").text("f") == "f: wrong"
    assert Problem("a.b", None, "wrong", "do so").text() == "a.b: wrong; do so"
