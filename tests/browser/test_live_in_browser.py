"""What somebody at the live page sees and can do."""

import asyncio
from collections import deque

import pytest
from live_world import BusySight

from coordinator.core.errors import DeadlineExceeded
from coordinator.security.keys import Key, new_hash, split_hash

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.xdist_group("browser")]

TABLE = """Object.fromEntries([...document.querySelectorAll('#list tbody tr:not(.group)')].map(
    row => [row.dataset.id, [...row.cells].map(cell => cell.textContent)]))"""
KEY = "the-key-of-ops-1"

# every text on the page against what is behind it, by WCAG 2.2 §1.4.3
CONTRAST = """(() => {
  const part = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = rgb(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text; (text = walk.nextNode());) {
    const node = text.parentElement;
    if (!text.data.trim() || !node.checkVisibility() || node.disabled) continue;
    if (/SCRIPT|STYLE|NOSCRIPT|OPTION/.test(node.tagName)) continue;
    const [a, b] = [light(rgb(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) poor.push([text.data.trim(), ratio.toFixed(2)]);
  }
  return poor;
})()"""


class TestWhatIsShown:
    async def test_every_instance_has_its_row(self, page, site):
        rows = await page.run(TABLE)
        assert list(rows) == [*site.sight.names["prefill"], *site.sight.names["decode"]]
        ident, state, *_, engine, model, _, _ = rows["d0"]
        assert (ident, state, engine, model) == ("d0", "●ready", "vllm", "qwen3-32b")
        counts = await page.run("document.querySelector('#counts').textContent")
        assert counts == "4 prefill, 8 decode; all ready"

    async def test_figures_move(self, page):
        for name in ("requests", "tokens", "ttft", "itl"):
            figure = f"document.querySelector('#n-{name}').textContent"
            await page.wait(f"/[0-9]/.test({figure})")
            before = await page.run(figure)
            if name != "itl":  # its median stands still under a steady load
                await page.wait(f"{figure} !== {before!r}")
            label = await page.run(f"document.querySelector('#c-{name} svg').getAttribute('aria-label')")
            assert "from" in label
        assert await page.run("document.querySelector('#about').textContent") == "qwen3-32b · version 1.2.3 · 2 workers"

    async def test_a_change_of_state_shows(self, page, site):
        site.sight.set_state("d3", "down", "connect refused")
        row = "document.querySelector('#list tr[data-id=d3]')"
        await page.wait(f"{row}.textContent.includes('down')")
        assert await page.run(f"{row}.cells[8].textContent") == "connect refused"
        assert await page.run(f"{row}.className") == "down"
        await page.wait("document.querySelector('#counts').textContent.endsWith('1 not ready')")
        site.sight.set_state("d3", "ready")
        await page.wait(f"!{row}.textContent.includes('down')")

    async def test_instances_come_and_go(self, page, site):
        site.sight.names["decode"].append("d99")
        await page.wait("document.querySelector('#list tr[data-id=d99]') !== null")
        site.sight.names["decode"].remove("d99")
        await page.wait("!document.querySelector('#list tr[data-id=d99]')")

    async def test_a_failure_is_listed_and_announced(self, page, site):
        site.sight.finish(error_code="deadline_exceeded", error_reason="first_token", error_side="coordinator")
        await page.wait("document.querySelector('#kinds').textContent.includes('first token')")
        assert "first token" in await page.run("document.querySelector('#told').textContent")
        site.sight.finish().failed(DeadlineExceeded("first_token"))

    async def test_readiness(self, page, site):
        real = site.sight.look

        async def not_ready():
            from dataclasses import replace

            return replace(await real(), ready=False, why="no decode instance takes requests")

        site.sight.look = not_ready
        await page.wait("document.querySelector('#ready').textContent.includes('no decode instance takes requests')")
        assert "✕Not ready." in await page.run("document.querySelector('#ready').textContent")

    async def test_texts_of_others_are_never_markup(self, page, site):
        site.sight.set_state("d1", "down", "<img src=x onerror=alert(1)>")
        await page.wait("document.querySelector('#list tr[data-id=d1]').textContent.includes('<img')")
        assert await page.run("document.querySelectorAll('img').length") == 0


class TestAPath:
    async def test_it_is_lit_from_queue_to_answer(self, page):
        await page.run("light(paths.find(path => path.attempts === 1 && path.outcome === 'ok'))")
        lit = await page.run("lit")
        assert await page.run("[...document.querySelectorAll('#way li.lit')].length") == 5
        notes = await page.run("[...document.querySelectorAll('#way .note')].map(note => note.textContent)")
        assert notes[1].endswith(f"on {lit['prefill']}")
        assert notes[2].endswith(f"{lit['prefill']} → {lit['decode']}")
        assert notes[3].endswith(f"on {lit['decode']}")
        assert notes[4].startswith("ok after")
        rows = await page.run("[...document.querySelectorAll('#list tr.lit')].map(row => row.dataset.id)")
        assert sorted(rows) == sorted([lit["prefill"], lit["decode"]])
        told = await page.run("document.querySelector('#way-told').textContent")
        assert lit["id"] in told
        assert f"prefill {notes[1]}" in told
        await page.wait(f"!paths.some(path => path.id === {lit['id']!r})")  # it has left the feed and stays lit
        assert await page.run("document.querySelector('#paths [aria-pressed=true]').ariaLabel") == (
            f"Light the way of {lit['id']}"
        )

    async def test_where_a_failed_one_has_ended(self, page, site):
        site.sight.finish(id="broken", decode_s=None, outcome="engine_error", duration_s=9.0)
        # in one step: in the next one it may have left the feed
        await page.wait("paths.filter(path => path.id === 'broken').map(path => light(path)).length > 0")
        ends = await page.run("[...document.querySelectorAll('#way li.ends')].map(node => node.textContent)")
        assert len(ends) == 1
        assert ends[0].startswith("Handoff")
        assert "ended here" in ends[0]

    async def test_the_list_stands_still_under_the_pointer(self, page):
        await page.click("#paths tr:nth-child(3) button")
        await page.wait("document.querySelector('#held').textContent")
        first = await page.run("document.querySelector('#paths button').textContent")
        number = await page.run("lastNumber")
        await page.wait(f"lastNumber > {number} + 3")
        assert await page.run("document.querySelector('#paths button').textContent") == first
        await page.run("document.activeElement.blur()")
        await page.move(5, 5)
        await page.wait("!document.querySelector('#held').textContent")


class TestTable:
    async def test_filter_sort_group(self, page):
        await page.click("#filter")
        await page.write("d1")
        assert list(await page.run(TABLE)) == ["d1"]
        await page.run("document.querySelector('#filter').value = ''; document.querySelector('#role').value = 'decode'")
        await page.run("document.querySelector('#role').dispatchEvent(new Event('input'))")
        assert len(await page.run(TABLE)) == 8
        await page.click("#list th[data-name=requests] button")
        assert await page.run("document.querySelector('#list th[data-name=requests]').ariaSort") == "descending"
        shown = await page.run(
            "[...document.querySelectorAll('#list tbody tr:not(.group)')].map(r => +r.cells[2].textContent)"
        )
        assert shown == sorted(shown, reverse=True)
        await page.run("document.querySelector('#role').value = ''")
        await page.click("#group")
        assert await page.run("[...document.querySelectorAll('#list tr.group')].filter(row => !row.hidden).length") == 0
        assert len(await page.run(TABLE)) == 12

    async def test_a_thousand(self, browser, site):
        site.sight = BusySight(400, 600)
        await site.stop()
        await site.start()
        async with browser.page() as page:
            await page.open(site.origin)
            await page.wait("document.body.dataset.feed === 'live' && history.length > 2")
            assert len(await page.run(TABLE)) == 50
            assert await page.run("document.querySelectorAll('*').length") < 1500
            assert await page.run("document.querySelector('#range').textContent") == "1 to 50 of 1000"
            await page.click("#after")
            assert next(iter(await page.run(TABLE))) == "p50"
            took = await page.run("""(async () => {
              const took = [];
              for (let i = 0; i < 15; i++) {
                const from = performance.now();
                showAll();
                took.push(performance.now() - from);
                await new Promise(requestAnimationFrame);
              }
              return took.sort((a, b) => a - b)[7];
            })()""")
            assert took < 150, "milliseconds for one picture a second"
            assert page.complaints == []


class TestPeople:
    async def test_keyboard_alone(self, page):
        focused = "document.activeElement.id || document.activeElement.textContent"
        await page.press("Tab")
        assert await page.run(focused) == "Skip to the instances"
        assert await page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        await page.press("Enter")
        assert await page.run(focused) == "fleet"
        seen = []
        for _ in range(5):
            await page.press("Tab")
            seen.append(await page.run(focused))
        assert seen == ["filter", "role", "state", "group", "Instance"]
        await page.press("Enter")
        assert await page.run("document.querySelector('#list th[data-name=id]').ariaSort") in (
            "ascending",
            "descending",
        )
        await page.press("/")
        assert await page.run(focused) == "filter"
        await page.run("document.querySelector('#theme').focus()")
        await page.press("Tab")
        await page.press("Enter")
        assert await page.run("document.activeElement.ariaPressed") == "true"
        assert await page.run("lit !== null")
        await page.press("Escape")
        assert await page.run("lit === null")

    async def test_all_that_is_used_has_a_role_and_a_name(self, page):
        nodes = await page.nodes()
        roles = {node["role"] for node in nodes}
        assert {"banner", "main", "search", "table", "columnheader", "rowheader", "rowgroup", "log", "status"} <= roles
        for node in nodes:
            if node.get("focusable") and node["role"] != "RootWebArea":
                assert node["name"].strip(), node
        regions = {node["name"] for node in nodes if node["role"] == "region"}
        assert {
            "The way of a request",
            "Recent requests",
            "Last failures",
            "Instances",
            "Requests per second",
        } <= regions
        tables = {node["name"] for node in nodes if node["role"] == "table"}
        assert tables == {"Recent requests", "Instances"}
        images = [node["name"] for node in nodes if node["role"] in ("image", "img")]
        assert len(images) == 5
        assert all(images)
        headings = [node["name"] for node in nodes if node["role"] == "heading"]
        assert headings[0] == "pd-coordinator"

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    async def test_everything_can_be_read(self, browser, site, scheme):
        site.sight.set_state("d1", "down", "connect refused")
        async with browser.page(scheme=scheme) as page:
            await page.open(site.origin)
            await page.wait("document.body.dataset.feed === 'live' && history.length > 2")
            await page.run("light(paths[0])")
            assert await page.run(CONTRAST) == []

    async def test_the_theme_is_the_users_until_it_is_switched(self, page):
        ground = "getComputedStyle(document.body).backgroundColor"
        light = await page.run(ground)
        await page.prefer("dark")
        await page.wait(f"{ground} !== {light!r}")
        dark = await page.run(ground)
        await page.click("#theme")
        assert await page.run(ground) == light
        await page.prefer("light")
        assert await page.run(ground) == light
        await page.click("#theme")
        assert await page.run(ground) == dark

    @pytest.mark.parametrize("width", [360, 800, 1920])
    async def test_it_fits(self, browser, site, width):
        async with browser.page(width=width) as page:
            await page.open(site.origin)
            await page.wait("document.body.dataset.feed === 'live'")
            assert await page.run("document.documentElement.scrollWidth") <= width


class TestTheFeed:
    async def test_its_loss_is_plain_and_ends_by_itself(self, browser, site):
        async with browser.page() as page:
            await page.open(site.origin)
            await page.wait("document.body.dataset.feed === 'live'")
            await site.stop()
            await page.wait("document.body.dataset.feed === 'lost'")
            assert await page.run("document.querySelector('#lost').checkVisibility()")
            told = await page.run("document.querySelector('#lost').textContent")
            assert "The feed is lost." in told
            assert "What you see is from" in told
            assert await page.run("document.title") == "(lost) pd-coordinator"
            assert any(node["role"] == "alert" for node in await page.nodes())
            await site.start()
            await page.click("#retry")
            await page.wait("document.body.dataset.feed === 'live'")
            assert not await page.run("document.querySelector('#lost').checkVisibility()")
            assert await page.run("document.title") == "pd-coordinator"

    async def test_silence_is_a_loss_too(self, page, site):
        await page.run("lastEvent -= 60000; void 0")
        gate = asyncio.Event()
        real = site.sight.look

        async def stuck():
            await gate.wait()
            return await real()

        site.sight.look = stuck
        await page.run("lastEvent -= 60000; void 0")
        await page.wait("document.body.dataset.feed === 'lost'")
        gate.set()
        await page.wait("document.body.dataset.feed === 'live'")

    async def test_a_key_is_asked_for_and_kept_nowhere(self, browser, site):
        site.keys = [Key(0, "ops", split_hash(new_hash(KEY))[1])]
        await site.stop()
        await site.start()
        async with browser.page() as page:
            await page.open(site.origin)
            await page.wait("document.querySelector('#ask').open")
            assert await page.run("document.activeElement.id") == "key"
            await page.write("not-the-key-of-ops-1")
            await page.press("Enter")
            await page.wait("document.querySelector('#wrong').checkVisibility()")
            await page.write(KEY)
            await page.press("Enter")
            await page.wait("document.body.dataset.feed === 'live'")
            assert not await page.run("document.querySelector('#ask').open")
            assert (
                await page.run("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
                == '[{},{},""]'
            )
            assert KEY not in await page.run("document.documentElement.outerHTML")
            assert all(KEY not in url for url in page.requests)

    async def test_the_policy_holds(self, page):
        blocked = await page.run("""new Promise((resolve) => {
          document.addEventListener("securitypolicyviolation", (event) => resolve(event.effectiveDirective));
          fetch("http://127.0.0.1:9/").catch(() => {});
        })""")
        assert blocked == "connect-src"
        ran = await page.run("""(() => {
          const script = document.createElement("script");
          try { script.text = "window.ran = true"; document.body.append(script); } catch { /* trusted types */ }
          return window.ran === true;
        })()""")
        assert ran is False
        page.complaints = deque(maxlen=0)  # the browser's own words about these two come when they come
