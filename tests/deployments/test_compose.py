"""What protects the services of deployments/compose.yaml: rights, limits, networks, secrets and health checks."""

import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.server.deploy import FOLDER

TOOLS = Path(sys.executable).parent
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
ONCE = {"buckets", "account"}  # they end when their work is done
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
SECRET = re.compile(r"PASSWORD|PASSWD|SECRET|TOKEN|KEY|AUTH_STRING|CREDENTIAL")

each_service = pytest.mark.parametrize("name", sorted(SERVICES))


def secrets(service: dict[str, Any]) -> dict[str, str]:
    """Name of the file in the container -> name of the secret."""
    entries = [{"source": each} if isinstance(each, str) else each for each in service.get("secrets", [])]
    return {entry.get("target", entry["source"]): entry["source"] for entry in entries}


def user_of_target(target: str) -> str:
    """The user that the last USER of a stage of the Dockerfile names."""
    stages = re.split(r"(?m)^FROM ", DOCKERFILE)
    (stage,) = [text for text in stages if re.match(rf"\S+ AS {target}\n", text)]
    return str(re.findall(r"(?m)^USER (\S+)", stage)[-1])


def test_linters_find_nothing() -> None:
    config = str(FOLDER / ".compose-lint.yml")
    lint = [str(TOOLS / "compose-lint"), "check", "--quiet", "--strict-config", "--fail-on", "low", "--config", config]
    for command in ([*lint, str(FOLDER / "compose.yaml")], [str(TOOLS / "hadolint"), str(FOLDER / "Dockerfile")]):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr


@each_service
def test_a_service_has_no_rights_that_it_does_not_need(name: str) -> None:
    service = SERVICES[name]
    user = service.get("user") or user_of_target(service["build"]["target"])
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    for key in ("privileged", "cap_add", "devices", "pid", "ipc", "network_mode", "userns_mode"):
        assert key not in service


@each_service
def test_a_service_has_limits(name: str) -> None:
    limits = SERVICES[name]["deploy"]["resources"]["limits"]
    assert limits["cpus"] and limits["memory"] and limits["pids"] > 0


@each_service
def test_a_service_that_stays_has_a_health_check_and_is_waited_for(name: str) -> None:
    service = SERVICES[name]
    assert ("healthcheck" in service) == (name not in ONCE)
    assert service["restart"] == ("on-failure:5" if name in ONCE else "unless-stopped")
    for needed, how in service.get("depends_on", {}).items():
        assert how["condition"] == ("service_completed_successfully" if needed in ONCE else "service_healthy")


def test_images_have_exact_tags() -> None:
    images = [service["image"] for service in SERVICES.values()] + re.findall(r"(?m)^FROM (\S+)", DOCKERFILE)
    for image in images:
        assert re.fullmatch(r"[\w/-]+:(\d+\.\d+[\w.-]+|RELEASE\.[\dTZ-]+)", image), image


@each_service
def test_only_the_pages_are_published_and_only_on_this_machine(name: str) -> None:
    ports = SERVICES[name].get("ports", [])
    assert ports == {"prefect": ["127.0.0.1:4200:4200"], "mlflow": ["127.0.0.1:5000:5000"]}.get(name, [])


def test_databases_and_storage_are_reached_by_those_that_use_them() -> None:
    assert {name for name, network in COMPOSE["networks"].items() if (network or {}).get("internal")} == {
        "database",
        "storage",
    }
    members = {
        network: {name for name, service in SERVICES.items() if network in service["networks"]}
        for network in COMPOSE["networks"]
    }
    assert members["database"] == {"postgres", "prefect", "mlflow"}
    assert members["storage"] == {"minio", "buckets", "mlflow", "worker"}
    assert members["services"] == {"prefect", "mlflow", "account", "worker"}


@each_service
def test_folders_of_the_host_are_mounted_read_only(name: str) -> None:
    for volume in SERVICES[name].get("volumes", []):
        source, mode = re.fullmatch(r"(\$\{.*\}|[^:]+):[^:]+(:ro)?", volume).groups()  # type: ignore[union-attr]
        assert source in COMPOSE["volumes"] or mode == ":ro", volume
        assert "docker.sock" not in source and not source.endswith(("..", "../}"))


@each_service
def test_secrets_are_files(name: str) -> None:
    service = SERVICES[name]
    for key, value in (service.get("environment") or {}).items():
        assert not SECRET.search(key) or (key.endswith("_FILE") and value.startswith("/run/secrets/")), key
        assert not re.search(r"://[^/@]*:[^/@]*@", str(value)), key
    assert "env_file" not in service
    assert set(secrets(service).values()) <= set(COMPOSE["secrets"])


def test_nobody_holds_the_secrets_of_others() -> None:
    holders: dict[str, set[str]] = {}
    for name, service in SERVICES.items():
        for secret in secrets(service).values():
            holders.setdefault(secret, set()).add(name)
    assert holders == {
        "postgres_password": {"postgres"},
        "prefect_database_password": {"postgres", "prefect"},
        "mlflow_database_password": {"postgres", "mlflow"},
        "prefect_auth_string": {"prefect", "worker"},
        "mlflow_admin_password": {"mlflow", "account"},
        "mlflow_worker_password": {"account", "worker"},
        "mlflow_session_key": {"mlflow"},
        "minio_root_password": {"minio", "buckets"},
        "s3_worker_id": {"buckets", "worker"},
        "s3_worker_key": {"buckets", "worker"},
        "s3_mlflow_id": {"buckets", "mlflow"},
        "s3_mlflow_key": {"buckets", "mlflow"},
    }
    assert set(COMPOSE["secrets"]) == set(holders)


def test_servers_ask_for_a_login_and_answer_their_own_pages_only() -> None:
    prefect, mlflow, worker = (SERVICES[name] for name in ("prefect", "mlflow", "worker"))
    assert {"PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"} <= set(secrets(prefect))
    assert prefect["environment"]["PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS"] == "http://127.0.0.1:4200"
    assert prefect["environment"]["PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED"] == "true"
    for option in ("--app-name basic-auth", "--cors-allowed-origins http://127.0.0.1:5000", "--allowed-hosts mlflow:"):
        assert option in mlflow["command"]
    assert {"MLFLOW_AUTH_ADMIN_PASSWORD", "MLFLOW_FLASK_SERVER_SECRET_KEY"} <= set(secrets(mlflow))
    assert {"PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_PASSWORD"} <= set(secrets(worker))
    assert worker["environment"]["MLFLOW_TRACKING_USERNAME"] == "rollforward"  # not the administrator


def test_settings_of_prefect_exist() -> None:
    from prefect.settings import Settings
    from prefect.settings.legacy import _get_settings_fields

    known = {name for field in _get_settings_fields(Settings).values() for name in [field.name]}
    for service in SERVICES.values():
        named = {key for key in [*(service.get("environment") or {}), *secrets(service)] if key.startswith("PREFECT_")}
        assert named <= known, named - known


def test_databases_have_users_of_their_own() -> None:
    script = (FOLDER / "databases.sql").read_text()
    assert re.findall(r"CREATE DATABASE (\w+) OWNER (\w+);", script) == [
        ("prefect", "prefect"), ("mlflow", "mlflow"), ("mlflow_accounts", "mlflow"),
    ]  # fmt: skip
    roles = re.findall(r"CREATE ROLE (\w+) LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE PASSWORD :'\w+';", script)
    assert roles == ["prefect", "mlflow"]
    (closed,) = re.findall(r"REVOKE ALL ON DATABASE (.*) FROM PUBLIC;", script)
    assert set(closed.split(", ")) == {"postgres", "template1", "prefect", "mlflow", "mlflow_accounts"}
    assert SERVICES["prefect"]["environment"]["PREFECT_SERVER_DATABASE_USER"] == "prefect"
    accounts = (FOLDER / "mlflow_auth.ini").read_text()
    for uri in (SERVICES["mlflow"]["environment"]["MLFLOW_BACKEND_STORE_URI"], accounts):
        assert "postgresql://mlflow@postgres:5432/" in uri


def test_make_secrets_writes_what_compose_reads_and_keeps_it(tmp_path: Path) -> None:
    script = shutil.copy(FOLDER / "make-secrets", tmp_path)
    subprocess.run([script], check=True, capture_output=True)
    folder = tmp_path / "secrets"
    assert {f"./secrets/{path.name}" for path in folder.iterdir()} == {
        entry["file"] for entry in COMPOSE["secrets"].values()
    }
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    written = {path.name: path.read_text() for path in folder.iterdir()}
    assert len(set(written.values())) == len(written) and all(len(value) >= 20 for value in written.values())
    assert re.fullmatch(r"rollforward:[0-9a-f]{48}", written["prefect_auth_string"])
    again = subprocess.run([script], check=True, capture_output=True, text=True)
    assert again.stdout == "" and {path.name: path.read_text() for path in folder.iterdir()} == written


def test_secrets_enter_neither_git_nor_an_image() -> None:
    root = FOLDER.parent
    ignored = ["deployments/secrets/postgres_password", "deployments/.env"]
    subprocess.run(["git", "check-ignore", "--no-index", *ignored], cwd=root, check=True, capture_output=True)
    assert {"deployments/secrets", "**/.env"} <= set((root / ".dockerignore").read_text().split())


def test_with_secrets_sets_variables_from_files(tmp_path: Path) -> None:
    (tmp_path / "MY_PASSWORD").write_text("a b'$\"")
    (tmp_path / "folder").mkdir()
    script = tmp_path / "with-secrets"
    script.write_text((FOLDER / "with-secrets").read_text().replace("/run/secrets", str(tmp_path)))
    command = ["sh", str(script), sys.executable, "-c", "import os; print(os.environ['MY_PASSWORD'])"]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "a b'$\"\n"


def test_the_sandbox_file_opens_namespaces_to_the_worker_and_nothing_else() -> None:
    override = yaml.safe_load((FOLDER / "compose.sandbox.yaml").read_text())
    assert override["services"] == {
        "worker": {"security_opt": ["seccomp=./seccomp.json", "apparmor=unconfined", "systempaths=unconfined"]}
    }
    (rule,) = yaml.safe_load((FOLDER / "seccomp.json").read_text())["syscalls"]
    assert rule["action"] == "SCMP_ACT_ERRNO"
    denied = set(rule["names"])
    assert {"bpf", "keyctl", "init_module", "kexec_load", "open_by_handle_at", "perf_event_open", "setns"} <= denied
    assert not {"clone", "unshare", "mount", "umount2", "pivot_root"} & denied
