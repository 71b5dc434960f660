"""Settings of the sidecar: flags > environment (``SLIDINGSERVE_*``) > file (TOML) > defaults.

Each field's description says what it is for, its unit and why its default is what it is; `slidingserve check-config`
prints the result with the source of each value.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from sidecar.policies import registry
from sidecar.policies.base import COMMON_LIMITS, PolicyContext
from sidecar.session.machine import SessionDefaults
from slidingserve.contract.values import Mode, SloDefaults

ENVIRONMENT_PREFIX = "SLIDINGSERVE_"
CONFIG_VARIABLE = "SLIDINGSERVE_CONFIG"
DATA_VARIABLE = "SLIDINGSERVE_DATA"  # the folder of traces and kernel tables, for other commands
DEFAULT_SOCKET = "unix:/tmp/slidingserve.sock"


class ConfigError(ValueError):
    """Settings that cannot be used; the message names each field, its value, its source and the remedy."""


def check_address(text: str) -> str:
    """Returns an address as it is; raises ValueError if it is neither unix:/path nor host:port."""
    if text.startswith("unix:") and len(text) > len("unix:"):
        return text
    host, _, port = text.rpartition(":")
    if host and port.isascii() and port.isdecimal() and int(port) <= 65535:
        return text
    raise ValueError("give unix:/path/of/socket or host:port")


def _optional_address(text: str) -> str:
    return check_address(text) if text else text


class SidecarSettings(BaseSettings):
    """The sidecar's settings."""

    model_config = SettingsConfigDict(env_prefix=ENVIRONMENT_PREFIX, extra="forbid", frozen=True)

    listen: Annotated[str, AfterValidator(check_address)] = Field(
        DEFAULT_SOCKET,
        description="Where engines connect: unix:/path or host:port. A Unix socket needs no port and no TLS: who may "
        "open the file may connect (in production, a folder of its own). TCP is plain text.",
    )
    health_listen: Annotated[str, AfterValidator(_optional_address)] = Field(
        "",
        description="Second address (host:port) for health checks only, because Kubernetes probes cannot reach a Unix "
        "socket. Empty: health is served at `listen` alone.",
    )
    policy: str = Field(
        "vllm",
        description="Policy for sessions that name none, with its parameters: name or name:key=value,key=value.",
    )
    profile: str = Field(
        "",
        description="Hardware profile for the latency predictor of sessions that name none; empty: none. Policies that "
        "predict check it; `vllm` does not and takes any.",
    )
    mode: Literal["", "off", "shadow", "active"] = Field(
        "",
        description="How far engines are to obey: off (do not decide), shadow (decide and record, the engines go their "
        "own way) or active. Wins over what sessions ask for; empty: as each asks. `slidingserve mode` switches it "
        "while the sidecar runs.",
    )
    default_ttft_seconds: float = Field(
        1.0,
        ge=0,
        le=86400,
        allow_inf_nan=False,
        description="Time-to-first-token SLO in seconds where neither request nor session brings one; 0: none.",
    )
    default_tbt_seconds: float = Field(
        0.05,
        ge=0,
        le=86400,
        allow_inf_nan=False,
        description="Time-between-tokens SLO in seconds where neither request nor session brings one; 0: none.",
    )
    max_sessions: int = Field(
        64,
        ge=1,
        le=10000,
        description="Most engines at once; one more is refused. Each costs about 1 MB and its share of the core.",
    )
    max_message_bytes: int = Field(
        4 * 1024 * 1024,
        ge=4096,
        le=1024 * 1024 * 1024,
        description="Largest message accepted. A snapshot of 10,000 requests has about 1 MB; a larger message ends its "
        "stream with RESOURCE_EXHAUSTED.",
    )
    drain_seconds: float = Field(
        10.0,
        ge=0,
        le=3600,
        allow_inf_nan=False,
        description="After SIGTERM, how long to wait for engines to take their last answer and leave.",
    )
    journal_dir: Path | None = Field(
        None, description="Folder for journals, one file for each session; none: sessions are not recorded."
    )
    log_format: Literal["console", "json"] = Field("console", description="Form of the log lines on stderr.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_values(cls, value: object) -> object:
        """No setting is one, and pydantic would take true for 1."""
        if isinstance(value, bool):
            raise ValueError("is true or false; give a number or a text, as the setting wants")
        return value

    @field_validator("journal_dir", mode="before")
    @classmethod
    def _no_folder(cls, value: object) -> object:
        """An empty text stands for none, not for the current folder."""
        return None if value == "" else value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load_settings` hands over: it merges the sources itself, to know where each value is from."""
        return (init_settings,)

    def session_defaults(self) -> SessionDefaults:
        """Returns what sessions get where they leave it open."""
        name, parameters = registry.parse_spec(self.policy)
        slos = SloDefaults(self.default_ttft_seconds, self.default_tbt_seconds)
        mode = Mode[self.mode.upper()] if self.mode else Mode.UNSPECIFIED
        return SessionDefaults(name, parameters, slos, self.profile, mode)


def load_settings(
    flags: dict[str, Any] | None = None, file: Path | None = None, environment: Mapping[str, str] | None = None
) -> tuple[SidecarSettings, dict[str, str]]:
    """Merges the sources and checks the result, the policy and its parameters included.

    Args:
        flags: values from the command line; None stands for "not given".
        file: TOML file; without it the variable SLIDINGSERVE_CONFIG may name one.
        environment: instead of the process's.

    Returns:
        The settings, and for each field where it is from ("flag", "environment", the file's path or "default").

    Raises:
        ConfigError: anything is unknown, malformed or out of range.
    """
    environment = dict(os.environ) if environment is None else environment
    known = set(SidecarSettings.model_fields)
    if file is None and environment.get(CONFIG_VARIABLE):
        file = Path(environment[CONFIG_VARIABLE])
    values: dict[str, Any] = {}
    sources: dict[str, str] = dict.fromkeys(sorted(known), "default")
    layers: list[tuple[str, dict[str, Any]]] = [] if file is None else [(str(file), _read_file(file))]
    variables = {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): text
        for name, text in environment.items()
        if name.startswith(ENVIRONMENT_PREFIX) and name.removeprefix(ENVIRONMENT_PREFIX).lower() in known
    }
    layers.append(("environment", variables))
    layers.append(("flag", {name: value for name, value in (flags or {}).items() if value is not None}))
    for source, layer in layers:
        for name, value in layer.items():
            if name not in known:
                raise ConfigError(f"{source}: unknown setting {name!r}; known are: {', '.join(sorted(known))}")
            values[name], sources[name] = value, source
    try:
        settings = SidecarSettings(**values)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentences(error, sources))) from error
    _check_policy(settings, sources)
    return settings, sources


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Returns the names of variables that look like settings and are none, sorted.

    They are no error: an orchestrator may set variables of that prefix for a service of this name.
    """
    known = {f"{ENVIRONMENT_PREFIX}{name.upper()}" for name in SidecarSettings.model_fields}
    known |= {CONFIG_VARIABLE, DATA_VARIABLE}
    return sorted(name for name in environment if name.startswith(ENVIRONMENT_PREFIX) and name.upper() not in known)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f'{path}: is not TOML ({error}); write lines such as: policy = "vllm"') from error


def _sentences(error: ValidationError, sources: dict[str, str]) -> list[str]:
    lines = []
    for problem in error.errors():
        name = str(problem["loc"][0])
        message = problem["msg"].removeprefix("Value error, ")
        lines.append(f"{name} = {problem['input']!r} (from {sources.get(name, 'flag')}): {message}")
    return lines


def _check_policy(settings: SidecarSettings, sources: dict[str, str]) -> None:
    """Builds the default policy once for a common engine, so that a typo is found at start and not by an engine."""
    context = PolicyContext(COMMON_LIMITS, settings.profile)
    try:
        name, parameters = registry.parse_spec(settings.policy)
        registry.build(name, parameters, context)
    except registry.UnknownProfileError as error:
        raise ConfigError(f"profile = {settings.profile!r} (from {sources['profile']}): {error}") from error
    except (LookupError, ValueError) as error:
        raise ConfigError(f"policy = {settings.policy!r} (from {sources['policy']}): {error}") from error
