"""What a run refuses to start with: the exceptions that become one line and exit code 2."""

from __future__ import annotations


class ConfigError(Exception):
    """The config is wrong. The message is one line that says what to do."""


class EnvironmentProblem(Exception):
    """the machine or its environment is not as the config needs it"""
