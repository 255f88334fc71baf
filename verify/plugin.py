"""The golden vectors inside somebody's own suite: `pytest -p verify.plugin --hostpool-adapter my_module:MyAdapter`.

Every case is a test of its own, with a marker for its family and one for its layout (`-m "hostpool_mla and
hostpool_page_first"`); `hostpool` has them all. A failed one runs again by its node id, `hostpool::...`. Where the
project is installed, pytest finds the plugin by itself.

Cases run in the session's process. One that crashes or hangs ends it; `python -m verify adapter` isolates them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from verify.adapters.protocol import Loaded
    from verify.adapters.suite import Group, Outcome

OPTION, FOLDER = "--hostpool-adapter", "hostpool"  # node ids begin with a folder that there is not
ADAPTER: pytest.StashKey[Loaded] = pytest.StashKey()
OUTCOMES: pytest.StashKey[list[Outcome]] = pytest.StashKey()
ASKED: pytest.StashKey[set[str]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hostpool", "KV host pools")
    group.addoption(OPTION, metavar="ADAPTER", help="module:object; adds a test for every golden vector")


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption(OPTION)
    if not name:
        return
    from verify.adapters import protocol, suite

    config.addinivalue_line("markers", "hostpool: a golden vector of KV host pools")
    for part in (*suite.families(), *suite.manifest()["layouts"]):
        config.addinivalue_line("markers", f"hostpool_{part}: golden vectors of {part}")
    try:
        config.stash[ADAPTER] = protocol.load(name)
    except protocol.NoAdapter as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[OUTCOMES] = []


def pytest_report_header(config: pytest.Config) -> str | None:
    adapter = config.stash.get(ADAPTER, None)
    if adapter is None:
        return None
    from verify.adapters import suite

    versions = ", ".join(f"{name} {version}" for name, version in adapter.versions.items()) or "no versions given"
    vectors = f"vectors {suite.manifest()['version']} ({suite.manifest_digest()[:12]})"
    return f"host pools: adapter {adapter.name}, {versions}, {adapter.device}, {vectors}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Node ids of vectors are told apart from paths, before pytest looks for these."""
    config = session.config
    if ADAPTER in config.stash:
        ids = {arg: arg.partition("::") for arg in config.args}
        ours = {arg: case for arg, (path, _, case) in ids.items() if case and Path(path).name == FOLDER}
        config.args = [arg for arg in config.args if arg not in ours]
        config.stash[ASKED] = {*ours.values()}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before options such as -m choose among them."""
    if ADAPTER not in config.stash:
        return
    found, asked = [*_vectors(session)], config.stash[ASKED]
    if unknown := asked - {item.name for item in found}:
        raise pytest.UsageError(f"there is no vector {min(unknown)!r}")
    items += [item for item in found if item.name in asked or not asked]


def _vectors(session: pytest.Session) -> Iterator[Vector]:
    from verify.adapters import suite

    for group in suite.groups():
        for test in group.tests:
            item = Vector.from_parent(session, name=test["id"], nodeid=f"{FOLDER}::{test['id']}")
            item.group, item.test = group, test
            for marker in ("", f"_{group.family}", f"_{group.geometry['layout']}"):
                item.add_marker(f"hostpool{marker}")
            if reason := session.config.stash[ADAPTER].why_expected(test["id"]):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=False))
            yield item


class WrongVector(Exception):
    """A case that failed; its message says all there is to say."""


class Vector(pytest.Item):
    """One golden vector. It has what files such as conftest.py take for granted in every test."""

    group: Group
    test: dict[str, Any]
    module, cls, fixturenames = sys.modules[__name__], None, ()

    @property
    def function(self) -> Callable[[], None]:
        return self.runtest

    def runtest(self) -> None:
        from verify.adapters import protocol, runner

        try:
            outcome = runner.check(self.config.stash[ADAPTER], self.group, self.test)
        except protocol.NoAdapter as error:
            self.session.shouldfail = "nothing more is asked of this adapter"
            raise WrongVector(str(error)) from error
        self.config.stash[OUTCOMES].append(outcome)
        if outcome.status == "unsupported":
            pytest.skip(outcome.message)
        if outcome.status != "passed":
            raise WrongVector(outcome.message)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        wrong = isinstance(excinfo.value, WrongVector)
        return str(excinfo.value) if wrong else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, None, str]:
        return FOLDER, None, self.name


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What failing cases have in common, and expected failures that are none."""
    if not config.stash.get(OUTCOMES, []):
        return
    from verify.adapters import diagnosis, runner, suite

    found = {outcome.id: outcome for outcome in config.stash[OUTCOMES]}
    cases = [
        (group, test, found[test["id"]]) for group in suite.groups() for test in group.tests if test["id"] in found
    ]
    stale = runner.stale(config.stash[ADAPTER], found.values())
    said = [*diagnosis.summary(cases), *(f"stale: {line}" for line in stale)]
    if said:
        terminalreporter.section("KV host pools")
        for line in said:
            terminalreporter.line(line)
