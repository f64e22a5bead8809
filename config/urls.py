"""URLs in params: which may be read, and how they refer to a secret without containing it.

Params are copied: to runs/, Prefect, MLflow, the store, the report. A URL that needs a signature or a token therefore
names a variable of the environment, `https://data.example/rows.jsonl?sig=${RLHF_DATA_SIGNATURE}`, which is inserted
only when the URL is read. No other variables are allowed: params from another source could leak them.
"""

import os
import re
import urllib.parse

from config.errors import EnvironmentFault, ParamsError

REMOTE_SCHEMES = (
    "http",
    "https",
    "s3",
    "s3a",
    "gs",
    "gcs",
    "az",
    "abfs",
    "abfss",
    "hf",
    "github",
    "oss",
    "oci",
    "sftp",
    "ssh",
)
"""Other fsspec schemes read this machine, or unpack, cache or chain what they read."""
LOGIN = re.compile(r"(\w[\w+.-]*)://([^?#\s]*)@([^/:?#@]*)")
"""Scheme, the part before the last @, and the host; a password may contain a slash."""
PORT_AND_PATH = re.compile(r"\d+/")
"""After a host rather than a user the @ belongs to the path. github:// has owner:repository there."""
IPV6 = re.compile(r"\[[0-9A-Fa-f:.]+\]")
VARIABLE = re.compile(r"\$\{(RLHF_DATA_\w+)\}")
SECRET_NAME = re.compile(
    r"sig|token|key|secret|pass|pwd|auth|cred|policy|session|jwt|code|hmac|^x-(amz|goog|ms)-", re.IGNORECASE
)
LONG_VALUE = re.compile(r"[\w+/=~%-]{20,}")
PLAIN_NAMES = ("revision", "ref", "commit", "version", "versionid")
"""Names of parameters whose values are long but not secret."""


def unreadable(url: str) -> str | None:
    """Why a URL is not read, to append to its name in a message; None if it may be read."""
    scheme = url.partition("://")[0].lower()
    if "::" in IPV6.sub("", url):
        return (
            "chains one address to another with ::, which can name files of this machine. Download "
            "it, and name the local file"
        )
    if scheme not in REMOTE_SCHEMES:
        return (
            f"has the scheme {scheme}, and URLs are read by {', '.join(REMOTE_SCHEMES)}. Name a "
            "file of this machine by its plain path"
        )
    return None


def require_no_secret(setting: str, url: str) -> None:
    """Raise ParamsError for an address with a password, a token or a signature. The message has `setting` but not the
    secret.
    """
    secret = secret_of(url)
    if secret is None:
        return
    if setting == "tracking.uri":
        fix = (
            "Take it out, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; for a "
            "database, start mlflow server in front of it."
        )
    elif secret.startswith("a password"):
        fix = (
            "Take it out; the libraries find credentials in the files and variables of their own, "
            "such as AWS_SHARED_CREDENTIALS_FILE."
        )
    else:
        fix = (
            "Put the value in a variable of the environment whose name starts with RLHF_DATA_, and "
            "name that in its place: ${RLHF_DATA_TOKEN}."
        )
    raise ParamsError(f"{setting} has {secret}, and params are kept and shown in many places. {fix}")


def secret_of(url: str) -> str | None:
    """Name of the part of a URL that is or looks like a secret; None if there is none."""
    for scheme, login, host in LOGIN.findall(url):
        _, colon, password = login.partition(":")
        if colon and scheme != "github" and not PORT_AND_PATH.match(password):
            return f"a password before {host}"
        is_http = scheme in ("http", "https") and "/" not in login
        if not colon and is_http and not VARIABLE.fullmatch(login):
            return f"a login before {host}"
    parts = urllib.parse.urlsplit(url)
    for parameter in (part for text in (parts.query, parts.fragment) for part in text.split("&")):
        name, _, value = parameter.partition("=") if "=" in parameter else ("", "", parameter)
        bare = VARIABLE.sub("", value)
        named = bare == value and value and SECRET_NAME.search(name)
        if name.lower() not in PLAIN_NAMES and (named or LONG_VALUE.fullmatch(bare)):
            return f"a value of {name!r} in its query"
    return None


def with_secrets(url: str) -> str:
    """The URL with its variables inserted. Raises EnvironmentFault if one is not set."""

    def value(match: "re.Match[str]") -> str:
        secret = os.environ.get(match[1])
        if not secret:
            raise EnvironmentFault(
                f"{url} names {match[1]}, which is not set. Set it in the environment of rlhf, or of rlhf up."
            )
        return secret

    return VARIABLE.sub(value, url)


def without_secrets(text: str) -> str:
    """`text` with the values of such variables replaced by their names, for messages of libraries."""
    held = {value: name for name, value in os.environ.items() if name.startswith("RLHF_DATA_") and value}
    for value in sorted(held, key=len, reverse=True):
        for shown in (value, urllib.parse.quote(value, safe=""), urllib.parse.unquote(value)):
            text = text.replace(shown, f"${{{held[value]}}}")
    return text
