"""What docs/api.md and docs/errors.md show of refusals is what the front door sends."""

import json
import re
import sys
from pathlib import Path

import pytest

from coordinator.api.families import FAMILIES
from coordinator.core.errors import EngineFailed, InvalidKey, Side, TooManyRequests
from coordinator.security.keys import Key, new_hash, split_hash

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit/frontdoor"))

from door_world import World

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "docs/api.md").read_text().partition("### Keys and limits")[2].partition("\n### ")[0]
SHAPES = (ROOT / "docs/errors.md").read_text().partition("## Shapes")[2].partition("\n## ")[0]
ROW = re.compile(r"^\| (`/[^|]+`) \| (\w+) \| `([^|]+)` \| `([^|]+)` \|$", re.MULTILINE)
SHOWN = {
    path: (family, unknown, limited)
    for paths, family, unknown, limited in ROW.findall(SECTION)
    for path in re.findall(r"`([^`]+)`", paths)
}
GOOD = ["Authorization: Bearer the-key-of-team-a"]


@pytest.fixture
def world():
    """A front door for one key, which may make one request a minute."""
    made = World()
    made.door.guard.take([Key(0, "team-a", split_hash(new_hash("the-key-of-team-a"))[1], requests_per_minute=1)])
    return made


async def answer(world, path, headers):
    """Status line, headers and body of a call."""
    made = await world.ask(path.replace("{model}", "m"), b"{}", headers=headers)
    head, _, body = b"".join(made.writes).partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return first, {line.partition(": ")[0].lower(): line.partition(": ")[2] for line in lines}, body.decode()


def test_every_path_that_needs_a_key_for_an_engine_is_shown():
    paths = {
        route.template for family in FAMILIES for route in family.routes if route.operation in ("infer", "tokenize")
    }
    assert set(SHOWN) == {path for path in paths if "/versions/" not in path}


@pytest.mark.parametrize("path", SHOWN)
async def test_a_wrong_key_is_answered_as_shown(world, path):
    first, headers, body = await answer(world, path, ["x-api-key: nonsense"])
    assert first == "HTTP/1.1 401 Unauthorized"
    assert headers["www-authenticate"] == 'Bearer realm="pd-coordinator"'
    assert "`WWW-Authenticate: " + headers["www-authenticate"] + "`" in SECTION
    assert "retry-after" not in headers
    assert body == SHOWN[path][1]


@pytest.mark.parametrize("path", SHOWN)
async def test_a_key_above_its_limit_is_answered_as_shown(world, path):
    await answer(world, "/v1/completions", GOOD)
    first, headers, body = await answer(world, path, GOOD)
    assert first == "HTTP/1.1 429 Too Many Requests"
    assert 1 <= int(headers["retry-after"]) <= 120
    assert "www-authenticate" not in headers
    assert body == SHOWN[path][2]


async def test_without_a_key_the_example_is_what_comes(world):
    first, headers, body = await answer(world, "/v1/completions", [])
    (example,) = re.findall(r"```text\n(HTTP/1.1 401.*?)```", SECTION, re.DOTALL)
    assert example.startswith(first + "\n")
    assert f"\nwww-authenticate: {headers['www-authenticate']}\n" in example
    assert f"\nContent-Length: {len(body)}\n" in example
    assert example.rstrip().endswith("\n\n" + body)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("error", [EngineFailed(Side.DECODE, "d0", "reset"), TooManyRequests("x"), InvalidKey("x")])
def test_each_family_has_its_row_with_the_fields_of_its_errors(family, error):
    rows = re.findall(r"^\| ([^|`]+) \| `(\{.*?\})`", SHAPES, re.MULTILINE)
    (shown,) = [body for names, body in rows if family.name in names.lower().split(", ")]
    assert fields(json.loads(shown)) == fields(json.loads(family.error_body(error)))


def fields(value):
    """Names at every level."""
    return {name: fields(item) for name, item in value.items()} if isinstance(value, dict) else None
