"""What nbval leaves open: notebooks that would pass unchecked fail, GPU notebooks need a GPU."""

import pytest
from nbval.plugin import IPyNbFile

from verify.notebooks import problems, skip_reason


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    if isinstance(collector, IPyNbFile) and report.passed and (found := problems(collector.nb)):
        report.outcome, report.longrepr, report.result = "failed", "\n".join(found), []
    return report


def pytest_collection_modifyitems(items):
    for item in items:
        if isinstance(item.parent, IPyNbFile) and (reason := skip_reason(item.parent.nb)):
            item.add_marker(pytest.mark.skip(reason=reason))
