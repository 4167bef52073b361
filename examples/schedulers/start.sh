#!/bin/sh
exec zeroshard run --nodes "$NODES" --spares "${SPARES:-0}" --elastic ds_config.json --master-addr "$MEET" --on-sigterm "${ON_SIGTERM:-leave}" train.py "$@"
