"""How hard property tests try. The same examples every time: a failure comes back when the test is run again.

`pytest --hypothesis-profile=full` tries harder, as `--full` does.
"""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "suite",
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("full", settings.get_profile("suite"), max_examples=2000, stateful_step_count=100)
settings.load_profile("suite")
