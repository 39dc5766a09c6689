"""For all tests: how long an example takes on a busy machine says nothing about it."""

from hypothesis import settings

settings.register_profile("miles", deadline=None)
settings.load_profile("miles")
