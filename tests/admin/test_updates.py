"""The check for a newer version: it runs only while the setting is on."""

import asyncio
import os
import shlex
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from app.admin import updates
from app.admin.updates import Updates
from tests.admin.test_frame import OWN
from tests.api.fakes import make_site

pytestmark = pytest.mark.anyio


class Releases:
    """A stand-in for git, in a separate folder: from it, a checkout learns the released versions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._asked, self._listing = folder / "asked", folder / "told"
        git = folder / "git"
        git.write_text(
            f"#!/bin/sh\necho asked >>{shlex.quote(str(self._asked))}\ncat {shlex.quote(str(self._listing))}\n"
        )
        git.chmod(0o755)

    @property
    def path(self) -> str:
        """PATH on which this stand-in is the first git."""
        return os.pathsep.join((str(self.folder), os.environ["PATH"]))

    @property
    def asked(self) -> int:
        return len(self._asked.read_text().splitlines()) if self._asked.exists() else 0

    def tell(self, *versions: str) -> None:
        self._listing.write_text("".join(f"0\trefs/tags/v{version}\n" for version in versions))


class Installer:
    """A version lookup that returns its answers in turn; None raises an error, as without a network."""

    def __init__(self, *answers: str | None) -> None:
        self._answers = list(answers)
        self.count = 0

    async def __call__(self) -> str:
        self.count += 1
        answer = self._answers.pop(0)
        if answer is None:
            raise OSError("no network")
        return answer


class Switch:
    is_on = False

    def __call__(self) -> bool:
        return self.is_on


async def running(watched: Updates, story: Callable[[Updates], Awaitable[None]]) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(watched.run)
        await anyio.wait_all_tasks_blocked()
        await story(watched)
        group.cancel_scope.cancel()


async def test_nobody_is_asked_until_the_setting_is_switched_on_and_the_answer_goes_with_it() -> None:
    switch, installer = Switch(), Installer("2.0", "3.0")

    async def story(watched: Updates) -> None:
        watched.on_settings_changed()
        await anyio.wait_all_tasks_blocked()
        assert (watched.newer, installer.count) == ("", 0)
        switch.is_on = True
        watched.on_settings_changed()
        await anyio.wait_all_tasks_blocked()
        assert (watched.newer, installer.count) == ("2.0", 1)
        watched.on_settings_changed()  # another setting changed
        await anyio.wait_all_tasks_blocked()
        assert (watched.newer, installer.count) == ("2.0", 1)
        switch.is_on = False
        watched.on_settings_changed()
        assert watched.newer == ""
        switch.is_on = True
        watched.on_settings_changed()
        await anyio.wait_all_tasks_blocked()
        assert (watched.newer, installer.count) == ("3.0", 2)

    await running(Updates(switch, installer), story)


async def test_it_asks_again_after_a_day_and_sooner_when_nobody_could_tell() -> None:
    waited: list[float | None] = []
    has_waited = asyncio.Event()

    def passing(seconds: float | None) -> asyncio.Timeout:
        waited.append(seconds)
        if len(waited) < 4:
            return asyncio.timeout(0)
        has_waited.set()
        return asyncio.timeout(None)

    switch, installer = Switch(), Installer(None, "2.0", None, "")
    switch.is_on = True

    async def story(watched: Updates) -> None:
        await has_waited.wait()
        assert waited == [updates.RETRY_SECONDS, updates.DAY_SECONDS, updates.RETRY_SECONDS, updates.DAY_SECONDS]
        assert watched.newer == ""

    await running(Updates(switch, installer, passing), story)


async def test_what_came_of_it_is_told() -> None:
    switch, installer = Switch(), Installer("2.0", "", None)

    async def story(watched: Updates) -> None:
        for is_on, outcome, newer in (
            (False, "", ""),
            (True, "newer", "2.0"),
            (False, "", ""),
            (True, "latest", ""),
            (False, "", ""),
            (True, "unreachable", ""),
        ):
            switch.is_on = is_on
            watched.on_settings_changed()
            await anyio.wait_all_tasks_blocked()
            assert watched.view() == {"newer": newer, "command": watched.command, "outcome": outcome}

    await running(Updates(switch, installer), story)


async def test_the_state_tells_programs_of_a_newer_version_and_the_command() -> None:
    site = make_site(api_key="k")
    updates = site.app.state.admin.updates
    updates.newer = "2.0"
    state = (await site.client.get("/admin/api/state", headers=OWN)).json()
    assert (state["newer"], state["update_command"]) == ("2.0", updates.command)
