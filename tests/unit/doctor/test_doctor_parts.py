"""Dates of certificates, what this machine allows, what engines tell, and how it is shown."""

import datetime as dt
import json
import re
import resource
import socket

import pytest
import trustme
from engine_world import instance
from held_ports import HeldPorts

from coordinator import config
from coordinator.core.abilities import Identity, Verdict
from coordinator.core.errors import EngineFailed, EngineRefused, InternalError, Side
from coordinator.doctor import Level, as_json, as_text
from coordinator.doctor.advice import advice_for, told
from coordinator.doctor.dates import validities, validity
from coordinator.doctor.examination import pairs_of
from coordinator.doctor.examiners import Plain, Sglang, Silent, Vllm, _sums, examiner_of
from coordinator.doctor.findings import Report, fault, note, ok, warning
from coordinator.doctor.instances import odd_ones_out
from coordinator.doctor.machine import check_files, check_own_certificates, check_ports

NOW = dt.datetime.now(dt.UTC)


def days(number):
    return dt.timedelta(days=number)


def settings(**sections):
    return config.parse(json.dumps({"cluster": {"engine": "hybrid"}} | sections), "f")


class TestDates:
    @pytest.mark.parametrize("until", [NOW + days(3), dt.datetime(2049, 12, 31, tzinfo=dt.UTC),
                                       dt.datetime(2050, 1, 1, tzinfo=dt.UTC)])  # fmt: skip
    def test_both_kinds_of_dates(self, until):
        made = trustme.CA().issue_cert("a", not_before=NOW - days(9), not_after=until)
        (found,) = validities(made.cert_chain_pems[0].bytes().decode())
        assert abs(found.since - (NOW - days(9))) < dt.timedelta(seconds=1)
        assert abs(found.until - until) < dt.timedelta(seconds=1)

    def test_every_certificate_of_a_file(self):
        pem = "words\n" + "".join(trustme.CA().cert_pem.bytes().decode() for _ in range(3))
        assert len(validities(pem)) == 3
        assert validities("nothing of the kind") == []

    @pytest.mark.parametrize("der", [b"", b"\x30", b"\x30\x82", b"\x30\x03abc", b"\x30\x84\xff\xff\xff\xff", b"x" * 99])
    def test_what_is_none(self, der):
        with pytest.raises(ValueError, match="not a certificate"):
            validity(der)

    def test_every_cut(self):
        whole = trustme.CA().cert_pem.bytes().decode()
        (found,) = validities(whole)
        for end in range(30, len(whole) - 30, 97):
            with pytest.raises(ValueError, match=r"cut off|certificate|padding|start and end"):
                validities(whole[:end])
        assert found.since < found.until


class TestMachine:
    def test_files(self):
        given = settings(limits={"max_requests": 1000})
        (well,) = check_files(given, (10, 5000))
        assert (well.level, well.what) == (Level.OK, "5000 files may be open at once, 3256 may be needed")
        (free,) = check_files(given, (10, resource.RLIM_INFINITY))
        assert (free.level, free.what) == (Level.OK, "any number of files may be open at once, 3256 may be needed")
        (short,) = check_files(given, (10, 3000))
        assert short.level is Level.WARNING
        assert "3000 files may be open at once, limits.max_requests 1000 may need 3256" in short.what
        assert "lower limits.max_requests to 914" in short.advice
        assert settings(limits={"max_requests": 914}).limits.wanted_files <= 3000

    @pytest.fixture
    def port(self):
        with HeldPorts() as ports:
            yield ports.take()

    def test_ports(self, port):
        given = settings(server={"port": port, "management_port": 0})
        with socket.create_server(("127.0.0.1", port)):
            (found,) = check_ports(given, running=False)
            assert (found.level, found.subject) == (Level.FAULT, "server.port")
            assert "another program listens there" in found.what
            assert [one.level for one in check_ports(given, running=True)] == [Level.OK]
        assert [one.level for one in check_ports(given, running=False)] == [Level.OK]

    def test_an_address_that_is_not_ours(self):
        (found,) = check_ports(settings(server={"host": "192.0.2.1", "port": 7, "management_port": 0}), running=False)
        assert found.level is Level.FAULT
        assert "another program" not in found.what

    @pytest.mark.parametrize(
        ("since", "until", "level", "words"),
        [
            (-9, 90, Level.OK, "valid until"),
            (-9, 5, Level.WARNING, "expires soon"),
            (-9, -1, Level.FAULT, "expired on"),
            (1, 90, Level.FAULT, "not valid before"),
        ],
    )
    def test_certificates_of_our_own(self, tmp_path, since, until, level, words):
        made = trustme.CA().issue_cert("a", not_before=NOW + days(since), not_after=NOW + days(until))
        made.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "c.pem"))
        files = {"cert_file": str(tmp_path / "c.pem"), "key_file": str(tmp_path / "c.pem")}
        (found,) = check_own_certificates(settings(tls={"data": files}))
        assert (found.level, found.subject) == (level, "tls.data.cert_file")
        assert words in found.what

    def test_of_a_bundle_of_authorities_the_newest_counts(self, tmp_path):
        for name in ("old.pem", "bundle.pem"):
            with (tmp_path / name).open("ab") as file:
                for until in (-1, 500) if name == "bundle.pem" else (-1,):
                    made = trustme.CA().issue_cert("a", not_before=NOW - days(9), not_after=NOW + days(until))
                    file.write(made.cert_chain_pems[0].bytes())
        levels = [
            next(check_own_certificates(settings(tls={"engines": {"ca_file": str(tmp_path / name)}}))).level
            for name in ("old.pem", "bundle.pem")
        ]
        assert levels == [Level.FAULT, Level.OK]

    def test_a_file_that_is_none(self, tmp_path):
        (tmp_path / "c.pem").write_text("-----BEGIN CERTIFICATE-----\nnothing\n-----END CERTIFICATE-----")
        (found,) = check_own_certificates(settings(tls={"engines": {"ca_file": str(tmp_path / "c.pem")}}))
        assert found.level is Level.FAULT


PAGE = """# HELP vllm:prompt_tokens_by_source_total x
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 5.0
vllm:prompt_tokens_by_source_total{engine="1",source="local_compute"} 7.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 3.0
vllm:nixl_num_failed_transfers_total{engine="0"} 1.0
plain 2
odd{x="y"} no
"""


class TestExaminers:
    def test_a_page_is_summed(self):
        assert _sums(PAGE, "source") == {
            "local_compute": 12, "external_kv_transfer": 3, "vllm:nixl_num_failed_transfers_total": 1, "plain": 2
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("before", "after", "moved", "words"),
        [
            ({}, {}, None, "no counters"),
            ({}, {"local_compute": 9.0}, None, "no counters"),
            ({"external_kv_transfer": 1.0}, {"external_kv_transfer": 4.0}, True, "+3"),
            ({}, {"vllm:nixl_xfer_time_seconds_count": 1.0}, True, "nixl_xfer"),
            ({"external_kv_transfer": 1.0}, {"external_kv_transfer": 1.0}, False, "count no KV transfer"),
            ({}, {"external_kv_transfer": 0.0, "local_compute": 320.0}, False, "computed 320 prompt tokens itself"),
            (
                {},
                {"external_kv_transfer": 0.0, "vllm:nixl_num_failed_transfers_total": 2.0},
                False,
                "after a KV transfer had failed",
            ),
        ],
    )
    def test_vllm(self, before, after, moved, words):
        verdict = Vllm(None).judge(before, after)
        assert verdict.moved is moved
        assert words in verdict.why

    @pytest.mark.parametrize(("after", "moved"), [({}, None), ({"decodes": 1.0}, True), ({"decodes": 0.0}, False)])
    def test_sglang(self, after, moved):
        assert Sglang(None).judge({}, after).moved is moved

    def test_who_examines(self):
        class Mine:
            async def identify(self, instance, within_s):
                return Identity("decode")

            async def take_stock(self, decode, within_s):
                return {}

            def judge(self, before, after):
                return Verdict(moved=True, why="I say so")

        own = Mine()
        assert examiner_of("mine.py:Mine", own, None) is own
        assert type(examiner_of("vllm", object(), None)) is Vllm
        assert type(examiner_of("disaggpb", object(), None)) is Silent
        unknown = examiner_of("other:Engine", object(), None)
        assert type(unknown) is Plain
        assert unknown.judge({}, {}).moved is None


class TestPairs:
    def test_every_pair_once_and_everybody_early(self):
        instances = [instance(f"p{n}") for n in range(3)] + [instance(f"d{n}") for n in range(5)] + [instance("h0")]
        names = [pair.name for pair in pairs_of(instances)]
        assert names[0] == "h0"
        assert len(names) == len(set(names)) == 16
        early = {end for name in names[1:6] for end in name.split(" -> ")}
        assert early == {"p0", "p1", "p2", "d0", "d1", "d2", "d3", "d4"}

    def test_those_alone_that_can_be_placed(self):
        instances = [
            instance("p0", group="a"), instance("p1", group="b"), instance("d0", group="a"),
            instance("d1", engine="vllm", group="a"), instance("d2", group="a", model="other"),
        ]  # fmt: skip
        assert [pair.name for pair in pairs_of(instances)] == ["p0 -> d0"]

    def test_nobody_to_pair_with(self):
        assert list(pairs_of([instance("p0")])) == []


def test_different_versions_of_one_engine():
    rows = {"p0": (instance("p0"), "1"), "d0": (instance("d0"), "2"), "d1": (instance("d1", engine="vllm"), "3")}
    (found,) = odd_ones_out(rows)
    assert (found.level, found.subject) == (Level.WARNING, "mindie")
    assert "1: p0; 2: d0" in found.what


@pytest.mark.parametrize(
    ("error", "words", "advice"),
    [
        (
            EngineFailed(Side.DECODE, "d0", "connect_refused", detail="x"),
            "connect refused (x)",
            "is the instance started",
        ),
        (EngineFailed(Side.DECODE, "d0", "new_reason"), "new reason", "logging.level debug"),
        (EngineRefused(401, "no"), "status 401: no", "engine_key_env"),
        (EngineFailed(Side.DECODE, "d0", "key_refused", detail="e:1: status 401"), "key refused (e:1", "does not take"),
        (EngineRefused(404, "no"), "status 404: no", "this model"),
        (EngineRefused(422, "no"), "status 422: no", "refuses a plain"),
        (InternalError("x"), "internal error", "log"),
        (ZeroDivisionError("x"), "ZeroDivisionError: x", "log"),
    ],
)
def test_failures_in_plain_words(error, words, advice):
    assert words in told(error)
    assert advice in advice_for(error)


class TestReport:
    def report(self):
        found = Report("f.yaml", took_s=1.25)
        found.add(
            [ok("reach", "p0", "fine"), note("handover", "", "not tested"), fault("role", "d0", "wrong", "fix it")]
        )
        found.add([warning("clock", "d1", "late", "set it")])
        return found

    @pytest.mark.parametrize(
        ("findings", "status"),
        [([], 0), ([ok("a", "", "")], 0), ([note("a", "", "")], 0), ([warning("a", "", "", "")], 1),
         ([fault("a", "", "", ""), warning("a", "", "", "")], 2)],
    )  # fmt: skip
    def test_the_status(self, findings, status):
        assert Report("f", findings).status == status

    def test_the_worst_comes_first(self):
        assert as_text(self.report()).splitlines() == [
            "FAULT   role d0: wrong",
            "        -> fix it",
            "WARNING clock d1: late",
            "        -> set it",
            "NOTE    handover: not tested",
            "f.yaml: something is wrong (1 fault, 1 warning, 1 note, 1 ok; 1.2 s)",
        ]
        assert "OK      reach p0: fine" in as_text(self.report(), all_of_it=True)
        assert re.search(r"all is well \(nothing to look at", as_text(Report("f")))

    def test_for_programs(self):
        told = json.loads(as_json(self.report()))
        assert (told["file"], told["status"], told["seconds"]) == ("f.yaml", 2, 1.25)
        assert told["findings"][2] == {
            "level": "fault", "check": "role", "subject": "d0", "what": "wrong", "advice": "fix it"
        }  # fmt: skip
