"""The golden vectors inside somebody's own suite: `pytest -p verify.plugin --hostpool-adapter my_module:MyAdapter`.

Every case is a test of its own, with a marker for its family and one for its layout (`-m "hostpool_mla and
hostpool_page_first"`); `hostpool` has them all. Where the project is installed, pytest finds the plugin by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from verify.adapters.protocol import Loaded
    from verify.adapters.suite import Group, Outcome

OPTION = "--hostpool-adapter"
ADAPTER: pytest.StashKey[Loaded] = pytest.StashKey()
OUTCOMES: pytest.StashKey[list[Outcome]] = pytest.StashKey()


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
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before options such as -m choose among them."""
    if ADAPTER in config.stash:
        items += _vectors(session)


def _vectors(session: pytest.Session) -> Iterator[Vector]:
    from verify.adapters import suite

    for group in suite.groups():
        for test in group.tests:
            item = Vector.from_parent(session, name=test["id"], nodeid=f"hostpool::{test['id']}")
            item.group, item.test = group, test
            for marker in ("", f"_{group.family}", f"_{group.geometry['layout']}"):
                item.add_marker(f"hostpool{marker}")
            if reason := session.config.stash[ADAPTER].why_expected(test["id"]):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=False))
            yield item


class WrongVector(Exception):
    """A case that failed; its message says all there is to say."""


class Vector(pytest.Item):
    """One golden vector."""

    group: Group
    test: dict[str, Any]

    def runtest(self) -> None:
        from verify.adapters import runner

        outcome = runner.check(self.config.stash[ADAPTER], self.group, self.test)
        self.config.stash[OUTCOMES].append(outcome)
        if outcome.status == "unsupported":
            pytest.skip(outcome.message)
        if outcome.status != "passed":
            raise WrongVector(outcome.message)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        wrong = isinstance(excinfo.value, WrongVector)
        return str(excinfo.value) if wrong else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, None, str]:
        return "hostpool", None, self.name


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
