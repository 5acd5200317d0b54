"""How many examples property-based tests try: few and always the same, unless asked for more."""

import os

from hypothesis import HealthCheck, settings

COMMON = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("same", max_examples=40, derandomize=True, **COMMON)
settings.register_profile(
    "thorough",
    max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "1000")),
    print_blob=True,
    **COMMON,
)
# HYPOTHESIS_PROFILE=thorough tries other examples each time.
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
