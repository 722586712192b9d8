"""The keys that deployments/buckets.sh hands out, on an S3 server that enforces their policies."""

import urllib.request
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from support_servers import s3_server

from flows.server.deploy import FOLDER


@pytest.fixture(scope="module")
def clients() -> Iterator[dict[str, Any]]:
    """Clients of S3 with the keys of the worker and of MLflow's server."""
    with s3_server() as endpoint:
        root = {"aws_access_key_id": "root", "aws_secret_access_key": "root"}

        def client(service: str, **keys: str) -> Any:
            return boto3.client(service, endpoint_url=endpoint, region_name="us-east-1", **keys)

        client("s3", **root).create_bucket(Bucket="rollforward")
        client("s3", **root).put_object(Bucket="rollforward", Key="mlflow/metrics", Body=b"")
        accounts = client("iam", **root)
        made = {}
        for user in ("worker", "mlflow"):
            policy = (FOLDER / f"policies/{user}.json").read_text()
            accounts.create_user(UserName=user)
            accounts.put_user_policy(UserName=user, PolicyName="objects", PolicyDocument=policy)
            key = accounts.create_access_key(UserName=user)["AccessKey"]
            made[user] = client(
                "s3", aws_access_key_id=key["AccessKeyId"], aws_secret_access_key=key["SecretAccessKey"]
            )
        # From now on every request needs the right to make it.
        enforce = urllib.request.Request(f"{endpoint}/moto-api/reset-auth", b"0", {"Content-Type": "text/plain"})
        urllib.request.urlopen(enforce, timeout=10).close()
        yield made


def allowed(request: Any, **arguments: Any) -> bool:
    try:
        request(Bucket="rollforward", **arguments)
    except ClientError as error:
        if error.response["Error"]["Code"] != "AccessDenied":
            raise
        return False
    return True


def test_the_worker_uses_the_objects_of_the_bucket_and_nothing_else(clients: dict[str, Any]) -> None:
    worker = clients["worker"]
    assert allowed(worker.put_object, Key="runs/a/step", Body=b"1") and allowed(worker.get_object, Key="runs/a/step")
    assert allowed(worker.list_objects_v2, Prefix="runs/") and allowed(worker.delete_object, Key="runs/a/step")
    upload = worker.create_multipart_upload(Bucket="rollforward", Key="runs/big")["UploadId"]
    assert allowed(worker.abort_multipart_upload, Key="runs/big", UploadId=upload)
    assert not allowed(worker.delete_bucket) and not allowed(worker.put_bucket_policy, Policy="{}")
    with pytest.raises(ClientError, match="AccessDenied"):
        worker.create_bucket(Bucket="another")


def test_the_server_of_mlflow_reads_its_artifacts_and_nothing_else(clients: dict[str, Any]) -> None:
    mlflow = clients["mlflow"]
    assert allowed(mlflow.get_object, Key="mlflow/metrics") and allowed(mlflow.list_objects_v2)
    assert not allowed(mlflow.get_object, Key="runs/a/step")
    for request in (mlflow.put_object, mlflow.delete_object):
        assert not allowed(request, Key="mlflow/metrics")
