"""The view of devices, by Pilot."""

import re

import msgspec

from tests.support.dashboards import app_on, body, watching
from tests.support.frames import device, run


class TestDevices:
    async def test_a_hosts_network_is_shown(self):
        app = app_on()
        async with app.run_test(size=(140, 30)) as pilot:
            host = msgspec.structs.replace(device(1), net_tx_bytes_s=12e6, net_rx_bytes_s=3e3)
            await watching(pilot, [*run(20), host])
            await pilot.press("5")
            assert "net ↑ 11.4 MiB/s ↓ 2.9 KiB/s" in body(app)

    async def test_with_more_than_fit_the_least_busy_come_first(self):
        app = app_on()
        async with app.run_test(size=(80, 15)) as pilot:
            busy = [device(0, 90.0 - 5 * (7 * index % 8), "cuda", index) for index in range(8)]
            await watching(pilot, [*run(20), *busy, device(0)])
            await pilot.press("5")
            assert "4 of 9 devices, 5 not shown" in body(app)
            assert re.findall(r"GPU\d|CPU", body(app)) == ["GPU1", "GPU2", "GPU3", "GPU4"]
            await pilot.press(*["down"] * 8)
            assert re.findall(r"▶?(?:GPU\d|CPU) ", body(app)) == ["GPU6 ", "GPU7 ", "GPU0 ", "▶CPU "]

    async def test_one_line_each_where_cards_of_all_do_not_fit(self):
        app = app_on()
        async with app.run_test(size=(80, 28)) as pilot:
            await watching(pilot, [*run(20), *(device(0, 90.0, "cuda", index) for index in range(8)), device(0)])
            await pilot.press("5")
            assert "not shown" not in body(app)
            lines = re.findall(r"^[▶ ](GPU\d|CPU) .* \d\d % .*mem .* GiB", body(app), re.MULTILINE)
            assert lines == [*(f"GPU{index}" for index in range(8)), "CPU"]
            assert re.search(r"^ CPU .* exposed 10 % ", body(app), re.MULTILINE)  # the ranks that are on it
            await pilot.press(*["down"] * 8)
            await pilot.resize_terminal(80, 70)
            await pilot.pause()
            assert re.findall(r"▶(GPU\d|CPU)", body(app)) == ["CPU"]
            assert body(app).count("\n busy ") == 9

    async def test_busy_that_is_only_waiting_is_seen(self):
        app = app_on()
        async with app.run_test(size=(140, 30)) as pilot:
            await watching(pilot, [*run(20, late_rank=1), device(0, 100.0), device(1, 99.0)])
            await pilot.press("5")
            assert "exposed 21 %" in body(app)  # of rank 0's step 36 %, of rank 1's 7 %
            assert "busy % over the last seconds" in body(app)
