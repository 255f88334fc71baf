"""How hard property tests try. The same examples every time: a failure comes back when the test is run again."""

from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "suite",
    max_examples=20,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("full", settings.get_profile("suite"), max_examples=400, stateful_step_count=100)
settings.register_profile(
    "first failure", settings.get_profile("suite"), phases=[p for p in Phase if p not in (Phase.shrink, Phase.explain)]
)


def try_hard(full: bool) -> None:
    """Before tests are collected: many examples, or enough for every day."""
    settings.load_profile("full" if full else "suite")


def stop_at_the_first_failure() -> None:
    """As every day, but a failure is told as it was met: whoever asks only whether there is one need not wait."""
    settings.load_profile("first failure")


try_hard(full=False)
