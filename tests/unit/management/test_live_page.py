"""The live page as it is served: what a browser may do with it, and what it must never hold."""

import base64
import hashlib
import re

import pytest

from coordinator.management.page import FILE, LivePage, policy


@pytest.fixture
def page():
    return LivePage()


@pytest.fixture
async def call(serve, page):
    _, client = await serve(extra=page.routes())
    return client


def rules(headers):
    return dict(rule.split(" ", 1) for rule in headers["Content-Security-Policy"].split("; "))


async def test_it_is_served_with_a_strict_policy(call):
    status, body, headers = await call("GET", "/")
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    found = rules(headers)
    assert found["default-src"] == "'none'"
    assert found["connect-src"] == "'self'"
    assert found["frame-ancestors"] == found["base-uri"] == found["form-action"] == "'none'"
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", body.decode(), re.DOTALL)
        assert found[rule] == f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"


async def test_who_has_it_is_told_so(call):
    _, _, headers = await call("GET", "/")
    tag = headers["ETag"]
    for known in (tag, f"W/{tag}", f'"x", {tag}'):
        status, body, again = await call("GET", "/", headers={"If-None-Match": known})
        assert (status, body) == (304, b"")
        assert again["Content-Security-Policy"] == headers["Content-Security-Policy"]
    assert (await call("GET", "/", headers={"If-None-Match": '"other"'}))[0] == 200


async def test_head_and_nothing_else(call):
    status, body, _ = await call("HEAD", "/")
    assert (status, body) == (200, b"")
    assert (await call("POST", "/", {}))[0] == 405


def test_a_page_without_scripts_may_run_none():
    assert "script-src 'none'" in policy("<style>a{}</style>")
    assert "style-src 'sha256-" in policy("<style>a{}</style>")


def test_nothing_comes_from_elsewhere(page):
    text = page._body.decode()
    assert FILE.endswith(".html")
    addresses = set(re.findall(r"https?://[^\s\"'<>)`]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}, "a name space is no address"
    for attribute in re.findall(r"\s(?:src|href)=[\"']?([^\"'\s>]+)", text):
        assert attribute.startswith(("data:", "#", "v1/")), attribute


def test_nothing_that_the_policy_would_stop(page):
    text = page._body.decode()
    head, _, rest = text.partition("</style>")
    markup = head.partition("<style>")[0] + rest.partition("<script>")[0]
    assert not re.search(r"\son[a-z]+=", markup), "handlers in attributes"
    assert not re.search(r"\sstyle=", markup), "styles in attributes"
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert word not in text


def test_a_key_is_never_kept(page):
    text = page._body.decode()
    stored = re.findall(r"(?:localStorage|sessionStorage)\.setItem\(([^,)]+)", text)
    assert set(stored) <= {'"theme"'}
    assert "document.cookie" not in text
    assert "indexedDB" not in text
