"""Creates the worker's account on an MLflow server with basic authentication, or sets its password.

Reads MLFLOW_TRACKING_URI, the administrator's MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, and the account's
ROLLFORWARD_MLFLOW_USERNAME and ROLLFORWARD_MLFLOW_PASSWORD from the environment.
"""

import os

from mlflow.exceptions import MlflowException
from mlflow.server.auth.client import AuthServiceClient


def main() -> None:
    """Ends with the account and its password in place; raises MlflowException if the server refuses."""
    server = AuthServiceClient(os.environ["MLFLOW_TRACKING_URI"])
    name, password = os.environ["ROLLFORWARD_MLFLOW_USERNAME"], os.environ["ROLLFORWARD_MLFLOW_PASSWORD"]
    try:
        server.create_user(name, password)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
        server.update_user_password(name, password)


if __name__ == "__main__":
    main()
