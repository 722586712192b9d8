#!/bin/sh
# Creates the bucket and two users: the worker reads and writes objects of the bucket, MLflow's server reads them.
set -eu
MC_HOST_s3="http://rollforward-root:$(cat /run/secrets/minio_root_password)@minio:9000"
export MC_HOST_s3

mc mb --ignore-existing s3/rollforward
for user in worker mlflow; do
    id=$(cat "/run/secrets/s3_${user}_id")
    mc admin policy create s3 "objects-$user" "/policies/$user.json"
    # From standard input, so that the key is on no command line.
    printf '%s\n%s\n' "$id" "$(cat "/run/secrets/s3_${user}_key")" | mc admin user add s3
    case $(mc admin user info --json s3 "$id") in
        *"objects-$user"*) ;;  # attaching twice is an error
        *) mc admin policy attach s3 "objects-$user" --user "$id" ;;
    esac
done
