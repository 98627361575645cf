"""Pods and EndpointSlices, against an API server that lists and watches as the real one does."""

import asyncio
import json
import time

import kubernetes_validate
import pytest
from certificates import Authority
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kubernetes_api import (
    KubernetesApi,
    changed,
    endpoint,
    endpoint_slice,
    pod,
    selector,
    terminating,
    write_kubeconfig,
)

from coordinator.config import ConfigError, KubernetesSource, instance_from_mapping, parse
from coordinator.discovery.kubernetes import Access, KubernetesObjects
from coordinator.discovery.pauses import Pauses

from discovery_world import Notebook, validate  # isort: skip

ROLE = "pd-coordinator.io/role"
LABELS = {"app": "vllm", ROLE: "prefill"}


def engine_pod(name, ip, role="prefill", **more):
    return pod(name, ip, labels={"app": "vllm", ROLE: role}, ports={"http": 8000}, **more)


@pytest.fixture
def api():
    with KubernetesApi() as server:
        yield server


@pytest.fixture
def source(api, make, tmp_path):
    """Builds a source: `source(kind="pods", watch_s=9, ...)`."""

    def build(*, access=None, watch_s=60.0, **keys):
        given = {"label_selector": "app=vllm", "port": "http"} | keys
        access = access or Access(str(write_kubeconfig(tmp_path / "kubeconfig", api)))
        return KubernetesObjects(
            KubernetesSource(**given), access, make, watch_s=watch_s, pauses=Pauses(first_s=0.01, longest_s=0.05)
        )

    return build


def kinds(api):
    """What was asked: `list` or `watch`, in order."""
    return ["watch" if "watch" in query else "list" for _, query, _ in api.calls]


async def until(check):
    """Wait until something is so."""
    async with asyncio.timeout(20):
        while not check():  # noqa: ASYNC110  # the server runs in another thread
            await asyncio.sleep(0.005)


async def connected(api, count=1):
    """Wait until so many watches are open."""
    await until(lambda: api.watching == count)


# --- the fake is what it says


@pytest.mark.parametrize(
    "given",
    [
        pod("p0", "10.0.0.1", labels=LABELS, annotations={"a": "b"}, ports={"http": 8000}),
        pod("p0", None, phase="Pending", ready=False),
        terminating(pod("p0", "10.0.0.1")),
        endpoint_slice("s", [endpoint("10.0.0.1", "p0"), endpoint("10.0.0.2", ready=False)], ports={"http": 8000}),
    ],
    ids=["pod", "pending", "terminating", "slice"],
)
def test_objects_of_the_tests_are_valid(given):
    kubernetes_validate.validate(given, "1.33", strict=True)


def test_selectors_of_the_fake():
    chosen = selector("app=vllm,tier in (a, b),x!=y,!gone,there")
    assert chosen({"app": "vllm", "tier": "b", "there": ""})
    assert not chosen({"app": "vllm", "tier": "c", "there": ""})
    assert not chosen({"app": "vllm", "tier": "a", "there": "", "gone": "1"})
    assert selector("")({})


# --- pods


async def test_ready_pods_are_instances(api, source, running):
    api.put(engine_pod("p0", "10.0.0.1", annotations={"pd-coordinator.io/model": "Qwen/Qwen3-8B"}))
    api.put(engine_pod("d0", "10.0.0.2", "decode"))
    api.put(engine_pod("p1", "10.0.0.3", ready=False))
    api.put(engine_pod("p2", None, phase="Pending", ready=False))
    api.put(engine_pod("p3", "10.0.0.4", phase="Succeeded"))
    api.put(terminating(engine_pod("p4", "10.0.0.5")))
    api.put(pod("other", "10.0.0.6", labels={"app": "web"}))
    api.put(engine_pod("elsewhere", "10.0.0.7", namespace="other"))
    notebook = running(source())
    await notebook.until(lambda n: n.instances is not None)
    found = {one.id: one for one in notebook.instances}
    assert found.keys() == {"p0", "d0"}
    assert (found["p0"].url, found["p0"].role, found["p0"].model) == (
        "http://10.0.0.1:8000",
        "prefill",
        "Qwen/Qwen3-8B",
    )
    assert (found["d0"].role, found["d0"].model, found["d0"].engine) == ("decode", "m", "vllm")
    assert notebook.faults == {}


async def test_pods_come_change_and_go(api, source, running):
    notebook = running(source())
    await connected(api)
    starting = engine_pod("p0", "10.0.0.1", ready=False)
    api.put(starting)
    api.put(engine_pod("d0", "10.0.0.2", "decode"))
    await notebook.until(lambda n: n.ids == ["d0"])
    api.put(engine_pod("p0", "10.0.0.1"))
    await notebook.until(lambda n: n.ids == ["d0", "p0"])
    api.put(terminating(engine_pod("p0", "10.0.0.1")))
    await notebook.until(lambda n: n.ids == ["d0"])
    api.delete("Pod", "p0")
    api.put(engine_pod("p0", "10.0.0.9"))  # a StatefulSet's next one
    await notebook.until(lambda n: "http://10.0.0.9:8000" in n.urls)
    api.put(changed(engine_pod("p0", "10.0.0.9"), metadata={"labels": {"app": "web"}}))  # no longer selected
    await notebook.until(lambda n: n.ids == ["d0"])
    assert kinds(api) == ["list", "watch"]


async def test_what_does_not_matter_is_not_told(api, source, running):
    api.put(engine_pod("p0", "10.0.0.1"))
    notebook = running(source())
    await connected(api)
    await notebook.until(lambda n: n.told == 2)
    for number in range(5):
        api.put(changed(engine_pod("p0", "10.0.0.1"), metadata={"annotations": {"number": str(number)}}))
    api.put(engine_pod("d0", "10.0.0.2", "decode"))
    await notebook.until(lambda n: n.ids == ["d0", "p0"])
    assert notebook.told == 3


async def test_what_pods_say_about_themselves(api, source, running):
    says = {
        "pd-coordinator.io/engine": "vllm",
        "pd-coordinator.io/group": "g1",
        "pd-coordinator.io/port": "metrics",
        "pd-coordinator.io/options": '{"block_size": 32}',
    }
    given = pod("p0", "fd00::7", labels=LABELS, annotations=says, ports={"http": 8000, "metrics": 9000})
    api.put(given)
    notebook = running(source(options={"block_size": 16, "max_requests": 3}, group="g0", namespaced_ids=True))
    await notebook.until(lambda n: n.instances is not None)
    (one,) = notebook.instances
    assert (one.id, one.url, one.group, one.options) == (
        "p0.serving",
        "http://[fd00::7]:9000",
        "g1",
        {"block_size": 32},
    )
    assert one.capacity.max_requests == 3


async def test_other_names_of_labels(api, source, running):
    api.put(pod("p0", "10.0.0.1", labels={"app": "vllm", "component": "decode", ROLE: "prefill"}))
    notebook = running(source(role_label="component", port=7000, port_label=None))
    await notebook.until(lambda n: n.instances is not None)
    assert [(one.role, one.url) for one in notebook.instances] == [("decode", "http://10.0.0.1:7000")]


@pytest.mark.parametrize(
    ("labels", "annotations", "port", "told"),
    [
        ({}, {}, 8000, "it has no role: no label or annotation pd-coordinator.io/role, and none is set"),
        ({ROLE: "prefil"}, {}, 8000, "did you mean 'prefill'?"),
        ({ROLE: "prefill"}, {}, None, "it has no port: none is said, and none is set"),
        ({ROLE: "prefill"}, {}, "grpc", "it has no port of the name 'grpc'"),
        ({ROLE: "prefill", "pd-coordinator.io/port": "99999"}, {}, None, "the port 99999 is not in 1..65535"),
        ({ROLE: "prefill"}, {"pd-coordinator.io/options": "nonsense"}, 8000, "its options are no JSON object"),
        ({ROLE: "prefill"}, {"pd-coordinator.io/options": "[1]"}, 8000, "its options are no JSON object"),
        ({ROLE: "prefill"}, {"pd-coordinator.io/options": '{"bad": 1}'}, 8000, "this engine has no such key"),
        ({ROLE: "prefill", "pd-coordinator.io/engine": "vlm"}, {}, 8000, "did you mean 'vllm'?"),
    ],
)
async def test_a_pod_that_cannot_be_used_is_told(api, source, running, labels, annotations, port, told):  # noqa: PLR0917
    api.put(pod("bad", "10.0.0.1", labels={"app": "vllm", **labels}, annotations=annotations, ports={"http": 8000}))
    good = {"app": "vllm", ROLE: "decode", "pd-coordinator.io/port": "8000"}
    api.put(pod("good", "10.0.0.2", labels=good))
    notebook = running(source(port=port))
    await notebook.until(lambda n: n.instances is not None)
    assert notebook.ids == ["good"]
    assert told in notebook.faults["bad"]


@pytest.mark.parametrize(
    "key", ["engine_key_env", "engine_key_file", "ca_file", "url", "server_name", "tokenizer", "id"]
)
async def test_a_pod_cannot_choose_files_secrets_or_addresses(api, source, running, key):
    options = {"pd-coordinator.io/options": json.dumps({key: "HOME"})}
    api.put(engine_pod("evil", "10.0.0.1", annotations=options))
    notebook = running(source())
    await notebook.until(lambda n: n.instances is not None)
    assert notebook.instances == []
    assert f"not '{key}'" in notebook.faults["evil"]


async def test_a_pod_cannot_name_code(api, source, running):
    api.put(engine_pod("evil", "10.0.0.1", annotations={"pd-coordinator.io/engine": "os:system"}))
    notebook = running(source())
    await notebook.until(lambda n: n.instances is not None)
    assert notebook.instances == []
    assert "only the configuration file may name code to load" in notebook.faults["evil"]


# --- EndpointSlices


async def test_endpoints_that_are_ready_are_instances(api, source, running):
    labels = {"kubernetes.io/service-name": "prefill"}
    points = [
        endpoint("10.0.0.1", "p0"),
        endpoint("10.0.0.2", "p1", ready=False),
        endpoint("10.0.0.3", "p2", terminating=True),
        endpoint("10.0.0.4"),
    ]
    del points[3]["conditions"]  # nothing is known: it counts as ready
    api.put(endpoint_slice("prefill-x1", points, ports={"http": 8000}, labels=labels))
    notebook = running(
        source(kind="endpointslices", label_selector="kubernetes.io/service-name=prefill", role="prefill")
    )
    await notebook.until(lambda n: n.instances is not None)
    assert [(one.id, one.url) for one in notebook.instances] == [
        ("p0", "http://10.0.0.1:8000"),
        ("prefill-10.0.0.4:8000", "http://10.0.0.4:8000"),
    ]


async def test_an_endpoint_in_two_slices_is_there_once(api, source, running):
    """While slices are split and merged an endpoint may be in both; a Service of both families has one for each."""
    labels = {"app": "vllm"}
    six = [endpoint("fd00::1", "p0"), endpoint("fd00::2", "p1")]
    api.put(endpoint_slice("a6", six, ports={"http": 8000}, labels=labels, kind="IPv6"))
    api.put(endpoint_slice("b4", [endpoint("10.0.0.1", "p0")], ports={"http": 8000}, labels=labels))
    api.put(endpoint_slice("c4", [endpoint("10.0.0.1", "p0")], ports={"http": 8000}, labels=labels))
    notebook = running(source(kind="endpointslices", role="prefill"))
    await notebook.until(lambda n: n.instances is not None)
    assert notebook.urls == ["http://10.0.0.1:8000", "http://[fd00::2]:8000"]
    await connected(api)
    api.delete("EndpointSlice", "b4")
    api.put(endpoint_slice("c4", [], ports={"http": 8000}, labels=labels))
    await notebook.until(lambda n: n.urls == ["http://[fd00::1]:8000", "http://[fd00::2]:8000"])


async def test_slices_with_null_in_them(api, source, running):
    given = endpoint_slice("a", [], labels={"app": "vllm"})
    api.put(given | {"endpoints": None, "ports": None})
    api.put(endpoint_slice("b", [endpoint("10.0.0.1", "p0")], ports={"http": None}, labels={"app": "vllm"}))
    notebook = running(source(kind="endpointslices", role="prefill"))
    await notebook.until(lambda n: n.instances is not None)
    assert notebook.faults == {"p0": "it has no port of the name 'http'"}


# --- lists and watches


async def test_lists_come_in_pages(api, source, running):
    api.page_items = 7
    for number in range(40):
        api.put(engine_pod(f"p{number:02}", f"10.0.0.{number + 1}"))
    notebook = running(source())
    await notebook.until(lambda n: n.instances is not None)
    assert len(notebook.instances) == 40
    assert kinds(api)[:6] == ["list"] * 6
    assert api.calls[1][1]["continue"]


async def test_a_page_that_has_expired_begins_the_list_anew(api, source, running, monkeypatch):
    api.page_items = 2
    for number in range(5):
        api.put(engine_pod(f"p{number}", f"10.0.0.{number + 1}"))
    refuse = api._list
    seen = []

    def once(request, *rest):
        if "continue" in request.query and not seen:
            seen.append(1)
            api.other_writes()
            api.compact()
        return refuse(request, *rest)

    monkeypatch.setattr(api, "_list", once)
    notebook = running(source())
    await notebook.until(lambda n: n.instances is not None)
    assert len(notebook.instances) == 5
    assert kinds(api)[:5] == ["list"] * 5
    assert notebook.trouble == ""


async def test_a_watch_that_ends_goes_on_from_its_last_version(api, source, running):
    api.put(engine_pod("p0", "10.0.0.1"))
    notebook = running(source())
    await connected(api)
    api.put(engine_pod("p1", "10.0.0.2"))
    await notebook.until(lambda n: len(n.ids) == 2)
    last = api._version
    api.end_watches()
    await until(lambda: kinds(api).count("watch") == 2)  # or the first one may still tell of the next
    api.put(engine_pod("p2", "10.0.0.3"))
    await notebook.until(lambda n: len(n.ids) == 3)
    assert kinds(api) == ["list", "watch", "watch"]
    assert int(api.calls[2][1]["resourceVersion"]) == last
    assert api.calls[2][1]["allowWatchBookmarks"] == "true"


async def test_a_watch_that_breaks_goes_on_too_and_nothing_is_lost(api, source, running):
    api.put(engine_pod("p0", "10.0.0.1"))
    notebook = running(source())
    await connected(api)
    api.cut_watches()
    api.put(engine_pod("p1", "10.0.0.2"))
    await notebook.until(lambda n: len(n.ids) == 2)
    assert kinds(api).count("list") == 1
    assert notebook.trouble == ""


async def test_a_bookmark_spares_a_new_list(api, source, running):
    """Others write a lot, the history is cut, and only the bookmark says how far we are."""
    api.put(engine_pod("p0", "10.0.0.1"))
    objects = source()
    notebook = running(objects)
    await connected(api)
    api.other_writes(500)
    api.bookmark()
    await until(lambda: objects._version == str(api._version))
    api.compact()
    api.cut_watches()
    await until(lambda: kinds(api).count("watch") == 2)
    await connected(api)
    api.put(engine_pod("p1", "10.0.0.2"))
    await notebook.until(lambda n: len(n.ids) == 2)
    assert kinds(api).count("list") == 1


@pytest.mark.parametrize("way", ["event", "status"])
async def test_a_version_that_is_gone_has_everything_listed_again(api, source, running, way):
    api.gone_as = way
    api.put(engine_pod("p0", "10.0.0.1"))
    api.put(engine_pod("p1", "10.0.0.2"))
    notebook = running(source())
    await connected(api)
    api.away()
    api.delete("Pod", "p0")
    api.put(engine_pod("p2", "10.0.0.3"))
    api.compact()
    api.back()
    await notebook.until(lambda n: n.ids == ["p1", "p2"])
    assert kinds(api).count("list") == 2
    await connected(api)
    api.put(engine_pod("p3", "10.0.0.4"))
    await notebook.until(lambda n: n.ids == ["p1", "p2", "p3"])


async def test_a_server_that_is_away_changes_nothing_and_is_told(api, source, running):
    api.put(engine_pod("p0", "10.0.0.1"))
    notebook = running(source())
    await connected(api)
    api.away()
    await notebook.until(lambda n: "Cannot connect" in n.trouble)
    assert notebook.ids == ["p0"]
    api.delete("Pod", "p0")
    api.put(engine_pod("p1", "10.0.0.2"))
    api.back()
    await notebook.until(lambda n: n.ids == ["p1"] and n.trouble == "")
    assert kinds(api).count("list") == 1


async def test_a_server_that_is_not_there_at_the_start_is_told(api, source, running):
    api.away()
    notebook = running(source())
    await notebook.until(lambda n: "Cannot connect" in n.trouble)
    assert notebook.instances is None
    api.put(engine_pod("p0", "10.0.0.1"))
    api.back()
    await notebook.until(lambda n: n.ids == ["p0"] and n.trouble == "")


async def test_a_slow_server_that_writes_in_small_pieces(api, source, running):
    api.delay_s, api.piece_bytes = 0.05, 7
    api.put(engine_pod("p0", "10.0.0.1"))
    notebook = running(source())
    await connected(api)
    api.put(engine_pod("p1", "10.0.0.2", annotations={"pd-coordinator.io/model": "mödel/✓"}))
    await notebook.until(lambda n: len(n.ids) == 2)
    assert notebook.instances[1].model == "mödel/✓"


async def test_a_silent_server_is_given_up(api, source, running, monkeypatch):
    monkeypatch.setattr("coordinator.discovery.kubernetes.calls.CALL_S", 0.1)
    api.put(engine_pod("p0", "10.0.0.1"))
    notebook = running(source())
    await connected(api)
    api.silent = True
    api.end_watches()
    await notebook.until(lambda n: n.trouble == "no answer within 0.1 s")
    assert notebook.ids == ["p0"]
    api.silent = False
    await notebook.until(lambda n: n.trouble == "")


async def test_a_watch_that_the_server_forgets_ends_by_our_own_clock(api, source, running, monkeypatch):
    monkeypatch.setattr("coordinator.discovery.kubernetes.calls.GRACE_S", -0.9)
    running(source(watch_s=1.0))  # ours ends a moment after it begins, long before the server's
    await until(lambda: kinds(api).count("watch") >= 3)
    assert kinds(api).count("list") == 1


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("nonsense\n", "the API server says what cannot be read"),
        ('{"type": "ADDED", "object": {"metadata": {"name": 7}}}\n', "the API server says what cannot be read"),
        (
            '{"type":"ERROR","object":{"kind":"Status","code":500,"message":"etcd is ill"}}\n',
            "the watch ended: etcd is ill",
        ),
    ],
)
async def test_lines_that_make_no_sense_are_told(api, source, running, line, told):
    api.put(engine_pod("p0", "10.0.0.1"))
    notebook = running(source())
    await connected(api)
    api.say(line)
    await notebook.until(lambda n: told in n.trouble)
    assert notebook.ids == ["p0"]
    api.put(engine_pod("p1", "10.0.0.2"))
    await notebook.until(lambda n: n.ids == ["p0", "p1"] and n.trouble == "")


async def test_events_of_unknown_types_are_passed_over(api, source, running):
    notebook = running(source())
    await connected(api)
    api.say('{"type": "SOMETHING", "object": {}}\n')
    api.put(engine_pod("p0", "10.0.0.1"))
    await notebook.until(lambda n: n.ids == ["p0"])
    assert kinds(api) == ["list", "watch"]


async def test_a_server_that_has_too_much_to_do_is_left_alone_for_as_long_as_it_says(api, source, running):
    api.refuse, api.headers = (429, "too many requests"), {"Retry-After": "1"}
    began_s = time.monotonic()
    notebook = running(source())
    await notebook.until(lambda n: n.trouble == "status 429: too many requests")
    api.refuse = None
    await until(lambda: len(api.calls) >= 2)
    assert time.monotonic() - began_s >= 1
    await notebook.until(lambda n: n.trouble == "")


async def test_missing_rights_are_told(api, source, running):
    api.refuse = (403, 'pods is forbidden: User "me" cannot list resource "pods" in the namespace "serving"')
    notebook = running(source())
    await notebook.until(lambda n: n.trouble.startswith("status 403: pods is forbidden"))
    assert notebook.instances is None


# --- getting in


@pytest.fixture
def account(tmp_path, monkeypatch):
    """A service account's folder, as it is mounted into pods, and a server that wants its token, with TLS."""
    folder = tmp_path / "account"
    folder.mkdir()
    authority = Authority(folder, "ca")
    authority.file.rename(folder / "ca.crt")
    (folder / "token").write_text("first-token")
    (folder / "namespace").write_text("serving")
    with KubernetesApi(authority.issue("api")) as api:
        api.tokens = {"first-token"}
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
        yield folder, api


async def test_pods_use_their_service_account(account, source, running):
    folder, api = account
    api.put(engine_pod("p0", "10.0.0.1"))
    notebook = running(source(access=Access(None, account=folder)))
    await notebook.until(lambda n: n.ids == ["p0"])
    assert api.calls[0][0] == "/api/v1/namespaces/serving/pods"


async def test_a_token_that_was_exchanged_is_used_from_the_next_watch_on(account, source, running):
    folder, api = account
    api.put(engine_pod("p0", "10.0.0.1"))
    notebook = running(source(access=Access(None, account=folder)))
    await connected(api)
    api.tokens = {"second-token"}
    api.end_watches()
    await notebook.until(lambda n: n.trouble == "status 401: Unauthorized")
    assert notebook.ids == ["p0"]
    (folder / "token").write_text("second-token\n")
    await notebook.until(lambda n: n.trouble == "")
    assert [token for _, _, token in api.calls][-1] == "second-token"


async def test_another_authority_is_not_trusted(account, source, running, tmp_path):
    folder, api = account
    other = Authority(tmp_path, "other")
    other.file.replace(folder / "ca.crt")
    notebook = running(source(access=Access(None, account=folder)))
    await notebook.until(lambda n: "CERTIFICATE_VERIFY_FAILED" in n.trouble)
    assert api.calls == []


async def test_outside_of_a_cluster_the_reason_says_so(source, running, tmp_path, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    notebook = running(source(access=Access(None, account=tmp_path / "none")))
    await notebook.until(lambda n: n.trouble == "the service account cannot be used: Service host/port is not set.")


async def test_a_kubeconfig_with_a_token_file(account, source, running, tmp_path):
    folder, api = account
    api.put(engine_pod("p0", "10.0.0.1"))
    (folder / "token").write_text("first-token\n")
    path = write_kubeconfig(tmp_path / "config", api, authority=folder / "ca.crt", token_file=folder / "token")
    notebook = running(source(access=Access(str(path), "here")))
    await notebook.until(lambda n: n.ids == ["p0"])


@pytest.mark.parametrize(("text", "context"), [("nonsense: [", None), ("{}", None), ("", None), (None, "elsewhere")])
async def test_a_kubeconfig_that_cannot_be_used_is_told(api, source, running, tmp_path, text, context):
    path = write_kubeconfig(tmp_path / "config", api)
    if text is not None:
        path.write_text(text)
    notebook = running(source(access=Access(str(path), context)))
    await notebook.until(lambda n: n.trouble.startswith(f"{path} cannot be used: "))


# --- configuration


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{kind: services}", "must be one of: pods, endpointslices"),
        ("{context: here}", "context needs kubeconfig beside it"),
        ("{role_label: 'a b'}", "must be the key of a label or annotation"),
        ("{lable_selector: x}", "did you mean 'label_selector'?"),
        ("{kubeconfig: none.yaml}", "cannot be read"),
    ],
)
def test_faulty_settings(text, told):
    with pytest.raises(ConfigError) as caught:
        parse(f"discovery:\n  kubernetes:\n    - {text}\n")
    assert told in str(caught.value)
    assert "cluster.yaml:3: discovery.kubernetes[0]" in str(caught.value)


# --- whatever happens, what is told last is what is there

NAMES = ("p0", "p1", "d0")
PUTS = st.builds(
    lambda name, ip, ready, selected, ends: ("put", name, ip, ready, selected, ends),
    st.sampled_from(NAMES),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
EVENTS = st.one_of(
    PUTS,
    PUTS,
    st.tuples(st.just("delete"), st.sampled_from(NAMES)),
    st.tuples(
        st.sampled_from(["end", "cut", "compact", "bookmark", "others", "away", "back", "wait", "forbid", "allow"])
    ),
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(EVENTS, max_size=25), st.sampled_from(["event", "status"]), st.sampled_from([None, 50]))
def test_what_is_told_last_is_what_is_there(tmp_path, events, gone_as, piece_bytes):
    with KubernetesApi() as api:
        api.gone_as, api.piece_bytes = gone_as, piece_bytes
        api.page_items = 2
        asyncio.run(live_through(api, events, tmp_path))


async def live_through(api, events, tmp_path):
    common = parse("cluster:\n  engine: vllm\n")
    source = KubernetesObjects(
        KubernetesSource(label_selector="app=vllm", port="http"),
        Access(str(write_kubeconfig(tmp_path / "kubeconfig", api))),
        lambda keys: instance_from_mapping(keys, common, validate),
        pauses=Pauses(first_s=0.001, longest_s=0.01),
    )
    notebook = Notebook()
    task = asyncio.create_task(source.run(notebook))
    listening, truth = True, {}
    for event in events:
        what = event[0]
        if what == "put":
            _, name, ip, ready, selected, ends = event
            given = pod(
                name,
                f"10.0.0.{ip}",
                ready=ready,
                labels={"app": "vllm" if selected else "web", ROLE: "prefill"},
                ports={"http": 8000},
            )
            api.put(terminating(given) if ends else given)
            truth[name] = f"http://10.0.0.{ip}:8000" if ready and selected and not ends else None
        elif what == "delete" and event[1] in truth:
            api.delete("Pod", event[1])
            del truth[event[1]]
        elif what in ("away", "back") and listening is (what == "away"):
            await asyncio.to_thread(getattr(api, what))
            listening = what == "back"
        elif what in ("forbid", "allow"):
            api.refuse = (403, "no") if what == "forbid" else None
        else:
            {"end": api.end_watches, "cut": api.cut_watches, "compact": api.compact, "bookmark": api.bookmark,
             "others": api.other_writes}.get(what, lambda: None)()  # fmt: skip
            await asyncio.sleep(0.01)
    api.refuse = None
    if not listening:
        await asyncio.to_thread(api.back)
    there = {name: url for name, url in truth.items() if url is not None}
    await notebook.until(
        lambda n: n.instances is not None and not n.trouble and {one.id: one.url for one in n.instances} == there
    )
    task.cancel()
    await asyncio.wait([task])
