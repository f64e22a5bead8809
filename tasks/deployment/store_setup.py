"""Prepares the store of docker/compose.yaml: a folder owned by its user, and a certificate for calls between its
parts.

SeaweedFS has a port for its own parts beside the S3 port, which would take new users from anybody who reaches it. With
this certificate it answers only whoever has it too: the store itself.
"""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

OWNER = 1000
"""User and group of the store."""
DATA, PRIVATE = Path("/data"), Path("/run/store")
VALID = timedelta(days=3650)
RENEWED_BEFORE = timedelta(days=365)


def set_up(data: Path, private: Path, owner: int, now: datetime) -> None:
    """Give `data` and `private` to `owner`, and leave cert.pem and key.pem in `private`; those that are there stay
    until the year before they end.
    """
    certificate, key = private / "cert.pem", private / "key.pem"
    if not (key.exists() and _is_good(certificate, now)):
        _write(certificate, key, now)
    for path in (data, private, certificate, key):
        os.chown(path, owner, owner)
    private.chmod(0o700)


def _is_good(certificate: Path, now: datetime) -> bool:
    try:
        parsed = x509.load_pem_x509_certificate(certificate.read_bytes())
    except (OSError, ValueError):
        return False
    return parsed.not_valid_after_utc - now > RENEWED_BEFORE


def _write(certificate: Path, key: Path, now: datetime) -> None:
    """A key, and a certificate that it has signed itself, which is its own authority."""
    secret = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "store")])
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(secret.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(secret, hashes.SHA256())
    )
    for path in (key, certificate):
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
    key.write_bytes(
        secret.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))


if __name__ == "__main__":
    set_up(DATA, PRIVATE, OWNER, datetime.now(UTC))
