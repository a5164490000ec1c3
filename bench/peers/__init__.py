"""Implementations by other libraries, which the suites measure beside ours."""
