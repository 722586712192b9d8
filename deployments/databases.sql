-- Databases and users of Prefect and MLflow, created with the volume: each user owns its own databases and no others.
\set prefect_password `cat /run/secrets/prefect_database_password`
\set mlflow_password `cat /run/secrets/mlflow_database_password`

CREATE ROLE prefect LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE PASSWORD :'prefect_password';
CREATE ROLE mlflow LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE PASSWORD :'mlflow_password';

CREATE DATABASE prefect OWNER prefect;
CREATE DATABASE mlflow OWNER mlflow;
CREATE DATABASE mlflow_accounts OWNER mlflow;

REVOKE ALL ON DATABASE postgres, template1, prefect, mlflow, mlflow_accounts FROM PUBLIC;
