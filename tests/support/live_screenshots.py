"""Makes the pictures of the live page in docs/images: python tests/support/live_screenshots.py [folder].

They show a made-up cluster, so that they come out alike each time.
"""

import asyncio
import sys
import time
from pathlib import Path

from aiohttp import web
from browser import Browser, find_chromium
from live_world import BusySight

from coordinator.management.live import LiveFeed
from coordinator.management.page import LivePage

FOLDER = Path(__file__).parents[2] / "docs/images"
WIDTH = 1320
POINTS = 118


async def main(folder: Path) -> None:
    """Serve the page, look at it in both themes, and write what is seen."""
    for scheme in ("light", "dark"):
        sight = BusySight(5, 9, seed=11, rate=38, failing=0.0012, days_s=time.time() - POINTS)
        sight.set_state("d6", "down", "connect refused: 10.0.0.7:8000")
        sight.set_state("p3", "draining", "taken out by hand")
        feed = LiveFeed(sight, {"version": "0.1.0", "model": "qwen3-32b", "workers": 4})
        app = web.Application()
        app.add_routes([*LivePage().routes(), *feed.routes()])
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            for second in range(POINTS):
                feed._album.add(sight.now(), sight.days_s, float(second) - POINTS + time.monotonic())
            async with Browser(find_chromium()) as browser, browser.page(width=WIDTH, scheme=scheme) as page:
                await page.open(f"http://127.0.0.1:{runner.addresses[0][1]}/")
                await page.wait("document.body.dataset.feed === 'live'")
                await page.run("light(paths.find(path => path.duration_s > 2.2 && path.prefill_s > 0.2))")
                picture = await page.screenshot()
            (folder / f"live-{scheme}.png").write_bytes(picture)
        finally:
            await feed.aclose()
            await runner.cleanup()


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(folder))
