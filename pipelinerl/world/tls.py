"""TLS between the nodes of a run (`world.tls`): certificates that are given, or made from the run's secret.

The authority follows from the secret, so nothing is distributed: every server makes a certificate for its own name, and
every client trusts the authority besides the machine's. Private keys are in a temporary folder of the serving process.
"""

import atexit
import datetime
import functools
import hmac
import ipaddress
import os
import shutil
import ssl
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelinerl.config.environment import CA_VARIABLE, SECRET_VARIABLE
from pipelinerl.config.sections import WorldSection
from pipelinerl.errors import ConfigError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

VALID = (datetime.datetime(2020, 1, 1), datetime.datetime(2120, 1, 1))
"""Fixed, because all nodes must make the same certificate with any clock. The secret has no other end of life."""
WIRE_NAME = "weights.pipelinerl"
"""The name in the certificate of every listener for weights."""
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


def adopt(world: WorldSection, env: MutableMapping[str, str]) -> None:
    """Puts the authority's certificate into ``env``, where ``client_context`` and child processes find it."""
    if world.tls and not env.get(CA_VARIABLE):
        env[CA_VARIABLE] = Path(world.tls_ca).read_text(encoding="utf-8") if world.tls_ca else made_authority(env)


def client_context(env: Mapping[str, str] = os.environ) -> ssl.SSLContext | bool:
    """The context with which HTTP clients verify the run's servers. True = the usual one: the run has no authority."""
    if not env.get(CA_VARIABLE):
        return True
    context = ssl.create_default_context()  # a domain's requests to other services use the same client
    context.load_verify_locations(cadata=env[CA_VARIABLE])
    return context


def redis_options(env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Arguments of a redis client of a run with TLS. They do not depend on the run's configuration."""
    authority = env.get(CA_VARIABLE) or (made_authority(env) if env.get(SECRET_VARIABLE) else None)
    return {"ssl": True} | ({"ssl_ca_data": authority} if authority else {})


def server_files(world: WorldSection, hostname: str, env: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """Returns the files with certificate chain and private key of a server that others reach as ``hostname``.

    None without TLS. A made key is in a private folder that is deleted with this process.
    """
    if not world.tls:
        return None
    if world.tls_cert and world.tls_key:
        return world.tls_cert, world.tls_key
    folder = tempfile.mkdtemp(prefix="tls-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return _written(Path(folder), *made_server(hostname, env))


def wire_contexts(secret: str, env: Mapping[str, str] = os.environ) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
    """Returns the contexts of a listener and a dialler of weights (TLS 1.3). None: the run has no TLS.

    Both follow from the secret, also if HTTP uses given certificates: this certificate proves the secret.
    """
    return _wire_contexts(secret) if secret and env.get(CA_VARIABLE) else None


@functools.lru_cache(maxsize=2)
def _wire_contexts(secret: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    env = {SECRET_VARIABLE: secret}
    listener = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory(prefix="tls-") as folder:
        listener.load_cert_chain(*_written(Path(folder), *made_server(WIRE_NAME, env)))
    listener.num_tickets = 0  # no bytes come unasked on a connection
    dialler = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    dialler.load_verify_locations(cadata=made_authority(env))
    for context in (listener, dialler):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    return listener, dialler


def _written(folder: Path, certificate: str, key: str) -> tuple[str, str]:
    files = str(folder / "cert.pem"), str(folder / "key.pem")
    for path, content in zip(files, (certificate, key), strict=True):
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as file:
            file.write(content)
    return files


def made_authority(env: Mapping[str, str]) -> str:
    """Returns the certificate (PEM) of the authority that follows from the run's secret."""
    key = _key(env, b"authority")
    return _pem(_certificate("PipelineRL run", key, (), key))


def made_server(hostname: str, env: Mapping[str, str]) -> tuple[str, str]:
    """Returns certificate and private key (PEM) of a server, signed by the run's authority."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = _key(env, b"server")
    certificate = _certificate(hostname[:64], key, (hostname, *LOCAL_NAMES), _key(env, b"authority"))
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    return _pem(certificate), private


def _key(env: Mapping[str, str], purpose: bytes) -> "Ed25519PrivateKey":
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    secret = env.get(SECRET_VARIABLE, "")
    if not secret:
        raise ConfigError(f"world.tls=true makes certificates from {SECRET_VARIABLE}, which is not set")
    return Ed25519PrivateKey.from_private_bytes(hmac.digest(secret.encode(), b"tls " + purpose, "sha256"))


def _certificate(
    subject: str, key: "Ed25519PrivateKey", names: tuple[str, ...], issuer: "Ed25519PrivateKey"
) -> "x509.Certificate":
    """A certificate for ``names`` (none: the authority's own). The same arguments give the same bytes."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    identifier = x509.SubjectKeyIdentifier.from_public_key(issuer.public_key())
    builder = (
        x509.CertificateBuilder()
        .subject_name(named(subject))
        .issuer_name(named("PipelineRL run"))
        .public_key(key.public_key())
        .serial_number(int.from_bytes(hmac.digest(b"serial", subject.encode(), "sha256")[:8], "big") + 1)
        .not_valid_before(VALID[0])
        .not_valid_after(VALID[1])
        .add_extension(x509.BasicConstraints(ca=not names, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName([_name(name) for name in names]), critical=False)
    return builder.sign(issuer, None)


def _name(text: str) -> "x509.GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _pem(certificate: "x509.Certificate") -> str:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM).decode()
